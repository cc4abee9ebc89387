"""`alload sample` against diffusers' pipelines of the same parts."""

from types import SimpleNamespace

import diffusers
import hunyuan_video_folders
import jax
import numpy as np
import pytest
import torch
from diffusers.pipelines.wan import pipeline_wan_i2v
from encoder_folders import SENTENCE, pipeline_of, random_frames, write_pipeline
from PIL import Image
from safetensors.numpy import load_file, save_file

from alload_jax import cli
from alload_jax.encoders.conditions import HunyuanVideoText, SiglipImage
from alload_jax.errors import InputError, run_command

pytestmark = pytest.mark.parity

FRAMES, SIDE, WIDTH, STEPS = 9, 32, 64, 4
IMAGE = {"image_dim": 10, "added_kv_proj_dim": 16}
MODELS = {
    "Wan 2.1": {"in_channels": 36, **IMAGE},
    "Wan 2.1, last frame": {"in_channels": 36, **IMAGE, "pos_embed_seq_len": 10},
    "Wan 2.2 A14B": {"in_channels": 36},
    "Wan 2.2 5B": {"in_channels": 48, "out_channels": 48},
}
PROMPT = 'a shop with the sign "OPEN" and a blue door'


class ExactTimesteps(diffusers.UniPCMultistepScheduler):
    """Without the rounding of timesteps to whole numbers, which ours are not rounded to."""

    def set_timesteps(self, *args, **options):
        super().set_timesteps(*args, **options)
        self.timesteps = self.sigmas[:-1] * 1000


def noise_of(grid):
    """Our noise of seed 7 as NumPy has it, and as pipelines take it."""
    noise = np.array(jax.random.normal(jax.random.key(7), grid))
    return noise, torch.from_numpy(noise).permute(3, 0, 1, 2)[None]


def clip_of(latents):
    return latents[0].permute(1, 2, 3, 0).numpy()


def drawn(argv, out):
    assert cli.main([*argv, "--out", str(out), "--force"]) == 0
    return load_file(out)["latents"]


@pytest.fixture(scope="module")
def of_wan(wan, tmp_path_factory):
    """Folders and parts of pipelines without transformers by their kind, and two pictures."""
    pictures = [Image.fromarray(random_frames(1, SIDE, WIDTH, seed=n)[0]) for n in range(2)]
    for number, picture in enumerate(pictures):
        picture.save(wan[0] / f"{number}.png")
    other = tmp_path_factory.mktemp("wan")
    return {"2.1": wan[:2], "2.2": (other, write_pipeline(other, "2.2"))}, pictures


