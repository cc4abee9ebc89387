"""From media to a clip on the command line, beside diffusers and transformers run by hand."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import av
import encoder_folders as wan_folders
import hunyuan_video_folders as hunyuan_folders
import numpy as np
import pytest
import yaml
from encoder_folders import random_frames
from patience import wait_until
from PIL import Image

from alload_jax import cli
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import StoreReader
from alload_jax.encoders import loading
from alload_jax.encoders.conditions import ClipImage, HunyuanVideoText, SiglipImage, Umt5Text
from alload_jax.encoders.vae import HunyuanVideoVae, WanVae
from alload_jax.errors import run_command

pytestmark = pytest.mark.parity

ROOT = Path(__file__).parents[2]
CAPTIONS = ['a red sign says "STOP" and “HERE”', "a blue circle", ""]
SIZE = ("--area", "32x32", "--frames", "9", "--fps", "10", "--files-per-shard", "1")


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """Clips of nine and five frames, and a picture without a caption."""
    folder = tmp_path_factory.mktemp("media")
    for number, frames in enumerate((9, 6)):
        pictures = [Image.fromarray(one) for one in random_frames(frames, 32, 32, seed=number)]
        path = folder / f"{number}.gif"
        pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=100)
        path.with_suffix(".txt").write_text(CAPTIONS[number])
    Image.fromarray(random_frames(1, 40, 36)[0]).save(folder / "2.png")
    return folder


WAN = {"vae": "wan", "text": "umt5", "image-to-video": "first-last"}
HUNYUAN = {"vae": "hunyuan_video", "text": "hunyuan_video", "image-to-video": "first"}


def flags(folder, names):
    """The flags that name encoders in the folder of a pipeline."""
    folders = {"vae": "vae", "text": "text", "image-to-video": "image"}
    return [
        part
        for kind, name in names.items()
        for part in (f"--{kind}", name, f"--{folders[kind]}-folder", str(folder))
    ]


def prepare(media, out, *argv):
    return run_command(cli.main, ["prepare", "media", str(media), "--out", str(out), *SIZE, *argv])


def samples(out):
    manifest = read_manifest(out)
    reader = StoreReader(manifest)
    return [reader.read(number) for number in range(len(manifest))]


@pytest.fixture(scope="module")
def of_wan(wan, media, tmp_path_factory):
    """The data folder for image-to-video of Wan."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert prepare(media, out, *flags(wan[0], WAN)) == 0
    return out


