"""Requests of `alload sample`: what they are read from, and what they mean."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from alload_jax.data.prepare.encoders import ByteText
from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.sampling.encoders import Encoders
from alload_jax.sampling.requests import RawRequest, Target, check_request, read_list

MODEL = WanConfig(in_channels=3, text=TextConfig(64, 16), patch_size=(1, 4, 4))
SIZE = {"frames": 1, "height": 8, "width": 8, "out": Path("x.png")}


def target(model=MODEL, **fields):
    return Target(model, (1, 1, 1), 16, 1, **fields)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
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


def test_image_embeddings_beside_a_picture_to_encode_are_refused(tmp_path):
    save_file({"image": np.zeros((5, 4), np.float32)}, tmp_path / "i")
    save_file({"text": np.zeros((2, 64), np.float32)}, tmp_path / "p")
    model = WanConfig(
        in_channels=3, text=TextConfig(64, 16), patch_size=(1, 4, 4), image=ImageConfig(dim=4)
    )
    values = SIZE | {"frames": 5, "out": Path("x.gif"), "image": Path("x.png")}
    values |= {"prompt_embeds": tmp_path / "p", "image_embeds": tmp_path / "i"}
    encoders = Encoders(image=object())
    with pytest.raises(InputError, match=r"--image-embeds is given beside --image"):
        check_request(RawRequest(values), target(model, encoders=encoders))


@pytest.mark.parametrize(
    ("size", "batch"),
    [
        ({"height": 2**25}, 1),
        ({"width": 2**25}, 1),
        ({"frames": 2**23, "out": Path("x.gif")}, 1),
        ({"height": 8192, "width": 8192}, 1),
        ({"height": 1024, "width": 1024}, 1000),
    ],
)
def test_what_no_device_holds_is_refused_before_it_is_compiled(size, batch):
    """The number of values is within bounds."""
    model = WanConfig(in_channels=3, num_classes=10, patch_size=(1, 4, 4))
    raw = RawRequest(SIZE | {"class": (1,)} | size)
    with pytest.raises(InputError, match=r"GB for \d+ at a time, and .* choose a smaller size"):
        check_request(raw, target(model, batch=batch))
    check_request(RawRequest(SIZE | {"class": (1,)}), target(model, batch=batch))
