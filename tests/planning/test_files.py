"""The file of a plan; and the metrics that `alload plan` reports, recomputed from it alone."""

import contextlib
import io
import json
import statistics
from collections import Counter, defaultdict

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import MODES, cases, examples, write_json

from alload_jax import cli
from alload_jax.errors import InputError, run_command
from alload_jax.planning.cost import FORMAT
from alload_jax.planning.factory import make_plan
from alload_jax.planning.plan import METADATA_KEY, plan_table, write_plan

COLUMNS = [
    *("epoch", "step", "rank", "micro_batch", "sample", "seq_len", "padded_len", "tokens"),
    *("offset", "region", "split_tokens", "rows", "slots", "frames", "height", "width"),
]


def alload_plan(*flags):
    """Runs `alload plan --json` and returns its JSON."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert run_command(cli.main, ["plan", "--json", *map(str, flags)]) == 0
    return json.loads(printed.getvalue())


def write_manifest(path, columns):
    pa.parquet.write_table(pa.table(columns), path)
    return path


def read_plan(path):
    """The rows of a plan file, and the settings in its metadata."""
    table = pa.parquet.read_table(path)
    return table.to_pylist(), json.loads(table.schema.metadata[b"alload-plan"])


def flags_of(manifest, config, seed):
    """The flags of this plan; `rows` by name has no flag."""
    flags = ["--policy", config.policy, "--ranks-mode", config.ranks_mode, "--seed", seed]
    flags += ["--ranks", config.ranks, "--micro-batches-per-step", config.micro_batches_per_step]
    for name in ("m_mem", "m_comp", "p", "rows"):
        value = getattr(config, name)
        if isinstance(value, dict):
            value = min(value.values())
        if name == "p":
            value = value or 2.0  # by default the command fits it to a device
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", value]
    for name in ("vae_stride", "patch_size"):
        triple = ",".join(map(str, getattr(manifest.geometry, name)))
        flags += [f"--{name.replace('_', '-')}", triple]
    return flags


# ---------------------------------------------------- metrics recomputed from the file alone


def micro_batches(rows, settings):
    """{(step, micro_batch): {rank: (rows, padded_len)}}, with the ranks that compute padding."""
    work = defaultdict(dict)
    for row in rows:
        work[row["step"], row["micro_batch"]][row["rank"]] = (row["rows"], row["padded_len"])
    if settings["mode"] == "synchronous":
        for held in work.values():
            (shared,) = set(held.values())
            held.update(dict.fromkeys(range(settings["ranks"]), shared))
    return work


def rank_totals(work, settings, cost):
    """{step: [cost of every rank]}."""
    totals = defaultdict(lambda: [0.0] * settings["ranks"])
    for (step, _), held in work.items():
        for rank, (rows, padded_len) in held.items():
            totals[step][rank] += cost(rows, padded_len)
    return totals


def imbalance(costs):
    return max(costs) / statistics.fmean(costs) - 1


def variation(values):
    return statistics.pstdev(values) / statistics.fmean(values)


def excess(costs, largest_indivisible_cost):
    return max(costs) / max(statistics.fmean(costs), largest_indivisible_cost) - 1


def correlation(by_step):
    """Pearson's, of keys and values; 0 where one of them is constant."""
    if len(set(by_step.values())) < 2:
        return 0.0
    return statistics.correlation(list(by_step), list(by_step.values()))


def recomputed(path, cost):
    rows, settings = read_plan(path)
    work = micro_batches(rows, settings)
    held = [each for ranks in work.values() for each in ranks.values()]
    costs = rank_totals(work, settings, cost)
    squares = rank_totals(work, settings, lambda b, s: b * s**2)
    makespans = [max(ranks) for ranks in costs.values()]
    largest = defaultdict(float)
    for row in rows:
        largest[row["step"]] = max(largest[row["step"]], cost(1, row["seq_len"]))
    tokens = sum(row["seq_len"] for row in rows)
    lengths = defaultdict(list)
    for row in rows:
        lengths[row["step"]].append(row["seq_len"])
    above = [excess(costs[step], largest[step]) for step in costs]
    placed = Counter(row["sample"] for row in rows)
    m_mem = settings["m_mem"]
    per_step = [
        len(each) / statistics.fmean(map(len, lengths.values())) for each in lengths.values()
    ]
    return {
        "steps": len(costs),
        "samples": len(rows),
        "tokens": tokens,
        "buckets": len(set(held)),
        "step_samples_min": min(per_step),
        "step_samples_max": max(per_step),
        "segments": max(Counter((r["step"], r["micro_batch"], r["rank"]) for r in rows).values()),
        "imbalance": statistics.fmean(map(imbalance, costs.values())),
        "imbalance_max": max(map(imbalance, costs.values())),
        "idle": 1 - sum(map(statistics.fmean, costs.values())) / sum(makespans),
        "cost_cv": statistics.fmean(map(variation, costs.values())),
        "compute_cv": statistics.fmean(map(variation, squares.values())),
        "step_cv": variation(makespans),
        "padding": 1 - tokens / sum(b * s for b, s in held),
        "utilisation": tokens / (m_mem * len(held)) if m_mem else None,
        "excess": statistics.fmean(above),
        "excess_max": max(above),
        "order_correlation": correlation({k: statistics.fmean(v) for k, v in lengths.items()}),
        "length_share": statistics.fmean(len(set(v)) for v in lengths.values())
        / len({row["seq_len"] for row in rows}),
        "cost": sum(makespans),
        # Bucketed plans leave no sample over.
        "tokens_per_second": tokens / sum(makespans),
        "dropped": max(placed) + 1 - len(placed),
        "duplicated": len(rows) - len(placed),
    }


