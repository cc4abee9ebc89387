"""`alload bench balance`: figures of measurements, and a run on two CPU devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from alload_jax.bench.pictures import draw_balance
from alload_jax.cli import main
from alload_jax.commands.bench_balance import summarise
from alload_jax.errors import InputError

ROOT = Path(__file__).parents[2]
COSTS = ROOT / "benchmarks" / "results" / "calibration_wan_1_3b_h200.json"


def measured(seconds, predicted, busy):
    return {
        "case": "x",
        "seconds": seconds,
        "predicted": predicted,
        "predicted_epoch": 100.0,
        "busy": busy,
        "exposed": busy and [[0.0] * len(step) for step in busy],
    }


def test_figures_by_hand():
    cases = [measured([1.0, 2.0], [10.0, 20.0], [[1.0, 0.5], [2.0, 2.0]])]
    content = {"tokens": 600, "cases": [*cases, {"case": "y", "error": "out of memory"}]}
    summarise(content)
    figures = content["cases"][0]["figures"]
    assert content["factor"] == pytest.approx(0.1)
    assert figures["epoch_seconds"] == pytest.approx(10.0)
    assert figures["tokens_per_second"] == pytest.approx(60.0)
    assert figures["imbalance"] == pytest.approx((1 / 0.75 - 1) / 2)
    assert figures["idle"] == pytest.approx(1 - (0.75 + 2.0) / 3.0)
    assert figures["exposed"] == 0.0
    assert figures["prediction_error"] == pytest.approx(0.0)
    assert "figures" not in content["cases"][1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--cost-model", "nowhere.json"), "--cost-model nowhere.json: no such cost model"),
        (("--cost-model", str(COSTS), "--steps", "0"), "--steps is 0; it must be at least 1"),
        (("--cost-model", str(COSTS), "--longest", "0"), "--longest is 0; it must be at least 1"),
        (
            ("--cost-model", str(COSTS), "--picture", "no/x.png"),
            "no/x.png: not a file in",
        ),
        (
            ("--cost-model", str(COSTS), "--out", "no/such/x.json"),
            "not a file in an existing folder",
        ),
        (("--cost-model", str(COSTS), "--out", "/proc/x.json"), "/proc/x.json: cannot be written"),
        (("--cost-model", __file__), r"--cost-model .*test_balance\.py: is not valid JSON"),
    ],
)
def test_invalid_flags_are_named(flags, reason):
    with pytest.raises(InputError, match=reason):
        main(["bench", "balance", *flags])


def test_a_failed_picture_is_one_line_after_the_json_is_written(tmp_path, monkeypatch):
    found = measured([1.0], [10.0], None) | {
        "tokens": 600,
        "devices": 1,
        "device": None,
        "peak_bytes": None,
        "programs": 1,
        "compiled": 1,
        "compile_seconds": 1.0,
    }
    monkeypatch.setattr("alload_jax.commands.bench_balance.measured", lambda *_: dict(found))
    out, picture = tmp_path / "x.json", tmp_path / "x.png"
    flags = ["--cost-model", str(COSTS), "--cases", "balanced", "--out", str(out)]
    with pytest.raises(
        InputError, match=r"--picture .*x\.png: no case was measured on GPUs; .* was written"
    ):
        main(["bench", "balance", *flags, "--picture", str(picture)])
    assert json.loads(out.read_text())["cases"][0]["figures"]["tokens_per_second"] == 60.0


FOUND = {"error": "out of memory"}


def balance_into(out, *cases, m_mem="81920"):
    flags = ["--cost-model", str(COSTS), "--out", str(out), "--m-mem", m_mem]
    main(["bench", "balance", *flags, "--cases", *cases])
    return [case["case"] for case in json.loads(out.read_text())["cases"]]


def test_cases_of_an_existing_file_are_kept_unless_they_are_measured_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("alload_jax.commands.bench_balance.measured", lambda *_: dict(FOUND))
    out = tmp_path / "x.json"
    assert balance_into(out, "first_fit", "balanced") == ["first_fit", "balanced"]
    assert balance_into(out, "balanced", "sorted-independent") == [
        *("first_fit", "balanced", "sorted-independent")
    ]
    assert balance_into(out, "balanced", m_mem="90000") == ["balanced"]
    out.write_text("not JSON")
    with pytest.raises(InputError, match=r"x\.json: is not valid JSON .*; name a new file"):
        balance_into(out, "balanced")


def test_a_case_has_its_own_m_mem(tmp_path, monkeypatch):
    seen = []

    def found(_, settings):
        seen.append(settings["planning"]["m_mem"])
        return dict(FOUND)

    monkeypatch.setattr("alload_jax.commands.bench_balance.measured", found)
    balance_into(tmp_path / "x.json", "balanced", "balanced:90000")
    assert seen == [81_920, 90_000]
    for name, reason in (("balance", "unknown; use one of"), ("balanced:x", "no number of")):
        with pytest.raises(InputError, match=f"--cases {name}: .*{reason}"):
            balance_into(tmp_path / "y.json", name)


@pytest.mark.parametrize(("model", "said"), [("tiny", True), ("1.3b", False)])
def test_cost_models_of_other_models_print_a_warning(model, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "alload_jax.commands.bench_balance.measured", lambda *_: {"error": "out of memory"}
    )
    flags = ["--cost-model", str(COSTS), "--cases", "balanced", "--out", str(tmp_path / "x.json")]
    assert main(["bench", "balance", "--model", model, "--layers", "2", *flags]) == 1
    printed = capsys.readouterr().out
    assert ("was made for dim 1536 (here 32), " in printed) == said
    assert "num_layers" not in printed


def test_the_picture_shows_the_first_case_and_balanced(tmp_path, monkeypatch):
    drawn = []
    draw = "alload_jax.bench.pictures._draw_steps"
    monkeypatch.setattr(draw, lambda axis, case: drawn.append(case["case"]))
    names = ["equal_tokens-independent", "balanced", "balanced-split", "everything-split"]
    cases = [
        measured([seconds], [seconds], [[seconds, seconds]]) | {"case": name}
        for name, seconds in zip(names, [4.0, 3.0, 2.0, 1.0], strict=True)
    ]
    for case in cases:
        case["predicted_epoch"] = case["seconds"][0]
    content = {"workload": "x", "devices": 2, "device": "some GPU", "tokens": 600, "cases": cases}
    summarise(content)
    draw_balance(tmp_path / "a.png", content)
    assert drawn == ["equal_tokens-independent", "balanced-split"]


def test_user_errors_end_the_command_in_one_line(tmp_path):
    flags = ["--model", "tiny", "--cost-model", str(COSTS), "--out", str(tmp_path / "x.json")]
    with pytest.raises(InputError, match=r"^policy equal_tokens: m_mem is 100 tokens"):
        main(["bench", "balance", *flags, "--m-mem", "100"])


@pytest.mark.slow
def test_cases_run_on_two_devices(tmp_path):
    out, method = tmp_path / "balance.json", "dual_constraint-independent"
    names = ["equal_tokens-independent", method, "balanced", "balanced-split"]
    command = [sys.executable, "-m", "alload_jax.cli", "bench", "balance", "--model", "tiny"]
    command += ["--longest", "520", "--m-mem", "560", "--samples", "60", "--steps", "2"]
    command += ["--one-aspect", "--cost-model", str(COSTS), "--out", str(out), "--cases", *names]
    xla_flags = os.environ["XLA_FLAGS"].replace("count=8", "count=2")
    flags = {"XLA_FLAGS": xla_flags, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=os.environ | flags, check=True)
    content = json.loads(out.read_text())
    assert [case["case"] for case in content["cases"]] == names
    cases = {case["case"]: case for case in content["cases"]}
    # A tuned M_comp of so small a mix binds nothing, and the plan is not measured twice.
    assert cases.pop(method)["same_as"] == names[0]
    assert all(case["figures"]["tokens_per_second"] > 0 for case in cases.values())
    assert all(len(case["rounds"]) == 3 for case in cases.values())


def test_the_table_of_the_documents_is_that_of_the_results():
    table = (ROOT / "docs" / "results.md").read_text().split("## Several GPUs\n")[1].split("###")[0]
    shown = [line.split("|") for line in table.splitlines() if "×)" in line]
    measured = set()
    for name in ("mixed_resolution", "long_video_v60"):
        path = COSTS.with_name(f"balance_{name}_h200_x4.json")
        for case in json.loads(path.read_text())["cases"]:
            if found := case.get("figures"):
                figures = (f"{found['tokens_per_second']:,.0f}", f"{found['imbalance']:.1%}")
                measured.add((*figures, f"{found['idle']:.1%}", str(case["programs"])))
    assert len(shown) > 6
    for *_, speed, imbalance, idle, programs, _ in shown:
        cells = (speed.split()[0], *(each.replace(" ", "") for each in (imbalance, idle, programs)))
        assert cells in measured
