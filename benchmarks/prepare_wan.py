"""Measures `alload prepare media --vae wan` on a GPU: how fast it is, how busy the GPU.

    python benchmarks/prepare_wan.py

It writes videos with moving, noisy pictures and a VAE of random weights in the size of Wan 2.1's,
and runs the command on them in a process of its own. A shard holds one file, so that the workers
share the few files as they would share many, and the time at which a shard was written says when
its file was done.

Rates and `gpu_busy` are taken from the moment at which the first file was done until the last was:
the start (imports, weights, the first clips) and the end of the folder do not count. At that moment
the first clip's time has passed, so that the other files count. `gpu_busy` is the mean of
nvidia-smi's utilization, which is the share of the time in which a kernel ran.

The roof is the VAE alone, in this process afterwards: the same clips, already decoded and on the
GPU, one after the other through the same encoder. `of_vae_alone` is its time for a clip, divided by
the command's. `from_host` is the same loop with clips in host memory, as the command has them.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
from PIL import Image

from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.data.prepare.inputs import find_items
from alload_jax.data.prepare.sources import buckets_of, fit
from alload_jax.data.prepare.videos import video_clips
from alload_jax.encoders.loading import choose_device, choose_dtype
from alload_jax.encoders.vae import WanVae
from alload_jax.files import Json

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "diffusers", "av", "numpy")
FPS = 16
DISTINCT = 6
"""Most different videos; the other files are copies of them."""
SAMPLE_MILLISECONDS = 200

Shape = tuple[int, int, int]
"""Frames, height and width of a clip."""


class Sample(NamedTuple):
    """What nvidia-smi showed at a time.

    Attributes:
      at: the time, in seconds since 1970.
      busy: share of the time in which a kernel ran, from 0 to 1.
      mebibytes: the GPU's memory in use.
    """

    at: float
    busy: float
    mebibytes: float


# ---------------------------------------------------------------- inputs


def write_video(path: Path, seed: int, shape: Shape) -> None:
    """A picture of smooth spots that moves under noise which changes with every frame."""
    count, height, width = shape
    rng = np.random.default_rng(seed)
    spots = rng.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), np.uint8)
    picture = np.asarray(Image.fromarray(spots).resize((width, height)), np.int16)
    noise = rng.normal(0, 5, picture.shape).astype(np.int16)
    step, texture = rng.integers(-6, 7, 2), rng.integers(0, height, (count, 2))
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=FPS)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"preset": "veryfast"} if codec == "libx264" else {"qscale": "4"}
        for number in range(count):
            frame = np.roll(picture, step * number, (0, 1))
            frame = frame + np.roll(noise, texture[number], (0, 1))
            pixels = frame.clip(0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def write_videos(folder: Path, files: int, shape: Shape) -> None:
    """Writes the files, with captions beside them."""
    folder.mkdir()
    for number in range(files):
        path = folder / f"clip{number:03d}.mp4"
        if number < DISTINCT:
            write_video(path, number, shape)
        else:
            shutil.copyfile(folder / f"clip{number % DISTINCT:03d}.mp4", path)
        path.with_suffix(".txt").write_text(f"clip number {number}", encoding="utf-8")


def write_vae(folder: Path, base_dim: int) -> int:
    """Saves Wan 2.1's VAE with random weights; returns how many parameters it has."""
    import torch
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=base_dim)
    vae.save_pretrained(folder)
    return sum(parameter.numel() for parameter in vae.parameters())


# ---------------------------------------------------------------- the GPU's samples


@contextmanager
def sampled(log: Path) -> Iterator[None]:
    """Lets nvidia-smi write a line to a file every `SAMPLE_MILLISECONDS`, where there is one."""
    command = ["nvidia-smi", "--query-gpu=timestamp,utilization.gpu,memory.used", "--id=0"]
    command += ["--format=csv,noheader,nounits", "-lms", str(SAMPLE_MILLISECONDS)]
    with log.open("w") as file:
        try:
            process = subprocess.Popen(command, stdout=file)
        except FileNotFoundError:
            yield
            return
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def read_samples(log: Path) -> list[Sample]:
    """Reads the lines that nvidia-smi wrote; one that was cut off is left out."""
    found = []
    for line in log.read_text().splitlines():
        try:
            at, busy, mebibytes = line.split(", ")
            seconds = datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            found.append(Sample(seconds, float(busy) / 100, float(mebibytes)))
        except ValueError:
            continue
    return found


def gpu_use(samples: Sequence[Sample], begin: float, end: float) -> Json:
    """Means of the samples from one time to another; None where there are none."""
    used = [sample for sample in samples if begin <= sample.at <= end]
    busy = [sample.busy for sample in used]
    return {
        "gpu_busy": float(np.mean(busy)) if used else None,
        "gpu_busy_least": min(busy, default=None),
        "gpu_samples": len(used),
        "gpu_mebibytes": max((sample.mebibytes for sample in used), default=None),
    }


