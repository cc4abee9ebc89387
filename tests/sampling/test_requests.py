"""Requests of `alload sample`, the conditions that they name, and pictures from latents."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from alload_jax.data.prepare.encoders import ByteText
from alload_jax.data.prepare.sources import Source, decode_image
from alload_jax.data.record import fold_frames
from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
from alload_jax.models.hunyuan_video.transformer_13b import HunyuanVideo13bConfig
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.sampling import requests
from alload_jax.sampling.encoders import Encoders, as_latent, find_encoders, read_picture
from alload_jax.sampling.requests import (
    RawRequest,
    Request,
    Target,
    arrays_of,
    check_request,
    decoded,
    family_fps,
    read_list,
    require_memory,
)

MODEL = WanConfig(in_channels=3, text=TextConfig(64, 16), patch_size=(1, 4, 4))
SIZE = {"frames": 1, "height": 8, "width": 8, "out": Path("x.png")}


def target(model=MODEL, **fields):
    return Target(model, (1, 1, 1), 16, 1, **fields)


@pytest.mark.parametrize(("encoding", "end"), [("utf-8", "\n"), ("utf-8-sig", "\r\n")])
def test_lines_of_a_list_end_where_json_lines_end(tmp_path, encoding, end):
    prompts = ["a\u2028b", "c\x85d", "猫"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    (tmp_path / "x.jsonl").write_text(end.join([*lines, ""]), encoding=encoding, newline="")
    found = read_list(tmp_path / "x.jsonl", {})
    assert [one.values["prompt"] for one in found] == prompts


@pytest.mark.parametrize(
    ("trained_null", "text", "expected"),
    [(True, ByteText(16), None), (False, ByteText(16), ""), (False, None, None)],
)
def test_guidance_leads_away_from_what_training_knows(tmp_path, trained_null, text, expected):
    save_file({"text": np.zeros((2, 64), np.float32)}, tmp_path / "p")
    raw = RawRequest(SIZE | {"prompt_embeds": tmp_path / "p"})
    fields = {"encoders": Encoders(text=text), "trained_null": trained_null}
    assert check_request(raw, target(**fields)).negative == expected
    if text:
        named = RawRequest({**raw.values, "negative_prompt": "blue"})
        assert check_request(named, target(**fields)).negative == "blue"


def test_bytes_need_no_folder_where_the_data_were_made_of_them():
    made_of = {"text": {"name": "bytes", "width": 6, "length": 5}}
    no_text, bytes_of_model = dataclasses.replace(MODEL, text=None), ByteText(64, 16)
    for model, origin, folder, expected in (
        (MODEL, made_of, None, ByteText(6, 5)),
        (MODEL, {"text": made_of["text"] | {"name": "umt5"}}, None, None),
        (no_text, made_of, None, None),
        (MODEL, {}, Path("bytes"), bytes_of_model),
    ):
        assert find_encoders(model, origin, text=folder).text == expected
    with pytest.raises(InputError, match="the model's condition is classes; leave it out"):
        find_encoders(no_text, {}, text=Path("bytes"))


def test_image_embeddings_beside_a_picture_to_encode_are_refused(tmp_path):
    save_file({"image": np.zeros((5, 4), np.float32)}, tmp_path / "i")
    save_file({"text": np.zeros((2, 64), np.float32)}, tmp_path / "p")
    model = dataclasses.replace(MODEL, image=ImageConfig(dim=4))
    values = SIZE | {"frames": 5, "out": Path("x.gif"), "image": Path("x.png")}
    values |= {"prompt_embeds": tmp_path / "p", "image_embeds": tmp_path / "i"}
    with pytest.raises(InputError, match=r"--image-embeds is given beside --image"):
        check_request(RawRequest(values), target(model, encoders=Encoders(image=object())))


WORDS = r"GB for \d+ at a time, and .* choose a smaller size"


@pytest.mark.parametrize(
    ("size", "batch", "words"),
    [
        ({"height": 2**25}, 1, WORDS),
        ({"frames": 2**23, "out": Path("x.gif")}, 1, WORDS),
        ({"height": 8192, "width": 8192}, 1, WORDS),
        ({"height": 1024, "width": 1024}, 1000, WORDS),
        ({"height": 2**31 + 4}, 1, "height is .*; it must be at most 2147483648"),
        ({"height": 2**26, "width": 12}, 1, "has more than 2147483648 values"),
        ({"height": 2**26, "width": 8}, 1, WORDS),
    ],
)
def test_what_no_device_holds_is_refused_before_it_is_compiled(size, batch, words):
    model = WanConfig(in_channels=3, num_classes=10, patch_size=(1, 4, 4))
    raw = RawRequest(SIZE | {"class": (1,)} | size)
    with pytest.raises(InputError, match=words):
        check_request(raw, target(model, batch=batch))
    check_request(RawRequest(SIZE | {"class": (1,)}), target(model, batch=batch))


@pytest.mark.parametrize(
    "model",
    [
        dataclasses.replace(MODEL, patch_size=(2, 4, 4)),
        HunyuanVideo13bConfig(in_channels=3, patch_size=(1, 4, 4), text=TextConfig(64, 16)),
    ],
    ids=["frames in pairs", "one time for all frames"],
)
def test_a_picture_needs_a_model_that_takes_a_first_frame(tmp_path, model):
    values = SIZE | {"frames": 6, "out": Path("x.gif"), "prompt": "a", "image": tmp_path / "x.png"}
    with pytest.raises(InputError, match=r"--image is given, but the model cannot take a first"):
        check_request(RawRequest(values), target(model, encoders=Encoders(text=ByteText(16))))


# ---------------------------------------------------------------- several kinds of tokens

KINDS = HunyuanVideoConfig(
    dim=16,
    num_heads=2,
    in_channels=5,
    out_channels=2,
    patch_size=(1, 1, 1),
    text=TextConfig(dim=6, length=5),
    glyphs=TextConfig(dim=4, length=3),
    image=ImageConfig(dim=2),
)


class Words:
    """A token of each kind for each word, and of glyphs for each word in capitals alone."""

    def __init__(self, glyph_width=4):
        self.glyph_width, self.calls = glyph_width, []

    def tokens(self, text):
        self.calls.append(text)
        words = text.split()
        glyphs = [word for word in words if word.isupper()]
        return {
            "text": np.full((len(words), 6), len(text), np.float32),
            "glyphs": np.full((len(glyphs), self.glyph_width), -1, np.float32),
        }


class Picture:
    """Encoders of given pictures: VAE and image encoder in one."""

    takes_last_frame, stride, channels = False, (4, 16, 16), 2

    def encode(self, picture):
        return np.ones((3, 2), np.float32)

    def encode_given(self, first, last, frames):
        return np.full((2, 2, 3, 3), 7, np.float32)


def arrays(encoders, **values):
    size = {"frames": 5, "height": 32, "width": 48, "out": Path("x.safetensors")}
    wanted = Target(KINDS, (4, 16, 16), None, 1, encoders, trained_null=False)
    return arrays_of(check_request(RawRequest(size | values), wanted), KINDS, encoders)


def tokens(condition):
    """The tokens of each kind, without padding."""
    found = {}
    for name, part in condition.tokens.items():
        (length,) = part.segments.length
        assert (part.segments.ids[:length] == 0).all()
        assert (part.segments.ids[length:] == -1).all()
        assert not part.values[length:].any()
        found[name] = part.values[:length].tolist()
    return found


def test_words_have_all_kinds_that_the_encoder_gives_cut_to_the_models_length(tmp_path):
    words = Words()
    encoders = Encoders(text=words)
    found = arrays(encoders, prompt="a SIGN")
    assert tokens(found.condition) == {"text": [[6] * 6] * 2, "glyphs": [[-1] * 4], "image": []}
    assert tokens(found.null) == {"text": [], "glyphs": [], "image": []}
    assert words.calls == ["a SIGN", ""]  # each once
    long = tokens(arrays(encoders, prompt="A B C D E F G").condition)
    assert (len(long["text"]), len(long["glyphs"])) == (5, 3)
    save_file(encoders.encoded("a SIGN"), tmp_path / "x.safetensors")
    of_file = arrays(encoders, prompt_embeds=tmp_path / "x.safetensors")
    assert tokens(of_file.condition) == tokens(found.condition)
    letters = tokens(arrays(Encoders(text=ByteText(6, 5)), prompt="SIGN").condition)
    assert (len(letters["text"]), len(letters["glyphs"])) == (4, 0)
    with pytest.raises(InputError, match="gives glyphs of width 3, but the model takes 4"):
        arrays(Encoders(text=Words(glyph_width=3)), prompt="A")


def test_a_picture_needs_both_its_encoders_and_no_last_frame(tmp_path):
    path = tmp_path / "x.png"
    Image.new("RGB", (48, 32), (9, 9, 9)).save(path)
    values = {"prompt": "a", "image": path}
    one, both = (Encoders(Words(), Picture(), image) for image in (None, Picture()))
    with pytest.raises(InputError, match="--image with --image-encoder"):
        arrays(one, **values)
    with pytest.raises(InputError, match="--last-image: the model takes a first frame only"):
        arrays(both, **values, last_image=path)
    found = arrays(both, **values)
    assert tokens(found.condition)["image"] == tokens(found.null)["image"] == [[1, 1]] * 3
    assert (found.condition.given == 7).all()
    without = arrays(both, prompt="a").condition
    assert tokens(without)["image"] == []
    assert not without.given.any()


# ---------------------------------------------------------------- pictures

VAE = SimpleNamespace(decode=lambda latents: np.zeros((len(latents), 8, 8, 3), np.uint8))


def test_latents_are_decoded_or_unfolded_where_they_are_pixels():
    request = Request((5, 2, 2), (2, 2, 2), 0, Path("x.gif"), None, None, None, None, 0)
    frames = np.random.default_rng(0).normal(size=(5, 2, 2, 3)).astype(np.float32)
    found = decoded(fold_frames(frames, 4), request._replace(frames_per_latent=4), None)
    np.testing.assert_allclose(found, frames, rtol=1e-6)
    np.testing.assert_array_equal(decoded(frames, request, None), frames)
    assert decoded(np.ones((2, 1, 1, 16), np.float32), request, VAE).shape == (2, 8, 8, 3)


@pytest.mark.parametrize(
    ("stride", "channels", "vae", "pictures", "frames", "fps"),
    [
        ((1, 1, 1), 1, None, 1, 1, None),
        ((1, 1, 1), 16, None, None, 1, None),
        ((4, 1, 1), 4, None, 1, 4, None),
        ((4, 1, 1), 12, None, 3, 4, None),
        ((4, 8, 8), 16, None, None, 1, 16.0),
        ((4, 8, 8), 16, VAE, 3, 1, 16.0),
        ((4, 16, 16), 48, None, None, 1, 24.0),
    ],
)
def test_latents_say_what_pictures_they_hold(stride, channels, vae, pictures, frames, fps):
    model = dataclasses.replace(MODEL, in_channels=channels)
    found = Target(model, stride, 1, 1, Encoders(vae=vae))
    assert (found.picture_channels, found.frames_per_latent) == (pictures, frames)
    assert family_fps(model, stride) == fps
    assert family_fps(dataclasses.replace(MODEL, in_channels=16), None) == 16.0


@pytest.mark.parametrize(
    ("channels", "frames", "kept"), [(1, 1, 1), (3, 1, 3), (4, 4, 1), (12, 4, 3), (3, 3, 1)]
)
def test_a_picture_is_the_first_latent(channels, frames, kept):
    picture = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    latent = as_latent(picture, channels, frames)
    assert (latent.shape, latent.dtype) == ((1, 4, 6, channels), np.float32)
    values = picture.astype(np.float32) / 127.5 - 1
    expected = values if kept == 3 else values.mean(axis=-1, keepdims=True)
    copies = latent.reshape(4, 6, frames, kept)
    np.testing.assert_allclose(copies, np.repeat(expected[:, :, None], frames, axis=2), atol=1e-6)


def test_a_picture_is_turned_as_its_file_says_and_as_preparation_reads_it(tmp_path):
    path, exif, rng = tmp_path / "photo.jpg", Image.Exif(), np.random.default_rng(0)
    exif[0x0112] = 6  # shown a quarter turn clockwise, as phones write it
    picture = Image.fromarray(rng.integers(0, 256, (48, 80, 3), np.uint8)).resize((800, 480))
    picture.save(path, exif=exif, quality=95)
    found = read_picture(path, 800, 480).astype(int)
    expected = np.asarray(picture.transpose(Image.Transpose.ROTATE_270)).astype(int)
    assert np.abs(found - expected).mean() < 6

    def fit(height, width):
        assert (height, width) == (800, 480)
        raise StopIteration

    with pytest.raises(StopIteration):
        decode_image(Source(path, 0, path.stat().st_size), fit)


def test_what_is_no_picture_is_one_line(tmp_path):
    bomb, text = tmp_path / "bomb.png", tmp_path / "text.png"
    Image.new("1", (20_000, 20_000)).save(bomb)
    text.write_text("no picture")
    for path in (bomb, text, tmp_path / "missing.png", tmp_path):
        with pytest.raises(InputError) as error:
            read_picture(path, 16, 16)
        assert str(error.value).startswith(f"{path}: cannot be read as an image (")
        assert "\n" not in str(error.value)
        assert (" (No such file or directory); name" in str(error.value)) == (path.name[0] == "m")
    os.mkfifo(tmp_path / "pipe.png")  # reading it would wait for ever
    with pytest.raises(InputError, match=r"pipe\.png: is not a regular file; name another"):
        read_picture(tmp_path / "pipe.png", 16, 16)


def test_drawing_takes_a_layers_tensors_and_float32_of_all_pairs_at_least(monkeypatch):
    dense = WanConfig(dim=64, num_heads=2)
    sparse = dataclasses.replace(dense, sparse_attention=SparseAttentionConfig())
    of_layer, of_pairs = 4 * 2 * 64 * 1000, 4 * 2 * 1000**2
    for model, least in ((dense, of_layer + of_pairs), (sparse, of_layer)):
        monkeypatch.setattr(requests, "host_bytes", lambda least=least: 3 * least)
        require_memory("it", model, 1000, 3)
        with pytest.raises(InputError, match=r"it takes more than .*, or draw fewer at a time"):
            require_memory("it", model, 1000, 4)
        monkeypatch.setattr(requests, "host_bytes", lambda least=least: 3 * least - 1)
        with pytest.raises(InputError, match=r"it takes more than .* for 3 at a time"):
            require_memory("it", model, 1000, 3)
