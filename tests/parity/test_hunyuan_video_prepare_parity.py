"""From media to a clip of HunyuanVideo 1.5 on the command line, with small random encoders."""

import json
import os
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import yaml
from PIL import Image

for package in ("torch", "diffusers", "transformers"):
    pytest.importorskip(package, reason=f"needs {package}: install alload-jax[parity]")

import torch  # noqa: E402
from diffusers import HunyuanVideo15ImageToVideoPipeline as Pipeline  # noqa: E402
from hunyuan_video_folders import (  # noqa: E402
    GLYPH_WIDTH,
    IMAGE_WIDTH,
    TEXT_WIDTH,
    write_pipeline,
)

from alload_jax import cli  # noqa: E402
from alload_jax.data.manifest import read_manifest  # noqa: E402
from alload_jax.data.store import StoreReader  # noqa: E402
from alload_jax.errors import run_command  # noqa: E402

pytestmark = pytest.mark.parity

ROOT = Path(__file__).parents[2]
CAPTIONS = ['a red sign says "STOP" and “HERE”', "a blue circle", ""]
SIZE = ("--area", "32x32", "--frames", "9", "--fps", "10", "--files-per-shard", "1")
MODEL = {
    "dim": 16,
    "ffn_dim": 24,
    "num_heads": 2,
    "num_layers": 1,
    "refiner_layers": 1,
    "in_channels": 17,
    "out_channels": 8,
    "text": {"dim": TEXT_WIDTH, "length": 40},
    "glyphs": {"dim": GLYPH_WIDTH, "length": 256},
    "image": {"dim": IMAGE_WIDTH},
    "remat": "none",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hunyuan")


@pytest.fixture(scope="module")
def parts(folder):
    return write_pipeline(folder)


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """Clips of nine and five frames, and a picture without a caption."""
    folder = tmp_path_factory.mktemp("media")
    rng = np.random.default_rng(0)
    for number, frames in enumerate((9, 5)):
        pictures = [
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)) for _ in range(frames)
        ]
        path = folder / f"{number}.gif"
        pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=100)
        path.with_suffix(".txt").write_text(CAPTIONS[number])
    Image.fromarray(rng.integers(0, 256, (40, 36, 3), np.uint8)).save(folder / "2.png")
    return folder


def flags(folder, *kinds):
    """The flags that name encoders in the folder of a pipeline."""
    named = {
        "vae": ("--vae", "hunyuan_video", "--vae-folder", str(folder)),
        "text": ("--text", "hunyuan_video", "--text-folder", str(folder), "--text-length", "40"),
        "given": ("--image-to-video", "first", "--image-folder", str(folder)),
    }
    return [part for kind in kinds for part in named[kind]]


ALL = ("vae", "text", "given")


def prepare(media, out, *argv):
    return run_command(cli.main, ["prepare", "media", str(media), "--out", str(out), *SIZE, *argv])


def samples(out):
    manifest = read_manifest(out)
    reader = StoreReader(manifest)
    return [reader.read(number) for number in range(len(manifest))]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(folder, parts, media, tmp_path_factory):
    """The data folder for image-to-video."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert prepare(media, out, *flags(folder, *ALL)) == 0
    return out


@pytest.fixture(scope="module")
def clips(media, tmp_path_factory):
    """The frames of each clip, [T, H, W, 3] uint8."""
    out = tmp_path_factory.mktemp("pixels") / "out"
    assert prepare(media, out) == 0
    return [
        np.round((one["latents"].astype(np.float32) + 1) * 127.5).astype(np.uint8)
        for one in samples(out)
    ]


# ---------------------------------------------------------------- what is stored


def stored(tensor):
    """[C, T, H, W] as [T, H, W, C] float16."""
    return tensor.permute(1, 2, 3, 0).numpy().astype(np.float16)


def test_what_is_stored_is_that_of_the_pipeline(folder, parts, clips, whole):
    pipeline = Pipeline(**parts, transformer=None, scheduler=None, guider=None)
    assert [len(clip) for clip in clips] == [9, 5, 1]
    for clip, caption, sample in zip(clips, CAPTIONS, samples(whole), strict=True):
        scaled = torch.from_numpy(clip.astype(np.float32) / 255.0).permute(3, 0, 1, 2)[None]
        first = Image.fromarray(clip[0])
        with torch.no_grad():
            mode = parts["vae"].encode(2.0 * scaled - 1.0).latent_dist.mode()
            latents = mode * parts["vae"].config.scaling_factor
            text, mask = pipeline._get_mllm_prompt_embeds(
                parts["text_encoder"], parts["tokenizer"], caption, "cpu", tokenizer_max_length=40
            )
            glyphs, glyph_mask = pipeline._get_byt5_prompt_embeds(
                parts["tokenizer_2"], parts["text_encoder_2"], caption, "cpu"
            )
            image = pipeline.encode_image(first, 1, "cpu", torch.float32)
            given, given_mask = pipeline.prepare_cond_latents_and_mask(
                latents, first, 1, 32, 32, torch.float32, "cpu"
            )
        expected = {
            "latents": stored(latents[0]),
            "text": text[0, : int(mask.sum())],
            "glyphs": glyphs[0, : int(glyph_mask.sum())],
            "image": image[0],
            "given": stored(torch.cat([given, given_mask], dim=1)[0]),
        }
        assert sample.keys() == expected.keys()
        for name, values in expected.items():
            assert sample[name].dtype == np.float16
            assert sample[name].shape == tuple(values.shape)
            np.testing.assert_allclose(sample[name], np.asarray(values), rtol=2e-3, atol=2e-3)
    lengths = read_manifest(whole).part_lengths[:, 0].tolist()
    assert lengths == [len('Text "STOP". Text "HERE". ') + 1, 0, 0]


def test_origin_and_stride_are_those_of_the_encoders(whole):
    manifest = read_manifest(whole)
    assert manifest.vae_stride == (4, 16, 16)
    origin = manifest.origin
    assert origin["vae"]["name"] == origin["text"]["name"] == "hunyuan_video"
    assert origin["image_to_video"]["image"]["name"] == "siglip"
    assert origin["text"]["glyph_width"] == GLYPH_WIDTH


def test_workers_and_a_second_start_give_the_same_bytes(folder, media, whole, tmp_path):
    code = (
        "import sys\n"
        "from alload_jax.data.prepare import unit\n"
        "whole, calls = unit.prepare_unit, []\n"
        "def once(*a, **k):\n"
        "    calls.append(1)\n"
        "    sys.exit(9) if len(calls) == 2 else whole(*a, **k)\n"
        "from alload_jax.data.prepare import pipeline\n"
        "pipeline.prepare_unit = once\n"
        "from alload_jax import cli\n"
        "cli.main(sys.argv[1:])"
    )
    out = tmp_path / "out"
    argv = ["prepare", "media", str(media), "--out", str(out), *SIZE, *flags(folder, *ALL)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    stopped = subprocess.run(
        [sys.executable, "-c", code, *argv], env=environment, capture_output=True, check=False
    )
    assert stopped.returncode == 9, stopped.stderr
    assert not out.exists()
    assert prepare(media, out, *flags(folder, *ALL), "--workers", "2") == 0
    assert contents(out) == contents(whole)


def test_what_does_not_fit_is_refused_in_one_line(folder, parts, media, tmp_path, capsys):
    vae, text = flags(folder, "vae"), flags(folder, "text")
    for argv, named in (
        ([*vae, "--image-to-video", "first-last"], "take a first frame only; choose first"),
        ([*vae, "--image-to-video", "first", "--image-folder", f"{folder}/vae"], "siglip"),
        ([*vae, "--image-to-video", "first"], "give --image-folder DIR"),
        ([*text, "--text-length", "0"], "--text-length"),
        (["--vae", "wan", "--vae-folder", str(folder)], "not AutoencoderKLWan"),
        (["--text", "umt5", "--text-folder", str(folder)], "not umt5"),
    ):
        assert prepare(media, tmp_path / "out", *argv) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1, err
        assert named in err


# ---------------------------------------------------------------- from media to a clip


def train(config, folder):
    """Trains in a process of its own; returns the rows of the metrics."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(config)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in (folder / "run/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert losses.keys() == {1, 2}
    assert all(np.isfinite(loss) for loss in losses.values())
    return rows


