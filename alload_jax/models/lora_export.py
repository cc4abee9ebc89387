"""Writes adapters as safetensors with the keys of diffusers or of the original repository."""

from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors

from alload_jax.errors import InputError
from alload_jax.files import replacing
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.named_tensors import Naming, Tensor
from alload_jax.models.common.safetensor_files import (
    TEXT_LENGTH,
    WeightsDtype,
    write_safetensors,
)
from alload_jax.models.families import family_of
from alload_jax.models.lora_files import Adapter, Target

BASE_NOTE = "alload_base"
"""Metadata key of files of adapters: the weights that they belong to."""


def lora_tensors(
    adapters: dict[Target, Adapter], config: ModelConfig, naming: Naming
) -> dict[str, np.ndarray]:
    """Returns the tensors of a file of adapters, float32.

    With `original` keys, `.alpha` holds the scale; diffusers' keys have none, so that the scale is
    part of `lora_B`.

    Args:
      adapters: by the kernel that they change.
      config: config of the model.
      naming: whose keys.

    Raises:
      InputError: the model has layers for which there are no keys.
    """
    table = {Target(t.path, t.layer): t for t in family_of(config).tensors(config, naming)}
    found: dict[str, np.ndarray] = {}
    for target, adapter in adapters.items():
        if target not in table:
            raise InputError(
                f"{target.path.removesuffix('/kernel')} has an adapter, but released models of "
                f"family {config.family} lack that layer; leave it out of model.lora.targets"
            )
        tensor = table[target]
        key = tensor.key.removesuffix(".weight")
        down, up = _to_theirs(tensor, adapter)
        if naming == "diffusers":
            found[f"transformer.{key}.lora_A.weight"] = down
            found[f"transformer.{key}.lora_B.weight"] = up * np.float32(adapter.scale)
        else:
            found[f"diffusion_model.{key}.lora_down.weight"] = down
            found[f"diffusion_model.{key}.lora_up.weight"] = up
            alpha = np.asarray(adapter.scale * adapter.rank, np.float32)
            found[f"diffusion_model.{key}.alpha"] = alpha
    return found


def write_lora(
    file: Path,
    adapters: dict[Target, Adapter],
    config: ModelConfig,
    naming: Naming,
    dtype: WeightsDtype = "float32",
    force: bool = False,
    base: str = "",
    text_length: int | None = None,
) -> int:
    """Writes adapters atomically as a safetensors file; see `lora_tensors`.

    Args:
      file: file to write.
      adapters: by the kernel that they change.
      config: config of the model.
      naming: whose keys.
      dtype: dtype of the tensors.
      force: replace a file that exists.
      base: the weights that the adapters belong to, for the file's metadata.
      text_length: tokens to which training padded the texts, for the metadata; None if not known.

    Returns:
      The number of tensors.

    Raises:
      InputError: the file exists or cannot be written, or there are no keys for a layer.
    """
    tensors = lora_tensors(adapters, config, naming)
    if file.suffix != ".safetensors" or file.is_dir():
        raise InputError(f"{file}: name a file that ends in .safetensors")
    if file.exists() and not force:
        raise InputError(f"{file}: exists already; give --force to replace it, or name another")
    target = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    content = {
        key: value.astype(target) if value.ndim else value  # alpha stays exact
        for key, value in tensors.items()
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        notes = {BASE_NOTE: base} if base else {}
        if text_length is not None:
            notes[TEXT_LENGTH] = str(text_length)
        with replacing(file) as unfinished:
            write_safetensors(unfinished, content, notes)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{file}: cannot be written ({error}); make room, or name another") from (
            error
        )
    return len(content)


def _to_theirs(tensor: Tensor, adapter: Adapter) -> tuple[np.ndarray, np.ndarray]:
    """The two matrices in the checkpoint's layout; those of a convolution are convolutions."""
    narrow = Tensor(
        tensor.key, (adapter.rank, *tensor.shape[1:]), tensor.path, tensor.layer, tensor.kind
    )
    up = np.ascontiguousarray(adapter.up.T)
    return narrow.to_theirs(adapter.down), up.reshape(*up.shape, *(1 for _ in tensor.shape[2:]))
