"""`alload plan`: workloads, comparisons, simulation, page, cost models."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from alload_jax import cli
from alload_jax.config import read_config
from alload_jax.errors import run_command
from alload_jax.planning.cost import CostFile, MemoryModel, QuadraticCost, write_cost_file

ROOT = Path(__file__).parents[2]
SIZES = ((480, 832), (720, 1280))
SMALL = ["--workload", "wan-480p", "--size", 2000, "--m-mem", 66_816, "--ranks", 4]
COSTS = CostFile(
    quadratic=QuadraticCost(0.05, 1.7e-5, 1e-9, 5e-4),
    memory=MemoryModel(30e9, 5e5),
    m_mem=70_000,
    device="NVIDIA H200",
    model={"dim": 1536, "remat": "attention"},
    origin="measured",
)


@pytest.fixture
def alload(tmp_path, monkeypatch, capsys):
    """Runs `alload plan` in an empty folder; returns its status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        status = run_command(cli.main, ["plan", *map(str, argv)])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def figures(alload):
    """Runs `alload plan --json` and returns its JSON."""

    def run(*argv):
        status, out, err = alload(*argv, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


@pytest.fixture
def cost_file(tmp_path):
    write_cost_file(tmp_path / "cost.json", COSTS)
    return "cost.json"


def test_without_a_cost_model_the_reported_source_is_analytic(alload):
    status, out, _ = alload(*SMALL, "--policy", "balanced")
    assert status == 0
    assert "analytic, not measured: wan2.1-1.3b on NVIDIA H200" in out
    assert "data: wan-480p, 2,000 samples" in out


def test_another_device_and_model_cost_more(figures):
    cost = {
        (model, device): figures(
            *SMALL, "--policy", "balanced", "--model", model, "--device", device, "--shards", 8
        )["metrics"]["cost"]
        for model in ("wan2.1-1.3b", "wan2.1-14b")
        for device in ("h200", "a100")
    }
    assert cost["wan2.1-1.3b", "a100"] > 2 * cost["wan2.1-1.3b", "h200"]
    assert cost["wan2.1-14b", "h200"] > 5 * cost["wan2.1-1.3b", "h200"]


def test_sparse_layers_cost_less(figures, alload, cost_file):
    by_cost = (*SMALL, "--policy", "sorted")
    dense = figures(*by_cost)
    sparse = figures(*by_cost, "--sparse-layers", 0.8, "--density", 0.05)
    assert sparse["metrics"]["cost"] < 0.8 * dense["metrics"]["cost"]
    model = sparse["plan"]["cost_model"]
    assert model["kind"] == "SparseCost"
    assert model["layers"] == {"share": 0.8, "density": 0.05, "min_tokens": 16_384, "block": 64}
    measured = figures(*by_cost, "--cost-model", cost_file, "--sparse-layers", 1)["plan"]
    assert measured["cost_model"]["layers"]["density"] == 0.1
    assert "80% of the layers sparse, density 0.05" in sparse["plan"]["cost_model_source"]
    status, _, err = alload(*SMALL, "--density", 0.05)
    assert (status, len(err.splitlines())) == (2, 1)
    assert "--sparse-layers" in err
    assert "share of sparse layers is 2" in alload(*SMALL, "--sparse-layers", 2)[2]


def test_a_config_with_forced_densities_is_planned_for_them(figures, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "run: {folder: run}\ndata: {folder: data}\nplanning: {policy: sorted, m_mem: 66816}\n"
        "model: {dim: 64, num_heads: 2, num_layers: 2, dtype: bfloat16,"
        " sparse_attention: {forced: [1.0, 0.2], min_tokens: 9000}}\n"
    )
    found = figures(
        "--workload", "wan-480p", "--size", 500, "--ranks", 2, "--config", "config.yaml"
    )
    layers = found["plan"]["cost_model"]["layers"]
    assert layers == {"share": 0.5, "density": 0.2, "min_tokens": 9000, "block": 64}


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_what_auto_keeps_follows_from_the_memory(figures, tmp_path, dtype):
    (tmp_path / "config.yaml").write_text(
        "run: {folder: run}\ndata: {folder: data}\nplanning: {policy: sorted, m_mem: 66816}\n"
        f"model: {{dim: 1536, ffn_dim: 8960, num_heads: 12, num_layers: 30, dtype: {dtype},"
        " remat: auto}\n"
    )
    data = ["--workload", "wan-480p", "--size", 500, "--ranks", 2, "--config", "config.yaml"]
    found = [figures(*data, "--memory-gb", size) for size in (60, 140, 400)]
    sources = [each["plan"]["cost_model_source"] for each in found]
    for words, source in zip(
        ("offload_feed_forward", "matmuls", "auto: none"), sources, strict=True
    ):
        assert words in source.split("model.remat ")[1]
    costs = [each["metrics"]["cost"] for each in found]
    assert costs[0] > costs[1] > costs[2]


def test_auto_keeps_less_where_many_short_samples_keep_their_texts(figures, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "run: {folder: run}\ndata: {folder: data}\nplanning: {policy: sorted, m_mem: 81920}\n"
        "model: {dim: 1536, ffn_dim: 8960, num_heads: 12, num_layers: 30, dtype: bfloat16,"
        " text: {dim: 4096, length: 512}, remat: auto}\n"
    )
    flags = ["--size", 5000, "--ranks", 2, "--memory-gb", 240, "--config", "config.yaml"]
    sources = [
        figures("--workload", name, *flags)["plan"]["cost_model_source"]
        for name in ("wan-480p", "mixed-resolution")  # from 1,560 and from 256 tokens on
    ]
    clips, images = (source.split("model.remat auto: ")[1] for source in sources)
    assert clips.startswith("norms_matmuls_and_attention,")
    assert images.startswith("matmuls_and_attention,")


def test_one_short_sample_changes_nothing_of_what_auto_keeps(figures, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "run: {folder: run}\ndata: {folder: data}\nplanning: {policy: balanced, m_mem: 81920}\n"
        "model: {dim: 1536, ffn_dim: 8960, num_heads: 12, num_layers: 30, dtype: bfloat16,"
        " text: {dim: 4096, length: 512}, remat: auto}\n"
    )
    lengths = ["32760"] * 300
    (tmp_path / "alike.csv").write_text("\n".join(["seq_len", *lengths]))
    (tmp_path / "short.csv").write_text("\n".join(["seq_len", *lengths, "16"]))
    flags = ["--ranks", 2, "--memory-gb", 140, "--config", "config.yaml"]
    alike, short = (
        figures("--manifest", name, *flags)["plan"]["cost_model_source"]
        for name in ("alike.csv", "short.csv")
    )
    assert "matmuls_and_attention" in alike
    assert short == alike


def test_policies_are_compared_over_ranks(figures, alload):
    policies = ["equal_tokens:independent", "dual_constraint", "first_fit", "balanced"]
    flags = ["--workload", "wan-480p", "--size", 2000, "--m-mem", 66_816, "--compare", *policies]
    content = figures(*flags, "--ranks", 2, 8)
    found = [(case["ranks"], case["name"]) for case in content["cases"]]
    names = ["equal_tokens (independent)", "dual_constraint (synchronous)", "first_fit", "balanced"]
    assert found == [(ranks, name) for ranks in (2, 8) for name in names]
    metrics = [case["metrics"] for case in content["cases"]]
    assert {each["samples"] for each in metrics} == {2000}
    status, out, _ = alload(*flags, "--ranks", 2, 8)
    assert status == 0
    for name in names:
        assert sum(f"  {name} " in line for line in out.splitlines()) == 2


@pytest.mark.parametrize(
    "compared", [("auto", "balanced", "sorted"), ("sorted", "balanced", "auto")]
)
def test_the_policy_that_auto_takes_is_compared_once(figures, compared):
    names = [case["name"] for case in figures(*SMALL, "--compare", *compared)["cases"]]
    assert names == ["balanced", "sorted (synchronous)"]


def test_a_comparison_accepts_settings_of_a_single_policy(figures):
    policies = ["equal_tokens", "dual_constraint", "balanced"]
    found = figures(*SMALL, "--compare", *policies, "--context", 2, "--m-comp", "auto")["cases"]
    assert found[2]["name"] == "balanced (split, c = 2)"
    assert found[1]["plan"]["m_comp"] > 0
    assert "m_comp" not in found[0]["plan"]


def test_a_simulation_adds_noise_and_the_all_reduce(figures):
    quiet = figures(*SMALL, "--policy", "balanced", "--simulate")
    noisy = figures(*SMALL, "--policy", "balanced", "--simulate", "--noise", 0.05)
    slow = figures(*SMALL, "--policy", "balanced", "--simulate", "--all-reduce", 1)
    assert quiet["simulation"]["seconds"] == pytest.approx(quiet["metrics"]["cost"])
    assert noisy["simulation"]["idle"] > quiet["simulation"]["idle"] + 0.02
    added = slow["simulation"]["seconds"] - quiet["simulation"]["seconds"]
    assert added == pytest.approx(quiet["metrics"]["steps"])


def test_the_page_is_written_and_named(alload, tmp_path):
    flags = ["--compare", "equal_tokens:independent", "dual_constraint:independent", "balanced"]
    status, out, _ = alload(*SMALL, 8, *flags, "--report", "page.html", "--m-comp", "auto")
    assert status == 0
    assert out.splitlines()[-1] == "report: page.html"
    page = (tmp_path / "page.html").read_text()
    for part in ("How to feed 4 GPUs", "equal_tokens (independent)", "balanced", "M_comp"):
        assert part in page
    assert "<script src" not in page


def test_frozen_parameters_increase_m_mem(figures, alload):
    flags = ["--workload", "wan-480p", "--size", 300, "--ranks", 2, "--policy", "balanced"]
    lora = ["--trained-parameters", 20_000_000]
    m_mem = [
        figures(*flags, *more)["plan"]["m_mem"]
        for more in ([], lora, [*lora, "--frozen-dtype", "bfloat16"])
    ]
    assert m_mem == sorted(set(m_mem))
    out = alload(*flags, *lora)[1]
    assert "20,000,000 of 1,418,996,800 parameters trained" in out


def test_m_mem_is_computed_from_device_memory(figures, cost_file):
    flags = ["--workload", "wan-480p", "--size", 500, "--ranks", 2, "--policy", "balanced"]
    flags += ["--cost-model", cost_file]
    assert figures(*flags)["plan"]["m_mem"] == 70_000
    found = figures(*flags, "--memory-gb", 80, "--margin", 0.1)["plan"]["m_mem"]
    assert found == int((80e9 * 0.9 - 30e9) // 5e5)


def test_a_model_that_one_device_does_not_hold_is_planned_where_m_mem_is_known(figures, alload):
    flags = ["--workload", "wan-480p", "--size", 500, "--ranks", 8]
    large = [*flags, "--model", "wan2.1-14b"]
    for given in (large, [*flags, "--config", ROOT / "configs" / "wan2_1_t2v_14b.yaml"]):
        assert figures(*given, "--m-mem", 40_000)["plan"]["m_mem"] == 40_000
    assert figures(*large, "--memory-gb", 800)["plan"]["m_mem"] > 100_000
    status, _, err = alload(*large, "--memory-gb", 200)
    assert (status, err.count("\n")) == (2, 1)
    assert "the device has 200.0 GB" in err


def test_the_margin_stays_free_on_a_known_device_too(figures):
    flags = ["--workload", "wan-480p", "--size", 500, "--ranks", 2, "--device", "h200"]
    half, most = (figures(*flags, "--margin", each)["plan"]["m_mem"] for each in (0.5, 0.05))
    assert half < 0.6 * most


def test_a_measured_cost_model_is_named(alload, cost_file):
    out = alload(*SMALL, "--policy", "balanced", "--cost-model", cost_file)[1]
    assert "cost model: cost.json, measured for NVIDIA H200" in out


def test_a_cost_model_of_another_device_is_refused_unless_accepted(alload, cost_file):
    flags = [*SMALL, "--policy", "balanced", "--cost-model", cost_file, "--device", "a100"]
    status, out, err = alload(*flags)
    assert (status, out) == (2, "")
    assert "cost.json: was made for NVIDIA H200, not for NVIDIA A100-SXM4-80GB" in err
    assert "alload calibrate" in err
    assert alload(*flags, "--foreign-cost-model")[0] == 0


def test_a_cost_model_of_another_model_is_refused_unless_accepted(alload, cost_file):
    config = "run: {folder: runs/x}\ndata: {folder: data}\nplanning: {m_mem: 70000}\n"
    with open("config.yaml", "w") as file:
        file.write(config)
    flags = [*SMALL, "--config", "config.yaml", "--cost-model", cost_file]
    status, _, err = alload(*flags)
    assert status == 2
    assert "cost.json: was made for dim 1536 (here " in err
    assert alload(*flags, "--foreign-cost-model")[0] == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--ranks", 2], ["--workload", "--manifest"]),
        (["--ranks", 2, "--workload", "wan-480p", "--manifest", "m.csv"], ["either"]),
        (["--ranks", 2, "--workload", "wan-481p"], ["wan-481p", "wan-480p"]),
        (["--ranks", 2, "--workload", "wan-480p", "--size", 0], ["size is 0"]),
        (["--ranks", 2, "--workload", "wan-480p", "--device", "h300"], ["h300", "h200"]),
        ([*SMALL, "--compare", "balance"], ["'balance'", "balanced"]),
        ([*SMALL, "--compare", "equal_tokens:alone"], ["equal_tokens:independent"]),
        ([*SMALL, "--compare", "equal_tokens", "balanced", "--out", "p.parquet"], ["--out"]),
        ([*SMALL, 8, "--out", "p.parquet"], ["--out", "one --ranks"]),
        ([*SMALL, "--m-comp", "much"], ["much", "auto"]),
        ([*SMALL, "--noise", -1], ["--noise is -1"]),
        ([*SMALL, "--margin", 1], ["--margin is 1"]),
        ([*SMALL, "--epochs", 10**9], ["--epochs is 1000000000", "at most 10,000"]),
        ([*SMALL, "--out", "plan.csv"], ["--out is plan.csv", ".parquet"]),
        ([*SMALL, "--noise", "nan"], ["--noise is nan"]),
        ([*SMALL, "--p", "inf"], ["planning.p is inf"]),
        ([*SMALL, "--policy", "balanced", "--m-mem", 10**23], ["at most 1,000,000,000,000"]),
        ([*SMALL, "--policy", "balanced", "--align", 70_000], ["align is 70000", "smaller"]),
        ([*SMALL, "--compare", "balanced:independent"], ["give balanced"]),
        ([*SMALL, "--size", 10**13], ["at most 1,000,000,000"]),
        ([*SMALL, "--out", ""], ["is empty"]),
        ([*SMALL, "--policy", "equal_tokens", "--context", 2], ["splits no sample"]),
        ([*SMALL, "--policy", "balanced", "--context", 3], ["context is 3", "4 ranks"]),
        ([*SMALL, "--policy", "balanced", "--m-mem", 30_000], ["(33390 tokens)", "at least 33390"]),
        ([*SMALL, "--trained-parameters", 0], ["0 parameters", "from 1 to 1418996800"]),
        ([*SMALL, "--frozen-dtype", "bfloat16"], ["--trained-parameters", "give both"]),
        (
            [*SMALL, "--trained-parameters", 9, "--cost-model", "c.json"],
            ["--trained-parameters", "c.json"],
        ),
        ([*SMALL, "--p", 2, "--memory-gb", 80], []),
        ([*SMALL, "--report", "."], ["is a folder"]),
    ],
)
def test_invalid_plans_are_reported_in_one_line(alload, flags, named):
    status, _, err = alload(*flags)
    if not named:
        assert status == 0  # m_mem is given, so memory is not needed
        return
    assert status == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for part in named:
        assert part in err


