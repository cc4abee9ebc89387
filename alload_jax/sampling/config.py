"""The sampling section of a config."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import PyTree

from alload_jax.diffusion.schedules import Sampler
from alload_jax.errors import InputError, require_fields, require_positive
from alload_jax.planning.samples import Triple
from alload_jax.sampling.pictures import ClipFormat, has_mp4


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


@dataclass(frozen=True)
class GridConfig:
    """A picture of samples with a column per class.

    Attributes:
      frames, height, width: size of each sample; one frame gives a PNG, more frames a GIF.
      rows: number of samples per class.
      labels: number of classes in the condition of each sample: the column's class and the next
        ones.
    """

    frames: int
    height: int
    width: int
    rows: int = 6
    labels: int = 1

    def __post_init__(self) -> None:
        names = ("frames", "height", "width", "rows", "labels")
        require_positive("sampling.grids: ", self, *names)

    @property
    def size(self) -> Triple:
        """(frames, height, width) of each sample in pixels."""
        return (self.frames, self.height, self.width)

    @property
    def name(self) -> str:
        """The name of its files, without suffix."""
        return "x".join(map(str, self.size))


@dataclass(frozen=True)
class SamplingConfig:
    """Which samples are generated, during training and at the end.

    Attributes:
      every: number of optimizer steps between samples; null for only at the end.
      sampler: `unipc`, or `euler`, which needs more steps for the same error.
      steps: number of evaluations of the model.
      guidance: scale of classifier-free guidance; 1 is none.
      embedded_guidance: scale that models are told which take one as an input.
      shift: shift of the noise levels; null for that of training at each size.
      seed: seed of the initial noise.
      grids: pictures of classes.
      prompts: samples of models of text.
      encoders: folders of encoders for the prompts.
      high_noise: run folder of the expert that draws prompts at noise levels from
        objective.timesteps.highest on; null for none.
      clip_format: file format of clips; `mp4` needs the extra `media`.
    """

    every: int | None = None
    sampler: Sampler = "unipc"
    steps: int = 30
    guidance: float = 2.0
    embedded_guidance: float = 6.0
    shift: float | None = None
    seed: int = 0
    grids: tuple[GridConfig, ...] = ()
    prompts: tuple[PromptConfig, ...] = ()
    encoders: EncoderFolders = field(default_factory=EncoderFolders)
    high_noise: str | None = None
    clip_format: ClipFormat = "gif"

    def __post_init__(self) -> None:
        if self.clip_format == "mp4" and not has_mp4():
            raise InputError(
                "sampling.clip_format is mp4, which needs the package av; "
                "install alload-jax[media], or choose gif"
            )
        require_positive("sampling.", self, "every", "steps")
        require_fields("sampling.", self, "embedded_guidance", lambda v: 0 <= v < 1e6, "0 or more")
        require_fields("sampling.", self, "shift", lambda v: 0 < v < math.inf, "above 0, or null")


Draw = Callable[[PyTree, jax.Array, np.ndarray, Triple], np.ndarray]
"""(values of a model, key, labels [B, L], (frames, height, width) in pixels) → samples
[B, frames, height, width, 1 or 3]."""
