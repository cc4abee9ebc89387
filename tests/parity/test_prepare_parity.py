"""`alload prepare media` with Wan's encoders, against diffusers and transformers run by hand."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: install alload-jax[parity]")
pytest.importorskip("diffusers", reason="needs diffusers: install alload-jax[parity]")
pytest.importorskip("transformers", reason="needs transformers: install alload-jax[parity]")

from diffusers import (  # noqa: E402
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
)
from encoder_folders import random_vae, write_pipeline  # noqa: E402
from patience import wait_until  # noqa: E402
from PIL import Image  # noqa: E402

from alload_jax import cli  # noqa: E402
from alload_jax.data.manifest import read_manifest  # noqa: E402
from alload_jax.data.store import StoreReader  # noqa: E402
from alload_jax.encoders import loading  # noqa: E402
from alload_jax.errors import run_command  # noqa: E402

pytestmark = pytest.mark.parity

CAPTIONS = ["a red square moves to the left", "a blue circle", *[""] * 7]
TINY = ("--area", "32x32", "--frames", "9", "--fps", "10", "--files-per-shard", "1")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The folder of a pipeline, and its parts."""
    folder = tmp_path_factory.mktemp("wan")
    return folder, write_pipeline(folder)


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """Two clips of nine and five frames with captions, and pictures without."""
    folder = tmp_path_factory.mktemp("media")
    rng = np.random.default_rng(0)
    for number, frames in enumerate((9, 6)):
        pictures = [
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)) for _ in range(frames)
        ]
        path = folder / f"{number}.gif"
        pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=100)
        path.with_suffix(".txt").write_text(CAPTIONS[number])
    for number in range(2, 9):
        picture = Image.fromarray(rng.integers(0, 256, (40, 36, 3), np.uint8))
        picture.save(folder / f"{number}.png")
    return folder


def flags(folder, *kinds):
    """The flags that name encoders in the folder of a pipeline."""
    names = {"vae": ("--vae", "wan", "--vae-folder"), "text": ("--text", "umt5", "--text-folder")}
    names["given"] = ("--image-to-video", "first-last", "--image-folder")
    return [part for kind in kinds for part in (*names[kind], str(folder))]


ALL = ("vae", "text", "given")


def prepare(media, out, *argv):
    return run_command(cli.main, ["prepare", "media", str(media), "--out", str(out), *TINY, *argv])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def samples(out):
    manifest = read_manifest(out)
    reader = StoreReader(manifest)
    return [reader.read(number) for number in range(len(manifest))]


