import dataclasses
import json
import math
import subprocess
import sys

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import pytest

from alload_jax import cli
from alload_jax.commands import prepare
from alload_jax.commands.plan_tables import LABELS
from alload_jax.data.datasets.digits import Digits
from alload_jax.errors import InputError, run_command
from alload_jax.planning.metrics import PlanMetrics
from alload_jax.training.run_files import program

BOUNDS = ["--policy", "equal_tokens", "--m-mem", "100", "--ranks", "2"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a manifest of lengths and one of shapes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.csv").write_text("seq_len\n" + "10\n20\n40\n" * 4)
    sizes = {"frames": [1, 17, 17], "height": [64] * 3, "width": [64] * 3}
    pa.parquet.write_table(pa.table(sizes), tmp_path / "m.parquet")
    return tmp_path


@pytest.fixture
def alload(folder, capsys):
    """Runs the command in this process; returns its status, stdout and stderr."""

    def run(*argv):
        status = run_command(cli.main, [str(part) for part in argv])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def refused(alload, folder):
    """Runs a command that must be refused with status 2 and one line, without other output."""

    def run(*argv):
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        status, out, err = alload(*argv)
        assert status == 2
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        return err

    return run


def plan(*flags, manifest="m.csv"):
    return ["plan", "--manifest", manifest, *flags]


# ------------------------------------------------------------------------------------ plan


def test_plan_prints_every_metric_as_a_table(alload):
    status, out, err = alload(*plan(*BOUNDS))
    assert (status, err) == (0, "")
    assert "equal_tokens (synchronous) · 2 ranks" in out
    assert "m_mem 100" in out
    labels = LABELS | {"cost": "time of the epoch, s", "tokens_per_second": "tokens/s"}
    for field in dataclasses.fields(PlanMetrics):
        assert labels.get(field.name, field.name.replace("_", " ")) in out


def test_plan_prints_every_metric_as_json(alload):
    status, out, err = alload(*plan(*BOUNDS, "--json"))
    assert (status, err) == (0, "")
    content = json.loads(out)
    names = {field.name for field in dataclasses.fields(PlanMetrics)}
    assert content["metrics"].keys() - names == {
        "repeated_neighbours",
        "repeated_neighbours_random",
        "first_step_seconds",
    }
    assert names <= content["metrics"].keys()
    assert content["metrics"]["samples"] == 12
    assert content["plan"]["ranks"] == 2


@pytest.mark.parametrize("show", [[], ["--json"]])
def test_plan_writes_its_file_in_addition_to_its_output(alload, folder, show):
    status, out, _ = alload(*plan(*BOUNDS, "--out", "new/plan.parquet", *show))
    assert status == 0
    assert pa.parquet.read_table(folder / "new/plan.parquet").num_rows == 12
    assert ("plan: new/plan.parquet" in out) == (not show)


def test_unknown_metrics_are_dashes(alload):
    flags = ["--policy", "fixed", "--rows", 2, "--ranks", 2, "--p", 2]
    (line,) = [line for line in alload(*plan(*flags))[1].splitlines() if "utilisation" in line]
    assert "–" in line
    assert json.loads(alload(*plan(*flags, "--json"))[1])["metrics"]["utilisation"] is None


def test_an_epoch_that_costs_nothing_is_still_json(alload, folder):
    model = {"format": "alload-cost-model-1", "power": {"p": 2.0, "a": 0.0}}
    (folder / "free.json").write_text(json.dumps(model))
    _, out, _ = alload(*plan(*BOUNDS, "--cost-model", "free.json", "--json"))
    content = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content["metrics"]["idle"] == 0


def test_geometry_flags_decide_the_tokens_of_shapes(alload):
    def tokens(*flags):
        out = alload(*plan(*BOUNDS[:2], "--m-mem", 10**6, "--ranks", 1, *flags, "--json",
                           manifest="m.parquet"))[1]  # fmt: skip
        return json.loads(out)["metrics"]["tokens"]

    assert tokens() == 16 + 2 * 5 * 16
    assert tokens("--patch-size", "1,4,4") == 4 + 2 * 5 * 4
    assert tokens("--vae-stride", "1,16,16") == 4 + 2 * 17 * 4
    assert tokens("--vae-stride", "1,1,1", "--patch-size", "1,1,1") == 64 * 64 * 35


def test_a_manifest_written_by_alload_gives_its_stride(alload, folder):
    table = pa.parquet.read_table(folder / "m.parquet")
    notes = {b"alload-manifest": json.dumps({"vae_stride": [1, 16, 16]}).encode()}
    pa.parquet.write_table(table.replace_schema_metadata(notes), folder / "own.parquet")
    flags = ["--policy", "equal_tokens", "--m-mem", 10**6, "--ranks", 1, "--json"]
    out = alload(*plan(*flags, manifest="own.parquet"))[1]
    assert json.loads(out)["metrics"]["tokens"] == 4 + 2 * 17 * 4
    out = alload(*plan(*flags, "--vae-stride", "4,8,8", manifest="own.parquet"))[1]
    assert json.loads(out)["metrics"]["tokens"] == 16 + 2 * 5 * 16


def test_the_same_command_prints_the_same_plan_and_another_seed_another(alload):
    def order(*flags):
        return json.loads(alload(*plan(*BOUNDS, "--json", *flags))[1])["plan"]["order"]

    assert order() == order("--seed", 0)
    assert order() != order("--seed", 1)
    assert len({order("--seed", seed) for seed in range(5)}) == 5


def test_epoch_chooses_which_epoch_is_planned(alload, folder):
    def samples(epoch):
        alload(*plan(*BOUNDS, "--epoch", epoch, "--out", "plan.parquet"))
        return pa.parquet.read_table(folder / "plan.parquet")["sample"].to_pylist()

    assert samples(0) == samples(0)
    assert samples(0) != samples(1)
    assert sorted(samples(0)) == sorted(samples(1)) == list(range(12))


def test_the_plan_of_a_run_has_all_its_epochs(alload, folder):
    status, _, _ = alload(*plan(*BOUNDS, "--epochs", 3, "--out", "run.parquet"))
    assert status == 0
    whole = pa.parquet.read_table(folder / "run.parquet")
    assert set(whole["epoch"].to_pylist()) == {0, 1, 2}
    for epoch in range(3):
        alload(*plan(*BOUNDS, "--epoch", epoch, "--out", "one.parquet"))
        alone = pa.parquet.read_table(folder / "one.parquet")
        assert whole.filter(pa.compute.field("epoch") == epoch).to_pydict() == alone.to_pydict()
    assert alload(*plan(*BOUNDS, "--epochs", 0))[0] == 2


def test_a_sample_that_is_listed_twice_is_named(alload, folder):
    (folder / "m.csv").write_text("seq_len,path\n10,a.mp4\n20,a.mp4\n10,a.mp4\n20,b.mp4\n")
    status, _, err = alload(*plan(*BOUNDS))
    assert status == 0
    assert "1 sample has the path and the size of another one, such as row 2 and row 0" in err
    assert "(a.mp4)" in err


def test_dual_constraint_treats_an_infinite_compute_bound_as_none(alload):
    flags = ["--m-mem", 100, "--ranks", 2, "--json"]
    unbounded = alload(*plan("--policy", "dual_constraint", "--m-comp", "inf", *flags))[1]
    equal = alload(*plan("--policy", "equal_tokens", *flags))[1]
    assert json.loads(unbounded)["metrics"] == json.loads(equal)["metrics"]


CONFIG = """
run: {folder: runs/x, seed: 3}
data: {folder: data/x}
planning: {policy: fixed, rows: {"10": 3, "20": 2, "40": 1}, m_mem: 60, ranks: 2}
model: {patch_size: [1, 4, 4]}
"""


def test_a_training_config_gives_values_that_flags_omit(alload, folder):
    (folder / "run.yaml").write_text(CONFIG)
    _, out, _ = alload(*plan("--config", "run.yaml", "--json"))
    found = json.loads(out)["plan"]
    expected = {"policy": "Fixed", "m_mem": 60, "ranks": 2, "seed": 3}
    assert found | expected == found
    assert found["rows"] == {"10": 3, "20": 2, "40": 1}
    flags = ["--policy", "equal_tokens", "--m-mem", 80, "--seed", 4, "--ranks", 5]
    found = json.loads(alload(*plan("--config", "run.yaml", *flags, "--json"))[1])["plan"]
    assert found | {"policy": "EqualTokens", "m_mem": 80, "ranks": 5, "seed": 4} == found
    found = json.loads(alload(*plan("--config", "run.yaml", "--seed", 0, "--json"))[1])["plan"]
    assert found["seed"] == 0


def test_a_training_configs_patch_size_decides_the_tokens_of_shapes(alload, folder):
    (folder / "run.yaml").write_text(CONFIG)
    flags = ["--config", "run.yaml", "--policy", "equal_tokens", "--m-mem", 100, "--json"]
    out = alload(*plan(*flags, manifest="m.parquet"))[1]
    assert json.loads(out)["metrics"]["tokens"] == 4 + 2 * 5 * 4
    out = alload(*plan(*flags, "--patch-size", "1,2,2", manifest="m.parquet"))[1]
    assert json.loads(out)["metrics"]["tokens"] == 16 + 2 * 5 * 16


def test_rows_by_bucket_print_as_a_table_too(alload, folder):
    (folder / "run.yaml").write_text(CONFIG)
    status, out, err = alload(*plan("--config", "run.yaml"))
    assert (status, err) == (0, "")
    assert "utilisation" in out


# -------------------------------------------------------------------------------- refusals

OUT = ["--out", "plan.parquet"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--policy", "equal_tokens", "--p", 2], ["planning.m_mem", "planning.cost_model"]),
        (["--policy", "dual_constraint", "--p", 2], ["planning.m_mem", "planning.cost_model"]),
        (["--policy", "fixed"], ["planning.rows"]),
        (["--policy", "fixed", "--rows", 0], ["0 rows", "at least 1"]),
        (["--policy", "fixed", "--rows", 2**63], ["9223372036854775808 rows", "at most 1,048,576"]),
        (["--policy", "fixed", "--rows", 2**62, "--m-mem", 99], ["rows", "at most 1,048,576"]),
        (["--policy", "fixed", "--rows", 3, "--m-mem", 100], ["bucket 40", "3 rows", "100"]),
        (["--policy", "fixed", "--rows", 1, "--m-mem", 30], ["(40 tokens)", "30", "at least 40"]),
        (["--policy", "equal_tokens", "--m-mem", 30], ["(40 tokens)", "30", "at least 40"]),
        (["--policy", "dual_constraint", "--m-mem", 30], ["(40 tokens)", "30", "at least 40"]),
        (["--m-mem", 0], ["m_mem is 0", "at least 1"]),
        (["--m-mem", 100, "--p", 0], ["p is 0.0", "above 0"]),
        (["--m-mem", 100, "--p", "nan"], ["p is nan", "above 0"]),
        (["--m-mem", 100, "--m-comp", -1], ["m_comp is -1.0", "above 0"]),
        (["--m-mem", 100, "--micro-batches-per-step", 0], ["micro_batches_per_step is 0"]),
        (["--m-mem", 100, "--ranks", -1], ["ranks is -1", "at least 1"]),
        (["--m-mem", 100, "--ranks", 2**63 - 2], ["ranks is 9223372036854775806", "at most 1,0"]),
        (["--m-mem", 100, "--cost-model", "none.json"], ["none.json", "no such cost model"]),
        (["--m-mem", 100, "--cost-model", "m.csv"], ["m.csv", "not valid JSON"]),
        (["--m-mem", 100, "--seed", -1], ["seed", "-1"]),
        (["--m-mem", 100, "--epoch", -1], ["epoch", "-1"]),
        (["--m-mem", 100, "--vae-stride", "0,8,8"], ["vae_stride", "(0, 8, 8)"]),
    ],
)
def test_settings_that_cannot_be_planned_are_refused(refused, flags, named):
    message = refused(*plan("--ranks", 2, *flags, *OUT))
    for part in named:
        assert part in message


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--m-mem", "many"], ["--m-mem", "'many'"]),
        (["--m-mem", "1.5"], ["--m-mem", "'1.5'"]),
        (["--p", "two"], ["--p", "'two'"]),
        (["--policy", "equal"], ["--policy", "'equal'", "equal_tokens"]),
        (["--ranks-mode", "async"], ["--ranks-mode", "'async'", "independent"]),
        (["--vae-stride", "8,8"], ["--vae-stride", "'8,8'", "4,8,8"]),
        (["--patch-size", "1,x,2"], ["--patch-size", "'1,x,2'"]),
        (["--ranks"], ["--ranks"]),
        (["surplus"], ["surplus"]),
    ],
)
def test_flags_that_cannot_be_read_are_refused(refused, flags, named):
    message = refused(*plan(*BOUNDS, *OUT, *flags))
    for part in named:
        assert part in message


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--m-men", "100"], "--m-mem"),
        (["--m-men=100"], "--m-mem"),
        (["--m_mem", "100"], "--m-mem"),
        (["--rank-mode", "independent"], "--ranks-mode"),
        (["--polcy", "fixed"], "--policy"),
        (["--micro-batch-per-step", "2"], "--micro-batches-per-step"),
        (["--jsno"], "--json"),
        (["--micro", "2"], "--micro-batches-per-step"),
        (["--polic=fixed"], "--policy"),
    ],
)
def test_a_mistyped_flag_suggests_the_nearest(refused, typed, meant):
    message = refused(*plan("--ranks", 2, *OUT, *typed))
    assert typed[0].split("=")[0] in message
    assert f"did you mean {meant}?" in message