def assert_same(reported, recomputed):
    # Two compare epochs, of which the file holds one, one is of the cost model, and the weights of
    # samples have a test of their own.
    others = ("repeated_neighbours", "first_step_seconds", "longest_weight")
    reported = {k: v for k, v in reported.items() if not k.startswith(others)}
    assert reported.keys() == recomputed.keys()
    for name, value in recomputed.items():
        expected = None if value is None else pytest.approx(value, rel=1e-9, abs=1e-9)
        assert reported[name] == expected, name


@given(
    case=cases(),
    quadratic=st.none() | st.tuples(st.floats(0, 1), st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-6)),
)
@examples(40)
def test_every_metric_can_be_recomputed_from_the_plan_file(tmp_path_factory, case, quadratic):
    manifest, config, seed = case
    folder = tmp_path_factory.mktemp("plan")
    path, out = write_manifest(folder / "m.parquet", manifest.columns), folder / "plan.parquet"
    flags, p = flags_of(manifest, config, seed), config.p or 2.0

    def cost(rows, seq_len):
        if not quadratic:
            return rows * float(seq_len) ** p
        c0, c1, c2 = quadratic
        return c0 + c1 * rows * seq_len + c2 * rows * seq_len * seq_len

    if quadratic:
        coefficients = dict(zip(("c0", "c1", "c2"), quadratic, strict=True))
        model = {"format": FORMAT, "quadratic": coefficients}
        flags += ["--cost-model", write_json(folder / "cost.json", model)]
    reported = alload_plan("--manifest", path, "--out", out, *flags)["metrics"]
    found = recomputed(out, cost)
    shapes = set(zip(manifest.lengths(), manifest.shapes(), strict=True))
    if len({length for length, _ in shapes}) < len(shapes):
        del found["buckets"], reported["buckets"]  # programs of equal length but other shapes
    assert_same(reported, found)


@pytest.mark.parametrize(
    ("left", "right"),
    [([], ["--p", 3]), (["--p", 1.5], ["--cost-model", "cost.json"]), ([], ["--device", "a100"])],
)
def test_the_file_says_what_predicted_the_costs(tmp_path, monkeypatch, left, right):
    monkeypatch.chdir(tmp_path)
    quadratic = {"c0": 1.0, "c1": 1.0, "c2": 1.0}
    write_json(tmp_path / "cost.json", {"format": FORMAT, "quadratic": quadratic})
    write_manifest(tmp_path / "m.parquet", {"seq_len": [10, 20, 40]})
    reports, files = [], []
    for flags in (left, right):
        flags = ["--policy", "equal_tokens", "--m-mem", 40, "--ranks", 2, *flags]
        reports.append(alload_plan("--manifest", "m.parquet", "--out", "plan.parquet", *flags))
        files.append(read_plan("plan.parquet"))
    assert reports[0]["metrics"]["cost"] != reports[1]["metrics"]["cost"]
    assert files[0] != files[1]


