"""The command: its help and errors, what starts without JAX; `alload calibrate --from-run`."""

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from alload_jax import cli, processes
from alload_jax.commands import prepare
from alload_jax.commands.flags import of_each_expert
from alload_jax.data.datasets.digits import Digits
from alload_jax.errors import InputError, out_of_memory, run_command
from alload_jax.planning.cost import (
    CostFile,
    QuadraticCost,
    SparseTerms,
    read_cost_file,
    write_cost_file,
)
from alload_jax.training.run_files import program

PLAN = ["plan", "--workload", "wan-480p", "--size", "40", "--m-mem", "66816", "--ranks", "2"]


def test_an_incomplete_command_line_is_refused(refused):
    for argv, named in (
        ([], ["COMMAND"]),
        (["plam"], ["plam", "plan", "prepare"]),
        (["prepare"], ["KIND", "required"]),
        (["prepare", "letters", "--out", "x"], ["letters", "digits"]),
        (["prepare", "digits", "--out", "data", "--seed", "-1"], ["seed"]),
        (["data", ""], ["STORE is empty; give a value"]),
        (["prepare", "media", "x", "--out", ""], ["--out is empty; give a value"]),
        (["sample", "--checkpoint", "x", "--prompt", "a", "--prompt=b"], ["given twice; --list"]),
        (["sample", "--checkpoint", "x", "--prompt", "a", "cat"], ["cat is unknown; put several"]),
    ):
        refused(named, *argv)


def test_values_of_a_flag_given_again_follow_the_first():
    parser = cli._Parser()
    parser.add_argument("--lora", nargs="+", default=[])
    assert parser.parse_args(["--lora", "a", "b", "--lora", "c"]).lora == ["a", "b", "c"]
    assert parser.parse_args([]).lora == []


def test_prepare_writes_a_folder_that_can_be_planned_and_leaves_one_that_exists(
    alload, refused, figures, tmp_path, monkeypatch
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    said = ["mine: exists already", "name another folder or remove it"]
    refused(said, "prepare", "digits", "--out", "mine")
    small = Digits(mix=((1, 8, 8, 5), (5, 16, 16, 2)))
    monkeypatch.setattr(prepare.DATASETS, "get", lambda _: lambda: small)
    assert alload("prepare", "digits", "--out", "data") == (0, "data/manifest.parquet\n", "")
    assert (tmp_path / "data/samples.png").is_file()
    flags = ["--policy", "fixed", "--rows", 2, "--ranks", 1, "--patch-size", "1,4,4", "--p", 2]
    found = figures("--manifest", "data/manifest.parquet", *flags)
    assert found["metrics"]["tokens"] == 5 * 4 + 2 * 2 * 16  # two latents of 5 frames


def test_a_full_disk_costs_a_data_folder_no_more_than_its_picture(alload, monkeypatch):
    def full(picture, file, **options):
        Path(file).write_bytes(b"")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare.DATASETS, "get", lambda _: lambda: Digits(mix=((1, 8, 8, 5),)))
    monkeypatch.setattr("PIL.Image.Image.save", full)
    status, out, err = alload("prepare", "digits", "--out", "data")
    assert (status, out) == (0, "data/manifest.parquet\n")
    said = "data/samples.png: No space left on device; free disk space"
    assert err == f"warning: {said}; the data folder is complete without it\n"
    Path("sheet.png").write_text("mine")
    status, out, err = alload("data", "data", "--sheet", "sheet.png", "--force")
    assert (status, err) == (2, f"error: {said.replace('data/samples', 'sheet')}\n")
    assert Path("sheet.png").read_text() == "mine"


def test_a_config_that_is_no_yaml_is_reported_with_its_line(refused, tmp_path):
    for content, words in (
        (b"run:\n  folder: [x\ndata: y\n", "error: run.yaml: line 3: is not valid YAML ("),
        (b"\xff\xfe\x00", "run.yaml: is not valid text"),
    ):
        (tmp_path / "run.yaml").write_bytes(content)
        refused(words, *PLAN, "--config", "run.yaml")


