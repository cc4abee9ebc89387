"""Draws the samples of `alload sample` and writes them."""

import argparse
import dataclasses
import math
import os
from collections.abc import Hashable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from alload_jax.commands.flags import of_each_expert
from alload_jax.commands.model_source import Source, completed, find_source
from alload_jax.diffusion.schedules import noise_levels, rounded_timesteps
from alload_jax.errors import InputError, print_stderr
from alload_jax.files import read_json
from alload_jax.models.families import family_of
from alload_jax.planning.samples import Triple
from alload_jax.sampling import flow
from alload_jax.sampling.encoders import Encoders, find_encoders
from alload_jax.sampling.pictures import LATENTS, write_clip
from alload_jax.sampling.requests import (
    FILES,
    RawRequest,
    Request,
    Target,
    arrays_of,
    check_request,
    decoded,
    read_list,
    stacked,
)
from alload_jax.training.memory import memory_named
from alload_jax.training.restore import one_device_mesh

_LISTED = (
    *("negative_prompt", "negative_embeds", "image_embeds", "image", "last_image"),
    *("frames", "height", "width", "seed", "out"),
)
"""Flags that apply to every line of a list that does not override them."""


def sample(options: argparse.Namespace) -> None:
    """Checks all requests, reads the weights, draws and writes.

    Args:
      options: the flags. Those of which the model knows the default are filled in.

    Raises:
      InputError: a request or a file is not valid; or a sample is not finite, does not fit the
        memory or cannot be written.
    """
    _name_both(options)
    source = find_source(options.checkpoint, options.weights, options.step)
    if options.low_noise_checkpoint and options.boundary is None:
        options.boundary = source.noise_levels()[0]
    if options.boundary == 0:
        raise InputError(
            f"alload sample: {options.checkpoint} does not say from which noise level its expert "
            "is used; give --boundary, such as 0.875"
        )
    source = completed(source, options.base, "--lora", options.lora, options.skip_unknown)
    low_noise = _low_noise_source(options, source)
    told = options.embedded_guidance
    if told is not None and source.config.with_guidance(told) is source.config:
        _note("--embedded-guidance has no effect: the model takes no scale of guidance")
    for name in ("guidance", "embedded_guidance", "sampler"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(source.sampling, name))
    options.fps = options.fps or source.fps()
    named = {"text": options.text_encoder, "vae": options.vae, "image": options.image_encoder}
    folders = {name: Path(folder) if folder else None for name, folder in named.items()}
    encoders = find_encoders(source.config, source.origin(), **folders)
    stride, length = _data(options, source, encoders)
    given = {name: getattr(options, name) for name in (*_LISTED, "prompt", "prompt_embeds")}
    given |= {"class": options.classes and tuple(options.classes)}
    values = {name: Path(v) if name in FILES else v for name, v in given.items() if v is not None}
    raw = read_list(Path(options.list), values) if options.list else [RawRequest(values)]
    null, batch = source.trained_null(), options.batch
    target = Target(source.config, stride, length, options.zoom, encoders, null, batch)
    requests = [check_request(one, target) for one in raw]
    _check_outs(raw, options.force)
    groups = _groups(options, requests, source)
    _note_guidance(requests, raw, options.guidance, source)
    _note_noise_levels(options, source, low_noise)
    if any(request.first for request in requests) and not source.trained_with_given_frames():
        _note(
            "the run was not trained with a first frame (objective.given_first_frame is 0), so "
            "that --image may be followed badly"
        )
    if options.dense_attention and source.config.sparse_attention is None:
        _note("--dense-attention has no effect: the model is dense")
    _draw(options, groups, source, low_noise, encoders)


def _name_both(options: argparse.Namespace) -> None:
    """Names the second of two experts, and what belongs to it, where --checkpoint holds both."""
    options.low_noise_base, place = options.base, Path(options.checkpoint)
    first, *others = of_each_expert(options, "checkpoint")
    for second in others:
        index = options.boundary is None and read_json(place / "model_index.json")
        options.boundary = index.get("boundary_ratio") if index else options.boundary
        options.checkpoint, options.low_noise_checkpoint = first.checkpoint, second.checkpoint
        options.base, options.low_noise_base = first.base, second.base
        options.lora, options.low_noise_lora = first.lora, second.lora + options.low_noise_lora


def _note(words: str) -> None:
    print_stderr(f"note: {words}")


def _low_noise_source(options: argparse.Namespace, source: Source) -> Source | None:
    """The second of two experts, which has the first one's architecture."""
    if not options.low_noise_checkpoint:
        return None
    found = find_source(options.low_noise_checkpoint, options.weights, options.step)
    added = ("--low-noise-lora", options.low_noise_lora, options.skip_unknown)
    found = completed(found, options.low_noise_base, *added)
    if source.config.architecture() != found.config.architecture():
        raise InputError(
            f"--low-noise-checkpoint {options.low_noise_checkpoint}: holds another model than "
            f"{options.checkpoint}; both experts must have one architecture"
        )
    return found