def test_an_unknown_flag_refers_to_help(refused):
    assert "--help" in refused(*plan(*BOUNDS, "--zzzzzzzz", *OUT))


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], ["COMMAND"]),
        (["plam"], ["plam", "plan", "prepare"]),
        (["plan"], ["--manifest"]),
        (["prepare"], ["KIND", "required"]),
        (["prepare", "letters", "--out", "x"], ["letters", "digits"]),
        (["plan", "--manifest", "m.csv", "--m-mem", "100"], ["--ranks"]),
    ],
)
def test_an_incomplete_command_line_is_refused(refused, argv, named):
    message = refused(*argv)
    for part in named:
        assert part in message


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("none.csv", None, "no such manifest"),
        ("none.parquet", None, "no such manifest"),
        ("m.txt", b"seq_len\n10\n", "not a readable manifest"),
        ("bad.parquet", b"seq_len\n10\n", "not a readable manifest"),
        ("bad.csv", b"seq_len,b\n10\n", "not a readable manifest"),
        ("bad.csv", b"", "not a readable manifest"),
        ("bad.csv", b"seq_len\n", "no rows"),
        ("bad.csv", b"length\n10\n", "needs frames, height and width, or seq_len"),
        ("bad.csv", b"frames,height\n10,10\n", "needs frames, height and width, or seq_len"),
        ("bad.csv", b"seq_len\n10\n0\n", "row 1 has seq_len = 0"),
        ("bad.csv", b"seq_len\n10\n-5\n", "row 1 has seq_len = -5"),
        ("bad.csv", b"seq_len\n10\n2.5\n", "row 1 has seq_len = 2.5"),
        ("bad.csv", b"seq_len\n10\nnan\n", "row 1 has seq_len = nan"),
        ("bad.csv", b"seq_len\n10\n1e19\n", "row 1 has seq_len = 1e+19"),
        ("bad.csv", b"seq_len,b\n10,1\n,1\n", "row 1 has seq_len = nan"),
        ("bad.csv", b"seq_len\nten\n", "column seq_len"),
        ("bad.csv", b"seq_len,seq_len\n10,10\n", "seq_len"),
    ],
)
def test_a_manifest_that_cannot_be_planned_is_refused(refused, folder, name, content, named):
    if content is not None:
        (folder / name).write_bytes(content)
    message = refused(*plan(*BOUNDS, *OUT, manifest=name))
    assert name in message
    assert named in message


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[]", b'{"format": "alload"}'])
def test_a_cost_model_that_cannot_be_read_is_refused(refused, folder, content):
    (folder / "cost.json").write_bytes(content)
    assert "cost.json" in refused(*plan(*BOUNDS, "--cost-model", "cost.json", *OUT))


