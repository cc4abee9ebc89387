"""Flips single bits in a data folder and in a checkpoint: each must be found, or change nothing."""

import contextlib
import io
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from chaos_runs import Campaign

from alload_jax.data.datasets.digits import Digits
from alload_jax.data.manifest import Manifest, read_manifest
from alload_jax.data.store import BadRecordError, StoreReader
from alload_jax.errors import InputError
from alload_jax.training.checkpoint import CheckpointConfig, Checkpoints

Read = Callable[[], Any]
_MIX = ((17, 16, 16, 24), (1, 8, 8, 40))
"""Samples that fill most of their file."""


def flip_bits(campaign: Campaign, count: int, seed: int) -> dict[str, Any]:
    """Flips bits, one after the other, half of them in a store and half in a checkpoint."""
    began, folder = time.monotonic(), campaign.folder / "bits"
    if not (campaign.folder / "reference" / "summary.json").exists():
        campaign.reference()
    shutil.rmtree(folder, ignore_errors=True)
    Digits(mix=_MIX, motion="drift", frames_per_latent=1).write(folder / "store")
    saved = max(
        (path for path in (campaign.folder / "reference" / "checkpoints").iterdir()
         if path.name.isdigit()),
        key=lambda path: int(path.name),
    )  # fmt: skip
    shutil.copytree(saved, folder / "checkpoints" / saved.name)
    chance, found, faults = random.Random(seed), {}, []
    parts: dict[str, tuple[Path, Read]] = {
        "store": (folder / "store", lambda: content_of_store(folder / "store")),
        "checkpoint": (folder / "checkpoints", lambda: newest(folder / "checkpoints")),
    }
    for name, (place, read) in parts.items():
        counts, missed = flip_in(place, read, count // 2, chance)
        found[name] = dict(counts)
        faults += missed
    return {"flips": found, "seconds": round(time.monotonic() - began, 1), "faults": faults}


def flip_in(
    place: Path, read: Read, count: int, chance: random.Random
) -> tuple[Counter[str], list[str]]:
    """Flips bits of the files of a folder, each alone.

    Returns:
      How many were `found`, and how many were `harmless`: what is read is the same. What was
      neither, in words.
    """
    files = sorted(path for path in place.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    healthy, counts, faults = read(), Counter[str](), []
    for _ in range(count):
        # Small files hold what large ones are read by.
        path = chance.choice(files) if chance.random() < 0.5 else chance.choices(files, sizes)[0]
        content = path.read_bytes()
        if not content:
            counts["harmless"] += 1
            continue
        bit = chance.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        what = outcome(read, healthy)
        counts[what if what in ("found", "harmless") else "missed"] += 1
        if what not in ("found", "harmless"):
            faults.append(f"bit {bit} of {path.relative_to(place)}: {what}")
        path.write_bytes(content)
    return counts, faults


def outcome(read: Read, healthy: Any) -> str:
    """What comes of a flipped bit: `found`, `harmless`, or a fault in words."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            now = read()
    except (InputError, BadRecordError):
        return "found"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    same = jax.tree.all(jax.tree.map(np.array_equal, now, healthy))
    return "harmless" if same else "other values are read"


def content_of_store(folder: Path) -> Any:
    """All that a store says of its samples."""
    manifest: Manifest = read_manifest(folder)
    reader = StoreReader(manifest)
    try:
        records = [reader.read(sample) for sample in range(len(manifest))]
    finally:
        reader.close()
    return [records, np.asarray(manifest.shape), np.frombuffer(
        repr((manifest.vae_stride, manifest.identity())).encode(), np.uint8)]  # fmt: skip


def newest(folder: Path) -> Any:
    """The newest whole checkpoint's arrays, as a run finds and reads them.

    Raises:
      InputError: it is damaged.
    """
    with Checkpoints(folder, CheckpointConfig(), {}) as checkpoints:
        moved: set[Path] = set()
        try:
            step = checkpoints.newest_undamaged()
        finally:
            moved = set(folder.glob("damaged-*"))
            for path in moved:  # for the next flip
                path.rename(folder / path.name.removeprefix("damaged-"))
    if step is None:
        raise InputError("no checkpoint is found")
    handler = ocp.PyTreeCheckpointer()
    state = handler.restore(folder / str(step) / "state")
    return jax.tree.map(np.asarray, state)
