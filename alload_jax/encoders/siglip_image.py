"""The image encoder of HunyuanVideo 1.5's image-to-video models: SigLIP of transformers."""

from typing import Any

from alload_jax.encoders.image import ImageEncoder


class SiglipImage(ImageEncoder):
    """SigLIP's image encoder; see `ImageEncoder`. It gives the states of the last layer, normed.

    They are [729, 1152] for the released encoder.
    """

    name = "siglip"
    model_type = "siglip_vision_model"
    described = "SigLIP's image encoder (SiglipVisionModel, as transformers saves it)"
    processor = "feature_extractor"

    def _classes(self) -> tuple[Any, Any]:
        # Pillow's resizing: torchvision's, where it is installed, gives other pixels.
        from transformers import SiglipImageProcessorPil, SiglipVisionModel

        return SiglipVisionModel, SiglipImageProcessorPil

    def _states(self, model: Any, pixels: Any) -> Any:
        return model(pixels).last_hidden_state
