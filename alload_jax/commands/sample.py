"""`alload sample`: draws samples from a model and writes a file for each."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from alload_jax.commands.flags import add_run_flags
from alload_jax.diffusion.schedules import Sampler, noise_levels, rounded_timesteps
from alload_jax.encoders.loading import share_memory
from alload_jax.errors import InputError

if TYPE_CHECKING:  # these modules import JAX, which only `run` needs
    from alload_jax.commands.model_source import FolderSource, RunSource
    from alload_jax.commands.sample_draw import Drawing, Group
    from alload_jax.sampling.encoders import Encoders
    from alload_jax.sampling.requests import RawRequest, Request


_LISTED = (
    *("negative_prompt", "negative_embeds", "image_embeds", "image", "last_image"),
    *("frames", "height", "width", "seed", "out"),
)
"""Flags that apply to every line of a list that does not override them."""

_LARGEST = 1000
"""Maximum of --steps, --batch, --zoom and the parts of --vae-stride."""

_COUNTS = ("steps", "batch", "zoom")
_STRIDES = frozenset(map(str, range(1, _LARGEST + 1)))

_LIST = """\
JSON lines with one object per sample; its keys (class, prompt, negative_prompt, prompt_embeds,
negative_embeds, image, last_image, image_embeds, frames, height, width, seed, out) override the
flags; paths are relative to the list's folder"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add("--checkpoint", required=True, help="run folder, or transformer folder of diffusers")
    add_run_flags(add)
    add("--lora", metavar="FILE[:SCALE]", nargs="+", default=[], help="LoRA files to add, with "
        "factors; default 1")  # fmt: skip
    _add_conditions(parser)
    _add_encoders(parser)
    _add_low_noise(parser)
    add("--frames", type=int, help="frames of the clip; 1 for an image")
    add("--height", type=int, help="height in pixels")
    add("--width", type=int, help="width in pixels")
    add("--vae-stride", nargs="+", metavar="N", help="pixels per latent, T H W; default: the "
        "data's, else by the channels: 1 1 1 for 1 or 3, 4 16 16 for 48, else 4 8 8")  # fmt: skip
    add("--steps", type=int, default=30, help="evaluations of the model; default 30")
    add("--sampler", choices=get_args(Sampler), help="default: the run's; unipc for diffusers")
    add("--round-timesteps", action="store_true", help="give the model whole timesteps, as "
        "diffusers' pipelines do with unipc: 1000 times the noise level, rounded down")  # fmt: skip
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
    add("--fps", type=float, help="frames per second of GIF and MP4; default: the data's, "
        "else those of the model's family, else 9")  # fmt: skip
    add("--force", action="store_true", help="replace files that exist")


def _add_conditions(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--class", dest="classes", metavar="N", nargs="+", type=int,
        help="classes of one sample")  # fmt: skip
    what.add_argument("--prompt", metavar="WORDS", help="what the sample shows, in words")
    what.add_argument("--prompt-embeds", metavar="FILE",
        help="safetensors with `text` [L, width]; padded with zeros")  # fmt: skip
    what.add_argument("--list", metavar="FILE", help=_LIST)
    parser.add_argument("--negative-prompt", metavar="WORDS",
        help="what guidance leads away from; default: an empty text, or zeros where the run was "
        "trained with them")  # fmt: skip
    parser.add_argument("--negative-embeds", metavar="FILE",
        help="the same as embeddings")  # fmt: skip
    parser.add_argument("--image-embeds", metavar="FILE",
        help="safetensors with `image` [N, width], for models with image embeddings")  # fmt: skip
    parser.add_argument("--image", metavar="FILE", help="picture of the first frame")
    parser.add_argument("--last-image", metavar="FILE", help="picture of the last frame, for "
        "models that take one")  # fmt: skip


def _add_encoders(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text-encoder", metavar="DIR", help="local folder of the model's text encoder, for "
        "--prompt: umT5 for Wan, HunyuanVideo 1.5's pipeline; bytes for the embedding of --text "
        "bytes, which runs on such data have without it")  # fmt: skip
    add("--vae", metavar="DIR", help="local folder of the model's VAE, which turns latents into "
        "pictures")  # fmt: skip
    add("--image-encoder", metavar="DIR", help="local folder of the model's image encoder, CLIP or "
        "SigLIP, for --image with models that take image embeddings")  # fmt: skip


