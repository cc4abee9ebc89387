"""Encoders against diffusers and transformers run by hand, on small random folders."""

import json
from functools import partial

import encoder_folders as wan_folders
import hunyuan_video_folders as hunyuan_folders
import numpy as np
import pytest
import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline as HunyuanPipeline
from diffusers import WanPipeline
from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as theirs
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from diffusers.video_processor import VideoProcessor
from encoder_folders import as_video, channels_last, random_frames
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from alload_jax.encoders import loading
from alload_jax.encoders import vae as vae_module
from alload_jax.encoders.conditions import (
    ClipImage,
    HunyuanVideoText,
    SiglipImage,
    Umt5Text,
    clean_prompt,
    glyph_prompt,
)
from alload_jax.encoders.vae import HunyuanVideoVae, WanVae
from alload_jax.errors import InputError

pytestmark = pytest.mark.parity

close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def vae(hunyuan):
    return HunyuanVideoVae(hunyuan[0])


def encoded(model, frames):
    """The mode of the posterior by diffusers, scaled by its factor."""
    with torch.no_grad():
        mode = model.encode(as_video(frames)).latent_dist.mode()
    return channels_last(mode * model.config.get("scaling_factor", 1.0))


# ---------------------------------------------------------------- VAEs


@pytest.mark.parametrize(("kind", "side"), [("2.1", 8), ("2.2", 16)])
def test_latents_and_pictures_of_wan_are_those_of_diffusers(wan, kind, side, tmp_path):
    model = wan_folders.random_vae(kind)
    model.save_pretrained(tmp_path)
    ours = WanVae(tmp_path)
    mean, std = (
        torch.tensor(getattr(model.config, f"latents_{name}")).view(1, -1, 1, 1, 1)
        for name in ("mean", "std")
    )
    assert ours.stride == (4, side, side)
    for frames in (1, 5, 9):
        clip = random_frames(frames, 2 * side, 3 * side)
        with torch.no_grad():
            mode = model.encode(as_video(clip)).latent_dist.mode()
        found = ours.latents(clip)
        assert (found.dtype, found.shape) == (np.float32, (1 + frames // 4, 2, 3, ours.channels))
        np.testing.assert_array_equal(found, channels_last((mode - mean) * (1.0 / std)))
    scaled = torch.from_numpy(found).permute(3, 0, 1, 2)[None] / (1.0 / std) + mean
    with torch.no_grad():
        video = model.decode(scaled, return_dict=False)[0]
    expected = wan[2].video_processor.postprocess_video(video, output_type="pil")[0]
    decoded = ours.decode(found)
    np.testing.assert_array_equal(decoded, np.stack([np.asarray(one) for one in expected]))
    assert decoded.std() > 1


@pytest.mark.parametrize(("frames", "latents_a_chunk"), [(1, 1), (9, 1), (9, 99), (13, 2)])
def test_chunks_of_hunyuan_video_give_what_whole_clips_give(
    hunyuan, vae, monkeypatch, frames, latents_a_chunk
):
    model = hunyuan[1]["vae"]
    monkeypatch.setattr(vae_module, "_PIXELS", latents_a_chunk * 4 * 32 * 48)
    clip = random_frames(frames, 32, 48)
    found, expected = vae.latents(clip), encoded(model, clip)
    assert (found.dtype, found.shape) == (np.float32, (1 + frames // 4, 2, 3, vae.channels))
    close(found, expected)
    assert expected.std() > 0.1
    latents = np.random.default_rng(1).normal(size=found.shape).astype(np.float32)
    scaled = torch.from_numpy(latents).permute(3, 0, 1, 2)[None] / model.config.scaling_factor
    with torch.no_grad():
        video, chunked = (one.decode(scaled).sample for one in (model, vae._model))
    close(chunked.numpy(), video.numpy())
    pictures = VideoProcessor(vae_scale_factor=16).postprocess_video(video, output_type="pil")[0]
    off = np.abs(vae.decode(latents).astype(int) - np.stack([np.asarray(one) for one in pictures]))
    assert off.max() <= 1  # where a value lies between two levels
    assert (off > 0).mean() < 1e-3


def test_a_failed_clip_leaves_nothing_to_the_next(vae, monkeypatch):
    clip, calls = random_frames(9, 32, 48), []
    expected, convolution = vae.latents(clip), type(vae._model.encoder.conv_out.conv)
    convolve = convolution.forward

    def failing(self, x):
        calls.append(len(calls))
        if len(calls) == 40:
            raise RuntimeError("stopped")
        return convolve(self, x)

    monkeypatch.setattr(vae_module, "_PIXELS", 1)
    monkeypatch.setattr(convolution, "forward", failing)
    with pytest.raises(RuntimeError, match="stopped"):
        vae.latents(clip)
    close(vae.latents(clip), expected)


@pytest.mark.parametrize("with_last", [False, True])
def test_given_latents_of_wan_are_the_condition_of_the_pipeline(wan, with_last):
    folder, _, pipeline = wan
    first, last = random_frames(2, 16, 24)
    process = pipeline.video_processor.preprocess
    images = [process(Image.fromarray(one), height=16, width=24) for one in (first, last)]
    size = {"height": 16, "width": 24, "num_frames": 9, "dtype": torch.float32, "device": "cpu"}
    with torch.no_grad():
        _, condition = pipeline.prepare_latents(
            images[0], batch_size=1, **size, last_image=images[1] if with_last else None
        )
    ours = WanVae(folder)
    found = ours.encode_given(first, last if with_last else None, 9)
    np.testing.assert_array_equal(found, channels_last(condition))
    assert found[-1, ..., 3].all() == with_last
    picture = ours.latents(first[None])
    close(found[:1, ..., 4:], picture)
    alone = np.concatenate([np.ones((1, 2, 3, 4)), picture], axis=-1)
    np.testing.assert_array_equal(ours.encode_given(first, None, 1), alone)


def test_given_latents_of_hunyuan_video_are_the_condition_of_the_pipeline(hunyuan, vae):
    (first,) = random_frames(1, 32, 48)
    with torch.no_grad():
        latents, mask = hunyuan[2].prepare_cond_latents_and_mask(
            torch.zeros(1, vae.channels, 3, 2, 3),
            Image.fromarray(first),
            batch_size=1,
            height=32,
            width=48,
            dtype=torch.float32,
            device="cpu",
        )
    found = vae.encode_given(first, None, 9)
    close(found, channels_last(torch.cat([latents, mask], dim=1)))
    np.testing.assert_array_equal(found[:1, ..., :-1], vae.latents(first[None]))
    np.testing.assert_array_equal(vae.encode_given(first, None, 1), found[:1])


def test_nothing_is_said_where_accelerate_is_missing(wan, monkeypatch):
    said = []
    monkeypatch.setattr("diffusers.models.modeling_utils.logger.warning", said.append)
    monkeypatch.setattr("diffusers.models.modeling_utils.is_accelerate_available", lambda: False)
    find = loading.importlib.util.find_spec
    monkeypatch.setattr(
        loading.importlib.util,
        "find_spec",
        lambda name: None if name == "accelerate" else find(name),
    )
    WanVae(wan[0]).latents(random_frames(1, 16, 16))
    assert said == []


def test_what_does_not_fit_the_memory_is_tiled(wan, hunyuan, monkeypatch, capsys):
    ours, clip = WanVae(wan[0]), random_frames(5, 16, 24)
    expected, kind = ours.latents(clip), type(ours._model)
    whole = kind._encode

    def small(self, x):
        if not self.use_tiling and x.shape[-2] * x.shape[-1] >= 16 * 24:
            raise torch.OutOfMemoryError("too large")
        return whole(self, x)

    monkeypatch.setattr(kind, "_encode", small)
    np.testing.assert_array_equal(ours.latents(clip), expected)  # smaller than a tile
    assert "384 pixels" in capsys.readouterr().err
    ours.latents(clip)
    ours.latents(clip[:, :8, :8])
    assert capsys.readouterr().err == ""
    assert not ours._model.use_tiling

    def never(self, x):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(kind, "_encode", never)
    with pytest.raises(InputError, match="also in tiles"):
        ours.latents(clip)


def test_tiles_of_hunyuan_video_are_those_of_diffusers(hunyuan):
    clip, reference, ours = (
        random_frames(5, 32, 288),
        hunyuan[1]["vae"],
        HunyuanVideoVae(hunyuan[0]),
    )
    reference.enable_tiling()
    expected = encoded(reference, clip)
    reference.disable_tiling()
    forward = ours._model.encoder.forward

    def small(x):
        if x.shape[-1] > 256:
            raise torch.OutOfMemoryError("too large")
        return forward(x)

    ours._model.encoder.forward = small
    close(ours.latents(clip), expected)
    assert not np.allclose(encoded(reference, clip), expected, atol=1e-3)


def test_clips_and_latents_of_other_shapes_are_refused(wan, vae, tmp_path):
    ours, zeros = WanVae(wan[0]), partial(np.zeros, dtype=np.uint8)
    picture = zeros((32, 32, 3))
    for refused, named in (
        (lambda: ours.latents(np.zeros((5, 16, 16, 3), np.float32)), "float32"),
        (lambda: ours.latents(zeros((4, 16, 16, 3))), "4n"),
        (lambda: ours.latents(zeros((0, 16, 16, 3))), "4n"),
        (lambda: ours.latents(zeros((5, 12, 16, 3))), "multiples of 8"),
        (lambda: ours.latents(zeros((5, 16, 0, 3))), "multiples of 8"),
        (lambda: ours.latents(zeros((5, 16, 16))), "T, H, W, 3"),
        (lambda: ours.latents(zeros((5, 16, 16, 4))), "T, H, W, 3"),
        (lambda: ours.decode(np.zeros((2, 2, 2, 48), np.float32)), "height, width, 16"),
        (lambda: ours.decode(np.zeros((2, 0, 2, 16), np.float32)), "height, width, 16"),
        (lambda: ours.encode_given(picture, picture, 1), "as many"),
        (lambda: vae.latents(zeros((5, 24, 32, 3))), "multiples of 16"),
        (lambda: vae.encode_given(picture, picture, 9), "first frame only"),
        (lambda: vae.encode_given(picture, None, 4), "4n"),
    ):
        with pytest.raises(ValueError, match=named):
            refused()
    strided = {"spatial_compression_ratio": 8, "block_out_channels": (8, 8, 16, 16)}
    hunyuan_folders.random_vae(**strided).save_pretrained(tmp_path)
    other = HunyuanVideoVae(tmp_path)
    assert other.stride == (4, 8, 8)
    assert other.latents(zeros((5, 16, 16, 3))).shape == (2, 2, 2, 8)


@pytest.mark.parametrize(("make", "name"), [(WanVae, "wan"), (HunyuanVideoVae, "hunyuan")])
def test_bfloat16_is_close_to_float32(make, name, request, monkeypatch):
    folder, clip = request.getfixturevalue(name)[0], random_frames(5, 32, 48)
    exact = make(folder).latents(clip)
    monkeypatch.setattr(make, "dtype", "bfloat16")  # as on a GPU
    found = make(folder).latents(clip)
    assert found.dtype == np.float32
    assert not np.array_equal(found, exact)
    np.testing.assert_allclose(found, exact, atol=0.1 * exact.std() + 0.05)


# ---------------------------------------------------------------- text and pictures

TEXTS = ["a red square", "", "a  &amp;amp; circle\non\tgrass ", "the right of a blue circle " * 9]


def test_texts_of_wan_are_those_of_the_pipeline(wan, tmp_path):
    folder, parts, pipeline = wan
    shared = {name: parts[name] for name in ("tokenizer", "text_encoder", "vae")}
    embed = WanPipeline(**shared, scheduler=pipeline.scheduler)._get_t5_prompt_embeds
    ours = Umt5Text(folder, length=16)
    with torch.no_grad():
        expected = [embed(text, max_sequence_length=16)[0].numpy() for text in TEXTS]
    found = [ours.tokens(text)["text"] for text in TEXTS]
    assert len(found[1]) == 1  # the end alone
    assert len(found[3]) == 16
    for one, wanted in zip(found, expected, strict=True):
        assert one.shape[1] == ours.width
        np.testing.assert_array_equal(one, wanted[: len(one)])
        assert not wanted[len(one) :].any()
    for text in [*TEXTS, "&lt;b&gt; \u3000 x\u00a0y &amp;lt;", "naïve — “quoted” 猫"]:
        assert clean_prompt(text) == prompt_clean(text)
    parts["text_encoder"].save_pretrained(tmp_path / "text_encoder")
    with pytest.raises(InputError, match="no tokenizer"):
        Umt5Text(tmp_path)
    (tmp_path / "tokenizer").mkdir()
    for name, source in (("spiece.model", "spiece"), ("tokenizer_config.json", "tokenizer")):
        data = (folder / source / name).read_bytes()
        (tmp_path / "tokenizer" / name).write_bytes(data)
    np.testing.assert_array_equal(Umt5Text(tmp_path, length=16).tokens(TEXTS[3])["text"], found[3])
    (tmp_path / "tokenizer" / "spiece.model").write_bytes(b"nothing")
    with pytest.raises(InputError, match="tokenizer: the tokenizer cannot be read"):
        Umt5Text(tmp_path, length=16).tokens("a cat")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 14),
        ('a sign says "STOP" and “GO – 猫” and "STOP"', 63),
        ("a man says “" + "on and on " * 40 + "”", 64),
    ],
)
def test_texts_of_hunyuan_video_are_those_of_the_pipeline(hunyuan, text, tokens):
    folder, parts, pipeline = hunyuan
    with torch.no_grad():
        language = pipeline._get_mllm_prompt_embeds(
            parts["text_encoder"], parts["tokenizer"], text, "cpu", tokenizer_max_length=64
        )
        glyphs = pipeline._get_byt5_prompt_embeds(
            parts["tokenizer_2"], parts["text_encoder_2"], text, "cpu"
        )
    ours = HunyuanVideoText(folder, 64)
    found = ours.tokens(text)
    assert list(found) == ["text", "glyphs"]
    for name, (states, valid) in (("text", language), ("glyphs", glyphs)):
        count = int(valid.sum())
        assert bool(valid[0, :count].all())
        assert (found[name].shape, found[name].dtype) == ((count, states.shape[2]), np.float32)
        np.testing.assert_allclose(found[name], states[0, :count].numpy(), rtol=1e-4, atol=1e-5)
    assert len(found["text"]) == tokens
    assert (len(found["glyphs"]) > 0) == ("“" in text)
    ours.unload()
    assert "_models" not in vars(ours)
    np.testing.assert_array_equal(ours.tokens(text)["text"], found["text"])


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from('"“”ab\n '), max_size=14))
@example('""')
@example("“a” “a”")
def test_quoted_parts_are_those_that_the_pipeline_finds(text):
    assert glyph_prompt(text) == theirs.extract_glyph_texts(text)