@pytest.mark.parametrize("out", ["plans", "m.csv/plan.parquet"])
def test_an_out_that_cannot_be_written_is_refused(alload, folder, out):
    (folder / "plans").mkdir()
    before = sorted(folder.rglob("*"))
    status, _, err = alload(*plan(*BOUNDS, "--out", out))
    assert status == 2
    assert err.count("\n") == 1
    assert out in err
    assert sorted(folder.rglob("*")) == before


def test_invalid_yaml_is_reported_with_its_line(refused, folder):
    (folder / "run.yaml").write_text("run:\n  folder: [x\ndata: y\n")
    message = refused(*plan(*BOUNDS, "--config", "run.yaml", *OUT))
    assert message.startswith("error: run.yaml: line 3: is not valid YAML (")
    (folder / "run.yaml").write_bytes(b"\xff\xfe\x00")
    assert "run.yaml: is not valid text" in refused(*plan(*BOUNDS, "--config", "run.yaml", *OUT))


def test_a_config_that_is_not_there_is_refused(refused):
    assert "none.yaml" in refused(*plan(*BOUNDS, "--config", "none.yaml", *OUT))


# --------------------------------------------------------------------------------- prepare


@pytest.mark.parametrize("content", [{"manifest.parquet": "mine"}, {"notes.txt": "mine"}])
def test_prepare_refuses_a_folder_that_exists_and_leaves_it(refused, folder, content):
    data = folder / "data"
    data.mkdir()
    for name, text in content.items():
        (data / name).write_text(text)
    message = refused("prepare", "digits", "--out", data)
    assert f"{data}: exists already" in message
    assert "name another folder or remove it" in message
    assert {path.name for path in data.iterdir()} == content.keys()
    assert not list(folder.glob("*.partial"))


