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
from training_runs import ROOT, Runs, metrics_of

from alload_jax import cli
from alload_jax.data.manifest import read_manifest
from alload_jax.data.prepare.encoders import ByteText

pytestmark = pytest.mark.slow


def write_media(folder):
    """Videos of a square that moves one of two ways, and pictures of it, with captions."""
    folder.mkdir()
    for number in range(6):
        right = number % 2 == 0
        frames = np.full((9, 32, 32, 3), 20, np.uint8)
        for time, frame in enumerate(frames):
            left = 2 + 2 * time if right else 22 - 2 * time
            frame[10:20, left : left + 8] = 230
        with av.open(str(folder / f"clip {number}.mp4"), "w") as container:
            stream = container.add_stream("mpeg4", rate=16)
            stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
            for frame in frames:
                picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
                container.mux(stream.encode(picture))
            container.mux(stream.encode())
        Image.fromarray(frames[0]).save(folder / f"image {number}.png")
        text = f"a square that moves {'right' if right else 'left'}"
        (folder / f"clip {number}.txt").write_text(text)
        (folder / f"image {number}.txt").write_text("a square")


def test_media_are_prepared_trained_on_and_sampled(tmp_path, capsys):
    write_media(tmp_path / "in")
    store, flags = tmp_path / "store", ["--area", "32x32", "--frames", "9"]
    assert cli.main(["prepare", "media", str(tmp_path / "in"), "--out", str(store), *flags]) == 0
    manifest = read_manifest(store)
    assert sorted(set(map(tuple, manifest.shape.tolist()))) == [(1, 32, 32), (9, 32, 32)]
    runs = Runs(tmp_path, store)
    runs.config = ROOT / "configs" / "videos.yaml"
    small = ["--model.dim", "16", "--model.ffn_dim", "16", "--model.num_layers", "1"]
    folders = ["--data.folder", str(store), "--run.folder", str(tmp_path / "run")]
    shown = "{prompt: a square that moves left, frames: 9, height: 32, width: 32, seed: 5}"
    drawn_in_training = ["--sampling.prompts", f"[{shown}]", "--sampling.steps", "2"]
    flags = [*folders, *small, *drawn_in_training, "--planning.m_mem", "288"]
    runs.finish(*flags, "--run.steps", "12")
    prompt = tmp_path / "prompt.safetensors"
    embedded = ByteText().encode("a square that moves left")
    save_file({"text": embedded.astype(np.float32)}, prompt)
    clip = tmp_path / "clip.mp4"
    sizes = ["--frames", "9", "--height", "32", "--width", "32", "--steps", "2"]
    draw = ["sample", "--checkpoint", str(tmp_path / "run"), *sizes]
    assert cli.main([*draw, "--prompt-embeds", str(prompt), "--out", str(clip)]) == 0
    with av.open(str(clip)) as container:
        assert container.streams.video[0].average_rate == 16
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.shape(frames) == (9, 32, 32, 3)

    # What training draws is what the command draws.
    gif, in_training = tmp_path / "clip.gif", tmp_path / "run/samples/step_0000012/prompt_0.gif"
    prompt_5 = ["--prompt", "a square that moves left", "--seed", "5"]
    assert cli.main([*draw, *prompt_5, "--out", str(gif)]) == 0
    assert gif.read_bytes() == in_training.read_bytes()

    def drawn(*flags):
        out = tmp_path / "latents.safetensors"
        assert cli.main([*draw, *flags, "--out", str(out), "--force"]) == 0
        return load_file(out)["latents"]

    words = ["--prompt", "a square  that moves\nleft"]
    np.testing.assert_array_equal(drawn("--prompt-embeds", str(prompt)), drawn(*words))
    picture = tmp_path / "in" / "image 1.png"
    begun = drawn(*words, "--image", str(picture))
    first = np.asarray(Image.open(picture), np.float32) / 127.5 - 1
    np.testing.assert_allclose(begun[0], first, atol=1e-6)
    assert "--image" in capsys.readouterr().err  # the run was not trained with a first frame


# ------------------------------------------------------------ programs


ONE_DEVICE_AT_SPEED = {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}


