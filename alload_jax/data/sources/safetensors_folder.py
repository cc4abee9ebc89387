"""A folder of safetensors files with one sample each, whose tensors have names of your choice."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from alload_jax.data.sources.arrays import Layout
from alload_jax.data.sources.files import find_files
from alload_jax.data.sources.tensor_samples import Reading, TensorNames, TensorSamples
from alload_jax.data.sources.vae_statistics import Normalize
from alload_jax.errors import InputError
from alload_jax.planning.geometry import Triple

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class SafetensorsFolder:
    """Safetensors files with one sample each; see `SourceConfig`.

    Attributes:
      name: `safetensors`.
      latents: name of the tensor of latents.
      text: name of the tensor of text embeddings.
      mask: name of the text's mask: 1 for tokens, then 0 for padding; null if there is none.
      labels: name of a tensor of classes, which then takes the place of text.
      text_suffix: if the text lies in a file of its own beside FILE.safetensors, what follows FILE
        in its name, such as _te.safetensors; null if it lies in the same file.
      layout: order of the axes of latents.
      normalize: the VAE whose statistics normalise the latents; none for normalised latents.
      vae_stride: pixels per latent along frames, height and width; null for the usual one of
        latents with 16 or 48 channels.
    """

    name: Literal["safetensors"] = "safetensors"
    latents: str = "latents"
    text: str = "prompt_embeds"
    mask: str | None = None
    labels: str | None = None
    text_suffix: str | None = None
    layout: Layout = "CTHW"
    normalize: Normalize | None = None
    vae_stride: Triple | None = None

    def __post_init__(self) -> None:
        if self.text_suffix is not None and not self.text_suffix.endswith(SUFFIX):
            raise InputError(
                f"data.source.text_suffix is {self.text_suffix!r}; it must end in {SUFFIX}"
            )

    def open(self, folder: str) -> TensorSamples:
        """See `SourceConfig.open`.

        Raises:
          InputError: a file is missing or damaged, or lacks a tensor.
        """
        place = Path(folder)
        files = find_files(place, SUFFIX) if place.exists() else []
        if not files:
            raise InputError(f"{place}: holds no {SUFFIX} files; set data.folder to their folder")
        present = set(files)
        if self.text_suffix:
            files = [name for name in files if not self._is_text(place, name, present)]
        names = [self._names(place, name, present) for name in files]
        reading = Reading(self.layout, self.normalize, classes=self.labels is not None)
        return TensorSamples(place, names, reading, self.vae_stride, {"format": "safetensors"})

    def _is_text(self, folder: Path, name: str, present: set[str]) -> bool:
        """Whether a file holds the text of another.

        Raises:
          InputError: it has a text of its own, as samples do.
        """
        assert self.text_suffix is not None
        own = name.removesuffix(SUFFIX) + self.text_suffix
        if name.endswith(self.text_suffix) and own in present:
            raise InputError(
                f"{folder / name}: its name is that of a text, but {own} would be its own; rename "
                "the sample so that it does not end in data.source.text_suffix"
            )
        return name.endswith(self.text_suffix)

    def _names(self, folder: Path, name: str, present: set[str]) -> TensorNames:
        other = name.removesuffix(SUFFIX) + self.text_suffix if self.text_suffix else name
        if other not in present:
            raise InputError(
                f"{folder / name}: its text {other} is missing; add it, or remove both"
            )
        mask = None if self.labels else self.mask
        return TensorNames(name, self.latents, other, self.labels or self.text, mask)