def test_a_tokenizer_of_another_model_is_refused(hunyuan, tmp_path):
    folder, parts, _ = hunyuan
    for name in ("text_encoder", "text_encoder_2", "tokenizer_2"):
        parts[name].save_pretrained(tmp_path / name)
    short = parts["tokenizer"].from_pretrained(folder / "tokenizer")
    short.chat_template = "{{ messages[1]['content'] }}"
    short.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(InputError, match="tokenizer: gives 5 tokens"):
        HunyuanVideoText(tmp_path).tokens("a cat")
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="tokenizer: has no chat template; copy"):
        HunyuanVideoText(tmp_path).tokens("a cat")


def test_image_embeddings_are_those_of_the_pipelines(wan, hunyuan):
    (picture,) = random_frames(1, 40, 56)
    with torch.no_grad():
        of_wan = wan[2].encode_image(Image.fromarray(picture), "cpu")[0].numpy()
        encoder = (hunyuan[1]["image_encoder"], hunyuan[1]["feature_extractor"])
        siglip = HunyuanPipeline._get_image_embeds(*encoder, Image.fromarray(picture), "cpu")
    for ours, expected in ((ClipImage(wan[0]), of_wan), (SiglipImage(hunyuan[0]), siglip[0])):
        found = ours.encode(picture)
        np.testing.assert_array_equal(found, expected)
        assert found.shape[1] == ours.width
        with pytest.raises(ValueError, match="H, W, 3"):
            ours.encode(picture[..., :1])