@pytest.mark.parametrize(
    ("name", "rounded"), [*((name, False) for name in MODELS), ("Wan 2.1", True)]
)
def test_a_clip_of_wan_is_that_of_the_pipeline(name, rounded, of_wan, tmp_path, monkeypatch):
    # This pipeline calls ftfy even where it is not installed; it leaves plain words as they are.
    plain = SimpleNamespace(fix_text=str)
    monkeypatch.setattr(pipeline_wan_i2v, "ftfy", plain, raising=False)
    is_5b, has_last, fields = name.endswith("5B"), "last" in name, MODELS[name]
    kind, stride, channels = ("2.2", 16, 48) if is_5b else ("2.1", 8, 16)
    negative = "blue" if is_5b else None  # without one, guidance leads away from an empty text
    (folder, parts), pictures = of_wan[0][kind], of_wan[1]
    images, folder = of_wan[0]["2.1"][0], str(folder)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "ffn_dim": 24}
    sizes |= {"freq_dim": 16, "text_dim": 12, "out_channels": 16}
    torch.manual_seed(1)
    model = diffusers.WanTransformer3DModel(**sizes | fields)
    hunyuan_video_folders.moved_from_zero(model).save_pretrained(tmp_path / "transformer")
    checkpoint, experts = tmp_path / "transformer", {}
    if name.endswith("A14B"):  # two experts
        second = hunyuan_video_folders.moved_from_zero(
            diffusers.WanTransformer3DModel(**sizes | fields)
        )
        second.save_pretrained(tmp_path / "transformer_2")
        (tmp_path / "model_index.json").write_text('{"boundary_ratio": 0.8}')
        checkpoint, experts = tmp_path, {"transformer_2": second, "boundary_ratio": 0.8}
    scheduler = diffusers.UniPCMultistepScheduler if rounded else ExactTimesteps
    options = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    unused = {} if "image_dim" in fields else {"image_encoder": None, "image_processor": None}
    own = {"scheduler": scheduler(**options), "transformer": model, "expand_timesteps": is_5b}
    pipeline = pipeline_of(parts, **own, **unused, **experts)
    pipeline.set_progress_bar_config(disable=True)
    noise, latents = noise_of((3, SIDE // stride, WIDTH // stride, channels))
    found = pipeline(
        image=pictures[0],
        last_image=pictures[1] if has_last else None,
        prompt=SENTENCE,
        negative_prompt=negative,
        height=SIDE,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        guidance_scale=2.0,
        latents=latents,
        output_type="latent",
    )
    expected = clip_of(found.frames)
    assert np.abs(noise - expected).mean() > 0.1

    command = ["sample", "--checkpoint", str(checkpoint), "--prompt", SENTENCE]
    command += ["--negative-prompt", negative] if negative else []
    command += ["--text-encoder", folder, "--vae", folder, "--image", str(images / "0.png")]
    command += ["--last-image", str(images / "1.png")] if has_last else []
    command += [] if unused else ["--image-encoder", folder]
    command += ["--frames", str(FRAMES), "--height", str(SIDE), "--width", str(WIDTH)]
    command += ["--steps", str(STEPS), "--guidance", "2", "--seed", "7", "--shift", "3"]
    command += ["--dtype", "float32", *(["--round-timesteps"] if rounded else [])]
    latents = drawn(command, tmp_path / "clip.safetensors")
    np.testing.assert_allclose(latents, expected, rtol=0, atol=1e-4)
    if is_5b:
        decoded = tmp_path / "clip.gif"
        assert cli.main([*command, "--out", str(decoded)]) == 0
        with Image.open(decoded) as clip:
            assert (clip.n_frames, clip.size) == (FRAMES, (WIDTH, SIDE))
        contrary = [*command, "--vae-stride", "1", "1", "1", "--out", str(tmp_path / "x.gif")]
        with pytest.raises(InputError, match=f"that of --vae {folder} is"):
            cli.main(contrary)


# ---------------------------------------------------------------- HunyuanVideo 1.5


@pytest.fixture(scope="module")
def of_hunyuan(hunyuan):
    """The folder of a pipeline, its parts, and `alload sample` without a prompt and --out."""
    folder, parts, _ = hunyuan
    parts = parts | {"transformer": hunyuan_video_folders.random_transformer()}
    parts["transformer"].save_pretrained(folder / "transformer")
    Image.fromarray(random_frames(1, SIDE, SIDE)[0]).save(folder / "0.png")
    argv = ["sample", "--checkpoint", f"{folder}/transformer", "--vae", str(folder)]
    argv += ["--frames", str(FRAMES), "--height", str(SIDE), "--width", str(SIDE), "--seed", "7"]
    argv += ["--steps", str(STEPS), "--sampler", "euler", "--shift", "5", "--guidance", "2"]
    return folder, parts, [*argv, "--dtype", "float32"]


def expected_of(parts, picture=None, negative=None):
    """Latents of the pipeline for text, or for a picture and text."""
    kind = diffusers.HunyuanVideo15ImageToVideoPipeline
    given = {"image": picture}
    if picture is None:
        kind, given = diffusers.HunyuanVideo15Pipeline, {"height": SIDE, "width": SIDE}
        unused = ("image_encoder", "feature_extractor")
        parts = {name: part for name, part in parts.items() if name not in unused}
    pipeline = kind(
        **parts,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=2.0),
    )
    pipeline.set_progress_bar_config(disable=True)
    noise, latents = noise_of((3, SIDE // 16, SIDE // 16, 8))
    found = pipeline(
        **given,
        prompt=PROMPT,
        negative_prompt=negative,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        latents=latents,
        output_type="latent",
    )
    assert np.abs(noise - clip_of(found.frames)).mean() > 0.05
    return clip_of(found.frames)


def test_clips_of_hunyuan_video_are_those_of_the_pipelines(of_hunyuan, tmp_path):
    folder, parts, command = of_hunyuan
    encoded = [*command, "--text-encoder", str(folder)]
    prompted, negative = [*encoded, "--prompt", PROMPT], 'blur, "TEXT"'
    found = drawn([*prompted, "--negative-prompt", negative], tmp_path / "a.safetensors")
    close = {"rtol": 1e-3, "atol": 1e-3}
    np.testing.assert_allclose(found, expected_of(parts, None, negative), **close)

    plain = drawn(prompted, tmp_path / "b.safetensors")
    other = drawn([*encoded, "--prompt", PROMPT.replace('"', "")], tmp_path / "c.safetensors")
    assert np.abs(other - plain).max() > 1e-3  # the glyphs count

    image = ["--image", f"{folder}/0.png"]
    words = drawn([*prompted, *image, "--image-encoder", str(folder)], tmp_path / "d.safetensors")
    picture = Image.open(folder / "0.png")
    np.testing.assert_allclose(words, expected_of(parts, picture), **close)
    assert not np.allclose(words, plain, atol=1e-2)

    text, embedded = HunyuanVideoText(folder), list(command)
    for name, what in (("prompt", PROMPT), ("negative", "")):
        save_file(text.tokens(what), tmp_path / f"{name}.safetensors")
        embedded += [f"--{name}-embeds", str(tmp_path / f"{name}.safetensors")]
    tokens = SiglipImage(folder).encode(np.asarray(picture))
    save_file({"image": tokens}, tmp_path / "image.safetensors")
    embedded += [*image, "--image-embeds", str(tmp_path / "image.safetensors")]
    np.testing.assert_array_equal(drawn(embedded, tmp_path / "e.safetensors"), words)

    still = tmp_path / "x.png"
    assert cli.main([*prompted, "--frames", "1", "--out", str(still)]) == 0
    with Image.open(still) as decoded:
        assert decoded.size == (SIDE, SIDE)


def test_what_does_not_fit_is_refused_in_one_line(of_hunyuan, wan, tmp_path, capsys):
    folder, _, command = of_hunyuan
    text = ["--prompt", PROMPT, "--text-encoder", str(folder)]
    image = ["--image", f"{folder}/0.png"]
    both = [*image, "--image-encoder", str(folder)]
    for flags, named in (
        (["--prompt", PROMPT], "needs an encoder; give --text-encoder"),
        ([*text, *image], "--image with --image-encoder"),
        ([*text, *both, "--last-image", f"{folder}/0.png"], "a first frame only"),
        ([*text, *image, "--image-encoder", f"{folder}/vae"], "siglip_vision_model"),
        ([*text, "--text-encoder", f"{folder}/text_encoder_2"], "qwen2_5_vl_text"),
        ([*text, "--vae", str(wan[0])], "latents of 16 channels"),
        ([*text, "--height", "40"], "nearest: 32 and 48"),
    ):
        assert run_command(cli.main, [*command, *flags, "--out", str(tmp_path / "x.gif")]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1, err
        assert named in err
    assert not (tmp_path / "x.gif").exists()
