"""Loads and saves weights as safetensors, one tensor at a time."""

import dataclasses
import hashlib
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig, TextConfig
from alload_jax.models.common.named_tensors import Tensor
from alload_jax.models.common.safetensor_files import (
    CONFIG_SHA256,
    INDEX,
    STEM,
    TEXT_LENGTH,
    Checkpoint,
    WeightsDtype,
    write_safetensors,
)
from alload_jax.models.common.stored import DtypeOf, StoredDtype
from alload_jax.models.families import family_of, read_model_config
from alload_jax.models.placing import places_of, set_layer


def _all_float32(_: str) -> StoredDtype:
    return "float32"


def load_weights(
    place: str | Path,
    config: ModelConfig,
    mesh: Mesh,
    dtype_of: DtypeOf = _all_float32,
    only: Callable[[str], bool] = lambda _: True,
) -> Any:
    """Reads parameters onto the mesh; host memory holds at most one tensor at a time.

    Args:
      place: a `transformer/` folder of diffusers, a folder of the model's original repository, or
        one safetensors file of either.
      config: config of the model.
      mesh: mesh on which the parameters are placed.
      dtype_of: dtype in which a parameter is stored, by its name.
      only: whether a parameter is wanted, by its name.

    Returns:
      Nested dict of arrays as `stored_tree` returns it.

    Raises:
      InputError: files are missing, damaged or pickled, or their tensors do not fit the model; the
        message names all tensors that are missing, unexpected or of the wrong shape.
    """
    with Checkpoint(place) as checkpoint:
        family = family_of(config)
        wanted = family.tensors(config, family.naming_of(set(checkpoint.keys)))
        _check_keys(checkpoint, wanted, family.ignored_tensors)
        checkpoint.check_sums()
        places = places_of(config, mesh, dtype_of)
        params: dict[str, Any] = {}
        for tensor in wanted:
            if not only(tensor.path):
                continue
            value = tensor.to_ours(checkpoint.read(tensor.key))
            place_of = places[tensor.path]
            if tensor.layer is None:
                params[tensor.path] = place_of.whole(value)
                continue
            if tensor.path not in params:
                params[tensor.path] = place_of.zeros()
            layer = place_of.layer(value)
            params[tensor.path] = set_layer(params[tensor.path], layer, tensor.layer)
        return unflatten_dict(params, sep="/")


def read_transformer(folder: Path) -> ModelConfig:
    """Reads the model config from a folder with config.json and safetensors.

    diffusers' config does not contain the number of tokens to which texts are padded; our exports
    store it in the metadata of the safetensors. For other files it is Wan's, 512.

    Raises:
      InputError: config.json or the safetensors are missing or damaged.
    """
    config = read_model_config(folder / "config.json")
    with Checkpoint(folder) as checkpoint:
        noted = checkpoint.note(TEXT_LENGTH)
    if noted is None or not noted.isdecimal() or config.text is None:
        return config
    return dataclasses.replace(config, text=TextConfig(config.text.dim, int(noted)))


def require_same_architecture(ours: ModelConfig, theirs: ModelConfig, place: Path) -> None:
    """Checks that weights of `theirs` fit a model of `ours`; lengths of texts may differ.

    Raises:
      InputError: the architectures differ; the message names every key that differs.
    """
    expected, found = ours.architecture(), theirs.architecture()
    for fields in (expected, found):
        for part in fields.values():
            if isinstance(part, dict):
                part.pop("length", None)
        fields.pop("num_classes")
        for begins_anew in ("sparse_attention", "lora"):
            fields.pop(begins_anew, None)
        if fields.get("out_channels") == fields["in_channels"]:
            fields.pop("out_channels")
    wrong = [
        f"model.{key} is {expected.get(key)}, but {found.get(key)} there"
        for key in sorted(expected.keys() | found.keys())
        if expected.get(key) != found.get(key)
    ]
    if wrong:
        raise InputError(f"{place}: weights of another architecture: {'; '.join(wrong)}")


def require_free(folder: Path) -> None:
    """Checks that `save_weights` may create this folder.

    Raises:
      InputError: the path exists and is not an empty folder.
    """
    empty = folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())
    if (folder.exists() or folder.is_symlink()) and not empty:
        raise InputError(f"{folder}: exists already; name another folder or remove it")


