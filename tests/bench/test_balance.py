"""`alload bench balance`: figures of measurements, and a run on two CPU devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from alload_jax.bench.balance import representative
from alload_jax.bench.pictures import draw_balance
from alload_jax.cli import main
from alload_jax.commands.bench_balance import summarise
from alload_jax.errors import InputError

ROOT = Path(__file__).parents[2]
COSTS = ROOT / "benchmarks" / "results" / "calibration_wan_1_3b_h200.json"


def measured(seconds, predicted, busy=None):
    exposed = busy and [[0.25 * each for each in step] for step in busy]
    figures = {"seconds": seconds, "predicted": predicted, "busy": busy, "exposed": exposed}
    return {"case": "x", "predicted_epoch": 100.0} | figures


@pytest.fixture
def balance(tmp_path, monkeypatch):
    """Runs the command with what its process is said to find; gives settings and the JSON."""

    def run(*flags, found=None, out=tmp_path / "x.json"):
        asked = []

        def measure(_, settings):
            asked.append(settings)
            return dict(found or {"error": "out of memory"})

        monkeypatch.setattr("alload_jax.bench.harness.measured", measure)
        code = main(["bench", "balance", "--cost-model", str(COSTS), "--out", str(out), *flags])
        assert code == (0 if found else 1)
        return asked, json.loads(out.read_text())

    return run


def test_figures_by_hand():
    cases = [measured([1.0, 2.0], [10.0, 20.0], [[1.0, 0.5], [2.0, 2.0]])]
    cases[0]["rounds"] = [[1.0, 2.0], [1.5, 2.0], [1.0, 1.5]]
    content = {"tokens": 600, "cases": [*cases, {"case": "y", "error": "out of memory"}]}
    content |= {"device": "NVIDIA H200", "devices": 2, "flops": 989e13}
    summarise(content)
    assert content["factor"] == pytest.approx(0.1)
    expected = {"epoch_seconds": 10.0, "spread": 1 / 3, "tokens_per_second": 60.0, "MFU": 0.5}
    expected |= {"prediction_error": 0.0, "imbalance": (1 / 0.75 - 1) / 2, "CV": 0.25 / 0.75 / 2}
    expected |= {"idle": 1 - (0.75 + 2.0) / 3.0, "exposed": 0.25 * (0.75 + 2.0) / 3.0}
    assert content["cases"][0]["figures"] == pytest.approx(expected)
    assert "figures" not in content["cases"][1]


def test_timed_steps_stand_for_all_others_by_what_they_cost():
    lengths = [[30, 2], [20, 5], [8, 8], [10, 10], [1], [9, 9], [3], [5, 5], [7], [2, 2]]
    cost = [sum(length**2 for length in row) for row in lengths]
    chosen = representative(list(range(10)), np.asarray(cost, float), 5)
    assert len(chosen) == 5
    ranks = np.argsort(np.argsort(cost))[chosen]
    assert sorted(ranks // 2) == [0, 1, 2, 3, 4]
    assert representative([4, 7], np.arange(10.0), 5) == [4, 7]


def test_a_failed_picture_is_one_line_after_the_json_is_written(balance, tmp_path):
    found = measured([1.0], [10.0]) | {"tokens": 600, "devices": 1, "device": None}
    found |= {"peak_bytes": [2, 5], "programs": 1, "compiled": 1, "compile_seconds": None}
    out, picture = tmp_path / "x.json", tmp_path / "x.png"
    with pytest.raises(
        InputError, match=r"--picture .*x\.png: no case was measured on GPUs; .* was written"
    ):
        balance("--cases", "balanced", "--picture", str(picture), found=found)
    assert json.loads(out.read_text())["cases"][0]["figures"]["tokens_per_second"] == 60.0


def test_cases_of_an_existing_file_are_kept_unless_they_are_measured_anew(balance, tmp_path):
    def names(*flags):
        return [case["case"] for case in balance(*flags)[1]["cases"]]

    assert names("--cases", "first_fit", "balanced") == ["first_fit", "balanced"]
    both = names("--cases", "balanced", "sorted-independent")
    assert both == ["first_fit", "balanced", "sorted-independent"]
    with pytest.raises(InputError, match=r"x\.json: its m_mem is another; name a new file"):
        names("--cases", "balanced", "--m-mem", "90000")
    (tmp_path / "x.json").write_text("not JSON")
    with pytest.raises(InputError, match=r"x\.json: is not valid JSON .*; name a new file"):
        names("--cases", "balanced")


def test_a_case_may_have_its_own_m_mem_and_unlike_cost_models_are_told(balance, capsys, tmp_path):
    asked, _ = balance("--cases", "balanced", "balanced:90000", "--layers", "2")
    assert [each["planning"]["m_mem"] for each in asked] == [81_920, 90_000]
    assert "was made for" not in capsys.readouterr().out
    balance("--model", "tiny", "--cases", "balanced", out=tmp_path / "other.json")
    printed = capsys.readouterr().out
    assert "was made for dim 1536 (here 32), " in printed
    assert "num_layers" not in printed


def test_the_picture_shows_the_first_case_and_balanced(tmp_path, monkeypatch):
    drawn = []
    draw = "alload_jax.bench.pictures._draw_steps"
    monkeypatch.setattr(draw, lambda axis, case: drawn.append(case["case"]))
    names = ["equal_tokens-independent", "balanced", "balanced-split", "everything-split"]
    cases = [
        measured([seconds], [seconds], [[seconds, seconds]])
        | {"case": name, "predicted_epoch": seconds}
        for name, seconds in zip(names, [4.0, 3.0, 2.0, 1.0], strict=True)
    ]
    content = {"workload": "x", "devices": 2, "device": "some GPU", "tokens": 600, "cases": cases}
    summarise(content)
    draw_balance(tmp_path / "a.png", content)
    assert drawn == ["equal_tokens-independent", "balanced-split"]


def test_user_errors_of_the_process_end_the_command_in_one_line(tmp_path):
    flags = ["--model", "tiny", "--cost-model", str(COSTS), "--out", str(tmp_path / "x.json")]
    with pytest.raises(InputError, match=r"^policy equal_tokens: m_mem is 100 tokens"):
        main(["bench", "balance", *flags, "--m-mem", "100"])
    same = ["--same", "1", "32", "24"]
    for bad, said in ((["--longest", "1"], "the shortest"), (same, "is no whole tokens")):
        with pytest.raises(InputError, match=f"^{' '.join(bad)}: {said}"):
            main(["bench", "balance", *flags, *bad, "--cases", "balanced"])


OTHERS = [["--samples", "7"], ["--longest", "9000"], ["--one-aspect"], ["--fsdp", "2"]]


@pytest.mark.parametrize("others", [*OTHERS, ["--context", "2"], ["--steps", "3"]])
def test_a_file_of_other_samples_or_ways_is_refused(balance, others, tmp_path):
    assert balance("--cases", "sorted-independent")[1]["cases"]
    kept = [case["case"] for case in balance("--cases", "balanced")[1]["cases"]]
    assert kept == ["sorted-independent", "balanced"]
    with pytest.raises(
        InputError, match=r"x\.json: its (set of s|number of ).* another; name a new"
    ):
        balance("--cases", "balanced", *others)
    assert len(json.loads((tmp_path / "x.json").read_text())["cases"]) == 2


def test_policies_place_the_same_samples(in_process, tmp_path, capsys, monkeypatch):
    found = {"seconds": [2.0], "busy": None, "peak_bytes": None, "programs": 1, "compiled": 1}
    found |= {"compile_seconds": None}
    monkeypatch.setattr("alload_jax.bench.balance.run_steps", lambda *_: dict(found))
    out = tmp_path / "balance.json"
    flags = ["--model", "tiny-mmdit", "--same", "1", "32", "32", "--samples", "33", "--m-mem", "36"]
    flags += ["--steps", "1", "--repeats", "1", "--cost-model", str(COSTS), "--out", str(out)]
    assert main(["bench", "balance", *flags, "--cases", "balanced", "dual_constraint"]) == 0
    content = json.loads(out.read_text())
    assert content["workload"] == "all samples 1x32x32"
    assert content["tokens"] == 33 * (4 + 8)  # those of the text count
    assert [case["case"] for case in content["cases"]] == ["balanced", "dual_constraint"]
    for case in content["cases"]:
        computed = case["row_tokens"] * content["devices"] * case["steps"]
        assert computed * (1 - case["padding"]) <= content["tokens"]
        assert case["figures"]["tokens_per_second"] > 0
    assert "| balanced" in capsys.readouterr().out


@pytest.mark.slow
def test_cases_run_on_two_devices(tmp_path):
    out, method = tmp_path / "balance.json", "dual_constraint-independent"
    names = ["equal_tokens-independent", method, "balanced-split"]
    command = [sys.executable, "-m", "alload_jax.cli", "bench", "balance", "--model", "tiny"]
    command += ["--longest", "520", "--m-mem", "560", "--samples", "60", "--steps", "2"]
    command += ["--one-aspect", "--cost-model", str(COSTS), "--out", str(out), "--cases", *names]
    xla_flags = os.environ["XLA_FLAGS"].replace("count=8", "count=2")
    flags = {"XLA_FLAGS": xla_flags, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=os.environ | flags, check=True)
    cases = {case["case"]: case for case in json.loads(out.read_text())["cases"]}
    assert list(cases) == names
    # A tuned M_comp of so small a mix binds nothing, and the plan is not measured twice.
    assert cases.pop(method)["same_as"] == names[0]
    assert all(case["figures"]["tokens_per_second"] > 0 for case in cases.values())
    assert all(len(case["rounds"]) == 3 for case in cases.values())
