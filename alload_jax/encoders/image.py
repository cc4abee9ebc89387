"""Image encoders of transformers, CLIP and SigLIP: a picture to embeddings."""

from abc import abstractmethod
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from typing_extensions import override

from alload_jax.encoders.loading import (
    Encoder,
    find_beside,
    inference,
    require_packages,
    to_host,
    weight_files,
    weights_digest,
)

if TYPE_CHECKING:
    import torch

_PROCESSORS = ("preprocessor_config.json",)


class ImageEncoder(Encoder):
    """An image encoder in local folders; see `Encoder`.

    Attributes:
      name: its name in the origin of data.
      model_type: the `model_type` of its config.json.
      processor: name of the folder of the image processor in a pipeline.
      processor_class: its class in transformers.
    """

    name: ClassVar[str]
    model_type: ClassVar[str]
    processor: ClassVar[str]
    processor_class: ClassVar[str]
    subfolder = "image_encoder"
    default_dtype = "float32"  # as in Wan's pipelines

    @override
    def __init__(self, folder: str | Path, *, device: str | None = None, dtype: str | None = None):
        super().__init__(folder, device=device, dtype=dtype)
        self._processor_folder = find_beside(
            self.folder, self.processor, _PROCESSORS, "image processor"
        )

    @property
    def width(self) -> int:
        """Components of an embedding."""
        return int(self._config.get("hidden_size", 768))

    def origin(self) -> dict[str, object]:
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
            return to_host(self._states(model, pixels.to(self._device, model.dtype))[0])

    @abstractmethod
    def _states(self, model: Any, pixels: "torch.Tensor") -> "torch.Tensor":
        """[1, L, width], what diffusion models take of the encoder's output."""

    @cached_property
    def _processor(self) -> Any:
        require_packages(self.described)
        kind = getattr(import_module("transformers"), self.processor_class)
        return kind.from_pretrained(self._processor_folder, local_files_only=True)


class ClipImage(ImageEncoder):
    """CLIP's image encoder; see `ImageEncoder`. It gives the states before the last layer.

    They are [257, 1280] for the released encoder.
    """

    name = "clip"
    model_type = "clip_vision_model"
    described = "CLIP's image encoder (CLIPVisionModel, as transformers saves it)"
    processor = "image_processor"
    library_class = "transformers.CLIPVisionModel"
    # Pillow's resizing: torchvision's, where it is installed, gives other pixels.
    processor_class = "CLIPImageProcessorPil"

    def _states(self, model: Any, pixels: "torch.Tensor") -> "torch.Tensor":
        return model(pixels, output_hidden_states=True).hidden_states[-2]


class SiglipImage(ImageEncoder):
    """SigLIP's image encoder; see `ImageEncoder`. It gives the states of the last layer, normed.

    They are [729, 1152] for the released encoder.
    """

    name = "siglip"
    model_type = "siglip_vision_model"
    described = "SigLIP's image encoder (SiglipVisionModel, as transformers saves it)"
    processor = "feature_extractor"
    library_class = "transformers.SiglipVisionModel"
    # Pillow's resizing: torchvision's, where it is installed, gives other pixels.
    processor_class = "SiglipImageProcessorPil"

    def _states(self, model: Any, pixels: "torch.Tensor") -> "torch.Tensor":
        return model(pixels).last_hidden_state