# ---------------------------------------------------------------- the command


def prepare(scratch: Path, options: argparse.Namespace) -> Json:
    """Runs the command on the videos and says how fast it was."""
    flags = ["--area", f"{options.height}x{options.width}", "--frames", options.frames]
    flags += ["--fps", FPS, "--vae", "wan", "--text", "bytes", "--files-per-shard", 1]
    flags += ["--workers", options.workers]
    places = [scratch / "videos", "--out", scratch / "store", "--vae-folder", scratch / "vae"]
    argv = [sys.executable, "-m", "alload_jax.cli", "prepare", "media", *places, *flags]
    begin = time.time()
    with sampled(scratch / "prepare.log"):
        subprocess.run(list(map(str, argv)), cwd=ROOT, check=True, stdout=sys.stderr)
    seconds = time.time() - begin
    done = sorted(path.stat().st_mtime for path in (scratch / "store").glob("*.arrayrecord"))
    if len(done) != options.files:
        raise SystemExit(f"{options.files} files were given, {len(done)} shards were written")
    return {
        "flags": shlex.join(map(str, flags)),
        "seconds": seconds,
        "seconds_until_first_file": done[0] - begin,
        **speed(done[-1] - done[0], options.files - 1, options.frames),
        **gpu_use(read_samples(scratch / "prepare.log"), done[0], done[-1]),
    }


def speed(seconds: float, files: int, frames: int) -> dict[str, float]:
    """Rates of so many files, of a clip each, that took so long."""
    return {
        "seconds_per_file": seconds / files,
        "files_per_second": files / seconds,
        "frames_per_second": files * frames / seconds,
    }


# ---------------------------------------------------------------- the VAE alone


def decoded(scratch: Path, shape: Shape) -> Iterator[np.ndarray]:
    """The clips of the different videos, decoded as the command does."""
    frames, height, width = shape
    areas = [buckets_of(f"{height}x{width}", 16)]
    for item in find_items(scratch / "videos")[:DISTINCT]:
        assert item.source is not None
        choose = partial(fit, areas=areas, max_enlarge=1.0)
        yield from video_clips(item.source, choose, fps=Fraction(FPS), frames=frames)


def looped(
    encode: Callable[[Any], Any], clips: Sequence[Any], options: argparse.Namespace, log: Path
) -> Json:
    """Encodes clips one after the other; every call ends when the latents are in host memory."""
    encode(clips[0])
    with sampled(log):
        begin = time.time()
        for number in range(options.encodes):
            encode(clips[number % len(clips)])
        end = time.time()
    found = speed(end - begin, options.encodes, options.frames)
    return found | gpu_use(read_samples(log), begin, end)


def measure_alone(scratch: Path, options: argparse.Namespace) -> Json:
    """Times decoding, and the VAE on clips that are decoded."""
    begin = time.time()
    clips = list(decoded(scratch, (options.frames, options.height, options.width)))
    decoding = speed(time.time() - begin, len(clips), options.frames)
    vae = WanVae(scratch / "vae")
    host = looped(vae.encode, clips, options, scratch / "host.log")
    pixels = [vae.pixels(clip) for clip in clips]
    alone = looped(vae.encode_pixels, pixels, options, scratch / "alone.log")
    return {"decoding_by_one_process": decoding, "from_host": host, "vae_alone": alone}


def measure(options: argparse.Namespace) -> Json:
    """Writes the inputs to a temporary folder and measures everything."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        shape = (options.frames, options.height, options.width)
        write_videos(scratch / "videos", options.files, shape)
        parameters = write_vae(scratch / "vae", options.base_dim)
        prepared = prepare(scratch, options)
        alone = measure_alone(scratch, options)
    device = choose_device(None)
    return {
        "vae_parameters": parameters,
        "torch_device": device.type,
        "dtype": str(choose_dtype(None, device)),
        "cpus": os.cpu_count(),
        "prepare": prepared,
        **alone,
        "of_vae_alone": alone["vae_alone"]["seconds_per_file"] / prepared["seconds_per_file"],
    }


def main() -> None:
    """Measures and writes the result."""
    parser = benchmark_parser(__doc__, ROOT / "benchmarks/results/prepare_wan_h200.json")
    add = parser.add_argument
    add("--files", type=int, default=24, help="videos to prepare, two or more; default 24")
    add("--workers", type=int, default=8, help="processes that decode; default 8")
    add("--encodes", type=int, default=12, help="encodes of each loop of the VAE; default 12")
    add("--frames", type=int, default=81, help="frames of a clip; default 81")
    add("--height", type=int, default=480, help="default 480")
    add("--width", type=int, default=832, help="default 832")
    add("--base-dim", type=int, default=96, help="width of the VAE; default 96, as Wan 2.1's")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # the GPU whose use is measured
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    record = Record(options.out, PACKAGES, settings=settings, **measure(options))
    record.write()
    print(json.dumps(record.content, indent=1))


if __name__ == "__main__":
    main()