@pytest.mark.parametrize("flag", ["--out", "--report"])
def test_only_plain_files_are_replaced(alload, tmp_path, flag):
    os.mkfifo(tmp_path / "pipe")
    status, _, err = alload(*SMALL, "--policy", "balanced", flag, "pipe")
    assert status == 2
    assert "pipe: is not a plain file" in err
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_link_is_followed(alload, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "plan.parquet").symlink_to("there/plan.parquet")
    assert alload(*SMALL, "--policy", "balanced", "--out", "plan.parquet")[0] == 0
    assert (tmp_path / "plan.parquet").is_symlink()
    assert (tmp_path / "there" / "plan.parquet").is_file()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--out", "x", "--report", "x"], "--report x is also --out"),
        (
            ["--out", "cost.json", "--cost-model", "cost.json"],
            "--out cost.json is also --cost-model",
        ),
        (["--report", "./cost.json", "--cost-model", "cost.json"], "is also --cost-model"),
    ],
)
def test_outputs_must_differ_from_inputs_and_each_other(alload, tmp_path, cost_file, flags, named):
    before = (tmp_path / cost_file).read_bytes()
    status, _, err = alload(*SMALL, "--policy", "balanced", *flags)
    assert status == 2
    assert named in err
    assert (tmp_path / cost_file).read_bytes() == before


