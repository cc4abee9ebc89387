"""`alload plan`: manifests, workloads, configs, comparisons, cost models, memory, weights."""

import dataclasses
import json
import os
import stat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import pytest

from alload_jax.commands import plan_inputs
from alload_jax.commands.plan import LABELS
from alload_jax.config import read_config
from alload_jax.data.store import StoreWriter
from alload_jax.planning.cost import CostFile, MemoryModel, QuadraticCost, write_cost_file
from alload_jax.planning.metrics import PlanMetrics

ROOT = Path(__file__).parents[2]
SIZES = ((480, 832), (720, 1280))
BOUNDS = ["--policy", "equal_tokens", "--m-mem", 100, "--ranks", 2]
LISTED = ["--manifest", "m.csv", *BOUNDS]
WAN = ["--workload", "wan-480p", "--size", 300, "--ranks", 4]
SMALL = [*WAN, "--m-mem", 66_816]
COSTS = CostFile(
    quadratic=QuadraticCost(0.05, 1.7e-5, 1e-9, 5e-4),
    memory=MemoryModel(30e9, 5e5),
    m_mem=70_000,
    device="NVIDIA H200",
    model={"dim": 1536, "remat": "attention"},
    origin="measured",
)
MEASURED = ["--cost-model", "cost.json"]
WAN_1_3B = "dim: 1536, ffn_dim: 8960, num_heads: 12, num_layers: 30"
MANIFEST = "path,seq_len\na/1.mp4,100\na/2.mp4,300\nb/1.mp4,200\nc.mp4,100\n"


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """The working folder, with manifests of lengths, of paths and of shapes, and a cost model."""
    (tmp_path / "m.csv").write_text("seq_len\n" + "10\n20\n40\n" * 4)
    (tmp_path / "paths.csv").write_text(MANIFEST)
    sizes = {"frames": [1, 17, 17], "height": [64] * 3, "width": [64] * 3}
    pa.parquet.write_table(pa.table(sizes), tmp_path / "m.parquet")
    write_cost_file(tmp_path / "cost.json", COSTS)
    (tmp_path / "plans").mkdir()
    return tmp_path


def write_config(folder, planning, model="", run="folder: run"):
    text = f"run: {{{run}}}\ndata: {{folder: data}}\nplanning: {{{planning}}}\n"
    (folder / "config.yaml").write_text(text + (f"model: {{{model}}}\n" if model else ""))
    return ["--config", "config.yaml"]


# ---------------------------------------------------------------- output


def test_every_metric_is_in_the_table_and_in_the_json(alload, figures):
    status, out, err = alload("plan", *LISTED)
    assert (status, err) == (0, "")
    for words in ("equal_tokens (synchronous) · 2 ranks", "m_mem 100", "data: m.csv, 12 samples"):
        assert words in out
    assert "analytic, not measured: wan2.1-1.3b on NVIDIA H200" in out
    labels = LABELS | {"cost": "time of the epoch, s", "tokens_per_second": "tokens/s"}
    names = {field.name for field in dataclasses.fields(PlanMetrics)}
    assert all(labels.get(name, name.replace("_", " ")) in out for name in names)
    content = figures(*LISTED)
    others = {"repeated_neighbours", "repeated_neighbours_random", "first_step_seconds"}
    assert content["metrics"].keys() == names | others
    assert content["metrics"]["samples"] == 12
    assert content["plan"]["ranks"] == 2
    # What is unknown is a dash; an epoch that costs nothing is still JSON.
    flags = ["--manifest", "m.csv", "--policy", "fixed", "--rows", 2, "--ranks", 2, "--p", 2]
    out = alload("plan", *flags)[1]
    assert "–" in next(line for line in out.splitlines() if "utilisation" in line)
    assert "no unit" in out
    free = {"format": "alload-cost-model-1", "power": {"p": 2.0, "a": 0.0}}
    Path("free.json").write_text(json.dumps(free))
    assert figures(*LISTED, "--cost-model", "free.json")["metrics"]["idle"] == 0


