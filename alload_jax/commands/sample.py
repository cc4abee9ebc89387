"""`alload sample`: draws samples from a model and writes a file for each."""

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from alload_jax.diffusion.schedules import Sampler, noise_levels
from alload_jax.errors import InputError

if TYPE_CHECKING:  # these modules import JAX, which only `run` needs
    from alload_jax.commands.model_source import FolderSource, RunSource
    from alload_jax.models.common.config import ModelConfig
    from alload_jax.sampling.requests import RawRequest, Request

HELP = "Draw samples from a run of train.py or from released weights."

_LIST = """\
JSON lines with one object per sample; its keys (class, prompt_embeds, negative_embeds,
image_embeds, frames, height, width, seed, out) override the flags; paths are relative to the
list's folder"""

_LISTED = ("negative_embeds", "image_embeds", "frames", "height", "width", "seed", "out")
"""Flags that apply to every line of a list that does not override them."""

_MAX = 1000
"""Maximum of --steps, --batch, --zoom and the parts of --vae-stride."""

_STRIDES = frozenset(map(str, range(1, _MAX + 1)))


class _Group(NamedTuple):
    """Requests that are drawn by one compiled program.

    Attributes:
      requests: requests of one shape.
      shift: shift of the noise levels.
      sigmas: [steps + 1] noise levels.
    """

    requests: "list[Request]"
    shift: float
    sigmas: np.ndarray


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add("--checkpoint", required=True, help="run folder, or transformer folder of diffusers")
    add("--weights", choices=["ema", "raw"], help="which weights of a run; default ema")
    add("--step", type=int, help="step of a run's checkpoint; default the newest")
    _add_conditions(parser)
    add("--frames", type=int, help="frames of the clip; 1 for an image")
    add("--height", type=int, help="height in pixels")
    add("--width", type=int, help="width in pixels")
    add("--vae-stride", nargs="+", metavar="N", help="pixels per latent, T H W; default: the "
        "data's, else by the channels: 1 1 1 for 1 or 3, 4 16 16 for 48, else 4 8 8")  # fmt: skip
    add("--steps", type=int, default=30, help="evaluations of the model; default 30")
    add("--sampler", choices=get_args(Sampler), help="default: the run's; unipc for diffusers")
    add(
        "--guidance",
        type=float,
        help="scale of classifier-free guidance, 1 for none; default: the run's, else 5",
    )
    add("--shift", type=float, help="shift of noise levels; default: the run's at this size, "
        "else 5, which Wan recommends for 720p; for 480p it recommends 3")  # fmt: skip
    add("--dtype", choices=["auto", "float32", "bfloat16"], help="compute dtype; default: "
        "the run's, else auto: bfloat16 on a GPU")  # fmt: skip
    add("--dense-attention", action="store_true", help="dense attention in all layers; default: "
        "sparse in those that are sparse in the checkpoint")  # fmt: skip
    add("--seed", type=int, default=0, help="seed of the noise; default 0")
    add("--batch", type=int, default=1, help="samples per batch, default 1; the last batch is "
        "padded, so that a sample depends only on its seed and this number")  # fmt: skip
    add("--zoom", type=int, default=1, help="factor by which pictures are enlarged; default 1")
    add("--out", help="file to write: x.png (one frame), x.gif, x.mp4, or x.safetensors (latents)")
    add("--force", action="store_true", help="replace files that exist")


def run(options: argparse.Namespace) -> int:
    """Checks all requests, reads the weights, draws and writes."""
    from alload_jax.commands.model_source import find_source
    from alload_jax.sampling.requests import Target, check_request

    _check_numbers(options)
    source = find_source(options.checkpoint, options.weights, options.step)
    if source.config.latent_channels != source.config.in_channels:
        raise NotImplementedError(
            f"{options.checkpoint}: takes {source.config.in_channels} channels and predicts "
            f"{source.config.latent_channels}: image-to-video models, which need conditioning "
            "frames, are not supported; choose a text-to-video model"
        )
    raw = _raw_requests(options)
    target = Target(source.config, *_data(options, source), options.zoom)
    requests = [check_request(one, target) for one in raw]
    _check_outs(raw, options.force)
    groups = _groups(requests, options, source)
    guidance = source.guidance if options.guidance is None else options.guidance
    if guidance == 1 and any(request.negative for request in requests):
        print("note: negative embeddings have no effect at --guidance 1", file=sys.stderr)
    if options.dense_attention and source.config.sparse_attention is None:
        print("note: --dense-attention has no effect: the model is dense", file=sys.stderr)
    _draw(groups, options, source)
    return 0


