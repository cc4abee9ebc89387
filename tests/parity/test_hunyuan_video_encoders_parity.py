"""HunyuanVideo 1.5's encoders against diffusers run by hand, on small random folders."""

import inspect
import json
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: install alload-jax[parity]")
pytest.importorskip("diffusers", reason="needs diffusers: install alload-jax[parity]")
pytest.importorskip("transformers", reason="needs transformers: install alload-jax[parity]")

from diffusers import HunyuanVideo15ImageToVideoPipeline as Pipeline  # noqa: E402
from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as theirs  # noqa: E402
from diffusers.pipelines.hunyuan_video1_5.image_processor import (  # noqa: E402
    HunyuanVideo15ImageProcessor,
)
from hunyuan_video_folders import random_vae, write_pipeline  # noqa: E402
from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from PIL import Image  # noqa: E402

from alload_jax import encoders  # noqa: E402
from alload_jax.encoders import vae as causal_chunks  # noqa: E402
from alload_jax.encoders.image import ClipImage, SiglipImage  # noqa: E402
from alload_jax.encoders.text import HunyuanVideoText, glyph_prompt  # noqa: E402
from alload_jax.encoders.vae import HunyuanVideoVae  # noqa: E402
from alload_jax.errors import InputError  # noqa: E402

pytestmark = pytest.mark.parity

HEIGHT, WIDTH = 32, 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hunyuan")


@pytest.fixture(scope="module")
def parts(folder):
    return write_pipeline(folder)


@pytest.fixture
def vae(folder, parts):
    return HunyuanVideoVae(folder)