def _add_low_noise(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--low-noise-checkpoint", metavar="DIR", help="second of two experts, as in Wan 2.2's A14B "
        "models: it takes the lower noise levels")  # fmt: skip
    add("--boundary", type=float, help="noise level below which it does, from 0 to 1; Wan 2.2 uses "
        "0.875 for text-to-video, 0.9 for image-to-video")  # fmt: skip
    add("--low-noise-lora", metavar="FILE[:SCALE]", nargs="+", default=[], help="LoRA files to add "
        "to it")  # fmt: skip
    add("--low-noise-guidance", type=float, help="its guidance; default: that of the first")


def run(options: argparse.Namespace) -> int:
    """Checks all requests, reads the weights, draws and writes."""
    _check_flags(options)
    if options.text_encoder or options.vae or options.image_encoder:
        share_memory()
    from alload_jax.commands.model_source import completed, find_source, read_loras
    from alload_jax.commands.sample_draw import draw
    from alload_jax.sampling.requests import Target, check_request

    source = find_source(options.checkpoint, options.weights, options.step)
    source = completed(source, options.base, read_loras("--lora", options.lora, source.config))
    low_noise = None
    if options.low_noise_checkpoint:
        low_noise = find_source(options.low_noise_checkpoint, options.weights)
        added = read_loras("--low-noise-lora", options.low_noise_lora, low_noise.config)
        low_noise = completed(low_noise, options.base, added)
        _require_same_model(options, source, low_noise)
    encoders = _encoders(options, source)
    stride, length = _data(options, source, encoders)
    raw = _raw_requests(options)
    target = Target(
        source.config,
        stride,
        length,
        options.zoom,
        encoders,
        trained_null=source.trained_null(),
        batch=options.batch,
    )
    requests = [check_request(one, target) for one in raw]
    _check_outs(raw, options.force)
    drawing, groups = _drawing(options, source), _groups(requests, options, source)
    _note_guidance(requests, raw, drawing.guidance, source)
    _note_noise_levels(options, source, low_noise)
    if any(request.first for request in requests) and not source.trained_with_given_frames():
        print(
            "note: the run was not trained with a first frame (objective.given_first_frame is 0), "
            "so that --image may be followed badly",
            file=sys.stderr,
        )
    if options.dense_attention and source.config.sparse_attention is None:
        print("note: --dense-attention has no effect: the model is dense", file=sys.stderr)
    draw(groups, drawing, (source, low_noise), encoders)
    return 0


def _check_flags(options: argparse.Namespace) -> None:
    """Checks the flags that no model is needed to check.

    Raises:
      InputError: a number is out of range, or flags do not go together.
    """
    counts = f"at least 1 and at most {_LARGEST}"
    bounds: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
        *((name, counts, lambda value: 1 <= value <= _LARGEST) for name in _COUNTS),
        ("guidance", "finite", math.isfinite),
        ("low_noise_guidance", "finite", math.isfinite),
        ("fps", f"above 0 and at most {_LARGEST}", lambda value: 0 < value <= _LARGEST),
        ("boundary", "between 0 and 1", lambda value: 0 < value < 1),
        ("shift", "above 0 and finite", lambda value: 0 < value < math.inf),
    )
    for name, wanted, holds in bounds:
        if (value := getattr(options, name)) is not None and not holds(value):
            flag = name.replace("_", "-")
            raise InputError(f"alload sample: --{flag} is {value}; it must be {wanted}")
    if (options.boundary is None) != (options.low_noise_checkpoint is None):
        raise InputError(
            "alload sample: --boundary and --low-noise-checkpoint go together; give both or neither"
        )
    if options.low_noise_lora and options.low_noise_checkpoint is None:
        raise InputError(
            "alload sample: --low-noise-lora goes with --low-noise-checkpoint; leave it out"
        )


def _note_guidance(
    requests: "list[Request]",
    raw: "list[RawRequest]",
    guidance: float,
    source: "RunSource | FolderSource",
) -> None:
    given = any("negative_prompt" in one.values or "negative_embeds" in one.values for one in raw)
    if guidance == 1 and given:
        print("note: negative embeddings have no effect at --guidance 1", file=sys.stderr)
    zeros = source.config.text and any(request.negative is None for request in requests)
    if guidance != 1 and zeros and not source.trained_null():
        print(
            "note: guidance leads away from zeros, on which the model was not trained; give "
            "--negative-embeds, or --text-encoder for an empty text",
            file=sys.stderr,
        )