@pytest.fixture(scope="module")
def whole(parts, media, tmp_path_factory):
    """The data folder of an uninterrupted run with all encoders."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert prepare(media, out, *flags(parts[0], *ALL)) == 0
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


def as_video(frames):
    scaled = torch.from_numpy(frames.astype(np.float32) / 255.0).permute(3, 0, 1, 2)[None]
    return 2.0 * scaled - 1.0


def channels_last(latents):
    return latents[0].permute(1, 2, 3, 0).numpy().astype(np.float16)


def test_latents_and_embeddings_are_those_of_the_libraries(parts, clips, whole):
    made = parts[1]
    shared = {name: made[name] for name in ("tokenizer", "text_encoder", "vae")}
    pipe = WanPipeline(**shared, scheduler=FlowMatchEulerDiscreteScheduler())
    mean = torch.tensor(made["vae"].config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(made["vae"].config.latents_std).view(1, -1, 1, 1, 1)
    assert [len(clip) for clip in clips] == [9, 5, *[1] * 7]
    for clip, caption, sample in zip(clips, CAPTIONS, samples(whole), strict=True):
        with torch.no_grad():
            mode = made["vae"].encode(as_video(clip)).latent_dist.mode()
            text = pipe._get_t5_prompt_embeds(caption, max_sequence_length=512)[0].numpy()
        expected = channels_last((mode - mean) * (1.0 / std))
        np.testing.assert_array_equal(sample["latents"], expected)
        assert sample["text"].dtype == np.float16
        assert 1 <= len(sample["text"]) < 64
        np.testing.assert_array_equal(
            sample["text"], text[: len(sample["text"])].astype(np.float16)
        )
        assert not text[len(sample["text"]) :].any()


def test_given_frames_are_those_of_the_image_to_video_pipeline(parts, clips, whole):
    made = parts[1]
    names = ("tokenizer", "text_encoder", "image_encoder", "image_processor", "vae")
    shared = {name: made[name] for name in names}
    pipe = WanImageToVideoPipeline(**shared, scheduler=FlowMatchEulerDiscreteScheduler())
    for clip, sample in zip(clips, samples(whole), strict=True):
        ends = [Image.fromarray(clip[0]), Image.fromarray(clip[-1])]
        first, last = (pipe.video_processor.preprocess(one, height=32, width=32) for one in ends)
        size = {"height": 32, "width": 32, "num_frames": len(clip), "dtype": torch.float32}
        last = last if len(clip) > 1 else None
        with torch.no_grad():
            _, given = pipe.prepare_latents(first, 1, **size, device="cpu", last_image=last)
            image = pipe.encode_image(ends, "cpu")
        np.testing.assert_array_equal(sample["given"], channels_last(given))
        expected = np.concatenate(image.numpy()).astype(np.float16)
        assert sample["image"].shape == expected.shape
        np.testing.assert_allclose(sample["image"], expected, atol=2e-3)


def test_the_origin_names_the_encoders(parts, whole):
    origin = read_manifest(whole).origin
    assert origin["vae"]["name"] == "wan"
    assert origin["text"] | {"weights": ""} == {
        "name": "umt5",
        "width": 12,
        "length": 512,
        "ftfy": origin["text"]["ftfy"],
        "weights": "",
    }
    assert origin["image_to_video"]["given"] == "first-last"
    digests = [origin["vae"], origin["text"], origin["image_to_video"]["image"]]
    assert len({one["weights"] for one in digests}) == 3


# ---------------------------------------------------------------- workers and kills


def test_a_killed_run_with_workers_goes_on_to_the_same_bytes(parts, media, whole, tmp_path, capfd):
    out = tmp_path / "out"
    workers = (*flags(parts[0], *ALL), "--workers", "2")
    (held := tmp_path / "held").touch()
    program = Path(__file__).parents[1] / "data" / "held_prepare.py"
    argv = [sys.executable, str(program), "prepare", "media", str(media), "--out"]
    argv += [str(out), *TINY, *workers]
    own = {"PYTHONPATH": str(Path(cli.__file__).parents[1]), "HELD": f"1 {held}"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen(argv, env=os.environ | own, **quiet)
    wait_until(lambda: list(tmp_path.glob("out.partial/shard-*.parquet")), started)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert not out.exists()
    assert list(tmp_path.glob("out.partial/*.parquet"))
    capfd.readouterr()
    assert prepare(media, out, *workers) == 0
    assert capfd.readouterr().err == ""
    assert contents(out) == contents(whole)


# ---------------------------------------------------------------- refusals


def refused(capsys, media, tmp_path, *argv):
    assert prepare(media, tmp_path / "out", *argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    return err


def test_what_does_not_fit_is_refused_in_one_line(parts, media, tmp_path, capsys):
    folder = parts[0]

    def line(*argv):
        return refused(capsys, media, tmp_path, *argv)

    vae, text = flags(folder, "vae"), flags(folder, "text")
    assert "--vae wan" in line("--image-to-video", "first")
    assert "first-last" in line(*vae, "--image-to-video", "middle")
    assert "--image-to-video" in line(*vae, "--image-folder", str(folder))
    assert "--text-length" in line(*text, "--text-length", "0")
    assert "clip_vision_model" in line(
        *vae, "--image-to-video", "first", "--image-folder", str(folder / "vae")
    )
    assert "umt5" in line("--text", "umt5", "--text-folder", str(folder / "vae"))


def test_the_vae_of_the_5b_model_needs_no_given_frames(media, tmp_path, capsys):
    random_vae("2.2").save_pretrained(tmp_path / "vae")
    argv = ("--vae", "wan", "--vae-folder", str(tmp_path / "vae"), "--image-to-video", "first")
    assert "objective.given_first_frame" in refused(capsys, media, tmp_path, *argv)
    assert prepare(media, tmp_path / "out", *argv[:4]) == 0
    assert [one["latents"].shape for one in samples(tmp_path / "out")] == [
        (3, 2, 2, 48),
        (2, 2, 2, 48),
        *[(1, 2, 2, 48)] * 7,
    ]


@pytest.mark.parametrize("missing", ["torch", "diffusers", "transformers"])
def test_a_missing_package_gives_one_line(parts, media, tmp_path, capsys, monkeypatch, missing):
    find = loading.importlib.util.find_spec
    monkeypatch.setattr(
        loading.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == missing else find(name, *rest),
    )
    for kind in ("vae", "text"):
        err = refused(capsys, media, tmp_path, *flags(parts[0], kind))
        assert f"--{kind}" in err
        assert "needs torch, diffusers and transformers; install alload-jax[prepare]" in err