def test_prepare_writes_a_folder_that_can_be_planned(alload, monkeypatch):
    small = Digits(mix=((1, 8, 8, 5), (5, 16, 16, 2)))
    monkeypatch.setattr(prepare.DATASETS, "get", lambda _: lambda: small)
    assert alload("prepare", "digits", "--out", "data") == (0, "data/manifest.parquet\n", "")
    flags = ["--policy", "fixed", "--rows", 2, "--ranks", 1, "--patch-size", "1,4,4", "--json"]
    status, out, _ = alload(*plan(*flags, manifest="data/manifest.parquet"))
    assert status == 0
    assert json.loads(out)["metrics"]["tokens"] == 5 * 4 + 2 * 2 * 16  # two latents of 5 frames


def test_prepare_refuses_a_seed_below_zero(refused):
    assert "seed" in refused("prepare", "digits", "--out", "data", "--seed", -1)


# ----------------------------------------------------------------------------- the command


@pytest.mark.parametrize("argv", [["--help"], ["plan", "--help"], ["prepare", "--help"]])
def test_help_goes_to_stdout_and_succeeds(folder, capsys, argv):
    with pytest.raises(SystemExit) as stop:
        run_command(cli.main, argv)
    assert stop.value.code == 0
    printed = capsys.readouterr()
    assert "usage: alload" in printed.out
    assert printed.err == ""


