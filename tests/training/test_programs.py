"""From files of others to a trained model, by command; and programs of benchmarks/."""

import json
import os
import subprocess
import sys

import av
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file
from training_runs import ROOT, metrics_of

from alload_jax import cli
from alload_jax.data.manifest import read_manifest
from alload_jax.data.prepare.encoders import ByteText

pytestmark = pytest.mark.slow


def train(*flags):
    """train.py on one device, with all of XLA's optimizations."""
    speed = {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "false", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "train.py", "--config", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | speed)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_loss_of_the_digits_falls_within_200_steps(tmp_path):
    """Of two sizes; each of all twelve has a program, which compiles longer than it trains."""
    flags = ["--run.folder", str(tmp_path / "run"), "--data.folder", str(tmp_path / "data")]
    flags += ["--data.dataset.mix", "[[1, 8, 16, 5500], [17, 8, 8, 400]]"]
    flags += ["--run.steps", "200", "--run.compilation_cache", "null", "--evaluators", "[]"]
    train("configs/digits.yaml", *flags, "--sampling.grids", "[]")
    steps = metrics_of(tmp_path / "run")[-100:]
    samples = sum(step["samples"] for step in steps)
    assert sum(step["loss"] * step["samples"] for step in steps) / samples < 0.5


def test_a_run_does_not_grow_with_its_steps_and_hardly_with_its_checkpoints(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from flat_memory import SAVED_EVERY, growth, measure

    # Fewer steps measure the beginning of a run, while allocators still grow. A line of metrics
    # alone is about 1,500 bytes as Python's objects.
    plain = growth(measure(tmp_path, "plain", 2500, None))
    assert plain["bytes_per_step"] < 500
    # Orbax asks TensorStore for its metrics, which are never freed; allocators also take time.
    saving = growth(measure(tmp_path, "saving", 1000, SAVED_EVERY))
    assert saving["bytes_per_step"] * SAVED_EVERY < 400_000
    for each in (plain, saving):
        assert max(each["descriptors"], each["threads"]) <= 2


COLOURS = {"red": 0, "blue": 2}


def write_media(folder):
    """Clips of a light of one of two colours, and a picture of each, with captions."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        name = list(COLOURS)[number % 2]
        clip = np.zeros((17, 32, 48, 3), np.uint8)
        clip[..., COLOURS[name]] = np.linspace(90, rng.uniform(150, 250), 17)[:, None, None]
        with av.open(folder / f"{number}.mp4", "w") as file:
            stream = file.add_stream("libx264", rate=16)
            stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
            for frame in clip:
                file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            file.mux(stream.encode())
        Image.fromarray(clip[0]).save(folder / f"still {number}.png")
        for medium in (number, f"still {number}"):
            (folder / f"{medium}.txt").write_text(f"{name} light")


def test_clips_take_the_colour_that_their_caption_names(tmp_path, capsys):
    """From media files to clips, by the config and the commands of walks."""
    media, store, run = (tmp_path / name for name in ("media", "store", "run"))
    write_media(media)
    flags = ["--area", "32x48", "--frames", "17", "--frames-per-latent", "4"]
    flags += ["--text-length", "16"]
    assert cli.main(["prepare", "media", str(media), "--out", str(store), *flags]) == 0
    manifest = read_manifest(store)
    assert manifest.vae_stride == (4, 1, 1)
    assert sorted(map(tuple, manifest.shape.tolist())) == [(1, 32, 48)] * 12 + [(17, 32, 48)] * 12
    assert manifest.channels.tolist() == [12] * 24
    flags = ["--run.folder", str(run), "--data.folder", str(store)]
    flags += ["--run.steps", "150", "--model.dim", "64", "--model.ffn_dim", "128"]
    flags += ["--model.num_heads", "2", "--model.num_layers", "2", "--planning.m_mem", "480"]
    flags += ["--optimizer.learning_rate", "3e-3", "--optimizer.warmup_steps", "10"]
    flags += ["--optimizer.ema_decay", "0.95", "--validation.share", "null"]
    flags += ["--sampling.prompts", "[]", "--objective.given_first_frame", "0"]
    flags += ["--model.text.length", "16", "--data.loader.processes", "0"]
    train("configs/walks.yaml", *flags, "--run.compilation_cache", str(tmp_path / "compiled"))
    size = {"frames": 17, "height": 32, "width": 48, "seed": 5}
    lines = [{"prompt": f"{name} light", "out": f"{name}.gif", **size} for name in COLOURS]
    lines += [lines[0] | {"out": "red.mp4"}]
    words = {"prompt": "red  light", "out": "words.safetensors"}
    image = {"image": str(media / "still 1.png"), "out": "begun.safetensors"}
    lines += [lines[0] | words, lines[0] | words | image]
    save_file({"text": ByteText().encode("red light").astype(np.float32)}, tmp_path / "embedded")
    embedded = {"prompt_embeds": str(tmp_path / "embedded"), "out": "embedded.safetensors"}
    lines += [size | embedded]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    draw = ["sample", "--checkpoint", str(run), "--list", str(tmp_path / "list.jsonl")]
    assert cli.main([*draw, "--steps", "10"]) == 0
    assert "--image" in capsys.readouterr().err  # the run was not trained with a first frame
    for name, channel in COLOURS.items():
        with Image.open(tmp_path / f"{name}.gif") as picture:
            assert picture.n_frames == 17
            picture.seek(16)
            light = np.asarray(picture.convert("RGB")).mean((0, 1))
        assert light[channel] > 100 + light[2 - channel]
    with av.open(tmp_path / "red.mp4") as container:
        assert container.streams.video[0].average_rate == 16
        assert len(list(container.decode(video=0))) == 17
    drawn = [load_file(tmp_path / each["out"])["latents"] for each in lines[3:]]
    np.testing.assert_array_equal(drawn[0], drawn[2])
    first = np.asarray(Image.open(media / "still 1.png"), np.float32) / 127.5 - 1
    for frame in np.split(drawn[1][0], 4, axis=-1):
        np.testing.assert_allclose(frame, first, atol=1e-6)
