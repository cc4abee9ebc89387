"""A plan's epoch as a Parquet file, from which anyone can recompute every metric."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from alload_jax.errors import InputError
from alload_jax.files import replacing
from alload_jax.planning.epoch import EpochPlan

METADATA_KEY = b"alload-plan"


def plan_table(
    plans: Mapping[int, EpochPlan], seq_len: np.ndarray, settings: dict[str, Any]
) -> pa.Table:
    """A row per placed sample, or per part of a split one, by epoch, step, micro_batch and rank.

    Columns: `epoch, step, rank, micro_batch, sample, seq_len, padded_len, tokens, offset, region,
    split_tokens, rows, slots, frames, height, width`.
    Steps count from 0 in each epoch. `sample` is the row number in the manifest. `tokens` is the
    number of its tokens on the rank and `offset` their position in the micro-batch, with rows laid
    end to end. `region` is `split` if the sample is split over the ranks of a context-parallel
    group, otherwise `whole`; the first `split_tokens` of a row are reserved for split samples.
    `rows` is the number of rows of `padded_len` tokens in the micro-batch, including padding rows;
    packed micro-batches have one, with room for `slots` samples. frames, height and width are zeros
    if unknown, packed, or if rows of several shapes are padded to one length. Plans of weighted
    samples have another column, `repetition`: which of the sample's times in the epoch it is, from
    0. A rank without a sample has no line: it computes padding in synchronous and packed plans and
    is idle in independent ones.

    Args:
      plans: the epochs by their numbers.
      seq_len: [N] int64, tokens of every sample of the manifest.
      settings: how the plan was made and measured (ranks, mode, m_mem, cost_model, samples, …),
        JSON values; stored in the table's metadata.
    """
    table = pa.concat_tables(_epoch_table(n, plan, seq_len) for n, plan in plans.items())
    return table.replace_schema_metadata({METADATA_KEY: json.dumps(settings).encode()})


def _epoch_table(number: int, plan: EpochPlan, seq_len: np.ndarray) -> pa.Table:
    counts = np.diff(plan.offsets)

    def spread(column: np.ndarray) -> np.ndarray:
        return np.repeat(column, counts)

    table = pa.table(
        {
            "epoch": np.full(len(plan.sample), number),
            "step": spread(plan.step),
            "rank": spread(plan.rank),
            "micro_batch": spread(plan.micro_batch),
            "sample": plan.sample,
            "seq_len": seq_len[plan.sample],
            "padded_len": spread(plan.padded_len),
            "tokens": plan.part_tokens(seq_len),
            "offset": plan.part_offsets(),
            "region": _regions(plan),
            "split_tokens": spread(plan.packing.split_tokens if plan.packing else 0 * plan.rows),
            "rows": spread(plan.rows),
            "slots": spread(plan.slots()),
            "frames": spread(plan.shape[:, 0]),
            "height": spread(plan.shape[:, 1]),
            "width": spread(plan.shape[:, 2]),
        }
    )
    if plan.repetition is not None:
        table = table.append_column("repetition", pa.array(plan.repetition))
    return table


def _regions(plan: EpochPlan) -> pa.DictionaryArray:
    is_split = plan.packing.is_split if plan.packing else np.zeros(len(plan.sample), bool)
    return pa.DictionaryArray.from_arrays(pa.array(is_split.astype(np.int8)), ["whole", "split"])


def replaceable(path: str | Path) -> Path:
    """The file to write for a path, with links resolved.

    Raises:
      InputError: the path is a folder or something else that is not a plain file.
    """
    if not str(path):
        raise InputError("the path of a file to write is empty; name a file")
    found = Path(os.path.realpath(path))
    if found.is_dir():
        raise InputError(f"{path}: is a folder; name a file")
    if found.exists() and not found.is_file():
        raise InputError(f"{path}: is not a plain file and would be replaced; name another")
    return found


def write_plan(path: str | Path, table: pa.Table) -> None:
    """Writes the table of `plan_table` as Parquet, atomically.

    Raises:
      InputError: the path cannot be written.
    """
    path = replaceable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            pyarrow.parquet.write_table(table, unfinished)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error}); name another file") from error
