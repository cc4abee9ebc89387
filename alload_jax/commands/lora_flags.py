"""Files of adapters as flags name them: `FILE` or `FILE:SCALE`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.lora_files import LoraFile, read_lora
from alload_jax.models.lora_merge import merge_file


class ScaledLora(NamedTuple):
    """A file of adapters and the factor of what it adds."""

    file: LoraFile
    scale: float


def read_loras(flag: str, names: Sequence[str], config: ModelConfig) -> tuple[ScaledLora, ...]:
    """Reads files of adapters given as `FILE` or `FILE:SCALE`.

    Raises:
      InputError: a file cannot be read, or does not fit the model.
    """
    found = []
    for name in names:
        place, scale = lora_name(name)
        if not Path(place).exists():
            raise InputError(f"{flag} {place}: no such file; name a LoRA file")
        found.append(ScaledLora(read_lora(place, config), scale))
    return tuple(found)


def lora_name(name: str) -> tuple[str, float]:
    """Splits `FILE:SCALE`; the scale is 1 where it is left out."""
    place, _, scale = name.rpartition(":")
    try:
        factor = float(scale)
    except ValueError:
        return name, 1.0
    return (place, factor) if place and math.isfinite(factor) else (name, 1.0)


def with_loras(values: Any, loras: Sequence[ScaledLora]) -> Any:
    """Returns a model's values with the adapters of files added."""
    for lora in loras:
        values = merge_file(values, lora.file, lora.scale)
    return values