def row_costs(rows, settings, turns):
    """{(step, micro_batch): [cost of every rank]}, from the file alone."""
    model, context = settings["cost_model"], settings.get("context", 1)
    ranks = settings["ranks"]

    def beyond(seq_len):
        return model["c2"] * seq_len**2

    base = {
        (row["step"], row["micro_batch"]): model["c0"]
        + model["c1"] * row["padded_len"]
        + model["c_sequence"] * row["slots"]
        for row in rows
    }
    costs = {turn: [base[turn]] * ranks for turn in turns}
    by_group = defaultdict(float)
    for row in rows:
        turn = row["step"], row["micro_batch"]
        if row["region"] == "whole":
            costs[turn][row["rank"]] += beyond(row["seq_len"])
        else:
            share = beyond(row["seq_len"]) * row["tokens"] / row["seq_len"] / context
            by_group[turn, row["rank"] // context] += share
    for (turn, group), cost in by_group.items():
        for rank in range(group * context, (group + 1) * context):
            costs[turn][rank] += cost
    return costs


@pytest.mark.parametrize(
    "flags",
    [
        ["--policy", "first_fit"],
        ["--policy", "balanced", "--context", 4, "--link-bandwidth", 1e30],
    ],
)
def test_the_metrics_of_a_packed_plan_can_be_recomputed(tmp_path, flags):
    out = tmp_path / "plan.parquet"
    flags = [*flags, "--workload", "mixed-resolution", "--size", 1000, "--ranks", 8]
    reported = alload_plan(*flags, "--m-mem", 81_920, "--out", out)
    rows, settings = read_plan(out)
    assert settings == reported["plan"]
    turns = {(row["step"], row["micro_batch"]) for row in rows}
    costs = row_costs(rows, settings, turns)
    metrics = reported["metrics"]
    assert metrics["steps"] == len(turns)
    assert metrics["cost"] == pytest.approx(sum(map(max, costs.values())))
    found = [max(ranks) / statistics.fmean(ranks) - 1 for ranks in costs.values()]
    assert metrics["imbalance"] == pytest.approx(statistics.fmean(found), abs=1e-9)
    assert metrics["imbalance_max"] == pytest.approx(max(found), abs=1e-9)
    tokens = sum(row["tokens"] for row in rows)
    assert metrics["tokens"] == tokens == sum({r["sample"]: r["seq_len"] for r in rows}.values())
    assert metrics["padding"] == pytest.approx(
        1 - tokens / (len(turns) * 8 * rows[0]["padded_len"])
    )
    assert metrics["samples"] == len({row["sample"] for row in rows})
    assert metrics["samples"] == 1000
    if "--context" in flags:
        assert "split" in {row["region"] for row in rows}


# ------------------------------------------------------------------------------ the file itself


@given(case=cases(), epoch=st.integers(0, 3))
@examples(12)
def test_the_file_is_the_plan(tmp_path_factory, case, epoch):
    manifest, config, seed = case
    plan = make_plan(config, manifest.samples(), 1, seed)
    columns = plan.epoch(epoch)
    out = tmp_path_factory.mktemp("plan") / "plan.parquet"
    write_plan(out, plan_table({epoch: columns}, plan.samples.seq_len, plan.identity()))
    rows, settings = read_plan(out)
    first = epoch * plan.steps_per_epoch
    expected = [
        {
            "epoch": epoch,
            "step": index,
            "rank": part.rank,
            "micro_batch": part.index,
            "sample": sample,
            "seq_len": manifest.lengths()[sample],
            "padded_len": part.seq_len,
            "tokens": manifest.lengths()[sample],
            "offset": row * part.seq_len,
            "region": "whole",
            "split_tokens": 0,
            "rows": part.rows,
            "slots": 0,
            **dict(zip(("frames", "height", "width"), part.shape, strict=True)),
        }
        for index in range(plan.steps_per_epoch)
        for part in plan.step(first + index).micro_batches
        for row, sample in enumerate(part.samples)
    ]
    assert rows == expected
    assert settings == plan.identity()


@pytest.mark.parametrize("mode", MODES)
def test_the_file_has_the_documented_columns_order_and_settings(tmp_path, mode):
    path = write_manifest(tmp_path / "m.parquet", {"seq_len": [10, 20, 40] * 5})
    out = tmp_path / "new" / "folder" / "plan.parquet"
    flags = ["--m-mem", 80, "--ranks", 3, "--micro-batches-per-step", 2, "--epoch", 2]
    reported = alload_plan("--manifest", path, "--out", out, "--ranks-mode", mode, *flags)
    schema = pa.parquet.read_schema(out)
    assert schema.names == COLUMNS
    assert {schema.field(k).type for k in COLUMNS if k != "region"} == {pa.int64()}
    assert METADATA_KEY == b"alload-plan"
    rows, settings = read_plan(out)
    places = [(row["step"], row["micro_batch"], row["rank"]) for row in rows]
    assert places == sorted(places)
    expected = {"ranks": 3, "micro_batches_per_step": 2, "manifest": str(path), "epoch": 2}
    assert settings == reported["plan"]
    assert settings.items() >= expected.items()
    assert mode in settings.values()


def test_an_earlier_plan_is_replaced_and_stays_where_writing_fails(tmp_path, monkeypatch):
    def fail(table, path):
        path.write_text("half a plan")
        raise OSError("no space left")

    out = tmp_path / "plan.parquet"
    out.write_text("an earlier plan")
    with monkeypatch.context() as patch:
        patch.setattr(pa.parquet, "write_table", fail)
        with pytest.raises(InputError, match="no space left"):
            write_plan(out, pa.table({"step": [0]}))
    assert out.read_text() == "an earlier plan"
    path = write_manifest(tmp_path / "m.parquet", {"seq_len": [10, 20]})
    alload_plan("--manifest", path, "--m-mem", 80, "--ranks", 1, "--out", out)
    assert len(read_plan(out)[0]) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m.parquet", "plan.parquet"]
