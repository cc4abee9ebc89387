"""Wrong flags of `alload bench` and `alload calibrate` are one line, before anything is written."""

import pytest
import yaml

CONFIG = {"run": {"folder": "run"}, "data": {"folder": "data"}, "planning": {"m_mem": 64}}
CASES = {"sorted": {"planning": {"policy": "sorted"}}, "equal-tokens": {"planning": {"m_mem": 9}}}
BASE = {
    "calibrate": ["--config", "tiny.yaml", "--out", "x.json"],
    "epoch": ["--config", "tiny.yaml", "--cases", "cases.yaml", "--data", "data"],
}
NO_FOLDER = "no/x.json: not a file in an existing folder"
NO_GPU = "the backend is 'cpu'; kernels are measured on a GPU: install the extra cuda12 or cuda13"


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        ("balance", ["--steps", 4], "'balance' (choose from 'kernel', 'step', 'epoch', 'sparse-"),
        ("calibrate", ["--config", "none.yaml"], "none.yaml: no such config"),
        ("calibrate", ["--out", "no/x.json"], NO_FOLDER),
        ("calibrate", ["--seconds", 0], "--seconds: '0' is not a number above 0"),
        ("calibrate", ["--margin", 1], "--margin: '1' is not a number from 0 to below 1"),
        ("calibrate", ["--layers", 0], "--layers: '0' is not a whole number from 1"),
        ("calibrate", ["--longest", 300], "a fit needs lengths further apart"),
        ("calibrate", ["--set", "model.dym", 3], "did you mean model.dim?"),
        ("calibrate", ["--memory-gb", 1e-5], "before any token"),
        ("calibrate", ["--from-run", "run"], "--from-run: not allowed with argument --config"),
        ("epoch", ["--only", "none"], "--only none: cases.yaml has only equal-tokens, sorted"),
        ("epoch", ["--seconds", 0], "--seconds: '0' is not a number above 0"),
        ("epoch", ["--repeats", 0], "--repeats: '0' is not a whole number from 1"),
        ("epoch", ["--out", "no/x.json"], NO_FOLDER),
        ("epoch", ["--picture", "x.foo"], "--picture x.foo: is not named .png; rename it"),
        ("epoch", ["--picture", "no/x.png"], "no/x.png: not a file in"),
        ("epoch", [], "--data data: no such folder; give --workload"),
        ("epoch", ["--cases", "none.yaml"], "none.yaml: no such file"),
        ("kernel", [], NO_GPU),
        ("kernel", ["--workloads", "wan"], "--workloads wan is unknown; there are wan-1.3b-480p"),
        ("kernel", ["--functions", "norm"], "--functions: invalid choice: 'norm' (choose from"),
        *(
            ("kernel", ["--shape", x], f"'{x}' is not three whole numbers such as 1,4096,1536")
            for x in ("1,2", "1,0,8")
        ),
        ("kernel", ["--out", "no/x"], NO_FOLDER),
        ("sparse-attention", [], NO_GPU),
        ("sparse-attention", ["--sparsities", 1], "'1' is not a number from 0 to below 1"),
        ("sparse-attention", ["--tokens", 0], "--tokens: '0' is not a whole number from 1"),
        ("sparse-attention", ["--out", "no/x"], NO_FOLDER),
        ("step", ["--remat", "most"], "invalid choice: 'most'"),
        ("step", ["--out", "no/x.json"], NO_FOLDER),
        ("step", ["--steps", 0], "--steps: '0' is not a whole number from 1"),
        (
            "step",
            ["--remat", "auto", "--memory-budget", 0],
            "--memory-budget: '0' is not a number above 0",
        ),
        ("step", ["--memory-budget", 40], "--memory-budget is for --remat auto"),
        ("step", ["--latentz", 1, 1, 1], "--latentz is unknown; did you mean --latents"),
        ("step", ["--keep-trace", "kept"], "--keep-trace needs --profile"),
        ("step", ["--profile", "--keep-trace", "tiny.yaml"], "this is a file; name a folder"),
        ("tune", [], NO_GPU),
        *(
            ("tune", [f"--{x}", 0], f"--{x}: '0' is not a whole")
            for x in ("dims", "check", "processes")
        ),
        ("tune", ["--seconds", 0], "--seconds: '0' is not a number above 0"),
        ("tune", ["--out", "no/x.json"], NO_FOLDER),
    ],
)
def test_wrong_flags_are_one_line(refused, tmp_path, command, flags, words):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(CASES))
    name = [command] if command == "calibrate" else ["bench", command]
    refused(words, *name, *BASE.get(command, []), *flags)
