"""Encoders by name, and the one in a folder: its config.json says which one it is."""

from pathlib import Path
from typing import Any

from alload_jax.encoders.conditions import ImageEncoder, TextModel
from alload_jax.encoders.loading import Encoder, TextEncoder, VaeEncoder, find_folder, read_config
from alload_jax.encoders.vae import Vae
from alload_jax.registry import Registry

VAE_ENCODERS: Registry[type[VaeEncoder]] = Registry(
    "--vae",
    {
        "none": "alload_jax.data.prepare.encoders:Pixels",
        "wan": "alload_jax.encoders.vae:WanVae",
        "hunyuan_video": "alload_jax.encoders.vae:HunyuanVideoVae",
        "hunyuan_video_13b": "alload_jax.encoders.vae:HunyuanVideo13bVae",
    },
)
"""Classes of `VaeEncoder`s; the `Vae`s among them can be opened by their folders."""
TEXT_ENCODERS: Registry[type[TextEncoder]] = Registry(
    "--text",
    {
        "bytes": "alload_jax.data.prepare.encoders:ByteText",
        "class": "alload_jax.data.prepare.encoders:ClassText",
        "umt5": "alload_jax.encoders.conditions:Umt5Text",
        "hunyuan_video": "alload_jax.encoders.conditions:HunyuanVideoText",
        "hunyuan_video_13b": "alload_jax.encoders.conditions:HunyuanVideo13bText",
    },
)
"""Classes of `TextEncoder`s; the `TextModel`s among them can be opened by their folders."""
IMAGE_ENCODERS: Registry[type[ImageEncoder]] = Registry(
    "image encoder",
    {
        "clip": "alload_jax.encoders.conditions:ClipImage",
        "siglip": "alload_jax.encoders.conditions:SiglipImage",
    },
)
"""Image encoders."""


def open_vae(folder: Path) -> Vae:
    """The VAE in a local folder, or in the subfolder `vae` of a pipeline.

    Raises:
      InputError: the folder holds no VAE that is known.
    """
    return _class_in(folder, VAE_ENCODERS, "vae", "_class_name", "a VAE as diffusers saves it")(
        folder
    )


def open_text(folder: Path, length: int) -> TextModel:
    """The text encoder in a local folder, or in the subfolder `text_encoder` of a pipeline.

    Args:
      folder: the folder.
      length: most tokens of a text.

    Raises:
      InputError: the folder holds no text encoder that is known.
    """
    wanted = "a text encoder as transformers saves it"
    return _class_in(folder, TEXT_ENCODERS, "text_encoder", "model_type", wanted)(folder, length)


def open_image(folder: Path) -> ImageEncoder:
    """The image encoder in a local folder, or in the subfolder `image_encoder` of a pipeline.

    Raises:
      InputError: the folder holds no image encoder that is known.
    """
    wanted = "an image encoder as transformers saves it"
    return _class_in(folder, IMAGE_ENCODERS, "image_encoder", "model_type", wanted)(folder)


def _class_in(
    folder: Path, registry: Registry[Any], subfolder: str, key: str, wanted: str
) -> type[Any]:
    """The class that the config.json of a folder names."""
    place, kinds = find_folder(folder, subfolder, wanted), map(registry.get, registry.names())
    known = {each.kind(): each for each in kinds if issubclass(each, Encoder)}
    return known[read_config(place, key, list(known), wanted)[key]]
