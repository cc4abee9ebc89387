"""The image encoder of Wan 2.1's image-to-video models: CLIP of transformers."""

from functools import cached_property
from pathlib import Path
from typing import Any

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

_WANTED = "CLIP's image encoder (CLIPVisionModel, as transformers saves it)"
_PROCESSORS = ("preprocessor_config.json",)


class ClipImage:
    """CLIP's image encoder in local folders; the first call that needs weights loads them.

    Attributes:
      folder: folder of config.json and weights.
    """

    def __init__(
        self, folder: str | Path, *, device: str | None = None, dtype: str | None = "float32"
    ):
        """Reads the config.

        Args:
          folder: local folder of encoder and processor, or of a pipeline with the subfolders
            `image_encoder` and `image_processor`.
          device: PyTorch device, such as `cuda:1`; None takes a GPU if there is one.
          dtype: `bfloat16` or `float32`, in which Wan's pipelines run it.

        Raises:
          InputError: the folder holds no such encoder.
        """
        self.folder = find_folder(Path(folder), "image_encoder", _WANTED)
        self._config = read_config(self.folder, "model_type", ["clip_vision_model"], _WANTED)
        self._processor_folder = find_beside(
            self.folder, "image_processor", _PROCESSORS, "image processor"
        )
        self._asked = device, dtype

    def origin(self) -> dict[str, Any]:
        """Name and a digest of config, weights and image processor, as JSON values.

        Raises:
          InputError: weights are missing.
        """
        files = weight_files(self.folder, "model")
        files += [self._processor_folder / name for name in _PROCESSORS]
        return {"name": "clip", "weights": weights_digest(self._config, files)}

    def encode(self, picture: np.ndarray) -> np.ndarray:
        """Encodes a picture: the states before the last layer.

        Args:
          picture: [H, W, 3] uint8.

        Returns:
          [L, width] float32, such as [257, 1280].

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
            found = model(pixels.to(self._device, model.dtype), output_hidden_states=True)
            return np.asarray(found.hidden_states[-2][0].float().cpu().numpy())

    def unload(self) -> None:
        """Frees the weights; the next call of `encode` loads them again."""
        self.__dict__.pop("_model", None)

    @cached_property
    def _device(self) -> Any:
        return choose_device(self._asked[0])

    @cached_property
    def _processor(self) -> Any:
        require_packages(_WANTED)
        # Pillow's resizing: torchvision's, where it is installed, gives other pixels.
        from transformers import CLIPImageProcessorPil

        return CLIPImageProcessorPil.from_pretrained(self._processor_folder, local_files_only=True)

    @cached_property
    def _model(self) -> Any:
        require_packages(_WANTED)
        weight_files(self.folder, "model")
        from transformers import CLIPVisionModel

        return load_model(CLIPVisionModel, self.folder, self._device, self._asked[1])