def test_run_command_reports_errors_of_users_in_one_line(capsys):
    lacks = (RuntimeError("can't start new thread"), OSError(11, os.strerror(11)))
    more = (
        "raise pids.max of the container or job, such as `docker --pids-limit`, TasksMax of systemd"
    )
    for error, status, line in (
        (InputError("x is wrong; give another"), 2, "error: x is wrong; give another"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device"), 2, "error: No space left on device"),
        (OSError("two\nlines"), 2, "error: two lines"),
        (OSError(), 2, "error: OSError"),
        (OSError(28, "No space", "x"), 2, "error: x: No space; free disk space"),
        (OSError(24, "Too many", "x"), 2, "error: x: Too many; raise `ulimit -n`"),
        (OSError(13, "Denied", "x"), 2, "error: x: Denied; name another path"),
        *((lack, 2, f"error: a thread or process cannot start ({lack}); {more}") for lack in lacks),
    ):

        def fail(argv, error=error):
            raise error

        assert run_command(fail, []) == status
        assert capsys.readouterr() == ("", f"{line}\n")
    assert run_command(len, ["a", "b", "c"]) == 3
    with pytest.raises(ZeroDivisionError):  # a bug is no error of the user
        run_command(lambda argv: 1 // 0, [])


@pytest.mark.parametrize("limit", ["max", "500", "130"])
def test_a_command_warns_where_few_threads_can_start(limit, tmp_path, monkeypatch, capsys):
    """XLA and other libraries hang or crash without them, and say nothing."""
    (tmp_path / "groups").write_text("0::/job/step")
    (tmp_path / "job" / "step").mkdir(parents=True)
    for name, value in (("max", limit), ("current", "90")):
        (tmp_path / "job" / f"pids.{name}").write_text(f"{value}\n")
    monkeypatch.setattr(processes, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(processes, "_MOUNT", tmp_path)
    assert run_command(len, []) == 0
    assert ("only 40 more threads" in capsys.readouterr().err) is (limit == "130")


def test_either_of_the_two_messages_says_that_a_device_is_out_of_memory():
    for message in ("RESOURCE_EXHAUSTED: failed to allocate", "INTERNAL: Out of memory while"):
        assert out_of_memory(RuntimeError(message))
    assert not out_of_memory(RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS"))


def shell(*argv, cwd=None):
    command = [sys.executable, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_the_module_runs_as_a_command(tmp_path):
    done = shell("-m", "alload_jax.cli", *PLAN, "--m-men", "100", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: alload plan: --m-men is unknown; did you mean --m-mem?\n"


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"alload {version('alload-jax')}\n")


def test_neither_planning_nor_help_needs_jax(tmp_path):
    names = ["", *("plan", "prepare", "data", "sample", "export", "bench")]
    names += ["bench kernel", "bench step"]
    code = (
        "import sys; from alload_jax import cli\n"
        f"for name in {names}:\n"
        "    try: cli.main([*name.split(), '--help'])\n"
        "    except SystemExit as stop: print('stopped', stop.code, 'jax' in sys.modules)\n"
        f"assert cli.main({[*PLAN, '--report', 'p.html', '--out', 'p.parquet', '--json']}) == 0\n"
        "import alload_jax.report.plan_page\n"
        "print('planned', 'jax' in sys.modules)"
    )
    done = shell("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("stopped 0 False\n") == len(names)
    assert done.stdout.count("usage: alload") == len(names)
    assert "480p" in done.stdout  # Wan's advice on --shift
    assert done.stdout.endswith("planned False\n")
    assert (tmp_path / "p.html").is_file()


def test_alload_train_is_the_training_program(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["alload", "train"])
    assert run_command(cli.main, ["train", "--config", "missing.yaml"]) == 2
    assert "missing.yaml" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: alload train [--config CONFIG]")
    assert "--model.lora" in printed


def test_a_run_is_continued_by_the_program_that_began_it(monkeypatch):
    for argv, command in (
        (["/some/where/train.py"], "python train.py"),
        (["mine/start.py", "train"], "python mine/start.py"),
        (["/venv/bin/alload", "train"], "alload train"),
        (["/src/alload_jax/cli.py", "train"], "alload train"),
        (["pytest"], "python train.py"),
    ):
        monkeypatch.setattr(sys, "argv", argv)
        assert program() == command


CONFIG = """
run: {folder: run}
data: {folder: data}
planning: {policy: balanced, m_mem: 64}
model: {dim: 64, num_heads: 2, num_layers: 1}
"""


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "environment.json").write_text(json.dumps([{"devices": ["cpu"], "versions": {}}]))
    rows = []
    for number in range(40):
        rows_of_step, tokens, squares = 1 + number % 5, 100.0 * (1 + number % 7), 1e4 * number
        seconds = 0.01 + 1e-3 * rows_of_step + 1e-4 * tokens + 1e-7 * squares
        row = {"step": number + 1, "cost_terms": [1.0, float(rows_of_step), tokens, squares]}
        rows.append(row | {"step_seconds": seconds, "input_wait_seconds": 0.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def calibrated(alload, run):
    """The cost model of the run, and what the command prints."""

    def calibrate():
        status, out, _ = alload("calibrate", "--from-run", "run", "--out", "cost.json")
        assert status == 0
        return read_cost_file("cost.json"), out

    return calibrate


def test_a_runs_step_times_become_a_cost_model(run, calibrated):
    with (run / "metrics.jsonl").open("a") as file:  # validations have lines of their own
        file.write('{"step": 40, "validation/set": "a", "validation/loss": 1.0}\n')
    costs, said = calibrated()
    assert "40 steps, mean error 0.0%" in said
    assert costs.quadratic.c1 == pytest.approx(1e-4, rel=1e-3)
    assert costs.quadratic.c2 == pytest.approx(1e-7, rel=1e-3)
    assert (costs.device, costs.origin) == ("cpu", "measured")
    # Its start tells what a program costs.
    summary = {"programs": 4, "compile_seconds": 20.0, "first_step_seconds": 32.0}
    (run / "summary.json").write_text(json.dumps(summary))
    costs, _ = calibrated()
    assert (costs.program_seconds, costs.start_seconds) == (5.0, 12.0)
    assert costs.first_step_seconds(10) == pytest.approx(62.0)


@pytest.mark.parametrize("planned", [True, False])
def test_a_run_with_sparse_attention_gives_its_terms_too(run, tmp_path, calibrated, planned):
    config = CONFIG.replace("num_layers: 1", "num_layers: 1, sparse_attention: {min_tokens: 0}")
    if planned:
        costs = tmp_path / "planned.json"
        quadratic, terms = QuadraticCost(0.01, 1e-4, 1e-7, 1e-3), SparseTerms(2e-7, 1e-5, 1e-9)
        write_cost_file(costs, CostFile(quadratic=quadratic, sparse=terms))
        config = config.replace("m_mem: 64", f"m_mem: 64, cost_model: {costs}")
    (run / "config.yaml").write_text(config)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, row in enumerate(lines):
        pairs, tokens, squares = 3e3 * (number * 7 % 11), 20.0 * (number % 9), 1e5 * (number % 4)
        row["cost_terms"] += [pairs, tokens, squares]
        row["step_seconds"] += 2e-7 * pairs + 1e-5 * tokens + 1e-9 * squares
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    found, _ = calibrated()
    assert found.quadratic.c2 == pytest.approx(1e-7, rel=1e-2)
    assert found.sparse.c3 == pytest.approx(2e-7, rel=1e-2)
    assert found.model["sparse_attention"]["selector"] == "pooled"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (None, None, "holds no run"),
        ("metrics.jsonl", "", "steps can be fitted"),
        ("metrics.jsonl", "not JSON\n", "line 1: is not valid JSON"),
        ("config.yaml", "run: [\n", "is not valid YAML"),
    ],
)
def test_what_is_no_run_or_a_damaged_one_is_one_line(name, content, words, run, refused):
    if name:
        (run / name).write_text(content)
    place = "run" if name else "none"
    refused(words, "calibrate", "--from-run", place, "--out", "cost.json")


def test_an_adapter_of_a_model_without_experts_goes_to_both(tmp_path):
    for name in ("WAN/transformer", "WAN/transformer_2"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("one", "two_high_noise", "two_low_noise"):
        (tmp_path / f"{name}.safetensors").touch()

    def loras(*names, **given):
        files = [f"{tmp_path / name}.safetensors:0.5" for name in names]
        options = {"checkpoint": tmp_path / "WAN", "out": None, "lora": files} | given
        found = of_each_expert(argparse.Namespace(**options), "checkpoint")
        return [[Path(lora.rpartition(":")[0]).stem for lora in each.lora] for each in found]

    assert loras("one", "two") == [["one", "two_high_noise"], ["one", "two_low_noise"]]
    first_alone = [["one", "two_high_noise"], ["two_low_noise"]]
    assert loras("one", "two", low_noise_lora=["other.safetensors"]) == first_alone
    with pytest.raises(InputError, match=r"give x\.safetensors for the files x_high_noise"):
        loras("two_high_noise")
