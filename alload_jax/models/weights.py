"""Loads and saves weights as safetensors, one tensor at a time, placed on devices."""

import dataclasses
import hashlib
import json
import math
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from alload_jax.errors import InputError
from alload_jax.files import require_local
from alload_jax.models.common.config import ModelConfig, TextConfig
from alload_jax.models.common.safetensor_files import (
    CONFIG_SHA256,
    INDEX,
    STEM,
    TEXT_LENGTH,
    WEIGHTS,
    Checkpoint,
    Naming,
    Tensor,
    WeightsDtype,
    write_safetensors,
)
from alload_jax.models.common.stored import DtypeOf, StoredDtype, converted, own_dtype
from alload_jax.models.families import abstract_model, family_of, read_model_config
from alload_jax.sharding.mesh import HOST_MEMORY, path_name, replicated, tree_shardings

_LAYER = re.compile(r"\.\d+\.")
"""Number of a layer in a tensor's key."""


def load_weights(
    place: str | Path,
    config: ModelConfig,
    mesh: Mesh,
    dtype_of: DtypeOf = lambda _: "float32",
    only: Callable[[str], bool] = lambda _: True,
    to_host: Callable[[str, jax.Array], bool] = lambda *_: False,
) -> PyTree:
    """Reads parameters onto the mesh; host memory holds at most one tensor at a time.

    Args:
      place: a `transformer/` folder of diffusers, a folder of the model's original repository, or
        one file of either: safetensors, scaled float8 included, or GGUF.
      config: config of the model.
      mesh: mesh on which the parameters are placed.
      dtype_of: dtype in which a parameter is stored, by its name.
      only: whether a parameter is wanted, by its name.
      to_host: whether an array goes on to the host's memory, by its name, as stored.

    Returns:
      Nested dict of arrays as `stored_tree` returns it.

    Raises:
      InputError: files are missing, damaged or pickled, or their tensors do not fit the model; the
        message names all tensors that are missing, unexpected or of the wrong shape.
    """
    family, shapes = family_of(config), abstract_model(config).params
    with Checkpoint(place) as checkpoint:
        wanted = family.tensors(config, family.naming_of(set(checkpoint.keys)))
        _check_keys(checkpoint, wanted, family.ignored_tensors)
        checkpoint.check_sums()
        shardings = flatten_dict(tree_shardings(shapes, mesh, family.partition_rules), sep="/")
        shapes = flatten_dict(shapes, sep="/")
        params: dict[str, PyTree] = {}
        # Of stacks that go to the host, the device holds those of one layer of the file at a time.
        wanted.sort(key=lambda tensor: (_LAYER.sub(".", tensor.key), tensor.key))
        ends = {tensor.path: number for number, tensor in enumerate(wanted)}
        key, stored = "", np.zeros(0)
        for number, tensor in enumerate(wanted):
            name = tensor.path
            if not only(name):
                continue
            if tensor.key != key:  # of several parts it is read once
                key, stored = tensor.key, checkpoint.read(tensor.key)
            value = tensor.to_ours(stored[tensor.rows] if tensor.outputs else stored)
            sharding, dtype = shardings[name], own_dtype(name, shapes[name], dtype_of(name))
            if tensor.layer is None:
                params[name] = _stored(_float32(value, sharding), dtype)
                continue
            if name not in params:
                params[name] = _zeros(shapes[name].shape, dtype, sharding)
            layer = _float32(value, NamedSharding(mesh, PartitionSpec(*sharding.spec[1:])))
            params[name] = _with_layer(params[name], layer, tensor.layer, dtype)
            if number == ends[name]:
                params[name] = _moved(params[name], name, to_host)
        return unflatten_dict(params, sep="/")


def _moved(stack: PyTree, name: str, to_host: Callable[[str, jax.Array], bool]) -> PyTree:
    def moved(path: tuple[object, ...], part: jax.Array) -> jax.Array:
        full = "/".join(filter(None, (name, path_name(path))))
        if not to_host(full, part):
            return part
        return jax.device_put(part, part.sharding.with_memory_kind(HOST_MEMORY))

    return jax.tree.map_with_path(moved, stack)