def small_config(path, data, **sections):
    """configs/hunyuan_video_1_5.yaml with a small model."""
    config = yaml.safe_load((ROOT / "configs" / "hunyuan_video_1_5.yaml").read_text())
    config["model"] |= MODEL
    config["run"] |= {"folder": "run", "steps": 2}
    config["run"].pop("compilation_cache")
    config["data"]["folder"] = str(data)
    config["planning"] |= {"policy": "dual_constraint", "m_mem": 400}
    config["objective"] |= {"condition_dropout": 0.1}
    config |= sections
    path.write_text(yaml.safe_dump(config))
    return path


def test_media_become_a_run_and_the_run_a_clip(folder, parts, media, whole, tmp_path, capsys):
    assert cli.main(["plan", "--manifest", str(whole), "--m-mem", "400", "--ranks", "1"]) == 0
    picture = str(media / "2.png")
    prompt = {"prompt": CAPTIONS[0], "image": picture, "frames": 9, "height": 32, "width": 32}
    encoders = {"text": str(folder), "vae": str(folder), "image": str(folder)}
    config = small_config(
        tmp_path / "config.yaml",
        whole,
        sampling={"steps": 2, "prompts": [prompt], "encoders": encoders},
        validation={"share": 0.3, "every": 2, "noise_levels": [0.5]},
    )
    assert any("validation/loss" in row for row in train(config, tmp_path))

    draw = ["sample", "--checkpoint", str(tmp_path / "run"), "--prompt", CAPTIONS[0]]
    draw += ["--frames", "9", "--height", "32", "--width", "32", "--steps", "2"]
    draw += ["--text-encoder", str(folder), "--vae", str(folder)]
    image = ["--image", picture, "--image-encoder", str(folder)]
    gif, clip = tmp_path / "clip.gif", tmp_path / "clip.mp4"
    assert cli.main([*draw, *image, "--out", str(gif)]) == 0
    assert gif.read_bytes() == (tmp_path / "run/samples/step_0000002/prompt_0.gif").read_bytes()
    assert cli.main([*draw, "--out", str(clip)]) == 0
    with av.open(str(clip)) as container:
        assert container.streams.video[0].average_rate == 10  # the data's
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.shape(frames) == (9, 32, 32, 3)
    assert np.std(frames) > 1

    random_other = tmp_path / "other"
    write_pipeline(random_other, seed=1)
    capsys.readouterr()
    wrong = [*draw, "--vae", str(random_other), "--out", str(tmp_path / "x.gif")]
    assert run_command(cli.main, wrong) == 2
    assert "training data were prepared with" in capsys.readouterr().err


def test_data_without_given_frames_train_text_to_video(folder, parts, media, tmp_path):
    out = tmp_path / "data"
    assert prepare(media, out, *flags(folder, "vae", "text")) == 0
    assert all(sample.keys() == {"latents", "text", "glyphs"} for sample in samples(out))
    train(small_config(tmp_path / "config.yaml", out), tmp_path)
