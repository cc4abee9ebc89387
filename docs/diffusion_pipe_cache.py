"""Copies latents and texts that diffusion-pipe cached for Wan into a data folder; needs PyTorch.

    python docs/diffusion_pipe_cache.py videos/cache/wan data/mine

By its utils/cache.py, metadata.db in a folder says where each item lies in which shard. By its
utils/dataset.py, cache_SIZE/latents has an item for each media file, and text_embeddings_1, beside
it or in ar_frames_RATIO_FRAMES, one for each of its captions, in their order. As there, each
caption of a media file gives a sample. After an interruption the same command goes on.
"""

import io
import pickle
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from alload_jax.data.store import StoreWriter
from alload_jax.errors import InputError, first_line

Place = tuple[Path, int, int]
Sample = tuple[Place, Place, str]
UNREAD = {"y": "first frames", "clip_context": "CLIP embeddings", "mask": "masks of the loss"}


def places(folder: Path) -> list[Place]:
    """Shard, offset and size of each item of a folder with metadata.db."""
    if not (folder / "metadata.db").is_file():
        raise SystemExit(f"{folder}: has no metadata.db; cache latents and text embeddings first")
    with closing(sqlite3.connect(folder / "metadata.db")) as tables:
        items = tables.execute("SELECT shard, shard_index FROM items").fetchall()
        bounds = {
            shard: tables.execute(f"SELECT offset, size FROM shard_{shard:d}").fetchall()
            for shard in {shard for shard, _ in items}
        }
    return [(folder / f"shard_{shard}.bin", *bounds[shard][at]) for shard, at in items]


def load(place: Place) -> dict:
    """Reads an item; PyTorch refuses one whose pickle would run code."""
    shard, offset, size = place
    try:
        with shard.open("rb") as file:
            file.seek(offset)
            return torch.load(io.BytesIO(file.read(size)), weights_only=True)
    except (OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise SystemExit(
            f"{shard}: the item at byte {offset} cannot be read ({first_line(error)}); run "
            "diffusion-pipe with --regenerate_cache --cache_only"
        ) from error


def samples_of(latents: Path) -> Iterator[Sample]:
    """Where the samples of a folder of latents lie, and their captions."""
    size = latents.parent.name.removeprefix("cache_").split("x")
    beside = latents.with_name("text_embeddings_1")
    ratio = latents.parents[1] / f"ar_frames_{size[0]}_{size[-1]}" / beside.name
    texts = defaultdict(list)
    for place in places(beside if beside.is_dir() else ratio):
        texts[tuple(load(place)["image_spec"])].append(place)
    for place in places(latents):
        item = load(place)
        for name in [name for name in UNREAD if item.get(name) is not None]:
            print(f"note: {UNREAD.pop(name)} of the cache are not copied", file=sys.stderr)
        found, captions = texts[tuple(item["image_spec"])], item["caption"]
        if len(found) != len(captions):
            raise SystemExit(
                f"{latents}: {item['image_spec'][-1]} has {len(captions)} captions and "
                f"{len(found)} texts; run diffusion-pipe with --regenerate_cache --cache_only"
            )
        yield from ((place, text, caption) for text, caption in zip(found, captions, strict=True))


def array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array of the same dtype."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def main(cache: Path, out: Path) -> None:
    """Writes all samples of the cache of a model."""
    folders = sorted(cache.glob("cache_*/latents"))
    samples = chain.from_iterable(map(samples_of, folders))
    if (first := next(samples, None)) is None or "seq_lens" not in load(first[1]):
        raise SystemExit(f"{cache}: holds no latents and texts of Wan; name its folder in cache")
    is_wan2_2 = len(load(first[0])["latents"]) == 48
    stride = (4, 16, 16) if is_wan2_2 else (4, 8, 8)
    fps = 24 if is_wan2_2 or "skyreels" in cache.name else 16
    origin = {"format": "diffusion-pipe", "vae": "wan2.2" if is_wan2_2 else "wan2.1", "fps": fps}
    with StoreWriter(out, vae_stride=stride, origin=origin, mode="resume") as writer:
        for place, text, caption in islice(chain([first], samples), writer.written, None):
            latents, words = np.moveaxis(array(load(place)["latents"]), 0, -1), load(text)
            size = (np.array(latents.shape[:3]) - [1, 0, 0]) * stride + [1, 0, 0]
            embeddings = words["text_embeddings"][: int(words["seq_lens"])]
            writer.add(latents, array(embeddings), tuple(size.tolist()), caption)
    print(f"{out}: {writer.written:,} samples of {len(folders):,} sizes")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("give the cache of a model and the data folder to write")
    try:
        main(*map(Path, sys.argv[1:]))
    except (InputError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
