"""Folders of encoders, read without PyTorch: which encoder they hold, and what they lack."""

import json
import pickle

import numpy as np
import pytest

from alload_jax.encoders import VAE_ENCODERS, open_image, open_text, open_vae
from alload_jax.encoders.conditions import (
    ClipImage,
    HunyuanVideo13bText,
    HunyuanVideoText,
    SiglipImage,
    glyph_prompt,
)
from alload_jax.encoders.vae import HunyuanVideo13bVae, HunyuanVideoVae, Vae, WanVae
from alload_jax.errors import InputError


@pytest.fixture
def folder(tmp_path):
    """The folder of a pipeline, with weights that are never read as such."""
    vae = {"_class_name": "AutoencoderKLHunyuanVideo15", "latent_channels": 8}
    for name, file, content in (
        ("vae", "diffusion_pytorch_model", vae),
        ("text_encoder", "model", {"model_type": "qwen2_5_vl_text", "hidden_size": 12}),
        ("text_encoder_2", "model", {"model_type": "t5", "d_model": 10}),
        ("image_encoder", "model", {"model_type": "siglip_vision_model", "hidden_size": 6}),
        ("tokenizer", "tokenizer.json", None),
        ("tokenizer_2", "added_tokens.json", None),
        ("feature_extractor", "preprocessor_config.json", None),
    ):
        (tmp_path / name).mkdir()
        if content is None:
            (tmp_path / name / file).write_text("{}")
        else:
            (tmp_path / name / "config.json").write_text(json.dumps(content))
            (tmp_path / name / f"{file}.safetensors").write_bytes(name.encode())
    return tmp_path


class Halves(Vae):
    """A VAE from outside the package."""

    name, class_name, described = "halves", "AutoencoderHalves", "halves"
    takes_last_frame = False
    stride, channels = (4, 2, 2), 3

    def encode_given(self, first, last, frames):
        return np.zeros((1, 1, 1, 1), np.float32)

    def _load(self):
        raise AssertionError

    _normalised = _as_decoded = _load


def test_a_folder_says_which_encoder_it_holds(folder):
    vae, image = open_vae(folder), open_image(folder / "image_encoder")
    text = open_text(folder, 9)
    assert (type(vae), vae.stride, vae.channels) == (HunyuanVideoVae, (4, 16, 16), 8)
    assert (type(image), image.width) == (SiglipImage, 6)
    assert (type(text), text.width, text.length) == (HunyuanVideoText, 12, 9)
    origin = text.origin()
    for name, fields in (
        ("text_encoder", {"model_type": "llama", "hidden_size": 8}),
        ("text_encoder_2", {"model_type": "clip_text_model", "hidden_size": 4}),
    ):
        (folder / name / "config.json").write_text(json.dumps(fields))
    other = open_text(folder, 9)
    assert (type(other), other.width, other.origin()["pooled_width"]) == (HunyuanVideo13bText, 8, 4)
    assert (origin["name"], origin["width"], origin["glyph_width"]) == ("hunyuan_video", 12, 10)
    VAE_ENCODERS.register(Halves.name, Halves)
    for kind, name in (
        (WanVae, "AutoencoderKLWan"),
        (HunyuanVideo13bVae, "AutoencoderKLHunyuanVideo"),
        (Halves, "AutoencoderHalves"),
    ):
        (folder / "vae" / "config.json").write_text(json.dumps({"_class_name": name}))
        assert type(open_vae(folder / "vae")) is kind


@pytest.mark.parametrize(
    "name",
    [
        *("text_encoder/model.safetensors", "text_encoder_2/model.safetensors"),
        "tokenizer_2/added_tokens.json",
    ],
)
def test_the_digest_of_texts_follows_every_file(folder, name):
    before = HunyuanVideoText(folder).origin()["weights"]
    (folder / name).write_bytes(b"other bytes")
    assert HunyuanVideoText(folder).origin()["weights"] != before


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (open_vae, "_class_name is x, not AutoencoderKLWan or AutoencoderKLHunyuanVideo15"),
        (
            lambda folder: open_text(folder, 9),
            "model_type is x, not umt5 or qwen2_5_vl_text or llama",
        ),
        (open_image, "model_type is x, not clip_vision_model or siglip_vision_model"),
        (WanVae, "_class_name is x, not AutoencoderKLWan; give the folder of Wan's VAE"),
        (HunyuanVideoText, "model_type is x, not qwen2_5_vl_text; give the folder of Qwen2.5-VL"),
        (ClipImage, "model_type is x, not clip_vision_model"),
    ],
)
def test_folders_of_something_else_are_refused(tmp_path, make, named):
    with pytest.raises(InputError, match="no such folder"):
        make(tmp_path / "missing")
    (tmp_path / "config.json").write_text('{"_class_name": "x", "model_type": "x"}')
    with pytest.raises(InputError) as error:
        make(tmp_path)
    assert named in str(error.value)


def test_missing_parts_of_a_pipeline_are_named(folder):
    (folder / "tokenizer_2" / "added_tokens.json").unlink()
    missing = rf"text_encoder_2: no tokenizer .* in it or in {folder}/tokenizer_2; copy it there"
    with pytest.raises(InputError, match=missing):
        HunyuanVideoText(folder)
    (folder / "text_encoder_2" / "config.json").unlink()
    with pytest.raises(InputError, match=r"text_encoder_2: has no config\.json.* byT5"):
        HunyuanVideoText(folder / "text_encoder")
    with pytest.raises(ValueError, match="at least 1"):
        HunyuanVideoText(folder, 0)


def test_an_encoder_is_sent_to_processes_without_what_it_has_loaded(folder):
    for encoder in (HunyuanVideoText(folder), SiglipImage(folder), HunyuanVideoVae(folder)):
        vars(encoder)["_model"] = vars(encoder)["_device"] = lambda: None  # cannot be pickled
        sent, other = pickle.loads(pickle.dumps([encoder, encoder]))
        assert sent is other
        assert sent.origin() == encoder.origin()
        assert not {"_model", "_device"} & vars(sent).keys()


def test_byt5_is_told_what_stands_in_quotes():
    for text in ("no quotes, it's plain", "", 'an open " quote', 'two\n"li\nnes"'):
        assert glyph_prompt(text) is None
    assert glyph_prompt('"A" then “B c”') == 'Text "A". Text "B c". '
    assert glyph_prompt('"twice" “twice” "once"') == 'Text "twice". Text "once". '
    assert glyph_prompt('""') == 'Text "". '
