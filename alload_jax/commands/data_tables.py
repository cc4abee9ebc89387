"""The tables that `alload data` prints."""

import json
from typing import Any

import numpy as np
import rich.box
from rich.table import Table
from rich.text import Text

from alload_jax.data.manifest import Manifest
from alload_jax.data.manifest_columns import caption_counts
from alload_jax.errors import one_line
from alload_jax.planning.geometry import Triple

_MOST_BUCKETS = 30
_LONGEST_VALUE = 100


def store_table(manifest: Manifest, patch_size: Triple) -> Table:
    """A table of what a store holds."""
    frames = manifest.shape[:, 0]
    tokens = manifest.samples(patch_size).seq_len
    table = Table(
        title=Text(one_line(str(manifest.folder))), title_justify="left", show_header=False
    )
    table.add_column("what")
    table.add_column("value")
    rows = {
        "samples": f"{len(manifest):,}",
        "images": f"{int((frames == 1).sum()):,}",
        "videos": f"{int((frames > 1).sum()):,}",
        "video": _video(manifest),
        "tokens": f"{int(tokens.sum()):,} with patch size {_joined(patch_size)}",
        "tokens of a sample": _range(tokens),
        **{name: held for name, held in manifest.form.described().items() if held != "none"},
        "condition tokens of a sample": _range(manifest.text_length),
        **_captions(manifest),
        "channels": str(int(manifest.channels[0])),
        "VAE stride": _joined(manifest.vae_stride),
        "shards" if manifest.is_store else "files": f"{len(manifest.shard_bytes):,}",
        "bytes": f"{sum(manifest.shard_bytes.values()):,}",
    }
    rows |= {one_line(f"origin: {name}"): _value(value) for name, value in manifest.origin.items()}
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    return table


def bucket_table(manifest: Manifest, patch_size: Triple) -> Table:
    """A table with a row for each size, those with the most tokens first."""
    sizes, first, counts = np.unique(manifest.shape, axis=0, return_index=True, return_counts=True)
    each = manifest.samples(patch_size).seq_len[first]
    total = each * counts
    table = Table(title="buckets", title_justify="left", box=rich.box.SIMPLE_HEAD)
    for name in ("frames×height×width", "samples", "tokens each", "tokens", "share of tokens"):
        table.add_column(name, justify="right")
    order = np.argsort(-total, kind="stable")
    for bucket in order[:_MOST_BUCKETS]:
        table.add_row(
            "×".join(map(str, sizes[bucket])),
            f"{counts[bucket]:,}",
            f"{each[bucket]:,}",
            f"{total[bucket]:,}",
            f"{total[bucket] / total.sum():.1%}",
        )
    if (rest := order[_MOST_BUCKETS:]).size:
        share = f"{total[rest].sum() / total.sum():.1%}"
        others = f"{len(rest):,} other sizes"
        table.add_row(others, f"{counts[rest].sum():,}", "", f"{total[rest].sum():,}", share)
    return table


def _video(manifest: Manifest) -> str:
    frames = manifest.shape[:, 0]
    count = int(frames[frames > 1].sum())
    if manifest.fps is None:
        return f"{count:,} frames; the origin names no fps"
    return f"{count / manifest.fps / 3600:,.3f} hours: {count:,} frames at {manifest.fps:g} fps"


def _captions(manifest: Manifest) -> dict[str, str]:
    """How many captions samples have, if some have several."""
    counts = caption_counts(manifest)
    several = int((counts > 1).sum())
    if not several:
        return {}
    return {"captions of a sample": f"{_range(counts)}; {several:,} samples have several"}


def _range(values: np.ndarray) -> str:
    low, middle, high = (float(np.quantile(values, q)) for q in (0, 0.5, 1))
    return f"{low:,.0f} to {high:,.0f}, median {middle:,.0f}"


def _joined(triple: Triple) -> str:
    return ",".join(map(str, triple))


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = one_line(text)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