@pytest.fixture(scope="module")
def of_hunyuan(hunyuan, media, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    argv = [*flags(hunyuan[0], HUNYUAN), "--text-length", "40"]
    assert prepare(media, out, *argv) == 0
    return out


@pytest.fixture(scope="module")
def clips(media, tmp_path_factory):
    """The frames of each clip, [T, H, W, 3] uint8."""
    out = tmp_path_factory.mktemp("pixels") / "out"
    assert prepare(media, out) == 0
    found = [(one["latents"].astype(np.float32) + 1) * 127.5 for one in samples(out)]
    assert [len(clip) for clip in found] == [9, 5, 1]
    return [np.round(clip).astype(np.uint8) for clip in found]


# ---------------------------------------------------------------- what is stored


def assert_stored(out, expected):
    """`expected` has, for each sample, its parts in float32."""
    for sample, parts in zip(samples(out), expected, strict=True):
        assert sample.keys() == parts.keys()
        for name, values in parts.items():
            np.testing.assert_array_equal(sample[name], values.astype(np.float16), err_msg=name)


def test_what_is_stored_for_wan_is_what_its_encoders_give(wan, clips, of_wan):
    """Which are those of the pipelines: test_encoders_parity.py."""
    vae, text, images = WanVae(wan[0]), Umt5Text(wan[0]), ClipImage(wan[0])
    expected = []
    for clip, caption in zip(clips, CAPTIONS, strict=True):
        ends = clip[0], clip[-1] if len(clip) > 1 else None
        parts = {"latents": vae.latents(clip), "given": vae.encode_given(*ends, len(clip))}
        image = np.concatenate([images.encode(one) for one in (clip[0], clip[-1])])
        expected.append(parts | text.tokens(caption) | {"image": image})
    assert_stored(of_wan, expected)
    origin = read_manifest(of_wan).origin
    digests = [origin["vae"], origin["text"], origin["image_to_video"]["image"]]
    assert len({one["weights"] for one in digests}) == 3
    assert [one["name"] for one in digests[:2]] == ["wan", "umt5"]
    assert (origin["text"]["width"], origin["text"]["length"]) == (12, 512)
    assert origin["image_to_video"]["given"] == "first-last"


def test_what_is_stored_for_hunyuan_video_is_what_its_encoders_give(hunyuan, clips, of_hunyuan):
    folder = hunyuan[0]
    vae, text, images = HunyuanVideoVae(folder), HunyuanVideoText(folder, 40), SiglipImage(folder)
    expected = [
        {"latents": vae.latents(clip), "given": vae.encode_given(clip[0], None, len(clip))}
        | text.tokens(caption)
        | {"image": images.encode(clip[0])}
        for clip, caption in zip(clips, CAPTIONS, strict=True)
    ]
    assert_stored(of_hunyuan, expected)
    manifest = read_manifest(of_hunyuan)
    lengths = manifest.part_lengths[:, 0].tolist()
    assert lengths == [len('Text "STOP". Text "HERE". ') + 1, 0, 0]
    assert manifest.vae_stride == (4, 16, 16)
    origin = manifest.origin
    assert origin["vae"]["name"] == origin["text"]["name"] == "hunyuan_video"
    assert origin["image_to_video"]["image"]["name"] == "siglip"
    assert origin["text"]["glyph_width"] == hunyuan_folders.GLYPH_WIDTH


def test_a_killed_run_with_workers_goes_on_to_the_same_bytes(wan, media, of_wan, tmp_path, capfd):
    out = tmp_path / "out"
    workers = (*flags(wan[0], WAN), "--workers", "2")
    (held := tmp_path / "held").touch()
    program = ROOT / "tests" / "data" / "held_prepare.py"
    argv = [sys.executable, str(program), "prepare", "media", str(media), "--out"]
    argv += [str(out), *SIZE, *workers]
    own = {"PYTHONPATH": str(ROOT), "HELD": f"1 {held}"}
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
    found, expected = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (out, of_wan)
    )
    assert found == expected


# ---------------------------------------------------------------- refusals


