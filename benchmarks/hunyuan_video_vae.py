"""Compares ways to run HunyuanVideo 1.5's VAE on a GPU: in chunks, in tiles, and whole clips.

    python benchmarks/hunyuan_video_vae.py

The VAE has random weights in the published size. `chunks` is what alload does: whole frames, a few
at a time. `tiles` and `whole` are diffusers' own ways, with `enable_tiling` and without. Each
encodes a clip of random spots and decodes the latents of `chunks`; of each the least of several
times counts, and the GPU's memory at its highest. `encode_error` and `decode_error` compare with
`whole` on a small clip that fits: root mean square of the difference, divided by the deviation.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.encoders.loading import choose_device, choose_dtype, release_memory
from alload_jax.encoders.vae import HunyuanVideoVae, Vae
from alload_jax.files import Json

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "diffusers", "numpy")

Shape = tuple[int, int, int]
"""Frames, height and width of a clip."""


class Chunks(HunyuanVideoVae):
    """Whole frames, a few at a time; `torch.OutOfMemoryError` where that does not fit."""

    def _whole_or_tiled(self, run: Callable[[], Any], area: float) -> Any:
        return run()


class Whole(Chunks):
    """All frames at once, as by diffusers."""

    def _load(self) -> Any:
        return Vae._load(self)


class Tiles(Whole):
    """diffusers' tiles, each with all frames."""

    def _load(self) -> Any:
        model = super()._load()
        model.enable_tiling()
        return model


WAYS: dict[str, type[HunyuanVideoVae]] = {"chunks": Chunks, "tiles": Tiles, "whole": Whole}


def write_vae(folder: Path, widths: tuple[int, ...]) -> int:
    """Saves the VAE with random weights; returns how many parameters it has."""
    import torch
    from diffusers import AutoencoderKLHunyuanVideo15

    torch.manual_seed(0)
    vae = AutoencoderKLHunyuanVideo15(block_out_channels=widths)
    vae.save_pretrained(folder)
    return sum(parameter.numel() for parameter in vae.parameters())


def spots(shape: Shape) -> np.ndarray:
    """[T, H, W, 3] uint8, a picture of smooth spots that moves."""
    frames, height, width = shape
    coarse = np.random.default_rng(0).integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    picture = np.asarray(Image.fromarray(coarse).resize((width, height)))
    return np.stack([np.roll(picture, 3 * number, 1) for number in range(frames)])


def measured(run: Callable[[], np.ndarray], repeats: int) -> Json:
    """Least seconds of several runs and most GiB of GPU memory; nothing if it does not fit."""
    import torch

    has_gpu, seconds = torch.cuda.is_available(), []
    if has_gpu:
        release_memory()
        torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(repeats + 1):  # the first chooses algorithms
            begin = time.perf_counter()
            run()  # ends when the result is in host memory
            seconds.append(time.perf_counter() - begin)
    except torch.OutOfMemoryError:
        return {"fits": False}
    gib = torch.cuda.max_memory_allocated() / 2**30 if has_gpu else None
    return {"fits": True, "seconds": min(seconds[1:]), "gib": gib}


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference, divided by the deviation of what is expected."""
    difference = found.astype(np.float64) - expected
    return float(np.sqrt(np.mean(difference**2)) / np.std(expected))


def measure(options: argparse.Namespace) -> Json:
    """Measures every way on the same clips."""
    clip, small = spots((options.frames, options.height, options.width)), spots(options.small)
    found: Json = {}
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_vae(Path(folder), tuple(options.widths))
        reference = Whole(folder)
        expected = reference.encode(small)
        pictures = reference.decode(expected)
        del reference
        latents = Chunks(folder).encode(clip)
        for name, kind in WAYS.items():
            vae = kind(folder)
            found[name] = {
                "encode_error": error(vae.encode(small), expected),
                "decode_error": error(vae.decode(expected), pictures),
                "encode": measured(lambda vae=vae: vae.encode(clip), options.repeats),  # type: ignore[misc]
                "decode": measured(lambda vae=vae: vae.decode(latents), options.repeats),  # type: ignore[misc]
            }
    device = choose_device(None)
    names = {"torch_device": device.type, "dtype": str(choose_dtype(None, device))}
    return {"vae_parameters": parameters, **names, "ways": found}


def main() -> None:
    """Measures and writes the result."""
    parser = benchmark_parser(__doc__, ROOT / "benchmarks/results/hunyuan_video_vae_h200.json")
    add = parser.add_argument
    add("--frames", type=int, default=121, help="frames of the clip, 4n + 1; default 121")
    add("--height", type=int, default=720, help="default 720")
    add("--width", type=int, default=1280, help="default 1280")
    add("--small", type=int, nargs=3, default=[17, 288, 512], help="frames, height and width of "
        "the clip that is compared; default 17 288 512")  # fmt: skip
    add("--widths", type=int, nargs=5, default=[128, 256, 512, 1024, 1024], help="channels of the "
        "VAE's blocks; default 128 256 512 1024 1024, as published")  # fmt: skip
    add("--repeats", type=int, default=2, help="runs of each way after the first; default 2")
    options = parser.parse_args()
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    record = Record(options.out, PACKAGES, settings=settings, **measure(options))
    record.write()
    print(json.dumps(record.content, indent=1))


if __name__ == "__main__":
    main()
