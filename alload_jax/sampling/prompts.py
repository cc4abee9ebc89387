"""Draws prompts during training and writes them as videos, decoded where there is a VAE."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from alload_jax.data.manifest import Manifest
from alload_jax.diffusion.schedules import Sampler, noise_levels
from alload_jax.diffusion.timesteps import TimestepConfig, shift_of
from alload_jax.models.common.config import ModelConfig
from alload_jax.sampling.clips import LATENTS, write_clip
from alload_jax.sampling.conditions import RequestArrays, arrays_of, stacked
from alload_jax.sampling.decoding import decoded, family_fps
from alload_jax.sampling.encoders import Encoders, find_encoders
from alload_jax.sampling.flow import make_flow
from alload_jax.sampling.pictures import Picture
from alload_jax.sampling.progress_grid import Row
from alload_jax.sampling.request_checks import check_request
from alload_jax.sampling.requests import RawRequest, Request, Target


@dataclass(frozen=True)
class PromptConfig:
    """A sample that is drawn from words.

    Attributes:
      prompt: what it shows.
      frames, height, width: its size in pixels.
      seed: seed of its noise.
      negative_prompt: what guidance leads away from; null for zeros.
      image, last_image: pictures of the first and last frame, for models that take them.
    """

    prompt: str
    frames: int
    height: int
    width: int
    seed: int = 0
    negative_prompt: str | None = None
    image: str | None = None
    last_image: str | None = None


@dataclass(frozen=True)
class EncoderFolders:
    """Local folders of the encoders; null for none.

    Attributes:
      text: text encoder, for prompts; not needed for data that were prepared with `--text bytes`.
      vae: VAE, which decodes samples; without it latents are written.
      image: image encoder, for models that take image embeddings.
    """

    text: str | None = None
    vae: str | None = None
    image: str | None = None


class _Drawn(NamedTuple):
    """A prompt, ready to be drawn."""

    request: Request
    arrays: RequestArrays
    flow: Any


class PromptWriter:
    """Draws the config's prompts and writes them to a folder for each step."""

    def __init__(
        self,
        prompts: Sequence[PromptConfig],
        folders: EncoderFolders,
        model: ModelConfig,
        timesteps: TimestepConfig,
        method: tuple[Sampler, int, float],
        manifest: Manifest,
        suffix: str,
        trained_null: bool,
    ):
        """Checks and encodes the prompts; weights of text encoders are freed again.

        Args:
          prompts: what to draw.
          folders: where the encoders are.
          model: config of the model.
          timesteps: distribution of noise levels in training, for their shift.
          method: sampler, number of evaluations, scale of guidance.
          manifest: the training data.
          suffix: suffix of the files of clips, such as `.gif`.
          trained_null: see `Target`.

        Raises:
          InputError: a prompt cannot be encoded or drawn.
        """
        self._model, self._words = model, [each.prompt for each in prompts]
        self._fps = manifest.fps or family_fps(model, manifest.vae_stride)
        sampler, steps, guidance = method
        self._notes = {"steps": steps, "sampler": sampler, "guidance": guidance}
        encoders = _encoders(folders, model, manifest) if prompts else Encoders()
        length = manifest.longest_text()
        target = Target(model, manifest.vae_stride, length, 1, encoders, trained_null)
        self._drawn = []
        for number, prompt in enumerate(prompts):
            request = _request(number, prompt, target, suffix)
            seq_len = math.prod(request.grid) // math.prod(model.patch_size)
            sigmas = noise_levels(sampler, steps, shift_of(timesteps, seq_len))
            flow = jax.jit(make_flow(model, sampler, sigmas, guidance))
            self._drawn.append(_Drawn(request, arrays_of(request, model, encoders), flow))
        self._vae = encoders.vae
        encoders.unload()

    def rows(self) -> tuple[Row, ...]:
        """The prompts and their files; none for samples that are written as latents."""
        pairs = zip(self._words, (each.request.out for each in self._drawn), strict=True)
        return tuple(Row(words, str(out)) for words, out in pairs if out.suffix != LATENTS)

    def pictures(self, folder: Path, values: Any) -> Iterator[Picture]:
        """Draws every prompt with these values of the model; see `SampleWriter.pictures`."""
        for request, arrays, flow in self._drawn:
            shape = (1, *request.grid, self._model.latent_channels)
            noise = jax.random.normal(jax.random.key(request.seed), shape)
            drawn = flow(values, noise, *jax.tree.map(jnp.asarray, stacked([arrays])))
            (clip,) = np.asarray(process_allgather(drawn, tiled=True))
            path = folder / request.out
            yield Picture(path, partial(self._write, path, clip, request))

    def _write(self, path: Path, clip: np.ndarray, request: Request) -> None:
        if path.suffix != LATENTS:
            clip = decoded(clip, request, self._vae)
        write_clip(path, clip, self._notes, fps=self._fps)


def _encoders(folders: EncoderFolders, model: ModelConfig, manifest: Manifest) -> Encoders:
    found = {name: Path(folder) if folder else None for name, folder in asdict(folders).items()}
    return find_encoders(model, manifest.origin, **found)


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