def refused(capsys, media, tmp_path, *argv):
    assert prepare(media, tmp_path / "out", *argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    return err


def test_what_does_not_fit_is_one_line(wan, hunyuan, media, tmp_path, capsys, monkeypatch):
    vae, text = (flags(wan[0], {kind: WAN[kind]}) for kind in ("vae", "text"))
    of_hunyuan = flags(hunyuan[0], {"vae": "hunyuan_video"})
    first = ("--image-to-video", "first")
    for argv, named in (
        (first, "--vae wan"),
        ([*vae, "--image-to-video", "middle"], "first-last"),
        ([*vae, "--image-folder", str(wan[0])], "--image-to-video"),
        ([*text, "--text-length", "0"], "--text-length"),
        ([*vae, *first, "--image-folder", f"{wan[0]}/vae"], "clip_vision_model"),
        (["--text", "umt5", "--text-folder", f"{wan[0]}/vae"], "umt5"),
        ([*of_hunyuan, "--image-to-video", "first-last"], "take a first frame only; choose first"),
        ([*of_hunyuan, *first, "--image-folder", f"{hunyuan[0]}/vae"], "siglip"),
        ([*of_hunyuan, *first], "give --image-folder DIR"),
        (["--vae", "wan", "--vae-folder", str(hunyuan[0])], "not AutoencoderKLWan"),
    ):
        assert named in refused(capsys, media, tmp_path, *argv)
    find = loading.importlib.util.find_spec
    monkeypatch.setattr(
        loading.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "torch" else find(name, *rest),
    )
    for kind, argv in (("--vae", vae), ("--text", text)):
        err = refused(capsys, media, tmp_path, *argv)
        assert kind in err
        assert "needs torch, diffusers and transformers; install alload-jax[prepare]" in err


def test_the_vae_of_the_5b_model_needs_no_given_frames(media, tmp_path, capsys):
    wan_folders.random_vae("2.2").save_pretrained(tmp_path / "vae")
    argv = ("--vae", "wan", "--vae-folder", str(tmp_path / "vae"))
    err = refused(capsys, media, tmp_path, *argv, "--image-to-video", "first")
    assert "objective.given_first_frame" in err
    assert prepare(media, tmp_path / "out", *argv) == 0
    shapes = [one["latents"].shape for one in samples(tmp_path / "out")]
    assert shapes == [(frames, 2, 2, 48) for frames in (3, 2, 1)]


# ---------------------------------------------------------------- from media to a clip

MODEL = {
    "dim": 16,
    "ffn_dim": 24,
    "num_heads": 2,
    "num_layers": 1,
    "refiner_layers": 1,
    "in_channels": 17,
    "out_channels": 8,
    "remat": "none",
    "text": {"dim": hunyuan_folders.TEXT_WIDTH, "length": 40},
    "glyphs": {"dim": hunyuan_folders.GLYPH_WIDTH, "length": 256},
    "image": {"dim": hunyuan_folders.IMAGE_WIDTH},
}


def train(folder, data, **sections):
    """Trains a small HunyuanVideo in a process of its own; returns the rows of the metrics."""
    config = yaml.safe_load((ROOT / "configs" / "hunyuan_video_1_5.yaml").read_text())
    config["model"] |= MODEL
    config["run"] |= {"folder": "run", "steps": 2}
    config["run"].pop("compilation_cache")
    config["data"]["folder"] = str(data)
    config["planning"] |= {"policy": "dual_constraint", "m_mem": 400}
    config["objective"] |= {"condition_dropout": 0.1}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | sections))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "train.py"), "--config", "config.yaml"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in (folder / "run/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert losses.keys() == {1, 2}
    assert all(np.isfinite(loss) for loss in losses.values())
    return rows


def test_media_become_a_run_and_the_run_a_clip(hunyuan, media, of_hunyuan, tmp_path, capsys):
    folder = str(hunyuan[0])
    assert cli.main(["plan", "--manifest", str(of_hunyuan), "--m-mem", "400", "--ranks", "1"]) == 0
    picture = str(media / "2.png")
    prompt = {"prompt": CAPTIONS[0], "image": picture, "frames": 9, "height": 32, "width": 32}
    encoders = {"text": folder, "vae": folder, "image": folder}
    rows = train(
        tmp_path,
        of_hunyuan,
        # Of UniPC the last bits differ between the two programs, which moved a pixel by one level.
        sampling={"sampler": "euler", "steps": 2, "prompts": [prompt], "encoders": encoders},
        validation={"share": 0.3, "every": 2, "noise_levels": [0.5]},
    )
    assert any("validation/loss" in row for row in rows)

    draw = ["sample", "--checkpoint", str(tmp_path / "run"), "--prompt", CAPTIONS[0]]
    draw += ["--frames", "9", "--height", "32", "--width", "32", "--steps", "2"]
    draw += ["--text-encoder", folder, "--vae", folder]
    image = ["--image", picture, "--image-encoder", folder]
    gif, clip = tmp_path / "clip.gif", tmp_path / "clip.mp4"
    assert cli.main([*draw, *image, "--out", str(gif)]) == 0
    assert gif.read_bytes() == (tmp_path / "run/samples/step_0000002/prompt_0.gif").read_bytes()
    assert cli.main([*draw, "--out", str(clip)]) == 0
    with av.open(str(clip)) as container:
        assert container.streams.video[0].average_rate == 10  # the data's
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.shape(frames) == (9, 32, 32, 3)
    assert np.std(frames) > 1

    hunyuan_folders.random_vae(seed=1).save_pretrained(tmp_path / "other")
    capsys.readouterr()
    wrong = [*draw, "--vae", str(tmp_path / "other"), "--out", str(tmp_path / "x.gif")]
    assert run_command(cli.main, wrong) == 2
    assert "training data were prepared with" in capsys.readouterr().err
