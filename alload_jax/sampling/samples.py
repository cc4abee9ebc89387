"""Generates samples of classes or prompts, and writes them as pictures."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import PyTree

from alload_jax.data.manifest import Manifest
from alload_jax.data.record import pixel_channels, unfold_frames
from alload_jax.diffusion.schedules import noise_levels
from alload_jax.diffusion.timesteps import TimestepConfig, shift_of
from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.planning.samples import Geometry, Triple, divisible
from alload_jax.sampling.config import Draw, PromptConfig, SamplingConfig
from alload_jax.sampling.encoders import Encoders, find_encoders
from alload_jax.sampling.flow import Condition, Flow, make_expert_flows
from alload_jax.sampling.pictures import (
    LATENTS,
    Picture,
    cell_box,
    clip_suffix,
    page_size,
    too_large,
    write_clip,
    write_grid,
)
from alload_jax.sampling.progress_grid import Progress, ProgressGrid, Row, step_folder
from alload_jax.sampling.requests import (
    RawRequest,
    Request,
    Target,
    arrays_of,
    check_request,
    decoded,
    family_fps,
    require_memory,
    stacked,
)


def make_draw(
    model: ModelConfig, timesteps: TimestepConfig, config: SamplingConfig, vae_stride: Triple
) -> Draw:
    """Builds a function that generates samples of pixels with classifier-free guidance.

    Noise levels are shifted by sequence length as in training, unless the config has a shift.

    Args:
      model: config of the model.
      timesteps: distribution of noise levels in training.
      config: how to generate.
      vae_stride: pixels per latent, (frames, height, width).
    """

    @partial(jax.jit, static_argnums=3)
    def draw(values: PyTree, key: jax.Array, labels: jax.Array, grid: Triple) -> jax.Array:
        noise = jax.random.normal(key, (len(labels), *grid, model.in_channels))
        null = jnp.full_like(labels, model.num_classes)
        _, flow = _flow(model, timesteps, config, grid)
        return flow(values, noise, Condition(labels), Condition(null))

    def draw_on_host(
        values: PyTree, key: jax.Array, labels: np.ndarray, size: Triple
    ) -> np.ndarray:
        grid = Geometry(vae_stride).latent_grid(*np.asarray(size)[:, None])[0].tolist()
        drawn = draw(values, key, jnp.asarray(labels), tuple(grid))
        return unfold_frames(np.asarray(process_allgather(drawn, tiled=True)), vae_stride[0])

    return draw_on_host


def _flow(
    model: ModelConfig, timesteps: TimestepConfig, config: SamplingConfig, grid: Triple
) -> list[Flow]:
    """The flow of samples whose latents have this grid, behind the part that another expert draws.

    Below `lowest`, where it was not trained, a model goes to the data that it predicts.
    """
    seq_len = math.prod(grid) // math.prod(model.patch_size)
    shift = config.shift or shift_of(timesteps, seq_len)
    sigmas = noise_levels(config.sampler, config.steps, shift)
    model = model.with_guidance(config.embedded_guidance)
    sigmas = np.append(sigmas[:-1][sigmas[:-1] >= timesteps.lowest], np.float32(0))
    below = timesteps.highest if config.high_noise else math.inf
    return make_expert_flows(model, config.sampler, sigmas, (config.guidance,) * 2, below)


class SampleWriter:
    """Generates the config's grids and prompts and writes them to a folder for each step.

    Attributes:
      draw: function that generates samples.
      condition_tokens: number of condition tokens per sample.
      origin: origin of the training data.
    """

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        timesteps: TimestepConfig,
        config: SamplingConfig,
        manifest: Manifest,
        trained_null: bool,
    ):
        """Checks that the samples can be generated, and encodes the prompts.

        Args:
          folder: for the files of all steps.
          model: config of the model.
          timesteps: distribution of noise levels in training.
          config: what to generate.
          manifest: the training data.
          trained_null: whether the model is trained with the null condition, which guidance needs.

        Raises:
          InputError: a grid has labels or sizes that the model or the data do not support, or a
            prompt cannot be encoded or drawn.
        """
        self.draw = make_draw(model, timesteps, config, manifest.vae_stride)
        self._folder, self._model, self._config = folder, model, config
        self.condition_tokens, self.origin = manifest.longest_text(), manifest.origin
        _check_grids(config, model, manifest)
        self._labels = []  # of each grid, [rows·num_classes, condition_tokens] int32
        for grid in config.grids:
            row, column = np.indices((grid.rows, model.num_classes)).reshape(2, -1)
            labels = np.full((len(row), self.condition_tokens), model.num_classes, np.int32)
            labels[:, 0] = column
            for n in range(1, grid.labels):
                labels[:, n] = (column + n * (row + 1)) % model.num_classes
            self._labels.append(labels)
        self._fps = manifest.fps or family_fps(model, manifest.vae_stride)
        encoders, self._prompts = Encoders(), list[_Prompt]()
        if config.prompts:
            folders = asdict(config.encoders).items()
            found = {name: Path(folder) if folder else None for name, folder in folders}
            encoders = find_encoders(model, manifest.origin, **found)
        target = Target(
            model, manifest.vae_stride, self.condition_tokens, 1, encoders, trained_null
        )
        for number, prompt in enumerate(config.prompts):
            request = _request(number, prompt, target, f".{config.clip_format}")
            flows = map(jax.jit, _flow(model, timesteps, config, request.grid))
            noise = jax.random.normal(
                jax.random.key(request.seed), (1, *request.grid, model.latent_channels)
            )
            arrays = jax.tree.map(jnp.asarray, stacked([arrays_of(request, model, encoders)]))
            self._prompts.append(_Prompt(prompt.prompt, request, noise, arrays, *flows))
        self._vae = encoders.vae
        encoders.unload()

    @property
    def count(self) -> int:
        """Number of files of each step."""
        return len(self._config.grids) + len(self._config.prompts)

    def progress(self, resumed_at: int) -> Progress:
        """What shows the samples over the steps of a run, of which `resumed_at` are done."""
        config, classes, grids = self._config, self._model.num_classes, list[ProgressGrid]()
        for grid, drawn_labels in zip(config.grids, self._labels, strict=True):
            file = f"{grid.name}{clip_suffix(grid.frames, config.clip_format)}"
            of_classes = []  # a row for each, with the first sample of its column
            for column in range(classes):
                labels = [str(one) for one in drawn_labels[column].tolist() if one < classes]
                box = cell_box(0, column, classes, grid.height, grid.width)
                of_classes.append(Row(" ".join(labels), file, box))
            grids.append(ProgressGrid(f"progress_{grid.name}", tuple(of_classes)))
        outs = [(each.words, each.request.out) for each in self._prompts]
        rows = tuple(Row(words, str(out)) for words, out in outs if out.suffix != LATENTS)
        if rows:
            grids.append(ProgressGrid("progress_prompts", rows))
        drawn = asdict(config) | dict.fromkeys(("every", "encoders", "clip_format"))
        digest = hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:16]
        return Progress(self._folder, grids, digest, resumed_at)

    def begin(self, read: Callable[[str], PyTree]) -> None:
        """Draws the higher noise levels of all prompts with the expert that another run trained.

        Args:
          read: gives the values of the model that a run folder holds; called only where needed.
        """
        if self._config.high_noise and self._prompts:
            values = read(self._config.high_noise)
            for at, each in enumerate(self._prompts):
                state = each.before(values, each.noise, *each.arrays)
                self._prompts[at] = each._replace(noise=state)

    def pictures(self, step: int, values: PyTree) -> Iterator[Picture]:
        """Generates every grid and prompt, usually with the EMA's values of the model.

        A collective operation, because each process may hold a part of the weights: go on to the
        end in all of them, also where a picture cannot be written.

        Yields:
          each picture, for the first process to write.
        """
        folder = step_folder(self._folder, step)
        folder.mkdir(parents=True, exist_ok=True)
        classes = self._model.num_classes
        for number, (grid, labels) in enumerate(zip(self._config.grids, self._labels, strict=True)):
            key = jax.random.fold_in(jax.random.key(self._config.seed), number)
            drawn = self.draw(values, key, labels, grid.size)
            clips = drawn.reshape(grid.rows, classes, *drawn.shape[1:])
            headers = [str(label) for label in range(classes)]
            path = folder / f"{grid.name}{clip_suffix(grid.frames, self._config.clip_format)}"
            yield Picture(path, partial(write_grid, path, clips, headers))
        for _, request, noise, arrays, _, flow in self._prompts:
            batch = flow(values, noise, *arrays)
            (clip,) = np.asarray(process_allgather(batch, tiled=True))
            path = folder / request.out
            yield Picture(path, partial(self._write_prompt, path, clip, request))

    def _write_prompt(self, path: Path, clip: np.ndarray, request: Request) -> None:
        if path.suffix != LATENTS:
            clip = decoded(clip, request, self._vae)
        config = self._config
        notes = {"steps": config.steps, "sampler": config.sampler, "guidance": config.guidance}
        write_clip(path, clip, notes, fps=self._fps)


class _Prompt(NamedTuple):
    """A prompt, ready to be drawn: `flow` takes the noise, or what `before` makes of it."""

    words: str
    request: Request
    noise: PyTree
    arrays: tuple[Condition, Condition]
    before: Flow
    flow: Flow


def _request(number: int, prompt: PromptConfig, target: Target, suffix: str) -> Request:
    values = {name: value for name, value in asdict(prompt).items() if value is not None}
    for name in ("image", "last_image"):
        if name in values:
            values[name] = Path(values[name])
    if target.picture_channels is None:
        suffix = LATENTS
    elif prompt.frames == 1:
        suffix = ".png"
    values["out"] = Path(f"prompt_{number}{suffix}")
    place = f"sampling.prompts[{number}]"
    return check_request(RawRequest(values, place, frozenset(values)), target)


def _check_grids(config: SamplingConfig, model: ModelConfig, manifest: Manifest) -> None:
    grids, columns = config.grids, model.num_classes
    if grids and model.text:
        raise InputError(
            "sampling.grids: a column shows a class, but the model's condition is text; leave "
            "sampling.grids empty, and list sampling.prompts"
        )
    stride, channels = manifest.vae_stride, model.in_channels
    if grids and pixel_channels(stride, channels) is None:
        raise InputError(
            f"sampling.grids: the data are VAE latents (stride {stride}, {channels} channels), "
            "which cannot be shown as pictures; leave sampling.grids empty"
        )
    for grid in grids:
        if grid.labels > (most := manifest.longest_text()):
            raise InputError(
                f"sampling.grids: labels is {grid.labels}, but no sample of the data has more than "
                f"{most}; set at most that"
            )
        if not divisible(grid.size, stride, model.patch_size):
            held = f" in latents of 1 frame, then {stride[0]} each" if stride[0] > 1 else ""
            raise InputError(
                f"sampling.grids: {grid.size} is not a multiple of model.patch_size "
                f"{model.patch_size}{held}; choose a size that is"
            )
        tokens = Geometry(stride, model.patch_size).token_grid(*np.asarray(grid.size)[:, None])[0]
        count = grid.rows * columns
        require_memory(f"sampling.grids: {grid.size}", model, math.prod(tokens.tolist()), count)
        width, height = page_size(grid.rows, columns, grid.height, grid.width)
        if large := too_large(clip_suffix(grid.frames, config.clip_format), height, width):
            raise InputError(f"sampling.grids: {grid.size} with {grid.rows} rows {large}")