def test_planning_a_workload_imports_no_jax(tmp_path):
    program = (
        "import sys; from alload_jax.cli import main; "
        f"main({['plan', *map(str, SMALL), '--policy', 'balanced', '--report', 'p.html']}); "
        "sys.exit('jax' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, cwd=tmp_path, check=False).returncode == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--row-tokens", 100_000], "planning.row_tokens is 100000, more than m_mem = 66816"),
        (["--row-tokens", 1000], "row_tokens is 1000 tokens, shorter than sample"),
        (["--context", "few"], "'few' is neither a whole number nor auto"),
        (["--sample-spread", "wide"], "'wide' is neither a number nor none"),
    ],
)
def test_what_rows_and_steps_cannot_be_is_one_line(alload, flags, words):
    base = ["--workload", "wan-480p", "--size", 300, "--ranks", 8, "--m-mem", 66_816]
    status, _, error = alload(*base, "--policy", "balanced", *flags)
    assert status != 0
    assert words in error
    assert len(error.splitlines()) == 1


MANIFEST = "path,seq_len\na/1.mp4,100\na/2.mp4,300\nb/1.mp4,200\nc.mp4,100\n"


@pytest.fixture
def manifest(tmp_path):
    (tmp_path / "m.csv").write_text(MANIFEST)
    return ["--manifest", "m.csv", "--m-mem", 300, "--ranks", 1, "--policy", "sorted"]