def run(program, *flags, **environment):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(
        [sys.executable, program, *flags], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_loss_of_the_digits_falls_within_300_steps(tmp_path):
    """With `gradient_mean: plan` it was 0.65, and pairs of digits were not learnt at all."""
    flags = ["--run.folder", str(tmp_path / "run"), "--data.folder", str(tmp_path / "data")]
    flags += ["--run.steps", "300", "--run.compilation_cache", "null", "--evaluators", "[]"]
    flags += ["--sampling.grids", "[]"]
    run("train.py", "--config", "configs/digits.yaml", *flags, **ONE_DEVICE_AT_SPEED)
    steps = metrics_of(tmp_path / "run")[-100:]
    samples = sum(step["samples"] for step in steps)
    assert sum(step["loss"] * step["samples"] for step in steps) / samples < 0.57


def test_a_run_does_not_grow_with_its_steps_and_hardly_with_its_checkpoints(tmp_path):
    result = tmp_path / "flat.json"
    # Fewer steps measure the beginning of a run, while allocators still grow.
    run("benchmarks/flat_memory.py", "--steps", "2500", "--out", str(result))
    found = json.loads(result.read_text())
    runs = found["runs"]
    # A line of metrics alone is about 1,500 bytes as Python's objects.
    assert runs["no checkpoints"]["bytes_per_step"] < 500
    # Orbax asks TensorStore for its metrics, which are never freed; allocators also take time.
    assert runs["checkpoints"]["bytes_per_step"] * found["saved_every"] < 400_000
    for each in runs.values():
        assert each["descriptors"] <= 2
        assert each["threads"] <= 2


def test_clips_take_the_colour_that_their_caption_names(tmp_path):
    """From media files to clips, by the config and the commands of walks."""
    media, store, drawn = tmp_path / "media", tmp_path / "store", tmp_path / "drawn"
    media.mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        colour = ("red", "blue")[number % 2]
        clip = np.zeros((17, 32, 48, 3), np.uint8)
        shade = np.linspace(90, rng.uniform(150, 250), 17)[:, None, None]
        clip[..., (0, 2)[number % 2]] = shade
        with av.open(media / f"{number}.mp4", "w") as file:
            stream = file.add_stream("libx264", rate=16)
            stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
            for frame in clip:
                file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            file.mux(stream.encode())
        (media / f"{number}.txt").write_text(f"{colour} light")
    flags = ["--area", "32x48", "--frames", "17", "--frames-per-latent", "4"]
    flags += ["--text-length", "16"]
    run("-m", "alload_jax.cli", "prepare", "media", str(media), "--out", str(store), *flags)
    manifest = read_manifest(store)
    assert manifest.vae_stride == (4, 1, 1)
    assert manifest.channels.tolist() == [12] * 12
    flags = ["--run.folder", str(tmp_path / "run"), "--data.folder", str(store)]
    flags += ["--run.steps", "150", "--model.dim", "64", "--model.ffn_dim", "128"]
    flags += ["--model.num_heads", "2", "--model.num_layers", "2", "--planning.m_mem", "480"]
    flags += ["--optimizer.learning_rate", "3e-3", "--optimizer.warmup_steps", "10"]
    flags += ["--optimizer.ema_decay", "0.95", "--validation.share", "null"]
    flags += ["--sampling.prompts", "[]", "--data.loader.processes", "0"]
    flags += ["--model.text.length", "16", "--run.compilation_cache", str(tmp_path / "compiled")]
    run("train.py", "--config", "configs/walks.yaml", *flags, **ONE_DEVICE_AT_SPEED)
    drawn.mkdir()
    size = {"frames": 17, "height": 32, "width": 48}
    colours = ("red", "blue")
    lines = [{"prompt": f"{name} light", "out": f"{name}.gif", **size} for name in colours]
    (drawn / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = ["--checkpoint", str(tmp_path / "run"), "--list", str(drawn / "list.jsonl")]
    run("-m", "alload_jax.cli", "sample", *flags, "--steps", "10", **ONE_DEVICE_AT_SPEED)
    for name, channel in zip(colours, (0, 2), strict=True):
        with Image.open(drawn / f"{name}.gif") as picture:
            assert picture.n_frames == 17
            picture.seek(16)
            light = np.asarray(picture.convert("RGB")).mean((0, 1))
        assert light[channel] > 100 + light[2 - channel]
