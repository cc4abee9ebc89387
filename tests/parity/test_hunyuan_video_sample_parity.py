"""`alload sample` of HunyuanVideo 1.5 against diffusers' pipelines of the same parts."""

import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from alload_jax import cli
from alload_jax.errors import run_command

for package in ("torch", "diffusers", "transformers"):
    pytest.importorskip(package, reason=f"needs {package}: install alload-jax[parity]")

import diffusers  # noqa: E402
import torch  # noqa: E402
from hunyuan_video_folders import random_transformer, write_pipeline  # noqa: E402

from alload_jax.encoders.image import SiglipImage  # noqa: E402
from alload_jax.encoders.text import HunyuanVideoText  # noqa: E402

pytestmark = pytest.mark.parity

FRAMES, SIDE, STEPS, SHIFT = 9, 32, 4, 5.0
PROMPT = 'a shop with the sign "OPEN" and a blue door'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hunyuan")


@pytest.fixture(scope="module")
def parts(folder):
    found = write_pipeline(folder) | {"transformer": random_transformer()}
    found["transformer"].save_pretrained(folder / "transformer")
    picture = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    Image.fromarray(picture).save(folder / "0.png")
    return found


@pytest.fixture(scope="module")
def command(folder, parts):
    """`alload sample` without --out and what makes it image-to-video."""
    size = ["--frames", str(FRAMES), "--height", str(SIDE), "--width", str(SIDE)]
    argv = ["sample", "--checkpoint", f"{folder}/transformer", *size, "--seed", "7"]
    argv += ["--steps", str(STEPS), "--sampler", "euler", "--shift", str(SHIFT)]
    return [*argv, "--guidance", "2", "--dtype", "float32", "--vae", str(folder)]


@pytest.fixture(scope="module")
def with_prompt(folder, command):
    return [*command, "--prompt", PROMPT, "--text-encoder", str(folder)]


def expected(parts, picture=None, negative=None):
    """Latents of the pipeline for text, or for a picture and text."""
    needed = dict(parts)
    if picture is None:
        kind = diffusers.HunyuanVideo15Pipeline
        for name in ("image_encoder", "feature_extractor"):
            needed.pop(name)
    else:
        kind = diffusers.HunyuanVideo15ImageToVideoPipeline
    pipeline = kind(
        **needed,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=2.0),
    )
    pipeline.set_progress_bar_config(disable=True)
    grid = (1 + (FRAMES - 1) // 4, SIDE // 16, SIDE // 16)
    noise = np.asarray(jax.random.normal(jax.random.key(7), (*grid, 8)))
    given = {"height": SIDE, "width": SIDE} if picture is None else {"image": picture}
    latents = pipeline(
        **given,
        prompt=PROMPT,
        negative_prompt=negative,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        latents=torch.from_numpy(noise.copy()).permute(3, 0, 1, 2)[None],
        output_type="latent",
    ).frames
    found = latents[0].permute(1, 2, 3, 0).numpy()
    assert np.abs(noise - found).mean() > 0.05
    return found


def drawn(argv, out):
    assert cli.main([*argv, "--out", str(out), "--force"]) == 0
    return load_file(out)["latents"]


@pytest.mark.parametrize("negative", [None, 'blur, "TEXT"'])
def test_a_clip_of_words_is_that_of_the_pipeline(parts, with_prompt, negative, tmp_path):
    flags = ["--negative-prompt", negative] if negative else []
    found = drawn([*with_prompt, *flags], tmp_path / "clip.safetensors")
    np.testing.assert_allclose(found, expected(parts, None, negative), rtol=1e-3, atol=1e-3)
    other = drawn([*with_prompt, "--prompt", PROMPT.replace('"', "")], tmp_path / "x.safetensors")
    assert np.abs(other - found).max() > 1e-3  # the glyphs count


def test_a_clip_of_a_picture_is_that_of_the_pipeline(folder, parts, with_prompt, tmp_path):
    flags = ["--image", f"{folder}/0.png", "--image-encoder", str(folder)]
    found = drawn([*with_prompt, *flags], tmp_path / "clip.safetensors")
    picture = Image.open(folder / "0.png")
    np.testing.assert_allclose(found, expected(parts, picture), rtol=1e-3, atol=1e-3)
    assert not np.allclose(found, expected(parts), atol=1e-2)


def test_embeddings_in_files_give_the_same_clip(folder, parts, command, with_prompt, tmp_path):
    picture = np.asarray(Image.open(folder / "0.png"))
    text, files = HunyuanVideoText(folder), {}
    for name, words in (("prompt", PROMPT), ("negative", "")):
        files[name] = str(tmp_path / f"{name}.safetensors")
        save_file(text.tokens(words), files[name])
    save_file({"image": SiglipImage(folder).encode(picture)}, tmp_path / "image.safetensors")
    embedded = ["--prompt-embeds", files["prompt"], "--negative-embeds", files["negative"]]
    embedded += ["--image-embeds", str(tmp_path / "image.safetensors")]
    image = ["--image", f"{folder}/0.png"]
    found = drawn([*command, *embedded, *image], tmp_path / "embedded.safetensors")
    words = drawn(
        [*with_prompt, *image, "--image-encoder", str(folder)], tmp_path / "w.safetensors"
    )
    np.testing.assert_array_equal(found, words)


@pytest.mark.parametrize(("name", "frames"), [("x.gif", FRAMES), ("x.png", 1)])
def test_samples_are_decoded_to_files(folder, with_prompt, tmp_path, name, frames):
    argv = [*with_prompt, "--frames", str(frames)]
    assert cli.main([*argv, "--out", str(tmp_path / name)]) == 0
    with Image.open(tmp_path / name) as clip:
        assert (getattr(clip, "n_frames", 1), clip.size) == (frames, (SIDE, SIDE))


def test_what_does_not_fit_is_refused_in_one_line(folder, parts, command, tmp_path, capsys):
    out = ["--out", str(tmp_path / "x.gif")]
    text = ["--prompt", PROMPT, "--text-encoder", str(folder)]
    image = ["--image", f"{folder}/0.png"]
    vae = tmp_path / "other" / "vae"
    diffusers.AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 2, 2]).save_pretrained(vae)
    both = [*image, "--image-encoder", str(folder)]
    for flags, named in (
        (["--prompt", PROMPT], "needs an encoder; give --text-encoder"),
        ([*text, *image], "--image with --image-encoder"),
        ([*text, *both, "--last-image", f"{folder}/0.png"], "a first frame only"),
        ([*text, *image, "--image-encoder", f"{folder}/vae"], "siglip_vision_model"),
        ([*text, "--text-encoder", f"{folder}/text_encoder_2"], "qwen2_5_vl_text"),
        ([*text, "--vae", str(vae)], "latents of 16 channels"),
        ([*text, "--height", "40"], "nearest: 32 and 48"),
    ):
        assert run_command(cli.main, [*command, *flags, *out]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1, err
        assert named in err
    assert not (tmp_path / "x.gif").exists()