def test_run_command_passes_arguments_and_status_through():
    assert run_command(lambda argv: len(argv), ["a", "b", "c"]) == 3


def test_run_command_reports_a_user_error_in_one_line_with_status_2(capsys):
    def fail(argv):
        raise InputError(f"{argv[0]} is wrong; give another")

    assert run_command(fail, ["x"]) == 2
    assert capsys.readouterr() == ("", "error: x is wrong; give another\n")


def test_run_command_ends_quietly_when_interrupted(capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    assert run_command(interrupt, []) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("two\nlines"), "two lines"),
        (OSError(), "OSError"),
        (OSError(28, "No space", "x"), "x: No space; name another path"),
    ],
)
def test_run_command_reports_an_os_error_in_one_line(capsys, error, line):
    def fail(argv):
        raise error

    assert run_command(fail, []) == 2
    assert capsys.readouterr() == ("", f"error: {line}\n")


def test_run_command_does_not_catch_bugs():
    with pytest.raises(ZeroDivisionError):
        run_command(lambda argv: 1 // 0, [])
    assert issubclass(InputError, ValueError)


def shell(*argv):
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False)


def test_the_module_runs_as_a_command(folder):
    done = shell("-m", "alload_jax.cli", *plan(*BOUNDS, "--json"))
    assert done.returncode == 0
    assert done.stderr == ""
    assert math.isfinite(json.loads(done.stdout)["metrics"]["cost"])
    done = shell("-m", "alload_jax.cli", *plan("--m-men", "100", *OUT))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: alload plan: --m-men is unknown; did you mean --m-mem?\n"
    assert not (folder / "plan.parquet").exists()


def test_planning_from_the_command_line_needs_no_jax(folder):
    argv = plan(*BOUNDS, *OUT)
    done = shell(
        "-c",
        f"import sys; from alload_jax import cli; assert cli.main({argv!r}) == 0; "
        "print(sorted(name for name in sys.modules if name.partition('.')[0] == 'jax'))",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_help_needs_jax():
    names = [
        "",
        "plan",
        "prepare",
        "data",
        "sample",
        "export",
        "bench",
        "bench kernel",
        "bench step",
    ]
    code = (
        "import sys; from alload_jax import cli\n"
        f"for name in {names}:\n"
        "    try: cli.main([*name.split(), '--help'])\n"
        "    except SystemExit as stop: print('stopped', stop.code, 'jax' in sys.modules)"
    )
    done = shell("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("stopped 0 False\n") == len(names)
    assert "480p" in done.stdout  # Wan's advice on --shift


def test_alload_train_is_the_training_program(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["alload", "train"])
    assert run_command(cli.main, ["train", "--config", "missing.yaml"]) == 2
    assert "missing.yaml" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: alload train [--config CONFIG]")
    assert "--model.lora.rank" in printed or "--model.lora" in printed
    assert program() == "alload train"


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["train.py"], "python train.py"),
        (["/some/where/train.py"], "python train.py"),
        (["mine/start.py", "train"], "python mine/start.py"),
        (["/venv/bin/alload", "train"], "alload train"),
        (["/src/alload_jax/cli.py", "train"], "alload train"),
        (["pytest"], "python train.py"),
    ],
)
def test_a_run_is_continued_by_the_program_that_began_it(argv, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    assert program() == command