def save_weights(
    folder: str | Path,
    params: Any,
    config: ModelConfig,
    dtype: WeightsDtype = "float32",
    shard_bytes: int = 5_000_000_000,
) -> list[Path]:
    """Writes parameters atomically as a `transformer/` folder that diffusers can load.

    Args:
      folder: folder to create; must be empty or not exist.
      params: nested dict of arrays, on any devices.
      config: config of the model.
      dtype: dtype of the files.
      shard_bytes: maximum size of a file in bytes, and of the host memory in use at a time.

    Returns:
      The paths of the safetensors files.

    Raises:
      InputError: the folder is not empty or cannot be written, or diffusers does not support such
        a model.
    """
    folder = Path(folder)
    fields = family_of(config).export_fields(config)
    require_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
    ) as scratch:
        unfinished = Path(scratch) / "transformer"
        unfinished.mkdir()
        try:
            described = json.dumps(fields, indent=2) + "\n"
            (unfinished / "config.json").write_text(described)
            notes = {CONFIG_SHA256: hashlib.sha256(described.encode()).hexdigest()}
            names = _write_tensors(unfinished, params, config, dtype, shard_bytes, notes)
        except safetensors.SafetensorError as error:
            raise InputError(
                f"{folder}: cannot be written ({error}); free disk space there"
            ) from error
        unfinished.replace(folder)  # replaces an empty folder
    return [folder / name for name in names]


def _write_tensors(
    folder: Path,
    params: Any,
    config: ModelConfig,
    dtype: WeightsDtype,
    shard_bytes: int,
    notes: dict[str, str],
) -> list[str]:
    """Writes the safetensors files and, if there are several, their index; returns their names."""
    arrays = flatten_dict(params, sep="/")
    target = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    groups = _groups(family_of(config).tensors(config, "diffusers"), target.itemsize, shard_bytes)
    names = [_file_name(n, len(groups)) for n in range(len(groups))]
    if config.text is not None:
        notes = notes | {TEXT_LENGTH: str(config.text.length)}
    for name, group in zip(names, groups, strict=True):
        content = {t.key: _to_checkpoint_layout(t, arrays[t.path]).astype(target) for t in group}
        write_safetensors(folder / name, content, notes)
    if len(groups) > 1:
        weight_map = {t.key: name for name, g in zip(names, groups, strict=True) for t in g}
        total = sum(math.prod(t.shape) for g in groups for t in g) * target.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return names


def _check_keys(checkpoint: Checkpoint, wanted: list[Tensor], ignored: tuple[str, ...]) -> None:
    present = {key for key in checkpoint.keys if not any(part in key for part in ignored)}
    names = {tensor.key for tensor in wanted}
    problems = [f"missing {key}" for key in sorted(names - present)]
    problems += [f"unexpected {key}" for key in sorted(present - names)]
    for tensor in wanted:
        if tensor.key in present and (shape := checkpoint.shape(tensor.key)) != tensor.shape:
            problems.append(f"{tensor.key} has shape {shape}, not {tensor.shape}")
        if tensor.key in present and not checkpoint.is_float(tensor.key):
            problems.append(f"{tensor.key} is {checkpoint.dtype(tensor.key)}, not float 16 to 64")
    if any(".lora_" in key for key in present):
        raise InputError(
            f"{checkpoint.place}: holds adapters (LoRA), not weights; give it as run.initial_lora, "
            "or as --lora"
        )
    if problems:
        raise InputError(
            f"{checkpoint.place}: does not fit the model: {'; '.join(problems)}; "
            "name a complete checkpoint of the model's architecture"
        )


def _to_checkpoint_layout(tensor: Tensor, array: jax.Array) -> np.ndarray:
    part = array if tensor.layer is None else array[tensor.layer]
    return tensor.to_theirs(np.asarray(part))


def _groups(wanted: list[Tensor], itemsize: int, max_bytes: int) -> list[list[Tensor]]:
    """Groups tensors in order into files of at most `max_bytes` bytes, or of one tensor."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in wanted:
        bytes_ = math.prod(tensor.shape) * itemsize
        if groups[-1] and size + bytes_ > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += bytes_
    return groups


def _file_name(number: int, count: int) -> str:
    if count == 1:
        return f"{STEM}.safetensors"
    return f"{STEM}-{number + 1:05d}-of-{count:05d}.safetensors"
