"""The metrics that `alload plan` reports can be recomputed from a packed plan's Parquet file."""

import json
import statistics
from collections import defaultdict

import pyarrow as pa
import pyarrow.parquet
import pytest

from alload_jax import cli
from alload_jax.errors import run_command


def alload_plan(capsys, *flags):
    assert run_command(cli.main, ["plan", "--json", *map(str, flags)]) == 0
    return json.loads(capsys.readouterr().out)


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
        ["--policy", "balanced"],
        ["--policy", "balanced", "--context", 4, "--link-bandwidth", 1e30],
    ],
)
def test_the_metrics_of_a_packed_plan_can_be_recomputed(tmp_path, capsys, flags):
    out = tmp_path / "plan.parquet"
    flags = [*flags, "--workload", "mixed-resolution", "--size", 3000, "--ranks", 8]
    reported = alload_plan(capsys, *flags, "--m-mem", 81_920, "--out", out)
    table = pa.parquet.read_table(out)
    rows = table.to_pylist()
    settings = json.loads(table.schema.metadata[b"alload-plan"])
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
    assert metrics["samples"] == 3000
    if "--context" in flags:
        assert "split" in {row["region"] for row in rows}