def test_weights_of_sources_are_planned_and_shown(alload, figures, manifest):
    found = figures(*manifest, "--weights", "a=3", "b=0.5", "--epoch", 1, "--out", "plan.parquet")
    assert found["metrics"]["samples"] in (7, 8)
    assert (found["metrics"]["dropped"], found["metrics"]["duplicated"]) == (0, 0)
    shares = {each["path"]: each for each in found["plan"]["sources"]}
    assert {name: each["epoch_tokens"] for name, each in shares.items()} == {
        "a": 1200,
        "b": 100,
        "others": 100,
    }
    rows = pyarrow.parquet.read_table("plan.parquet").to_pylist()
    times = sorted((row["sample"], row["repetition"]) for row in rows if row["sample"] < 2)
    assert times == [(sample, number) for sample in (0, 1) for number in range(3)]
    plain = figures(*manifest, "--out", "plan.parquet")
    assert "weights" not in plain["plan"]
    assert "repetition" not in pyarrow.parquet.read_schema("plan.parquet").names
    status, out, _ = alload(*manifest, "--weights", "a=3", "--report", "page.html")
    assert status == 0
    assert "80.0%" in out
    assert "others" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--weights", "a"], "--weights a: give PATH=WEIGHT, as portraits=3"),
        (["--weights", "a=much"], "--weights a=much: give PATH=WEIGHT"),
        (["--weights", "x=2"], "'x' matches no sample; there are a, b, c.mp4"),
        (["--weights", "a=0"], "the weight of 'a' is 0.0"),
        (["--weights", "*=0.01"], "an epoch might hold no sample"),
    ],
)
def test_weights_that_cannot_be_are_one_line(alload, manifest, flags, words):
    status, _, error = alload(*manifest, *flags)
    assert status == 2
    assert words in error
    assert len(error.splitlines()) == 1


