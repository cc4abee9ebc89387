"""Exports carry SHA-256: no flipped bit of a folder or of a file of adapters is read in silence."""

import contextlib
import dataclasses
import hashlib
import json
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from alload_jax.errors import InputError
from alload_jax.models.common.config import TextConfig
from alload_jax.models.common.lora import LoraConfig
from alload_jax.models.common.safetensor_files import CONFIG_SHA256, SHA256, check_sum
from alload_jax.models.families import abstract_model
from alload_jax.models.lora_files import BASE_NOTE, adapters_of, read_lora, write_lora
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.models.weights import load_weights, read_transformer, save_weights
from alload_jax.sharding.mesh import MeshConfig, make_mesh

LORA = LoraConfig(rank=2)
CONFIG = WanConfig(dim=16, ffn_dim=8, num_heads=2, num_layers=1, freq_dim=8, in_channels=2,
                   text=TextConfig(6, 4), dtype="float32")  # fmt: skip
FLIPS = 120


def random_params(config):
    rng = np.random.default_rng(0)
    shapes = abstract_model(config).params
    return jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(np.float32), shapes)


@pytest.fixture
def export(tmp_path):
    save_weights(tmp_path / "export", random_params(CONFIG), CONFIG, shard_bytes=8_000)
    return tmp_path / "export"


@pytest.fixture
def adapters(tmp_path):
    config = dataclasses.replace(CONFIG, lora=LORA)
    found = adapters_of(random_params(config), LORA)
    write_lora(tmp_path / "lora.safetensors", found, config, "diffusers", base="x", text_length=4)
    return tmp_path / "lora.safetensors"


def content_of_folder(folder):
    config = read_transformer(folder)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return config, jax.tree.leaves(load_weights(folder, config, mesh))


def content_of_adapters(file):
    lora = read_lora(file, CONFIG)
    parts = [(each.down, each.up, each.scale) for each in lora.adapters.values()]
    return (list(lora.adapters), lora.text_length), jax.tree.leaves(parts)


def flip(file, bit):
    """Flips a bit of a file; returns what it held."""
    good = file.read_bytes()
    damaged = bytearray(good)
    damaged[bit // 8] ^= 1 << bit % 8
    file.write_bytes(damaged)
    return good


def silent_flips(files, read, count):
    """Flips bits, most of them in headers, each alone; lists those that change what is read."""
    chance, (healthy, values), silent = random.Random(0), read(), []
    for _ in range(count):
        file = chance.choice(files)
        bits = 8 * file.stat().st_size
        bit = chance.randrange(bits if chance.random() < 0.3 else min(bits, 8 * 1500))
        good = flip(file, bit)
        with contextlib.suppress(InputError):
            now, found = read()
            same = now == healthy and all(
                np.array_equal(*pair) for pair in zip(found, values, strict=True)
            )
            silent += [] if same else [f"bit {bit} of {file.name}"]
        file.write_bytes(good)
    return silent


def test_no_flipped_bit_of_an_exported_folder_is_silent(export):
    files = sorted(export.iterdir())
    assert len(files) > 3
    assert silent_flips(files, lambda: content_of_folder(export), FLIPS) == []


def test_no_flipped_bit_of_a_file_of_adapters_is_silent(adapters):
    assert silent_flips([adapters], lambda: content_of_adapters(adapters), 2 * FLIPS) == []


def test_the_flips_are_seen_where_no_sums_are(export, adapters):
    """What the two tests above would miss without SHA-256 in the files."""
    for file in (adapters, *export.glob("*.safetensors")):
        safetensors.numpy.save_file(safetensors.numpy.load_file(file), file, {"format": "pt"})
    assert silent_flips(sorted(export.iterdir()), lambda: content_of_folder(export), FLIPS // 4)
    assert silent_flips([adapters], lambda: content_of_adapters(adapters), FLIPS)


def test_the_sums_are_those_of_the_bytes(export, adapters):
    for file in (adapters, *export.glob("*.safetensors")):
        with safetensors.safe_open(file, framework="numpy") as handle:
            notes = handle.metadata()
        assert notes["format"] == "pt"  # which diffusers asks for
        blank = file.read_bytes().replace(notes[SHA256].encode(), b"0" * 64)
        assert hashlib.sha256(blank).hexdigest() == notes[SHA256]
        if file != adapters:
            theirs = hashlib.sha256((export / "config.json").read_bytes()).hexdigest()
            assert notes[CONFIG_SHA256] == theirs
        else:
            assert notes[BASE_NOTE] == "x"


def test_a_sum_is_of_one_file_also_where_another_takes_its_place(adapters, monkeypatch):
    opened, safe_open = Path.open, safetensors.safe_open

    def open_once(path, *args):
        content = opened(path, *args)
        path.unlink()
        path.touch()
        return content

    def open_header(*args, **options):
        handle = safe_open(*args, **options)
        monkeypatch.setattr(Path, "open", open_once)
        return handle

    monkeypatch.setattr(safetensors, "safe_open", open_header)
    check_sum(adapters)


def test_a_changed_config_is_named(export):
    place = export / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"eps": 0.1}))
    with pytest.raises(InputError, match=r"config\.json: is damaged or was changed: its SHA-256"):
        content_of_folder(export)


def test_a_file_alone_needs_no_config(export, tmp_path):
    """As ComfyUI and users move it."""
    save_weights(tmp_path / "whole", random_params(CONFIG), CONFIG)
    (file,) = (tmp_path / "whole").glob("*.safetensors")
    moved = tmp_path / "alone.safetensors"
    shutil.copy(file, moved)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    load_weights(moved, CONFIG, mesh)