def _add_conditions(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--class", dest="classes", metavar="N", nargs="+", type=int,
        help="classes of one sample")  # fmt: skip
    what.add_argument("--prompt-embeds", metavar="FILE",
        help="safetensors with `text` [L, width]; padded with zeros")  # fmt: skip
    what.add_argument("--list", metavar="FILE", help=_LIST)
    parser.add_argument("--negative-embeds", metavar="FILE",
        help="the same for the negative prompt of guidance; default zeros")  # fmt: skip
    parser.add_argument("--image-embeds", metavar="FILE",
        help="safetensors with `image` [N, width], for models with image embeddings")  # fmt: skip


def _check_numbers(options: argparse.Namespace) -> None:
    for name in ("steps", "batch", "zoom"):
        if not 1 <= (value := getattr(options, name)) <= _MAX:
            bounds = f"at least 1 and at most {_MAX}"
            raise InputError(f"alload sample: --{name} is {value}; it must be {bounds}")
    if options.guidance is not None and not math.isfinite(options.guidance):
        raise InputError(f"alload sample: --guidance is {options.guidance}; it must be finite")
    if options.shift is not None and not 0 < options.shift < math.inf:
        raise InputError(
            f"alload sample: --shift is {options.shift}; it must be above 0 and finite"
        )


def _stride(parts: list[str] | None) -> tuple[int, int, int] | None:
    """Parses `4 8 8`, or `4,8,8` as in `alload plan`."""
    if parts is None:
        return None
    numbers = ",".join(parts).split(",")
    if len(numbers) != 3 or not all(one in _STRIDES for one in numbers):
        raise InputError(
            f"alload sample: --vae-stride is {' '.join(parts)}; give three whole numbers from 1 "
            f"to {_MAX}, such as 4 8 8"
        )
    return (int(numbers[0]), int(numbers[1]), int(numbers[2]))


def _data(
    options: argparse.Namespace, source: "RunSource | FolderSource"
) -> tuple[tuple[int, int, int], int | None]:
    """VAE stride and text length of the data; prints a note if they are guessed."""
    from alload_jax.models.families import family_of

    length, guesses = source.text_length(), []
    if (stride := _stride(options.vae_stride) or source.vae_stride()) is None:
        stride = family_of(source.config).sampling_defaults(source.config).vae_stride
        guesses = [f"a VAE stride of {' '.join(map(str, stride))} is guessed; --vae-stride sets it"]
    if length is None and source.config.text is None:
        guesses += ["classes are not padded, although training may have padded them"]
    if guesses:
        print(f"note: the data's manifest is gone: {'; '.join(guesses)}", file=sys.stderr)
    return stride, length


def _raw_requests(options: argparse.Namespace) -> "list[RawRequest]":
    """The requests of the flags, or those of the list with the flags as defaults."""
    from alload_jax.sampling.requests import FILES, RawRequest, read_list

    given = {name: getattr(options, name) for name in (*_LISTED, "prompt_embeds")}
    given |= {"class": options.classes and tuple(options.classes)}
    values: dict[str, Any] = {
        name: Path(value) if name in FILES else value
        for name, value in given.items()
        if value is not None
    }
    return read_list(Path(options.list), values) if options.list else [RawRequest(values)]