def random_clip(frames=5, height=HEIGHT, width=WIDTH, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def as_video(frames):
    """[1, 3, T, H, W] from −1 to 1, as diffusers' processors make it of 8-bit pictures."""
    scaled = torch.from_numpy(frames.astype(np.float32) / 255.0).permute(3, 0, 1, 2)[None]
    return 2.0 * scaled - 1.0


def channels_last(latents):
    return latents[0].permute(1, 2, 3, 0).numpy()


def encoded(model, frames):
    """Latents of all frames at once, by diffusers."""
    with torch.no_grad():
        mode = model.encode(as_video(frames)).latent_dist.mode()
    return channels_last(mode * model.config.scaling_factor)


# ---------------------------------------------------------------- VAE


@pytest.mark.parametrize("latents_a_chunk", [1, 3, 99])
@pytest.mark.parametrize("frames", [1, 5, 13])
def test_chunks_give_the_latents_of_the_whole_clip(
    vae, parts, monkeypatch, frames, latents_a_chunk
):
    monkeypatch.setattr(causal_chunks, "_PIXELS", latents_a_chunk * 4 * HEIGHT * WIDTH)
    clip, expected = random_clip(frames), encoded(parts["vae"], random_clip(frames))
    found = vae.encode(clip)
    assert found.dtype == np.float32
    assert found.shape == (1 + (frames - 1) // 4, HEIGHT // 16, WIDTH // 16, vae.channels)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1
    np.testing.assert_array_equal(vae.encode(clip), found)


@pytest.mark.parametrize("latents_a_chunk", [1, 2, 99])
@pytest.mark.parametrize("frames", [1, 2, 4])
def test_chunks_give_the_pictures_of_the_whole_clip(
    vae, parts, monkeypatch, frames, latents_a_chunk
):
    monkeypatch.setattr(causal_chunks, "_PIXELS", latents_a_chunk * 4 * HEIGHT * WIDTH)
    shape = (frames, HEIGHT // 16, WIDTH // 16, vae.channels)
    latents = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    scaled = torch.from_numpy(latents).permute(3, 0, 1, 2)[None] / vae._model.config.scaling_factor
    with torch.no_grad():
        video = parts["vae"].decode(scaled).sample
        chunked = vae._model.decode(scaled).sample
    np.testing.assert_allclose(chunked.numpy(), video.numpy(), rtol=1e-4, atol=1e-4)
    assert video.std() > 0.1
    processor = HunyuanVideo15ImageProcessor(vae_scale_factor=16)
    pictures = processor.postprocess_video(video, output_type="pil")[0]
    found = vae.decode(latents)
    assert found.shape == (4 * (frames - 1) + 1, HEIGHT, WIDTH, 3)
    off = np.abs(found.astype(int) - np.stack([np.asarray(one) for one in pictures]))
    assert off.max() <= 1  # where a value lies between two levels
    assert (off > 0).mean() < 1e-3


def test_no_frame_depends_on_a_later_one(vae):
    clip, other = random_clip(13), random_clip(13, seed=1)
    other[:5] = clip[:5]
    np.testing.assert_array_equal(vae.encode(clip)[:2], vae.encode(other)[:2])
    assert not np.allclose(vae.encode(clip)[2:], vae.encode(other)[2:], atol=1e-2)


def test_a_failed_clip_leaves_nothing_to_the_next(vae, monkeypatch):
    clip, expected = random_clip(9), vae.encode(random_clip(9))
    convolve, calls = type(vae._model.encoder.conv_out.conv).forward, []

    def failing(self, x):
        calls.append(len(calls))
        if len(calls) == 40:
            raise RuntimeError("stopped")
        return convolve(self, x)

    monkeypatch.setattr(causal_chunks, "_PIXELS", 1)
    monkeypatch.setattr(type(vae._model.encoder.conv_out.conv), "forward", failing)
    with pytest.raises(RuntimeError, match="stopped"):
        vae.encode(clip)
    np.testing.assert_allclose(vae.encode(clip), expected, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_the_memory_is_tiled_as_by_diffusers(vae, parts, monkeypatch, capsys):
    clip, reference = random_clip(5, 32, 288), parts["vae"]
    reference.enable_tiling()
    expected = encoded(reference, clip)
    scaled = torch.from_numpy(expected).permute(3, 0, 1, 2)[None]
    with torch.no_grad():
        video = reference.decode(scaled / reference.config.scaling_factor).sample
    reference.disable_tiling()
    whole = encoded(reference, clip)
    forward = vae._model.encoder.forward

    def small(x):
        if x.shape[-1] > 256:
            raise torch.OutOfMemoryError("too large")
        return forward(x)

    vae._model.encoder.forward = small
    found = vae.encode(clip)
    assert "9,216 pixels" in capsys.readouterr().err
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert not np.allclose(found, whole, atol=1e-3)
    pictures = np.clip(channels_last(video) / 2 + 0.5, 0, 1) * 255
    assert np.abs(vae.decode(expected) - pictures).max() < 0.51


def test_given_latents_are_the_condition_of_the_pipeline(vae, parts, folder):
    (first,) = random_clip(1)
    pipeline = Pipeline(**parts, transformer=None, scheduler=None, guider=None)
    with torch.no_grad():
        latents, mask = pipeline.prepare_cond_latents_and_mask(
            torch.zeros(1, vae.channels, 3, HEIGHT // 16, WIDTH // 16),
            Image.fromarray(first),
            batch_size=1,
            height=HEIGHT,
            width=WIDTH,
            dtype=torch.float32,
            device="cpu",
        )
    found = vae.encode_given(first, None, 9)
    expected = channels_last(torch.cat([latents, mask], dim=1))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found[:1, ..., :-1], vae.encode(first[None]))
    np.testing.assert_array_equal(vae.encode_given(first, None, 1), found[:1])
    with pytest.raises(ValueError, match="first frame only"):
        vae.encode_given(first, first, 9)
    with pytest.raises(ValueError, match="4n"):
        vae.encode_given(first, None, 4)


def test_clips_and_latents_of_other_shapes_are_refused(vae):
    with pytest.raises(ValueError, match="multiples of 16"):
        vae.encode(random_clip(5, 24, 32))
    with pytest.raises(ValueError, match="height, width, 8"):
        vae.decode(np.zeros((2, 2, 2, 16), np.float32))


def test_bfloat16_is_close_to_float32(folder, vae):
    clip, exact = random_clip(), vae.encode(random_clip())
    found = HunyuanVideoVae(folder, dtype="bfloat16").encode(clip)
    assert not np.array_equal(found, exact)
    np.testing.assert_allclose(found, exact, atol=0.1 * exact.std() + 0.05)


# ---------------------------------------------------------------- text

TEXTS = {
    "a blue circle": 24,
    "": 14,
    'a sign says "STOP" and “GO – 猫” and "STOP"': 63,
    "a man says “" + "on and on " * 40 + "”": 64,
}


@pytest.mark.parametrize(("text", "tokens"), TEXTS.items())
def test_text_embeddings_are_those_of_the_pipeline(folder, parts, text, tokens):
    with torch.no_grad():
        language, mask = Pipeline._get_mllm_prompt_embeds(
            parts["text_encoder"], parts["tokenizer"], text, "cpu", tokenizer_max_length=64
        )
        glyphs, glyph_mask = Pipeline._get_byt5_prompt_embeds(
            parts["tokenizer_2"], parts["text_encoder_2"], text, "cpu"
        )
    found = HunyuanVideoText(folder, 64).tokens(text)
    assert list(found) == ["text", "glyphs"]
    for name, states, valid in (("text", language, mask), ("glyphs", glyphs, glyph_mask)):
        count = int(valid.sum())
        assert bool(valid[0, :count].all())
        assert found[name].shape == (count, states.shape[2])
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], states[0, :count].numpy(), rtol=1e-4, atol=1e-5)
    assert len(found["text"]) == tokens
    assert (len(found["glyphs"]) > 0) == ("“" in text)


def test_the_instruction_is_that_of_the_pipeline():
    from alload_jax.encoders import text as ours

    found = inspect.signature(Pipeline._get_mllm_prompt_embeds).parameters
    assert found["system_message"].default == ours._SYSTEM
    assert found["crop_start"].default == ours._SYSTEM_TOKENS
    assert found["num_hidden_layers_to_skip"].default == ours._LAST_LAYERS
    found = inspect.signature(Pipeline._get_byt5_prompt_embeds).parameters
    assert found["tokenizer_max_length"].default == ours._GLYPH_TOKENS


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from('"“”ab\n '), max_size=14))
@example('""')
@example("“a” “a”")
def test_quoted_parts_are_those_that_the_pipeline_finds(text):
    assert glyph_prompt(text) == theirs.extract_glyph_texts(text)