def _float32(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Places values; each device receives only its shard."""
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: np.asarray(value[index], np.float32)
    )


def _zeros(shape: tuple[int, ...], dtype: StoredDtype, sharding: NamedSharding) -> PyTree:
    """All layers of a parameter as they are stored, to be filled."""
    stored = jax.eval_shape(
        partial(converted, dtype=dtype), jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    whole = replicated(sharding.mesh)
    return jax.tree.map(
        lambda part: jnp.zeros(
            part.shape, part.dtype, device=sharding if part.shape == shape else whole
        ),
        stored,
    )


_stored = jax.jit(converted, static_argnums=1, donate_argnums=0)


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _with_layer(stack: PyTree, value: jax.Array, index: int, dtype: StoredDtype) -> PyTree:
    """Writes a layer into what `_zeros` returned, which is donated."""
    return jax.tree.map(
        lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, index, 0),
        stack,
        converted(value[None], dtype),
    )


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
      InputError: the path exists and is not an empty folder, or is in object storage.
    """
    require_local(folder)
    empty = folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())
    if (folder.exists() or folder.is_symlink()) and not empty:
        raise InputError(f"{folder}: exists already; name another folder or remove it")


def save_weights(
    folder: str | Path,
    params: PyTree,
    config: ModelConfig,
    dtype: WeightsDtype = "float32",
    shard_bytes: int = 5_000_000_000,
    naming: Naming = "diffusers",
) -> list[Path]:
    """Writes parameters atomically as a `transformer/` folder that diffusers can load.

    With the keys of the original repository, or ComfyUI's, it holds one file for other programs.

    Args:
      folder: folder to create; must be empty or not exist.
      params: nested dict of arrays, on any devices.
      config: config of the model.
      dtype: dtype of the files.
      shard_bytes: maximum size of a file in bytes, and of the host memory in use at a time; that
        of all weights with other keys than diffusers'.
      naming: whose keys.

    Returns:
      The paths of the safetensors files.

    Raises:
      InputError: the folder is not empty or cannot be written, or diffusers does not support such
        a model.
    """
    folder, family, target = Path(folder), family_of(config), jnp.dtype(dtype)
    described = json.dumps(family.export_fields(config), indent=2) + "\n"
    notes = {CONFIG_SHA256: hashlib.sha256(described.encode()).hexdigest()}
    if config.text is not None:
        notes[TEXT_LENGTH] = str(config.text.length)
    require_free(folder)
    arrays = flatten_dict(params, sep="/")
    tensors = family.tensors(config, naming)
    is_whole = naming != "diffusers"
    groups = [tensors] if is_whole else _groups(tensors, target.itemsize, shard_bytes)
    count = len(groups)
    names = [f"{STEM}-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    if count == 1:
        names = [f"{STEM}.safetensors"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
    ) as scratch:
        unfinished = Path(scratch) / "transformer"
        unfinished.mkdir()
        try:
            (unfinished / "config.json").write_text(described)
            for name, group in zip(names, groups, strict=True):
                content: dict[str, np.ndarray] = {}
                for tensor in group:
                    at = ... if tensor.layer is None else tensor.layer
                    value = tensor.to_theirs(np.asarray(arrays[tensor.path][at])).astype(target)
                    if tensor.key not in content:  # several of ours may be one there
                        content[tensor.key] = np.empty(tensor.stored_shape, target)
                    content[tensor.key][tensor.rows] = value
                write_safetensors(unfinished / name, content, notes)
            if count > 1:
                weight_map = {t.key: name for name, g in zip(names, groups, strict=True) for t in g}
                total = sum(math.prod(t.shape) for g in groups for t in g) * target.itemsize
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                (unfinished / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        except (OSError, safetensors.SafetensorError) as error:
            raise InputError(
                f"{folder}: cannot be written ({error}); free disk space there"
            ) from error
        unfinished.replace(folder)  # replaces an empty folder
    return [folder / name for name in names]


def _check_keys(checkpoint: Checkpoint, wanted: list[Tensor], ignored: tuple[str, ...]) -> None:
    present = {key for key in checkpoint.keys if not any(part in key for part in ignored)}
    names = {tensor.key for tensor in wanted}
    problems = [f"missing {key}" for key in sorted(names - present)]
    problems += [f"unexpected {key}" for key in sorted(present - names)]
    for tensor in wanted:
        if tensor.key not in present:
            continue
        shape, dtype = checkpoint.header_of(tensor.key)
        if shape != tensor.stored_shape:
            problems.append(f"{tensor.key} has shape {shape}, not {tensor.stored_shape}")
        if dtype not in WEIGHTS:
            problems.append(f"{tensor.key} is {dtype}, not float 8 to 64")
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
