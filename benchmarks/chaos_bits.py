"""Flips single bits in what the project reads: each must be found, or change nothing."""

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
from chaos_runs import Campaign, last_arrays, steps_of

from alload_jax.data.datasets.digits import Digits
from alload_jax.data.manifest import (
    MANIFEST_NAME,
    Manifest,
    manifest_metadata,
    read_captions,
    read_manifest,
)
from alload_jax.data.store import BadRecordError, StoreReader
from alload_jax.errors import InputError
from alload_jax.models.families import read_model_config
from alload_jax.models.lora_files import read_lora
from alload_jax.models.weights import load_weights, read_transformer
from alload_jax.training import CheckpointConfig
from alload_jax.training.checkpoint import Checkpoints
from alload_jax.training.restore import one_device_mesh

Read = Callable[[], Any]
_MIX = ((17, 16, 16, 24), (1, 8, 8, 40))
"""Samples that fill most of their file."""


def flip_bits(campaign: Campaign, count: int, seed: int) -> dict[str, Any]:
    """Flips bits, one after the other, the same number in each part."""
    began, folder = time.monotonic(), campaign.folder / "bits"
    run, adapted = campaign.reference("packed rows, loader processes"), campaign.reference("LoRA")
    shutil.rmtree(folder, ignore_errors=True)
    Digits(mix=_MIX, motion="drift", frames_per_latent=1).write(folder / "store")
    saved = run / "checkpoints" / str(steps_of(run)[-1])
    shutil.copytree(saved, folder / "run" / "checkpoints" / saved.name)
    (folder / "manifest").mkdir()
    shutil.copy(campaign.folder / "texts" / MANIFEST_NAME, folder / "manifest")
    for path in (campaign.folder / "texts").glob("*.arrayrecord"):
        (folder / "manifest" / path.name).symlink_to(path)
    shutil.copytree(run / "exported" / "weights", folder / "export")
    shutil.copytree(adapted / "exported", folder / "adapters")
    parts: dict[str, tuple[Path, Read]] = {
        "store": (folder / "store", lambda: content_of_store(folder / "store")),
        "manifest": (folder / "manifest", lambda: content_of_store(folder / "manifest")),
        "checkpoint": (folder / "run", lambda: newest(folder / "run")),
        "export": (folder / "export", lambda: content_of_export(folder / "export")),
        "adapters": (folder / "adapters", lambda: content_of_adapters(folder)),
    }
    chance, found, faults = random.Random(seed), {}, []
    for number, (name, (place, read)) in enumerate(parts.items()):
        share = count * (number + 1) // len(parts) - count * number // len(parts)
        counts, missed = flip_in(place, read, share, chance)
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
    files = [path for path in place.rglob("*") if path.is_file() and not path.is_symlink()]
    files.sort()
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
    shapes = (str(jax.tree.structure(each)) for each in (now, healthy))
    same = len(set(shapes)) == 1 and jax.tree.all(jax.tree.map(np.array_equal, now, healthy))
    return "harmless" if same else "other values are read"


def content_of_store(folder: Path) -> Any:
    """All that a store says of its samples."""
    manifest: Manifest = read_manifest(folder)
    reader = StoreReader(manifest)
    try:
        records = [reader.read(sample) for sample in range(len(manifest))]
    finally:
        reader.close()
    said = [
        *sorted(vars(manifest).items()),
        read_captions(folder),
        manifest_metadata(manifest.path),
    ]
    return [records, as_array(said)]


def newest(run: Path) -> Any:
    """The newest whole checkpoint's arrays, as a run finds and reads them.

    Raises:
      InputError: it is damaged.
    """
    folder = run / "checkpoints"
    with Checkpoints(folder, CheckpointConfig(), {}) as checkpoints:
        try:
            step = checkpoints.newest_undamaged()
        finally:
            for path in folder.glob("damaged-*"):  # for the next flip
                path.rename(folder / path.name.removeprefix("damaged-"))
    if step is None:
        raise InputError("no checkpoint is found")
    return last_arrays(run)


def content_of_export(folder: Path) -> Any:
    """Architecture and weights of an exported folder."""
    config = read_transformer(folder)
    return [as_array(config), load_weights(folder, config, one_device_mesh())]


def content_of_adapters(folder: Path) -> Any:
    """What a file of adapters holds for the exported model beside it."""
    config = read_model_config(folder / "export" / "config.json")
    found = read_lora(folder / "adapters" / "lora.safetensors", config)
    pairs = [(each.down, each.up, each.scale) for each in found.adapters.values()]
    return [as_array((list(found.adapters), found.text_length)), pairs]


def as_array(value: Any) -> np.ndarray:
    """A value's description, which is equal for equal values."""
    return np.frombuffer(repr(value).encode(), np.uint8)