def _data(
    options: argparse.Namespace, source: Source, encoders: Encoders
) -> tuple[Triple, int | None]:
    """VAE stride and text length of the data; prints a note if they are guessed."""
    length, guesses = source.text_length(), []
    stride = encoders.vae.stride if encoders.vae else source.vae_stride()
    given = options.vae_stride
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
        _note(f"the run's data.json is gone: {'; '.join(guesses)}")
    return stride, length


def _check_outs(raw: Sequence[RawRequest], force: bool) -> None:
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


def _note_guidance(
    requests: Sequence[Request], raw: Sequence[RawRequest], guidance: float, source: Source
) -> None:
    given = any("negative_prompt" in one.values or "negative_embeds" in one.values for one in raw)
    if guidance == 1 and given:
        _note("negative embeddings have no effect at --guidance 1")
    zeros = source.config.text and any(request.negative is None for request in requests)
    if guidance != 1 and zeros and not source.trained_null():
        _note(
            "guidance leads away from zeros, on which the model was not trained; give "
            "--negative-embeds, or --text-encoder for an empty text"
        )


def _note_noise_levels(
    options: argparse.Namespace, source: Source, low_noise: Source | None
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
            _note(
                f"{flag} {place} was trained on noise levels {trained[0]:g} to {trained[1]:g}, and "
                f"draws from {highest:g} to {lowest:g}"
            )


Group = tuple[list[Request], float, np.ndarray, np.ndarray | None]
"""Requests of one shape, which one program draws; the shift of their noise levels; these, [steps +
1]; and [steps] rounded timesteps, None for those of the noise levels."""


def _groups(
    options: argparse.Namespace, requests: Sequence[Request], source: Source
) -> list[Group]:
    """Groups the requests by shape, in order of first appearance."""
    if options.round_timesteps and options.sampler != "unipc":
        raise InputError(
            f"alload sample: --round-timesteps is what diffusers does with unipc, and the sampler "
            f"is {options.sampler}; give --sampler unipc, or leave it out"
        )
    by_shape: dict[Hashable, list[Request]] = {}
    for request in requests:
        by_shape.setdefault(request.shape(), []).append(request)
    groups: list[Group] = []
    for members in by_shape.values():
        seq_len = math.prod(members[0].grid) // math.prod(source.config.patch_size)
        shift = source.shift(seq_len) if options.shift is None else options.shift
        sigmas = noise_levels(options.sampler, options.steps, shift)
        rounded = rounded_timesteps(options.steps, shift) if options.round_timesteps else None
        groups.append((members, shift, sigmas, rounded))
    return groups


def _draw(
    options: argparse.Namespace,
    groups: Sequence[Group],
    source: Source,
    low_noise: Source | None,
    encoders: Encoders,
) -> None:
    """Encodes what requests name, reads the weights, then draws and writes each batch."""
    config = source.config.with_guidance(options.embedded_guidance)
    config = dataclasses.replace(config, matmul="dtype")  # float8 is for training
    if options.dtype:
        config = dataclasses.replace(config, dtype=options.dtype)
    if options.dense_attention and config.sparse_attention is not None:
        config = dataclasses.replace(config, sparse_attention=config.sparse_attention.as_dense())
    requests = [request for members, *_ in groups for request in members]
    arrays = {each.out: arrays_of(each, config, encoders) for each in requests}
    encoders.unload()  # only the VAE is used from here on
    mesh, guidance = one_device_mesh(), options.low_noise_guidance
    guidances = (options.guidance, options.guidance if guidance is None else guidance)
    experts = [each.values(mesh) for each in (source, low_noise) if each is not None]
    failed: list[str] = []
    for members, shift, sigmas, rounded in groups:
        flows = [flow.make_flow(config, options.sampler, sigmas, options.guidance, rounded)]
        if low_noise is not None:
            given = (config, options.sampler, sigmas, guidances, options.boundary, rounded)
            flows = flow.make_expert_flows(*given)
        programs = [jax.jit(each) for each in flows]
        for begin in range(0, len(members), options.batch):
            part = members[begin : begin + options.batch]
            filled = part + part[-1:] * (options.batch - len(part))
            what = f"{part[0].out}: drawing latents of {part[0].grid}"
            with memory_named(what, "choose a smaller size or --batch"):
                # Each row depends only on its request.
                keys = [jax.random.key(each.seed) for each in filled]
                shape = (*part[0].grid, config.latent_channels)
                state: PyTree = jnp.stack([jax.random.normal(key, shape) for key in keys])
                conditions = stacked([arrays[each.out] for each in filled])
                for program, values in zip(programs, experts, strict=True):
                    state = program(values, state, *conditions)
                drawn = np.asarray(state)
            for request, clip in zip(part, drawn, strict=False):
                if not np.isfinite(clip).all():
                    failed.append(str(request.out))
                    continue
                if request.out.suffix.lower() != LATENTS:
                    clip = decoded(clip, request, encoders.vae)
                notes = {"steps": options.steps, "sampler": options.sampler, "seed": request.seed}
                notes |= {"guidance": float(options.guidance), "shift": float(shift)}
                write_clip(request.out, clip, notes, options.zoom, options.fps)
                print(request.out, flush=True)
    if failed:
        raise InputError(
            f"{', '.join(failed)}: the model's output is not finite; choose another checkpoint, or "
            "a guidance closer to 1"
        )
