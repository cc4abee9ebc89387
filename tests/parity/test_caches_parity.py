"""The converter of diffusion-pipe's caches, on files written by PyTorch as its utils/cache.py."""

import io
import runpy
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch

from alload_jax.data.manifest import read_manifest
from alload_jax.data.sources.opening import open_source
from alload_jax.errors import InputError

pytestmark = pytest.mark.parity

SCRIPT = Path(__file__).parents[2] / "docs" / "diffusion_pipe_cache.py"
CAPTIONS = {"/m/ä b.mp4": ["ä, one", "two"], "/m/c.mp4": ["three"], "/m/d.mp4": ["four"]}


def write(folder, items, per_shard):
    """Writes a folder as diffusion-pipe's Cache: shards of items one after another, metadata.db."""
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "metadata.db") as tables:
        tables.execute("CREATE TABLE fingerprint(value)")
        tables.execute("CREATE TABLE items(shard, shard_index)")
        for number, item in enumerate(items):
            shard, index = divmod(number, per_shard)
            if not index:
                tables.execute(f"CREATE TABLE shard_{shard}(offset, size)")
            buffer = io.BytesIO()
            torch.save(item, buffer)
            path = folder / f"shard_{shard}.bin"
            bounds = (path.stat().st_size if path.exists() else 0, buffer.tell())
            with path.open("ab") as file:
                file.write(buffer.getvalue())
            tables.execute("INSERT INTO items VALUES(?, ?)", (shard, index))
            tables.execute(f"INSERT INTO shard_{shard} VALUES (?, ?)", bounds)
    tables.close()


def write_cache(folder):
    """A cache with two sizes of a ratio and one of its own; texts of 1, 2, … tokens."""
    texts, kinds = {}, {"ar_frames_1.500_9": [*CAPTIONS], "cache_32x32x1": ["/m/e.png"]}
    for place, names in kinds.items():
        items = []
        for name in names:
            for caption in CAPTIONS.get(name, ["five"]):
                length, words = len(texts) + 1, torch.randn(512, 8).bfloat16()
                texts[caption] = words[:length]
                spec = {"image_spec": [None, name], "seq_lens": torch.tensor(length)}
                items.append({"text_embeddings": words} | spec)
        write(folder / place / "text_embeddings_1", items, per_shard=2)
    expected = []
    for place, frames, height, width in (
        *(("cache_1.500x48x32x9", 3, 4, 6), ("cache_1.500x96x64x9", 3, 8, 12)),
        ("cache_32x32x1", 1, 4, 4),
    ):
        items = []
        for name in ["/m/e.png"] if frames == 1 else reversed(CAPTIONS):
            latents = torch.randn(16, frames, height, width).bfloat16()
            captions = CAPTIONS.get(name, ["five"])
            spec = {"image_spec": [None, name], "mask": None, "caption": captions}
            items.append({"latents": latents} | spec)
            size = (4 * frames - 3, 8 * height, 8 * width)
            expected += [(size, latents, texts[caption], caption) for caption in captions]
        write(folder / place / "latents", items, per_shard=2)
    return expected


def convert(cache, out):
    runpy.run_path(str(SCRIPT))["main"](cache, out)


def test_all_items_of_all_shards_of_diffusion_pipe_are_read(tmp_path, capsys):
    expected = write_cache(tmp_path / "wan")
    convert(tmp_path / "wan", tmp_path / "data")
    assert len(expected) == 9
    assert "9 samples of 3 sizes" in capsys.readouterr().out
    source = open_source(str(tmp_path / "data"))
    assert source.captions(range(9)) == [caption for *_, caption in expected]
    for number, (size, latents, text, _) in enumerate(expected):
        found = source.read(number)
        assert tuple(source.manifest.shape[number]) == size
        assert str(found["latents"].dtype) == "bfloat16"
        stored = np.moveaxis(found["latents"].astype(np.float32), -1, 0)
        np.testing.assert_array_equal(stored, latents.float().numpy())
        np.testing.assert_array_equal(found["text"].astype(np.float32), text.float().numpy())
    with pytest.raises(InputError, match="exists already"):
        convert(tmp_path / "wan", tmp_path / "data")


def test_a_damaged_cache_ends_the_copy_which_goes_on_when_it_is_repaired(tmp_path, capsys):
    write_cache(tmp_path / "wan")
    shard = tmp_path / "wan" / "cache_32x32x1" / "latents" / "shard_0.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    with pytest.raises(SystemExit, match=r"shard_0\.bin: the item at byte 0 cannot be read"):
        convert(tmp_path / "wan", tmp_path / "data")
    shard.write_bytes(whole)
    convert(tmp_path / "wan", tmp_path / "data")
    convert(tmp_path / "wan", tmp_path / "again")
    first, second = (read_manifest(tmp_path / name) for name in ("data", "again"))
    assert first.identity() == second.identity()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda item: item | {"mask": torch.ones(2, 2), "y": torch.ones(2)}, None),
        (lambda item: item | {"caption": ["a", "b"]}, r"/m/c\.mp4 has 2 captions and 1 texts"),
        (lambda item: item | {"code": print}, "cannot be read"),
    ],
)
def test_what_is_not_copied_is_named_or_refused(tmp_path, change, words, capsys):
    spec = {"image_spec": [None, "/m/c.mp4"]}
    text = {"text_embeddings": torch.ones(512, 8), "seq_lens": torch.tensor(3)} | spec
    item = {"latents": torch.ones(16, 1, 4, 4), "mask": None, "caption": ["a"]} | spec
    write(tmp_path / "wan" / "cache_32x32x1" / "text_embeddings_1", [text], 1)
    write(tmp_path / "wan" / "cache_32x32x1" / "latents", [change(item)], 1)
    if words is None:
        convert(tmp_path / "wan", tmp_path / "data")
        said = capsys.readouterr().err
        assert "first frames" in said
        assert "masks" in said
    else:
        with pytest.raises(SystemExit, match=words):
            convert(tmp_path / "wan", tmp_path / "data")
        assert not (tmp_path / "data").exists()


def test_texts_that_are_missing_or_of_another_model_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="holds no latents and texts of Wan"):
        convert(tmp_path, tmp_path / "data")
    spec = {"image_spec": [None, "/m/c.mp4"]}
    item = {"latents": torch.ones(16, 1, 4, 4), "mask": None, "caption": ["a"]} | spec
    write(tmp_path / "hunyuan" / "cache_32x32x1" / "latents", [item], 1)
    with pytest.raises(SystemExit, match=r"has no metadata\.db; cache latents and text"):
        convert(tmp_path / "hunyuan", tmp_path / "data")
    text = {"prompt_embeds_1": torch.ones(512, 8)} | spec
    write(tmp_path / "hunyuan" / "cache_32x32x1" / "text_embeddings_1", [text], 1)
    with pytest.raises(SystemExit, match="holds no latents and texts of Wan"):
        convert(tmp_path / "hunyuan", tmp_path / "data")