def _note_noise_levels(
    options: argparse.Namespace,
    source: "RunSource | FolderSource",
    low_noise: "RunSource | FolderSource | None",
) -> None:
    """Says where a model is used at noise levels on which it was not trained."""
    boundary = 0.0 if options.boundary is None else options.boundary
    used = [("--checkpoint", options.checkpoint, source, (boundary, 1.0))]
    if low_noise is not None:
        flag = "--low-noise-checkpoint"
        used.append((flag, options.low_noise_checkpoint, low_noise, (0.0, boundary)))
    for flag, place, model, (lowest, highest) in used:
        trained = model.noise_levels()
        if lowest < trained[0] or highest > trained[1]:
            print(
                f"note: {flag} {place} was trained on noise levels {trained[0]:g} to "
                f"{trained[1]:g}, and draws from {highest:g} to {lowest:g}",
                file=sys.stderr,
            )


def _encoders(options: argparse.Namespace, source: "RunSource | FolderSource") -> "Encoders":
    from alload_jax.sampling.encoders import find_encoders

    text, vae, image = (
        Path(folder) if folder else None
        for folder in (options.text_encoder, options.vae, options.image_encoder)
    )
    return find_encoders(source.config, source.origin(), text=text, vae=vae, image=image)


def _require_same_model(
    options: argparse.Namespace,
    source: "RunSource | FolderSource",
    low_noise: "RunSource | FolderSource",
) -> None:
    if source.config.architecture() != low_noise.config.architecture():
        raise InputError(
            f"--low-noise-checkpoint {options.low_noise_checkpoint}: holds another model than "
            f"{options.checkpoint}; both experts must have one architecture"
        )


def _drawing(options: argparse.Namespace, source: "RunSource | FolderSource") -> "Drawing":
    """How all samples are drawn and written."""
    from alload_jax.commands.sample_draw import Drawing
    from alload_jax.sampling.flow import LowNoise

    guidance = source.guidance if options.guidance is None else options.guidance
    low_noise = None
    if options.boundary is not None:
        other = options.low_noise_guidance
        low_noise = LowNoise(options.boundary, guidance if other is None else other)
    return Drawing(
        steps=options.steps,
        sampler=options.sampler or source.sampler,
        guidance=guidance,
        low_noise=low_noise,
        batch=options.batch,
        dtype=options.dtype,
        dense=options.dense_attention,
        zoom=options.zoom,
        fps=options.fps or source.fps(),
    )


def _stride(parts: list[str] | None) -> tuple[int, int, int] | None:
    """Parses `4 8 8`, or `4,8,8` as in `alload plan`."""
    if parts is None:
        return None
    numbers = ",".join(parts).split(",")
    if len(numbers) != 3 or not all(one in _STRIDES for one in numbers):
        raise InputError(
            f"alload sample: --vae-stride is {' '.join(parts)}; give three whole numbers from 1 "
            f"to {_LARGEST}, such as 4 8 8"
        )
    return (int(numbers[0]), int(numbers[1]), int(numbers[2]))


def _data(
    options: argparse.Namespace, source: "RunSource | FolderSource", encoders: "Encoders"
) -> tuple[tuple[int, int, int], int | None]:
    """VAE stride and text length of the data; prints a note if they are guessed."""
    from alload_jax.models.families import family_of

    length, guesses = source.text_length(), []
    stride = encoders.vae.stride if encoders.vae else source.vae_stride()
    given = _stride(options.vae_stride)
    if given and encoders.vae and given != encoders.vae.stride:
        raise InputError(
            f"alload sample: --vae-stride is {' '.join(map(str, given))}, but that of --vae "
            f"{options.vae} is {' '.join(map(str, encoders.vae.stride))}; leave --vae-stride out"
        )
    if (stride := given or stride) is None:
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

    given = {name: getattr(options, name) for name in (*_LISTED, "prompt", "prompt_embeds")}
    given |= {"class": options.classes and tuple(options.classes)}
    values: dict[str, object] = {
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
) -> "list[Group]":
    """Groups the requests by shape, in order of first appearance."""
    from alload_jax.commands.sample_draw import Group

    sampler = options.sampler or source.sampler
    if options.round_timesteps and sampler != "unipc":
        raise InputError(
            f"alload sample: --round-timesteps is what diffusers does with unipc, and the sampler "
            f"is {sampler}; give --sampler unipc, or leave it out"
        )
    by_shape: dict[Hashable, list[Request]] = {}
    for request in requests:
        by_shape.setdefault(request.shape(), []).append(request)
    groups = []
    for members in by_shape.values():
        seq_len = math.prod(members[0].grid) // math.prod(source.config.patch_size)
        shift = source.shift(seq_len) if options.shift is None else options.shift
        sigmas = noise_levels(sampler, options.steps, shift)
        rounded = rounded_timesteps(options.steps, shift) if options.round_timesteps else None
        groups.append(Group(members, shift, sigmas, rounded))
    return groups