# ---------------------------------------------------------------- folders


def test_the_digest_follows_weights_and_config_alone(wan, tmp_path):
    folder, parts, _ = wan
    for make, name in ((WanVae, "vae"), (Umt5Text, "text_encoder"), (ClipImage, "image_encoder")):
        assert make(folder / name).origin() == make(folder).origin()

    def digest(name):
        return WanVae(tmp_path / name).origin()["weights"]

    expected = WanVae(folder).origin()["weights"]
    parts["vae"].save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert (tmp_path / "shards" / "diffusion_pytorch_model.safetensors.index.json").exists()
    clip = random_frames(1, 16, 24)
    np.testing.assert_array_equal(
        WanVae(tmp_path / "shards").latents(clip), WanVae(folder).latents(clip)
    )
    config = tmp_path / "copy" / "config.json"
    parts["vae"].save_pretrained(tmp_path / "copy")
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"_diffusers_version": "1", "_name_or_path": "x"}))
    assert digest("copy") == expected
    config.write_text(json.dumps(values | {"latents_std": [2.0] * 16}))
    assert digest("copy") != expected
    wan_folders.random_vae("2.1", seed=1).save_pretrained(tmp_path / "other")
    assert digest("other") != expected


def test_missing_parts_of_a_folder_are_named(wan, tmp_path):
    for make in (WanVae, Umt5Text, ClipImage):
        with pytest.raises(InputError, match=r"no config.json and no \w+/config.json"):
            make(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        WanVae(tmp_path)
    model = wan[1]["vae"]
    model.save_pretrained(tmp_path)
    weights = tmp_path / "diffusion_pytorch_model.safetensors"
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    tensors.pop("quant_conv.weight")
    save_file(tensors, weights)
    clip = random_frames(1, 16, 24)
    with pytest.raises(InputError, match=r"missing or have another shape, such as quant_conv"):
        WanVae(tmp_path).latents(clip)
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="weights cannot be read"):
        WanVae(tmp_path).latents(clip)
    weights.unlink()
    with pytest.raises(InputError, match=r"diffusion_pytorch_model\.safetensors: no such file"):
        WanVae(tmp_path).origin()


@pytest.mark.parametrize("missing", ["torch", "diffusers", "transformers"])
def test_a_missing_package_gives_one_line(wan, monkeypatch, missing):
    find, picture = loading.importlib.util.find_spec, random_frames(1, 16, 24)
    monkeypatch.setattr(
        loading.importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    for encode, argument in ((WanVae(wan[0]).latents, picture), (Umt5Text(wan[0]).tokens, "a")):
        with pytest.raises(InputError, match=r"install alload-jax\[prepare\]"):
            encode(argument)