def _check_outs(raw: "list[RawRequest]", force: bool) -> None:
    """Raises InputError if an output cannot be written or would replace a file."""
    seen: set[str] = set()
    for one in raw:
        out, place = one.get("out"), f"{one.place('out')}: {one.get('out')}"
        real = os.path.realpath(out)
        if real in seen:
            raise InputError(f"{place}: is the output of two samples; name a file for each")
        if os.path.isdir(real):
            raise InputError(f"{place}: is a folder; name a file")
        if os.path.lexists(out) and not force:
            raise InputError(
                f"{place}: exists already; give --force to replace it, or name another file"
            )
        folder = next(parent for parent in Path(real).parents if os.path.lexists(parent))
        if not os.path.isdir(folder):
            raise InputError(f"{place}: {folder} is not a folder; name another path")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"{place}: {folder} is not writable; name another path")
        seen.add(real)


def _groups(
    requests: "list[Request]", options: argparse.Namespace, source: "RunSource | FolderSource"
) -> list[_Group]:
    """Groups the requests by shape, in order of first appearance."""
    by_shape: dict[Any, list[Request]] = {}
    for request in requests:
        by_shape.setdefault(request.shape(), []).append(request)
    groups = []
    for members in by_shape.values():
        seq_len = math.prod(members[0].grid) // math.prod(source.config.patch_size)
        shift = source.shift(seq_len) if options.shift is None else options.shift
        sigmas = noise_levels(options.sampler or source.sampler, options.steps, shift)
        groups.append(_Group(members, shift, sigmas))
    return groups


def _draw(
    groups: list[_Group], options: argparse.Namespace, source: "RunSource | FolderSource"
) -> None:
    """Reads the weights, then draws and writes each batch."""
    import jax

    from alload_jax.sampling.clips import write_clip
    from alload_jax.sampling.flow import make_flow
    from alload_jax.training.restore import one_device_mesh

    config = dataclasses.replace(source.config, dtype=options.dtype or source.config.dtype)
    if options.dense_attention and config.sparse_attention is not None:
        config = dataclasses.replace(config, sparse_attention=config.sparse_attention.as_dense())
    sampler = options.sampler or source.sampler
    guidance = source.guidance if options.guidance is None else options.guidance
    notes = {"steps": options.steps, "sampler": sampler, "guidance": float(guidance)}
    values = source.values(one_device_mesh())
    failed: list[str] = []
    for group in groups:
        draw = jax.jit(make_flow(config, sampler, group.sigmas, guidance))
        for part in _batches(group.requests, options.batch):
            filled = part + part[-1:] * (options.batch - len(part))
            with _memory_named(part[0]):
                drawn = np.asarray(draw(values, *_inputs(filled, config)))
            for request, clip in zip(part, drawn, strict=False):
                if not np.isfinite(clip).all():
                    failed.append(str(request.out))
                    continue
                own = {"seed": request.seed, "shift": float(group.shift)}
                write_clip(request.out, clip, notes | own, options.zoom)
                print(request.out, flush=True)
    if failed:
        raise InputError(
            f"{', '.join(failed)}: the model's output is not finite; choose another checkpoint, or "
            "a guidance closer to 1"
        )


@contextmanager
def _memory_named(request: "Request") -> Iterator[None]:
    """Turns JAX's out-of-memory error into an InputError of one line."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "Out of memory" not in str(error):
            raise
        raise InputError(
            f"{request.out}: latents of {request.grid} do not fit this device's memory; choose a "
            "smaller size or --batch"
        ) from error


def _inputs(requests: "list[Request]", config: "ModelConfig") -> tuple[Any, Any, Any]:
    """Noise, condition and null condition of a batch; each row depends only on its request."""
    import jax
    import jax.numpy as jnp

    from alload_jax.sampling.conditions import conditions

    shape = (*requests[0].grid, config.in_channels)
    noise = jnp.stack([jax.random.normal(jax.random.key(r.seed), shape) for r in requests])
    return (noise, *conditions(requests, config))


def _batches(requests: "list[Request]", size: int) -> "Iterator[list[Request]]":
    for begin in range(0, len(requests), size):
        yield requests[begin : begin + size]