def test_files_hold_the_epochs_that_are_asked_for(alload, figures, folder):
    def rows(*flags, out="new/plan.parquet"):
        status, said, _ = alload("plan", *LISTED, *flags, "--out", out)
        assert (status, f"plan: {out}" in said) == (0, True)
        return pa.parquet.read_table(folder / out)

    epochs = [rows("--epoch", number).to_pydict() for number in range(3)]
    assert sorted(epochs[0]["sample"]) == sorted(epochs[1]["sample"]) == list(range(12))
    assert len({tuple(epoch["sample"]) for epoch in epochs}) == 3
    (folder / "link.parquet").symlink_to("new/linked.parquet")
    whole = rows("--epochs", 3, out="link.parquet")
    for number, alone in enumerate(epochs):
        assert whole.filter(pa.compute.field("epoch") == number).to_pydict() == alone
    assert (folder / "link.parquet").is_symlink()
    assert (folder / "new" / "linked.parquet").is_file()
    orders = [figures(*LISTED, "--seed", seed)["plan"]["order"] for seed in (0, 1, 2)]
    assert figures(*LISTED, "--out", "json.parquet")["plan"]["order"] == orders[0]
    assert len(set(orders)) == 3


def test_policies_are_compared_over_ranks_and_a_page_is_written(alload, figures, folder):
    policies = ["equal_tokens:independent", "dual_constraint", "first_fit", "balanced"]
    flags = ["--workload", "wan-480p", "--size", 300, "--m-mem", 66_816, *MEASURED]
    flags += ["--context", 2, "--m-comp", "auto", "--simulate", "--compare"]
    cases = figures(*flags, *policies, "--ranks", 2, 4)["cases"]
    names = ["equal_tokens (independent)", "dual_constraint (synchronous)", "first_fit"]
    names.append("balanced (split, c = 2)")
    found = [(case["ranks"], case["name"]) for case in cases]
    assert found == [(ranks, name) for ranks in (2, 4) for name in names]
    assert {case["metrics"]["samples"] for case in cases} == {300}
    assert cases[1]["plan"]["m_comp"] > 0
    assert "m_comp" not in cases[0]["plan"]
    flags += [*policies[:2], "--ranks", 2, 4, "--report", "page.html"]
    status, out, _ = alload("plan", *flags)
    assert status == 0
    for name in names[:2]:
        assert sum(f"  {name} " in line for line in out.splitlines()) == 2
    assert "replayed" in out
    assert out.splitlines()[-1] == "report: page.html"
    page = (folder / "page.html").read_text()
    for part in ("How to feed 2 GPUs", "equal_tokens (independent)", "M_comp"):
        assert part in page


def test_a_simulation_adds_noise_and_the_all_reduce(figures):
    flags = [*SMALL, *MEASURED, "--policy", "sorted", "--simulate"]
    quiet, noisy, slow = (figures(*flags, *more) for more in ([], ["--noise", 0.05],
                                                              ["--all-reduce", 1]))  # fmt: skip
    assert quiet["simulation"]["seconds"] == pytest.approx(quiet["metrics"]["cost"])
    assert noisy["simulation"]["seconds"] > quiet["simulation"]["seconds"]
    added = slow["simulation"]["seconds"] - quiet["simulation"]["seconds"]
    assert added == pytest.approx(quiet["metrics"]["steps"])


# ---------------------------------------------------------------- data and configs


def test_tokens_follow_flags_configs_and_the_manifest_s_own_stride(figures, folder):
    table = pa.parquet.read_table(folder / "m.parquet")
    notes = {b"alload-manifest": json.dumps({"vae_stride": [1, 16, 16]}).encode()}
    pa.parquet.write_table(table.replace_schema_metadata(notes), folder / "own.parquet")
    config = write_config(folder, "m_mem: 60, ranks: 2", "patch_size: [1, 4, 4]")
    for manifest, flags, expected in (
        ("m.parquet", [], 16 + 2 * 5 * 16),
        ("m.parquet", ["--patch-size", "1,4,4"], 4 + 2 * 5 * 4),
        ("m.parquet", ["--vae-stride", "1,16,16"], 4 + 2 * 17 * 4),
        ("m.parquet", ["--vae-stride", "1,1,1", "--patch-size", "1,1,1"], 64 * 64 * 35),
        ("own.parquet", [], 4 + 2 * 17 * 4),
        ("own.parquet", ["--vae-stride", "4,8,8"], 16 + 2 * 5 * 16),
        ("m.parquet", config, 4 + 2 * 5 * 4),
        ("m.parquet", [*config, "--patch-size", "1,2,2"], 16 + 2 * 5 * 16),
    ):
        bounds = ["--policy", "equal_tokens", "--m-mem", 10**6, "--ranks", 1, "--p", 2]
        found = figures("--manifest", manifest, *bounds, *flags)
        assert found["metrics"]["tokens"] == expected, (manifest, flags)