def test_weights_need_paths(alload, tmp_path):
    assert "a workload has not" in alload(*SMALL, "--weights", "a=2")[2]
    (tmp_path / "n.csv").write_text("seq_len\n100\n")
    flags = ["--manifest", "n.csv", "--m-mem", 300, "--ranks", 1, "--weights", "a=2"]
    assert "does not record the paths" in alload(*flags)[2]


READY = (
    "wan2_1_t2v_1_3b_lora",
    "wan2_1_t2v_14b_lora",
    "wan2_1_t2v_1_3b_8gpus",
    "wan2_1_i2v_14b_lora",
)


@pytest.mark.parametrize("name", READY)
def test_ready_configs_are_planned_and_their_clips_fit(figures, name):
    config = ROOT / "configs" / f"{name}.yaml"
    data = ["--workload", "wan-480p", "--size", 500, "--m-mem", 36_000, "--ranks", 8]
    assert figures("--config", config, *data)["metrics"]["utilisation"] > 0.7
    cases = figures("--config", config, "--memory", "--device", "h100")["cases"]
    (case,) = (case for case in cases if case["configured"])
    assert case["remat"] == read_config(["--config", str(config)]).model.remat
    assert case["m_mem"] >= 32_760
    assert case["clips"]["480x832"] >= 81 or name.endswith("8gpus")


