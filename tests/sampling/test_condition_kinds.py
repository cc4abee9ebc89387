"""Prompts of models whose condition has several kinds of tokens."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from alload_jax.data.prepare.encoders import ByteText
from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
from alload_jax.sampling.conditions import arrays_of
from alload_jax.sampling.encoders import Encoders
from alload_jax.sampling.requests import RawRequest, Target, check_request

MODEL = HunyuanVideoConfig(
    dim=16,
    num_heads=2,
    in_channels=5,
    out_channels=2,
    patch_size=(1, 1, 1),
    text=TextConfig(dim=6, length=5),
    glyphs=TextConfig(dim=4, length=3),
    image=ImageConfig(dim=2),
)
SIZE = {"frames": 5, "height": 32, "width": 48, "out": Path("x.safetensors")}


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


def request(encoders, **values):
    target = Target(MODEL, (4, 16, 16), None, 1, encoders, trained_null=False)
    return check_request(RawRequest(SIZE | values), target)


def tokens(part):
    """The tokens of a kind, without padding."""
    (length,) = part.segments.length
    assert (part.segments.ids[:length] == 0).all()
    assert (part.segments.ids[length:] == -1).all()
    assert not part.values[length:].any()
    return part.values[:length]


def test_words_have_all_kinds_that_the_encoder_gives():
    words = Words()
    encoders = Encoders(text=words)
    arrays = arrays_of(request(encoders, prompt="a SIGN"), MODEL, encoders)
    found, null = arrays.condition.tokens, arrays.null.tokens
    np.testing.assert_array_equal(tokens(found["text"]), np.full((2, 6), 6))
    np.testing.assert_array_equal(tokens(found["glyphs"]), np.full((1, 4), -1))
    assert len(tokens(found["image"])) == len(tokens(null["text"])) == 0
    assert words.calls == ["a SIGN", ""]  # each once


def test_tokens_beyond_the_model_s_length_are_cut():
    encoders = Encoders(text=Words())
    arrays = arrays_of(request(encoders, prompt="A B C D E F G"), MODEL, encoders)
    lengths = [len(tokens(arrays.condition.tokens[name])) for name in ("text", "glyphs")]
    assert lengths == [5, 3]


def test_an_encoder_of_text_alone_gives_no_glyphs():
    encoders = Encoders(text=ByteText(6, 5))
    found = arrays_of(request(encoders, prompt="SIGN"), MODEL, encoders).condition.tokens
    assert len(tokens(found["text"])) == 4
    assert len(tokens(found["glyphs"])) == 0


def test_words_and_a_file_of_their_tokens_are_the_same(tmp_path):
    encoders, path = Encoders(text=Words()), tmp_path / "x.safetensors"
    safetensors.numpy.save_file(encoders.encoded("go NOW"), path)
    of_words = arrays_of(request(encoders, prompt="go NOW"), MODEL, encoders)
    of_file = arrays_of(request(encoders, prompt_embeds=path), MODEL, encoders)
    for name, part in of_words.condition.tokens.items():
        np.testing.assert_array_equal(part.values, of_file.condition.tokens[name].values)


def test_kinds_of_another_width_are_refused():
    encoders = Encoders(text=Words(glyph_width=3))
    with pytest.raises(InputError, match="gives glyphs of width 3, but the model takes 4"):
        arrays_of(request(encoders, prompt="A"), MODEL, encoders)


def test_a_picture_needs_both_its_encoders_and_no_last_frame(tmp_path):
    from PIL import Image

    path = tmp_path / "x.png"
    Image.new("RGB", (48, 32), (9, 9, 9)).save(path)
    values = {"prompt": "a", "image": path}
    one, both = (Encoders(Words(), Picture(), image) for image in (None, Picture()))
    with pytest.raises(InputError, match="--image with --image-encoder"):
        request(one, **values)
    with pytest.raises(InputError, match="--last-image: the model takes a first frame only"):
        request(both, **values, last_image=path)
    found = arrays_of(request(both, **values), MODEL, both)
    assert len(tokens(found.condition.tokens["image"])) == 3
    assert len(tokens(found.null.tokens["image"])) == 3
    assert (found.condition.given == 7).all()
    without = arrays_of(request(both, prompt="a"), MODEL, both)
    assert len(tokens(without.condition.tokens["image"])) == 0
    assert not without.condition.given.any()
