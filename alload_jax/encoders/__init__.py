"""Opens the encoder in a folder: its config.json says which one it is."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from alload_jax.encoders.conditions import ImageEncoder, TextModel
from alload_jax.encoders.loading import find_folder, read_config
from alload_jax.encoders.vae import Vae
from alload_jax.registry import Registry

T = TypeVar("T")

VAES: Registry[type[Vae]] = Registry(
    "_class_name",
    {
        "AutoencoderKLWan": "alload_jax.encoders.vae:WanVae",
        "AutoencoderKLHunyuanVideo15": "alload_jax.encoders.vae:HunyuanVideoVae",
        "AutoencoderKLHunyuanVideo": "alload_jax.encoders.vae:HunyuanVideo13bVae",
    },
)
"""VAEs by the `_class_name` of their config.json."""
TEXT_MODELS: Registry[Callable[[Path, int], TextModel]] = Registry(
    "model_type",
    {
        "umt5": "alload_jax.encoders.conditions:Umt5Text",
        "qwen2_5_vl_text": "alload_jax.encoders.conditions:HunyuanVideoText",
        "llama": "alload_jax.encoders.conditions:HunyuanVideo13bText",
    },
)
"""Classes of `TextModel`s by the `model_type` of their config.json."""
IMAGE_ENCODERS: Registry[type[ImageEncoder]] = Registry(
    "model_type",
    {
        "clip_vision_model": "alload_jax.encoders.conditions:ClipImage",
        "siglip_vision_model": "alload_jax.encoders.conditions:SiglipImage",
    },
)
"""Image encoders by the `model_type` of their config.json."""


def open_vae(folder: Path) -> Vae:
    """The VAE in a local folder, or in the subfolder `vae` of a pipeline.

    Raises:
      InputError: the folder holds no VAE that is known.
    """
    return _class_in(folder, "vae", "_class_name", VAES, "a VAE as diffusers saves it")(folder)


def open_text(folder: Path, length: int) -> TextModel:
    """The text encoder in a local folder, or in the subfolder `text_encoder` of a pipeline.

    Args:
      folder: the folder.
      length: most tokens of a text.

    Raises:
      InputError: the folder holds no text encoder that is known.
    """
    wanted = "a text encoder as transformers saves it"
    return _class_in(folder, "text_encoder", "model_type", TEXT_MODELS, wanted)(folder, length)


def open_image(folder: Path) -> ImageEncoder:
    """The image encoder in a local folder, or in the subfolder `image_encoder` of a pipeline.

    Raises:
      InputError: the folder holds no image encoder that is known.
    """
    wanted = "an image encoder as transformers saves it"
    return _class_in(folder, "image_encoder", "model_type", IMAGE_ENCODERS, wanted)(folder)


def _class_in(folder: Path, subfolder: str, key: str, known: Registry[T], wanted: str) -> T:
    """The class that the config.json of a folder names."""
    place = find_folder(folder, subfolder, wanted)
    return known.get(read_config(place, key, known.names(), wanted)[key])