def test_memory_is_what_the_cost_model_says(figures, alload):
    frozen = ("--trained-parameters", 43_745_280, "--frozen-dtype", "bfloat16")
    content = figures("--memory", "--memory-gb", 24, *frozen)
    assert content["model"] == "wan2.1-1.3b"
    by_remat = {case["remat"]: case for case in content["cases"]}
    for case in by_remat.values():
        for (height, width), frames in zip(SIZES, case["clips"].values(), strict=True):
            for more, fits in ((0, True), (4, False)):
                latents = (frames + more - 1) // 4 + 1
                tokens = latents * (height // 16) * (width // 16)
                needed = case["state"] + case["per_token"] * tokens
                # The text of one sample takes less than 0.2 GB.
                assert (needed < 0.95 * 24e9) == fits or abs(needed - 0.95 * 24e9) < 0.2e9
    assert by_remat["offload"]["per_token"] < by_remat["full"]["per_token"]
    eight = figures("--memory", "--memory-gb", 24, *frozen[:2], "--frozen-dtype", "float8")
    saved = by_remat["full"]["state"] - eight["cases"][1]["state"]
    assert saved == pytest.approx(1_418_996_800 - 43_745_280)
    status, out, err = alload("--memory")
    assert status == 0
    assert "predicted by arithmetic, not measured" in out
    assert not err


def test_replicas_share_all_of_the_state_but_the_weights(figures):
    flags = ("--memory", "--model", "wan2.1-14b", "--device", "h200")
    alone, shared = (figures(*flags, *ranks)["cases"] for ranks in ((), ("--ranks", 8)))
    assert [case["m_mem"] for case in alone] == [0] * len(alone)
    assert all(case["m_mem"] for case in shared)
    assert max(case["m_mem"] for case in shared) > 75_600


def test_memory_takes_no_data(alload):
    status, _, err = alload("--memory", "--workload", "wan-480p")
    assert (status, err.count("\n")) == (2, 1)
    assert "--memory needs no data; leave --workload out" in err
