"""What the image encoders of transformers have in common: a picture to embeddings."""

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from alload_jax.encoders.devices import choose_device, inference, require_packages
from alload_jax.encoders.folders import (
    find_beside,
    find_folder,
    read_config,
    weight_files,
    weights_digest,
)
from alload_jax.encoders.loading import load_model

_PROCESSORS = ("preprocessor_config.json",)


class ImageEncoder(ABC):
    """An image encoder in local folders; the first call that needs weights loads them.

    Attributes:
      name: its name in the origin of data.
      model_type: the `model_type` of its config.json.
      described: what it is, for messages.
      processor: name of the folder of the image processor in a pipeline.
      folder: folder of config.json and weights.
    """

    name: ClassVar[str]
    model_type: ClassVar[str]
    described: ClassVar[str]
    processor: ClassVar[str]

    def __init__(
        self, folder: str | Path, *, device: str | None = None, dtype: str | None = "float32"
    ):
        """Reads the config.

        Args:
          folder: local folder of encoder and processor, or of a pipeline with both in subfolders,
            `image_encoder` and `processor`.
          device: PyTorch device, such as `cuda:1`; None takes a GPU if there is one.
          dtype: `bfloat16` or `float32`, in which Wan's pipelines run it.

        Raises:
          InputError: the folder holds no such encoder.
        """
        self.folder = find_folder(Path(folder), "image_encoder", self.described)
        self._config = read_config(self.folder, "model_type", [self.model_type], self.described)
        self._processor_folder = find_beside(
            self.folder, self.processor, _PROCESSORS, "image processor"
        )
        self._asked = device, dtype

    @property
    def width(self) -> int:
        """Components of an embedding."""
        return int(self._config.get("hidden_size", 768))

    def origin(self) -> dict[str, Any]:
        """Name and a digest of config, weights and image processor, as JSON values.

        Raises:
          InputError: weights are missing.
        """
        files = weight_files(self.folder, "model")
        files += [self._processor_folder / name for name in _PROCESSORS]
        return {"name": self.name, "weights": weights_digest(self._config, files)}

    def encode(self, picture: np.ndarray) -> np.ndarray:
        """Encodes a picture.

        Args:
          picture: [H, W, 3] uint8.

        Returns:
          [L, width] float32.

        Raises:
          ValueError: the picture has another shape or dtype.
          InputError: the weights cannot be loaded.
        """
        from PIL import Image

        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
            raise ValueError(
                f"the picture is {picture.dtype} of shape {picture.shape}; give uint8 [H, W, 3]"
            )
        model = self._model
        pixels = self._processor(images=Image.fromarray(picture), return_tensors="pt").pixel_values
        with inference():
            found = self._states(model, pixels.to(self._device, model.dtype))
            return np.asarray(found[0].float().cpu().numpy())

    def unload(self) -> None:
        """Frees the weights; the next call of `encode` loads them again."""
        self.__dict__.pop("_model", None)

    @abstractmethod
    def _classes(self) -> tuple[Any, Any]:
        """The classes of encoder and processor in transformers."""

    @abstractmethod
    def _states(self, model: Any, pixels: Any) -> Any:
        """[1, L, width], what diffusion models take of the encoder's output."""

    @cached_property
    def _device(self) -> Any:
        return choose_device(self._asked[0])

    @cached_property
    def _processor(self) -> Any:
        require_packages(self.described)
        _, kind = self._classes()
        return kind.from_pretrained(self._processor_folder, local_files_only=True)

    @cached_property
    def _model(self) -> Any:
        require_packages(self.described)
        weight_files(self.folder, "model")
        kind, _ = self._classes()
        return load_model(kind, self.folder, self._device, self._asked[1])
