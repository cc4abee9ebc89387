"""`alload prepare media` with a text encoder that gives several kinds of tokens."""

import json
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from media_helpers import SMALL, contents, prepare, skipped
from PIL import Image

from alload_jax import cli
from alload_jax.data.manifest import read_manifest
from alload_jax.data.prepare.encoders import (
    GIVEN_ENCODERS,
    TEXT_ENCODERS,
    VAE_ENCODERS,
    Given,
    Pixels,
)
from alload_jax.data.prepare.inputs import find_items
from alload_jax.data.prepare.model_encoders import TextEmbeddings
from alload_jax.data.prepare.pipeline import prepare_media
from alload_jax.data.prepare.settings import MediaSettings
from alload_jax.data.record import with_text_of_epoch
from alload_jax.data.store import StoreReader, damaged_records
from alload_jax.errors import InputError, run_command


class SpokenModel:
    """A token for each letter, and one of another kind for each exclamation mark."""

    def __init__(self, folder, length):
        self.folder, self.length = folder, length

    def origin(self):
        return {"name": "spoken", "length": self.length}

    def tokens(self, text):
        letters = np.array([[ord(letter), 1] for letter in text[: self.length]], np.float32)
        shouts = np.full((text.count("!"), 3), text.count("!") or 1, np.float32)
        return {"text": letters.reshape(-1, 2) * (1e9 if "huge" in text else 1), "shouts": shouts}


@dataclass(frozen=True)
class Spoken(TextEmbeddings):
    name = "spoken"
    needs_torch = False
    default_length = 30
    text_class = SpokenModel


@dataclass(frozen=True)
class Weighed(Pixels):
    has_weights = True


class GivenEnds:
    """The first and the last grey level of a clip."""

    @classmethod
    def make(cls, kind, vae_folder, image_folder):
        if kind != "ends":
            raise InputError(f"--image-to-video is {kind}; choose ends")
        return cls()

    def origin(self):
        return {"given": "ends"}

    def encode(self, first, last, frames):
        levels = np.array([first.mean(), last.mean()], np.float16)
        return Given(np.broadcast_to(levels, (frames, *first.shape[:2], 2)), None)


for registry, name, kind in (
    (TEXT_ENCODERS, "spoken", Spoken),
    (VAE_ENCODERS, "ends", Weighed),
    (GIVEN_ENCODERS, "ends", GivenEnds),
):
    if name not in registry.names():
        registry.register(name, kind)


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    captions = [["stop!", "go!!! now"], ["quiet"], ["a huge thing"], [""]]
    for number, texts in enumerate(captions):
        Image.new("RGB", (40, 40), (90 + number, 90, 90)).save(folder / f"{number}.png")
        (folder / f"{number}.json").write_text(json.dumps({"caption": texts}))
    return folder


@pytest.fixture
def spoken(media, tmp_path):
    def run(out, **changes):
        flags = SMALL | {"text": "spoken", "text_folder": str(tmp_path), "files_per_shard": 2}
        workers = changes.pop("workers", 1)
        settings = MediaSettings(**flags | changes)
        items = find_items(media, None, None, settings.captions == "all")
        prepare_media(items, tmp_path / out, settings, workers=workers)
        return tmp_path / out

    return run


def test_all_kinds_of_tokens_are_stored(spoken):
    out = spoken("out")
    manifest = read_manifest(out)
    reader = StoreReader(manifest)
    assert manifest.form.parts == (("shouts", 3),)
    assert manifest.text_length.tolist() == [5, 5, 0]
    assert manifest.part_lengths.tolist() == [[1], [0], [0]]
    arrays = reader.read(0)
    assert arrays["text"].dtype == arrays["shouts"].dtype == np.float16
    np.testing.assert_array_equal(arrays["text"][:, 0], [ord(letter) for letter in "stop!"])
    np.testing.assert_array_equal(arrays["shouts"], [[1, 1, 1]])
    assert skipped(out) == {"2.png": "the text encoder gives values that are not finite"}


def test_each_of_several_captions_has_its_own_tokens(spoken):
    out = spoken("out", captions="all")
    assert contents(spoken("two", captions="all", workers=2)) == contents(out)
    manifest = read_manifest(out)
    assert list(damaged_records(StoreReader(manifest))) == []
    assert manifest.text_length.tolist() == [9, 5, 0]
    assert manifest.part_lengths.tolist() == [[3], [0], [0]]
    arrays = StoreReader(manifest).read(0)
    drawn = Counter()
    for epoch in range(40):
        taken = with_text_of_epoch(arrays, seed=1, epoch=epoch, sample=0)
        drawn[len(taken["text"]), len(taken["shouts"])] += 1
    assert drawn.keys() == {(5, 1), (9, 3)}


def test_what_models_are_given_follows_the_vae(media, tmp_path, capsys):
    vae = {"vae": "ends", "vae_folder": str(tmp_path)}
    prepare(media, tmp_path / "out", image_to_video="ends", **vae)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.form.given_channels == 2
    assert manifest.origin["image_to_video"] == {"given": "ends"}
    for flags, named in (
        (["--image-to-video", "first"], "--vae wan or --vae hunyuan_video"),
        (["--vae", "wan", "--image-to-video", "first"], "--vae-folder"),
        (["--text", "hunyuan_video"], "--text hunyuan_video needs the folder of its weights"),
        (["--vae", "hunyuan_video", "--vae-folder", "missing"], "missing: no such folder"),
        (["--text", "hunyuan_video", "--text-folder", "missing"], "missing: no such folder"),
    ):
        argv = ["prepare", "media", str(media), "--out", str(tmp_path / "no"), *flags]
        assert run_command(cli.main, argv) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert named in err
