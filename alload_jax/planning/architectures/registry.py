"""Architectures by family, and named models."""

from collections.abc import Mapping
from typing import Any

from alload_jax.planning.architectures.architecture import Architecture
from alload_jax.registry import Registry

DEFAULT_FAMILY = "wan"
"""Family of fields that do not name one."""

_FAMILIES: Registry[type[Architecture]] = Registry(
    "model family",
    {
        "wan": "alload_jax.planning.architectures.wan:WanArchitecture",
        "hunyuan_video": (
            "alload_jax.planning.architectures.hunyuan_video:HunyuanVideoArchitecture"
        ),
    },
)
_MODELS: Registry[Architecture] = Registry(
    "model",
    {
        "wan2.1-1.3b": "alload_jax.planning.architectures.wan:WAN_1_3B",
        "wan2.1-14b": "alload_jax.planning.architectures.wan:WAN_14B",
        "hunyuan-video-1.5": ("alload_jax.planning.architectures.hunyuan_video:HUNYUAN_VIDEO_1_5"),
    },
)


def register_architecture(
    family: str, architecture: type[Architecture], named: Mapping[str, Architecture] | None = None
) -> None:
    """Registers a family's architecture.

    Args:
      family: the name that its `fields()` give as `family`.
      architecture: the class.
      named: models of the family that can be planned for by name.

    Raises:
      ValueError: the name of the family or of a model is registered already.
    """
    _FAMILIES.register(family, architecture)
    for name, model in (named or {}).items():
        _MODELS.register(name, model)


def from_fields(fields: Mapping[str, Any]) -> Architecture:
    """The architecture that fields describe; `family` decides which class reads them.

    Raises:
      InputError: the family is unknown, or the fields are wrong.
    """
    return _FAMILIES.get(fields.get("family", DEFAULT_FAMILY)).from_fields(fields)


def architecture_named(name: str) -> Architecture:
    """A model by its name, such as `wan2.1-1.3b`.

    Raises:
      InputError: there is no such name.
    """
    return _MODELS.get(name)


def model_names() -> tuple[str, ...]:
    """Models that can be planned for by name."""
    return _MODELS.names()