def test_weights_are_loaded_anew_after_they_are_freed(folder, parts):
    encoder = HunyuanVideoText(folder, 64)
    before = encoder.tokens("a cat")["text"]
    encoder.unload()
    assert "_models" not in vars(encoder)
    np.testing.assert_array_equal(encoder.tokens("a cat")["text"], before)


def test_a_tokenizer_of_another_model_is_refused(folder, parts, tmp_path):
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


# ---------------------------------------------------------------- pictures


def test_image_embeddings_are_those_of_the_pipeline(folder, parts):
    picture = np.random.default_rng(1).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    with torch.no_grad():
        expected = Pipeline._get_image_embeds(
            parts["image_encoder"], parts["feature_extractor"], Image.fromarray(picture), "cpu"
        )[0].numpy()
    found = SiglipImage(folder).encode(picture)
    np.testing.assert_array_equal(found, expected)
    assert found.shape == (4, SiglipImage(folder).width)


# ---------------------------------------------------------------- folders


def test_folders_say_which_encoder_they_hold(folder, parts):
    assert type(encoders.open_vae(folder)) is HunyuanVideoVae
    assert type(encoders.open_image(folder)) is SiglipImage
    assert isinstance(encoders.open_text(folder / "text_encoder", 9), HunyuanVideoText)
    assert encoders.open_vae(folder).stride == (4, 16, 16)
    with pytest.raises(InputError, match="is None, not umt5 or qwen2_5_vl_text"):
        encoders.open_text(folder / "vae", 9)


def test_the_digest_follows_both_encoders_and_their_tokenizers(folder, parts, tmp_path):
    for name in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"):
        shutil.copytree(folder / name, tmp_path / name)
    digest = HunyuanVideoText(folder).origin()["weights"]
    assert HunyuanVideoText(tmp_path).origin()["weights"] == digest
    assert HunyuanVideoText(folder / "text_encoder", 7).origin()["weights"] == digest
    for name, file in (("text_encoder_2", "config.json"), ("tokenizer_2", "added_tokens.json")):
        path = tmp_path / name / file
        before = path.read_text()
        path.write_text(json.dumps(json.loads(before) | {"x": 1}))
        assert HunyuanVideoText(tmp_path).origin()["weights"] != digest
        path.write_text(before)
    template = tmp_path / "tokenizer" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert HunyuanVideoText(tmp_path).origin()["weights"] != digest


def test_missing_parts_of_a_folder_are_named(folder, parts, tmp_path):
    parts["text_encoder"].save_pretrained(tmp_path / "text_encoder")
    with pytest.raises(InputError, match=r"text_encoder_2: has no config\.json"):
        HunyuanVideoText(tmp_path)
    parts["text_encoder_2"].save_pretrained(tmp_path / "text_encoder_2")
    with pytest.raises(InputError, match="no tokenizer"):
        HunyuanVideoText(tmp_path)
    for name in ("tokenizer", "tokenizer_2"):
        parts[name].save_pretrained(tmp_path / name)
    (tmp_path / "text_encoder_2" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"text_encoder_2/model.safetensors: no such file"):
        HunyuanVideoText(tmp_path).tokens("a cat")
    with pytest.raises(InputError, match="siglip_vision_model, not clip_vision_model"):
        ClipImage(folder)


def test_other_strides_are_read_from_the_config(tmp_path):
    random_vae(spatial_compression_ratio=8, block_out_channels=(8, 8, 16, 16)).save_pretrained(
        tmp_path
    )
    vae = HunyuanVideoVae(tmp_path)
    assert vae.stride == (4, 8, 8)
    assert vae.encode(random_clip(5, 16, 16)).shape == (2, 2, 2, 8)
