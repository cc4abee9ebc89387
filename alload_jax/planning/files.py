"""A plan's epoch as a Parquet file, from which anyone can recompute every metric."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from alload_jax.planning.epoch import EpochPlan

METADATA_KEY = b"alload-plan"


def plan_table(plan: EpochPlan, seq_len: np.ndarray, settings: dict[str, Any]) -> pa.Table:
    """One row per placed sample, in the order of (step, micro_batch, rank).

    Columns: `step, rank, micro_batch, sample, seq_len, padded_len, rows`. `sample` is the
    manifest's row number; `rows` is how many sequences of `padded_len` tokens the micro-batch
    holds on its rank, zero-weight filler included. In synchronous mode a rank that has no row in
    a micro-batch computes filler of the shape that the others have; in independent mode it idles.

    Args:
      plan: the epoch.
      seq_len: [N] int64, tokens of every sample of the manifest.
      settings: how the plan was made (ranks, ranks_mode, …); stored in the table's metadata.
    """
    counts = np.diff(plan.offsets)

    def spread(column: np.ndarray) -> np.ndarray:
        return np.repeat(column, counts)

    table = pa.table(
        {
            "step": spread(plan.step),
            "rank": spread(plan.rank),
            "micro_batch": spread(plan.micro_batch),
            "sample": plan.sample,
            "seq_len": seq_len[plan.sample],
            "padded_len": spread(plan.padded_len),
            "rows": spread(plan.rows),
        }
    )
    return table.replace_schema_metadata({METADATA_KEY: json.dumps(settings).encode()})


def write_plan(path: str | Path, table: pa.Table) -> None:
    """Writes the table of `plan_table` as Parquet, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    pyarrow.parquet.write_table(table, partial)
    partial.replace(path)