def test_a_training_config_gives_values_that_flags_omit(alload, figures, folder):
    planning = 'policy: fixed, rows: {"10": 3, "20": 2, "40": 1}, m_mem: 60, ranks: 2, p: 2'
    flags = ["--manifest", "m.csv", *write_config(folder, planning, run="folder: x, seed: 3")]
    expected = {"policy": "Fixed", "m_mem": 60, "ranks": 2, "seed": 3}
    expected["rows"] = {"10": 3, "20": 2, "40": 1}
    assert figures(*flags)["plan"].items() >= expected.items()
    assert "10: 3, 20: 2, 40: 1" in alload("plan", *flags)[1]
    others = ["--policy", "equal_tokens", "--m-mem", 80, "--seed", 0, "--ranks", 5]
    expected = {"policy": "EqualTokens", "m_mem": 80, "ranks": 5, "seed": 0}
    assert figures(*flags, *others)["plan"].items() >= expected.items()


def test_a_column_of_sizes_is_drawn_from(alload, figures, folder, monkeypatch):
    np.save(folder / "sizes.npy", [[1, 64, 64], [17, 64, 64]])
    np.save(folder / "size.npy", np.arange(90, dtype=np.uint16) // 45)
    flags = ["--manifest", "size.npy", *BOUNDS]
    assert figures(*flags)["metrics"]["tokens"] == 45 * 16 + 45 * 80
    monkeypatch.setattr(plan_inputs, "_MOST_DRAWN", 30)
    said = "size.npy, 30 drawn of 90 samples, whose epoch is longer"
    assert said in alload("plan", *flags)[1]
    assert figures(*flags)["metrics"]["samples"] == 30


def test_a_sample_that_is_listed_twice_is_named(alload, folder):
    (folder / "m.csv").write_text("seq_len,path\n10,a.mp4\n20,a.mp4\n10,a.mp4\n20,b.mp4\n")
    status, _, err = alload("plan", *LISTED)
    assert status == 0
    assert "1 sample has the path and the size of another one, such as row 2 and row 0" in err
    assert "(a.mp4)" in err


def test_the_data_of_a_config_are_planned_and_clips_of_one_video_are_no_copies(alload, folder):
    with StoreWriter(folder / "data", vae_stride=(1, 1, 1)) as writer:
        for _ in range(2):
            writer.add(np.zeros((1, 16, 16, 4)), np.zeros(1, int), (1, 16, 16), path="a.mp4")
    planning = "policy: equal_tokens, m_mem: 100, ranks: 2"
    status, out, err = alload("plan", *write_config(folder, planning, "in_channels: 4"))
    assert (status, err) == (0, "")
    assert "data: data, 2 samples" in out


def test_weights_of_sources_are_planned_and_shown(alload, figures):
    manifest = ["--manifest", "paths.csv", "--m-mem", 300, "--ranks", 1, "--policy", "sorted"]
    manifest += ["--p", 2, "--out", "plan.parquet"]
    found = figures(*manifest, "--weights", "a=3", "b=0.5", "--epoch", 1)
    assert found["metrics"]["samples"] in (7, 8)
    assert (found["metrics"]["dropped"], found["metrics"]["duplicated"]) == (0, 0)
    shares = {each["path"]: each["epoch_tokens"] for each in found["plan"]["sources"]}
    assert shares == {"a": 1200, "b": 100, "others": 100}
    rows = pa.parquet.read_table("plan.parquet").to_pylist()
    times = sorted((row["sample"], row["repetition"]) for row in rows if row["sample"] < 2)
    assert times == [(sample, number) for sample in (0, 1) for number in range(3)]
    assert "weights" not in figures(*manifest)["plan"]
    assert "repetition" not in pa.parquet.read_schema("plan.parquet").names
    status, out, _ = alload("plan", *manifest, "--weights", "a=3", "--report", "page.html")
    assert status == 0
    assert "80.0%" in out
    assert "others" in out


# ---------------------------------------------------------------- costs and memory


def test_another_device_model_or_sparse_attention_costs_otherwise(alload, figures, folder):
    by_cost = [*SMALL, "--policy", "sorted", "--shards", 8]
    of_wan = (("1.3b", "h200"), ("1.3b", "a100"), ("14b", "h200"))
    dense, slower, larger = (
        figures(*by_cost, "--model", f"wan2.1-{size}", "--device", device)["metrics"]["cost"]
        for size, device in of_wan
    )
    assert slower > 2 * dense
    assert larger > 5 * dense
    sparse = figures(*by_cost, "--sparse-layers", 0.8, "--density", 0.05)
    assert sparse["metrics"]["cost"] < 0.8 * dense
    model = sparse["plan"]["cost_model"]
    assert model["kind"] == "SparseCost"
    assert model["layers"] == {"share": 0.8, "density": 0.05, "min_tokens": 16_384, "block": 64}
    assert "80% of the layers sparse, density 0.05" in sparse["plan"]["cost_model_source"]
    measured = figures(*by_cost, *MEASURED, "--sparse-layers", 1)["plan"]
    assert measured["cost_model"]["layers"]["density"] == 0.1
    attention = "{forced: [1.0, 0.2], min_tokens: 9000}"
    model = f"dim: 64, num_heads: 2, num_layers: 2, sparse_attention: {attention}, dtype: bfloat16"
    config = write_config(folder, "policy: sorted, m_mem: 66816", model)
    layers = figures(*WAN, *config)["plan"]["cost_model"]["layers"]
    assert layers == {"share": 0.5, "density": 0.2, "min_tokens": 9000, "block": 64}
    frozen = [*WAN, "--policy", "sorted"]
    lora = ["--trained-parameters", 20_000_000]
    given = ([], lora, [*lora, "--frozen-dtype", "bfloat16"])
    m_mem = [figures(*frozen, *more)["plan"]["m_mem"] for more in given]
    assert m_mem == sorted(set(m_mem))
    said = alload("plan", *frozen, *lora)[1]
    assert "20,000,000 of 1,418,996,800 parameters trained" in said


def test_what_auto_keeps_follows_from_the_memory(figures, folder):
    def planned(dtype, memory):
        model = f"{WAN_1_3B}, dtype: {dtype}, remat: auto"
        config = write_config(folder, "policy: sorted, m_mem: 66816", model)
        found = figures(*WAN, *config, "--memory-gb", memory)
        source = found["plan"]["cost_model_source"]
        return source.split("model.remat ")[1], found["metrics"]["cost"]

    words = {60: "offload_feed_forward", 140: "matmuls", 400: "auto: none"}
    found = [planned("bfloat16", memory) for memory in words]
    assert all(word in source for word, (source, _) in zip(words.values(), found, strict=True))
    assert found[0][1] > found[1][1] > found[2][1]
    assert planned("auto", 140) == found[1]


@pytest.mark.parametrize(("matmul", "told"), [("float8", True), ("dtype", False)])
def test_a_prediction_says_that_it_knows_no_float8(figures, folder, matmul, told):
    config = write_config(folder, "m_mem: 66816", f"{WAN_1_3B}, matmul: {matmul}")
    source = figures(*WAN, *config)["plan"]["cost_model_source"]
    assert ("as if products were not in float8" in source) == told


def test_auto_keeps_less_where_many_short_samples_keep_their_texts(figures, folder):
    model = f"{WAN_1_3B}, dtype: bfloat16, text: {{dim: 4096, length: 512}}, remat: auto"
    config = write_config(folder, "policy: sorted, m_mem: 81920", model)

    def kept(*flags, memory=240):
        found = figures(*flags, *config, "--ranks", 2, "--memory-gb", memory)
        return found["plan"]["cost_model_source"].split("model.remat auto: ")[1]

    names = ("wan-480p", "mixed-resolution")  # from 1,560 and from 256 tokens on
    clips, images = (kept("--workload", name, "--size", 2000) for name in names)
    assert clips.startswith("norms_matmuls_and_attention,")
    assert images.startswith("matmuls_and_attention,")
    # One short sample changes nothing.
    for name, more in (("alike", []), ("short", ["16"])):
        (folder / f"{name}.csv").write_text("\n".join(["seq_len", *["32760"] * 300, *more]))
    alike, short = (kept("--manifest", f"{name}.csv", memory=140) for name in ("alike", "short"))
    assert "matmuls_and_attention" in alike
    assert short == alike


def test_m_mem_follows_from_the_memory_of_the_device(figures, refused):
    flags = [*WAN, "--policy", "sorted"]
    assert figures(*flags, *MEASURED)["plan"]["m_mem"] == 70_000
    found = figures(*flags, *MEASURED, "--memory-gb", 80, "--margin", 0.1)["plan"]["m_mem"]
    assert found == int((80e9 * 0.9 - 30e9) // 5e5)
    by_device = [*flags, "--device", "h200", "--margin"]
    half, most = (figures(*by_device, each)["plan"]["m_mem"] for each in (0.5, 0.05))
    assert half < 0.6 * most
    # A model that one device does not hold is planned where M_mem is known.
    large = [*flags, "--model", "wan2.1-14b"]
    for given in (large, [*flags, "--config", ROOT / "configs" / "wan2_1_t2v_14b.yaml"]):
        assert figures(*given, "--m-mem", 40_000)["plan"]["m_mem"] == 40_000
    assert figures(*large, "--memory-gb", 800)["plan"]["m_mem"] > 100_000
    refused("the device has 200.0 GB", "plan", *large, "--memory-gb", 200)


def test_a_cost_model_of_another_device_or_model_is_refused_unless_accepted(
    alload, refused, folder
):
    flags = [*SMALL, "--policy", "sorted", *MEASURED]
    assert "cost model: cost.json, measured for NVIDIA H200" in alload("plan", *flags)[1]
    for other, words in (
        (["--device", "a100"], "made for NVIDIA H200, not for NVIDIA A100-SXM4-80GB; run `alload"),
        (write_config(folder, "m_mem: 70000"), "cost.json: was made for dim 1536 (here "),
    ):
        refused(words, "plan", *flags, *other)
        assert alload("plan", *flags, *other, "--foreign-cost-model")[0] == 0


MORE = (pytest.param(name, marks=pytest.mark.slow) for name in ("t2v_1_3b_lora", "t2v_14b_lora"))


@pytest.mark.parametrize("name", ["t2v_1_3b_8gpus", "i2v_14b_lora", *MORE])
def test_ready_configs_are_planned_and_their_clips_fit(figures, name):
    config = ROOT / "configs" / f"wan2_1_{name}.yaml"
    data = ["--workload", "wan-480p", "--size", 300, "--m-mem", 36_000, "--ranks", 8]
    assert figures("--config", config, *data)["metrics"]["utilisation"] > 0.7
    cases = figures("--config", config, "--memory", "--device", "h100")["cases"]
    (case,) = (case for case in cases if case["configured"])
    assert case["remat"] == read_config(["--config", str(config)]).model.remat
    assert case["m_mem"] >= 32_760
    assert case["clips"]["480x832"] >= 81 or name.endswith("8gpus")


def test_memory_is_what_the_cost_model_says(figures, alload, refused):
    frozen = ("--trained-parameters", 43_745_280, "--frozen-dtype")
    content = figures("--memory", "--memory-gb", 24, *frozen, "bfloat16")
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
    eight = figures("--memory", "--memory-gb", 24, *frozen, "float8")
    saved = by_remat["full"]["state"] - eight["cases"][1]["state"]
    assert saved == pytest.approx(1_418_996_800 - 43_745_280)
    # Replicas share all of the state but the weights.
    large = ("--memory", "--model", "wan2.1-14b", "--device", "h200")
    alone, shared = (figures(*large, *ranks)["cases"] for ranks in ((), ("--ranks", 8)))
    assert [case["m_mem"] for case in alone] == [0] * len(alone)
    assert min(case["m_mem"] for case in shared) > 0
    assert max(case["m_mem"] for case in shared) > 75_600
    status, out, err = alload("plan", "--memory", "--model", "wan2.1-14b")
    assert (status, err) == (0, "")
    assert "predicted by arithmetic, not measured" in out
    assert "does not fit" in out
    refused("--memory needs no data; leave --workload out", "plan", "--memory", *WAN)


# ---------------------------------------------------------------- refusals

LISTED_PATHS = ["--manifest", "paths.csv", "--m-mem", 300, "--ranks", 1]
FIXED = ["--manifest", "m.csv", "--ranks", 2, "--policy", "fixed", "--rows"]
BALANCED = [*SMALL, "--policy", "balanced"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        # What is planned, and on how many ranks.
        (["--ranks", 2], ["--workload", "--manifest"]),
        ([*WAN, "--manifest", "m.csv"], ["either"]),
        (["--manifest", "m.csv", "--m-mem", 100], ["--ranks"]),
        ([*BOUNDS, "--manifest", "none.csv"], ["none.csv", "no such manifest"]),
        ([*BOUNDS, "--workload", "wan-481p"], ["wan-481p", "wan-480p"]),
        ([*BOUNDS, "--config", "none.yaml"], ["none.yaml"]),
        ([*LISTED, "--vae-stride", "0,8,8"], ["vae_stride", "(0, 8, 8)"]),
        # Numbers out of range.
        *(([*LISTED, f"--{x}", -1], [f"--{x}: '-1'", "from 0"]) for x in ("seed", "epoch")),
        *(([*SMALL, "--noise", x], [f"--noise: '{x}'"]) for x in (-1.0, "nan", "inf", "1e308")),
        ([*SMALL, "--vae-stride", f"{10**20},8,8"], ["three whole numbers such as 4,8,8"]),
        *(([*LISTED, "--ranks", x], [f"--ranks: '{x}'", "from 1"]) for x in (-1, 2**63 - 2)),
        *(([*SMALL, "--margin", x], [f"--margin: '{x}'", "below 1"]) for x in (1.0, -0.1)),
        *(([*SMALL, "--epochs", x], [f"--epochs: '{x}'", "from 1"]) for x in (0, 10**9)),
        (["--memory", "--memory-gb", 0], ["--memory-gb: '0'", "above 0"]),
        ([*LISTED, "--micro-batches-per-step", 0], ["micro_batches_per_step is 0"]),
        ([*FIXED, 0], ["0 rows", "at least 1"]),
        ([*FIXED, 2**63], ["9223372036854775808 rows", "at most 1,048,576"]),
        ([*BALANCED, "--m-mem", 10**23], ["at most 1,000,000,000,000"]),
        ([*BALANCED, "--row-tokens", 100_000], ["row_tokens is 100000, more than m_mem = 66816"]),
        # Words that are no values.
        ([*LISTED, "--m-mem", "1.5"], ["--m-mem", "'1.5'"]),
        ([*LISTED, "--p", "two"], ["--p", "'two'"]),
        ([*LISTED, "--policy", "equal"], ["--policy", "'equal'", "equal_tokens"]),
        ([*LISTED, "--ranks-mode", "async"], ["--ranks-mode", "'async'", "independent"]),
        ([*LISTED, "--vae-stride", "8,8"], ["--vae-stride", "'8,8'", "4,8,8"]),
        ([*LISTED, "--patch-size", "1,x,2"], ["--patch-size", "'1,x,2'"]),
        ([*LISTED, "--ranks"], ["--ranks"]),
        ([*SMALL, "--device", "h300"], ["h300", "h200"]),
        ([*SMALL, "--m-comp", "much"], ["much", "auto"]),
        ([*SMALL, "--context", "few"], ["'few' is not a whole number or auto"]),
        ([*SMALL, "--sample-spread", "wide"], ["'wide' is not a finite number or none"]),
        ([*SMALL, "--compare", "balance"], ["'balance'", "balanced"]),
        ([*SMALL, "--compare", "equal_tokens:alone"], ["equal_tokens:independent"]),
        ([*SMALL, "--compare", "balanced:independent"], ["give balanced"]),
        # Flags that exclude or need each other.
        ([*SMALL, "--policy", "equal_tokens", "--context", 2], ["splits no sample"]),
        ([*SMALL, "--density", 0.05], ["--sparse-layers"]),
        ([*SMALL, "--sparse-layers", 2], ["share of sparse layers is 2"]),
        ([*SMALL, "--trained-parameters", 0], ["0 parameters", "from 1 to 1418996800"]),
        ([*SMALL, "--frozen-dtype", "bfloat16"], ["--trained-parameters", "give both"]),
        ([*SMALL, *MEASURED, "--trained-parameters", 9], ["--trained-parameters", "cost.json"]),
        ([*WAN, "--p", 2, "--memory-gb", 80], ["memory coefficients"]),
        ([*LISTED, "--cost-model", "m.csv"], ["m.csv", "not valid JSON"]),
        # Files that cannot be written, or would be lost.
        ([*SMALL, "--compare", "equal_tokens", "balanced", "--out", "p.parquet"], ["--out"]),
        ([*SMALL, "--ranks", 4, 8, "--out", "p.parquet"], ["--out", "one --ranks"]),
        ([*SMALL, "--out", "plan.csv"], ["--out is plan.csv", ".parquet"]),
        ([*SMALL, "--out", ""], ["is empty"]),
        ([*SMALL, "--report", "plans"], ["plans: is a folder"]),
        ([*SMALL, "--out", "x", "--report", "x"], ["--report x is also --out"]),
        ([*SMALL, *MEASURED, "--report", "./cost.json"], ["is also --cost-model"]),
        ([*LISTED, "--out", "m.csv"], ["is also --manifest"]),
        # Weights.
        ([*LISTED_PATHS, "--weights", "a"], ["--weights a: give PATH=WEIGHT, as portraits=3"]),
        ([*LISTED_PATHS, "--weights", "a=much"], ["--weights a=much: give PATH=WEIGHT"]),
        ([*LISTED_PATHS, "--weights", "x=2"], ["'x' matches no sample; there are a, b, c.mp4"]),
        ([*LISTED_PATHS, "--weights", "a=0"], ["the weight of 'a' is 0.0"]),
        ([*LISTED_PATHS, "--weights", "*=0.01"], ["an epoch might hold no sample"]),
        ([*SMALL, "--weights", "a=2"], ["a workload has not"]),
        ([*LISTED, "--weights", "a=2"], ["does not record the paths"]),
        # Flags that do not exist.
        *(
            ([*LISTED, *typed], [typed[0].split("=")[0], f"did you mean {meant}?"])
            for typed, meant in (
                (["--m-men", "100"], "--m-mem"),
                (["--m_mem=100"], "--m-mem"),
                (["--micro", "2"], "--micro-batches-per-step"),
            )
        ),
        ([*LISTED, "--zzzzzzzz"], ["--help"]),
        ([*LISTED, "surplus"], ["surplus"]),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(refused, flags, named):
    refused(named, "plan", *flags)


def test_an_out_that_cannot_be_written_and_a_pipe_are_refused(alload, folder):
    os.mkfifo(folder / "pipe.parquet")
    before = sorted(folder.rglob("*"))
    said = {"m.csv/plan.parquet": "cannot be written", "pipe.parquet": "is not a plain file"}
    for out, words in said.items():
        status, _, err = alload("plan", *LISTED, "--p", 2, "--out", out)
        assert (status, err.count("\n")) == (2, 1)
        assert words in err
    assert stat.S_ISFIFO((folder / "pipe.parquet").stat().st_mode)
    assert sorted(folder.rglob("*")) == before
