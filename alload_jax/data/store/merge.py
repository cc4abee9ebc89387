"""Makes one store of several."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from alload_jax.data.manifest import (
    FPS,
    PATH,
    VAE,
    Manifest,
    in_row_schema,
    read_manifest,
    read_rows,
)
from alload_jax.data.store.finish import finish_store, form_of, require_alike
from alload_jax.data.store.shard_files import (
    partial_folder,
    remove_unfinished,
    replacing,
    shard_name,
    write_sidecar,
)
from alload_jax.data.store.writer import require_free
from alload_jax.errors import InputError

_ENCODERS = (VAE, "text")
"""Names in the origin that must agree."""
_LONGEST_VALUE = 40


def merge_stores(
    sources: Sequence[str | Path], out: str | Path, *, add_names: bool = False
) -> Path:
    """Writes a store with the samples of several, in their order. The sources stay as they are.

    Shards are hard links if both folders are on one file system, copies otherwise.

    Args:
      sources: two data folders or more.
      out: data folder to create. Its origin is that of the sources if they agree; otherwise it
        lists theirs under `merged`, beside the encoders and the frames per second of the videos.
      add_names: begin the paths of samples with the name of their source, as `portraits/clip.mp4`,
        so that `data.weights` can tell the sources apart.

    Returns:
      The path of the new manifest.

    Raises:
      InputError: a source is not a store or is given twice, the sources differ in VAE, stride,
        channels, kind of condition or the frames per second of their videos, or `out` exists.
    """
    out = Path(out)
    manifests = [read_manifest(source) for source in sources]
    _require_mergeable(manifests)
    require_free(out)
    remove_unfinished(out)
    partial = partial_folder(out)
    partial.mkdir(parents=True)
    origin = _merged_origin(manifests)
    try:
        names = _names(manifests) if add_names else [None] * len(manifests)
        named = zip(manifests, names, strict=True)
        shards = (shard for manifest, name in named for shard in _shards(manifest, name))
        for number, (path, rows) in enumerate(shards):
            _link(path, partial / shard_name(number))
            _describe(out, number, rows, manifests[0], origin)
        return finish_store(out)
    except BaseException:
        # It holds only links and copies.
        shutil.rmtree(partial, ignore_errors=True)
        raise


def origin_differences(sources: Sequence[str | Path]) -> list[str]:
    """What the origins of stores disagree about, for people to read.

    It does not keep stores from being merged: `area (480p in a, 720p in b)`.
    """
    origins = {str(source): _flat(read_manifest(source).origin) for source in sources}
    names = dict.fromkeys(name for origin in origins.values() for name in origin)
    found = []
    for name in names:
        first, *others = ((origin.get(name), place) for place, origin in origins.items())
        if other := next((one for one in others if one[0] != first[0]), None):
            words = ", ".join(f"{_words(value)} in {place}" for value, place in (first, other))
            found.append(f"{name} ({words})")
    return found


def _flat(origin: dict[str, Any]) -> dict[str, Any]:
    """The origin with the values of inner objects, as `media.area`."""
    flat: dict[str, Any] = {}
    for name, value in origin.items():
        inner = value if isinstance(value, dict) else None
        flat |= {name: value} if inner is None else {f"{name}.{k}": v for k, v in inner.items()}
    return flat


def _words(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


def _require_mergeable(manifests: list[Manifest]) -> None:
    if len(manifests) < 2:
        raise InputError(f"{len(manifests)} stores to merge; give at least two")
    seen = set()
    for manifest in manifests:
        folder = manifest.path.parent.resolve()
        if folder in seen:
            raise InputError(f"{manifest.path.parent}: is given twice; leave one out")
        seen.add(folder)
    require_alike(
        ((str(manifest.path.parent), _form(manifest)) for manifest in manifests),
        "only stores that agree can be merged",
    )


def _form(manifest: Manifest) -> dict[str, Any]:
    rows = read_rows(manifest.path.parent)
    notes = {"vae_stride": manifest.vae_stride, **manifest.form.notes()}
    encoders = {f"the origin's {name}": manifest.origin.get(name) for name in _ENCODERS}
    rate = {"fps of its videos": manifest.fps} if _has_videos(manifest) and manifest.fps else {}
    return form_of(rows, notes) | encoders | rate


def _has_videos(manifest: Manifest) -> bool:
    return bool((manifest.shape[:, 0] > 1).any())


def _merged_origin(manifests: list[Manifest]) -> dict[str, Any]:
    origins = [manifest.origin for manifest in manifests]
    if all(origin == origins[0] for origin in origins):
        return origins[0]
    shared = {name: origins[0][name] for name in _ENCODERS if name in origins[0]}
    # Images have no rate; of videos without one the rate is not known.
    timed = [manifest for manifest in manifests if _has_videos(manifest)] or manifests
    if all(manifest.fps == timed[0].fps for manifest in timed) and timed[0].fps:
        shared[FPS] = timed[0].origin[FPS]
    return shared | {"merged": origins}


def _names(manifests: list[Manifest]) -> list[str]:
    """The folders' names, with as many of the folders above as tell them apart."""
    parts = [manifest.path.parent.resolve().parts for manifest in manifests]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names


def _shards(manifest: Manifest, name: str | None) -> Iterator[tuple[Path, pa.Table]]:
    """Path and rows of each shard, in the manifest's order; samples' paths get the name."""
    rows = read_rows(manifest.path.parent)
    if name is not None:
        rows = _with_name(rows, name)
    order = np.argsort(manifest.shard, kind="stable")
    names = manifest.shard[order]
    for name in manifest.shard_bytes:
        begin, end = np.searchsorted(names, name), np.searchsorted(names, name, side="right")
        yield manifest.path.parent / name, rows.take(order[begin:end])


def _with_name(rows: pa.Table, name: str) -> pa.Table:
    """The rows with paths that begin with the name."""
    paths = [None] * len(rows)
    if PATH in rows.column_names:
        paths = rows[PATH].to_pylist()
        rows = rows.drop_columns(PATH)
    column = pa.array([f"{name}/{path}" if path else name for path in paths], pa.string())
    return in_row_schema(rows.append_column(PATH, column))


def _link(source: Path, path: Path) -> None:
    try:
        os.link(source, path)
    except OSError:  # another file system, or one without links
        with replacing(path) as unfinished:
            shutil.copyfile(source, unfinished)


def _describe(
    out: Path, number: int, rows: pa.Table, like: Manifest, origin: dict[str, Any]
) -> None:
    """Writes the sidecar of a shard that another store has written."""
    column = rows.column_names.index("shard")
    names = pa.array([shard_name(number)] * len(rows), pa.string())
    notes = {
        "vae_stride": list(like.vae_stride),
        **like.form.notes(),
        "origin": origin,
        "record_bytes": None,
    }
    write_sidecar(out, number, rows.set_column(column, "shard", names), notes)
