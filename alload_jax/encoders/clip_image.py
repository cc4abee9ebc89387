"""The image encoder of Wan 2.1's image-to-video models: CLIP of transformers."""

from typing import Any

from alload_jax.encoders.image import ImageEncoder


class ClipImage(ImageEncoder):
    """CLIP's image encoder; see `ImageEncoder`. It gives the states before the last layer.

    They are [257, 1280] for the released encoder.
    """

    name = "clip"
    model_type = "clip_vision_model"
    described = "CLIP's image encoder (CLIPVisionModel, as transformers saves it)"
    processor = "image_processor"

    def _classes(self) -> tuple[Any, Any]:
        # Pillow's resizing: torchvision's, where it is installed, gives other pixels.
        from transformers import CLIPImageProcessorPil, CLIPVisionModel

        return CLIPVisionModel, CLIPImageProcessorPil

    def _states(self, model: Any, pixels: Any) -> Any:
        return model(pixels, output_hidden_states=True).hidden_states[-2]
