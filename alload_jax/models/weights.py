"""Weights in and out: safetensors of diffusers or Wan's own repository, tensor by tensor."""

import json
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alload_jax.errors import InputError
from alload_jax.models.config import DiTConfig
from alload_jax.models.dit import abstract_params
from alload_jax.models.wan import (
    diffusers_fields,
    read_model_config,
    require_same_architecture,
)
from alload_jax.models.wan_keys import Tensor, naming_of, tensors
from alload_jax.sharding.rules import tree_shardings

_STEM = "diffusion_pytorch_model"
_INDEX = f"{_STEM}.safetensors.index.json"
_IGNORED = "norm_added_q"
"""Keys that some published files hold and no model uses; diffusers ignores them too."""

WeightsDtype = Literal["float32", "bfloat16"]


class Checkpoint:
    """The tensors of a folder (or file) of safetensors, read one at a time.

    Use as a context manager. `keys` maps each name to its file's handle.
    """

    def __init__(self, place: str | Path):
        self.place = Path(place)
        self.files = _files(self.place)
        self.keys: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Checkpoint":
        for file in self.files:
            try:
                handle = self._stack.enter_context(safetensors.safe_open(file, framework="numpy"))
            except (safetensors.SafetensorError, OSError) as error:
                self._stack.close()
                raise InputError(
                    f"{file}: is no whole safetensors file ({error}); download it again"
                ) from error
            self.keys |= dict.fromkeys(handle.keys(), handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shape(self, key: str) -> tuple[int, ...]:
        """Of one tensor; only the header is read."""
        return tuple(self.keys[key].get_slice(key).get_shape())

    def read(self, key: str) -> np.ndarray:
        """One tensor, in the file's dtype."""
        return self.keys[key].get_tensor(key)


def load_weights(place: str | Path, config: DiTConfig, mesh: Mesh) -> Any:
    """Reads parameters straight onto the mesh: on the host never more than one tensor at a time.

    Args:
      place: a `transformer/` folder of diffusers, a folder of Wan's own repository, or one
        safetensors file of either.
      config: of the model that takes them.
      mesh: whose shardings they get.

    Returns:
      Nested dict of float32 arrays, as `nnx.to_pure_dict` gives them.

    Raises:
      InputError: files are missing or damaged, pickled, or hold other tensors than the model has:
        all that are missing, surplus or misshapen are named at once.
    """
    with Checkpoint(place) as checkpoint:
        naming = naming_of(set(checkpoint.keys))
        wanted = tensors(config, naming)
        _check_keys(checkpoint, wanted)
        shapes = flatten_dict(abstract_params(config), sep="/")
        shardings = flatten_dict(tree_shardings(abstract_params(config), mesh), sep="/")
        params: dict[str, jax.Array] = {}
        for tensor in wanted:
            value = tensor.to_ours(checkpoint.read(tensor.key))
            sharding = shardings[tensor.path]
            if tensor.layer is None:
                params[tensor.path] = _placed(value, sharding)
                continue
            if tensor.path not in params:
                params[tensor.path] = _zeros(shapes[tensor.path].shape, sharding)
            layer = _placed(value, _of_one_layer(sharding))
            params[tensor.path] = _set_layer(params[tensor.path], layer, tensor.layer)
        return unflatten_dict(params, sep="/")


def initial_weights(place: str | None, config: DiTConfig, mesh: Mesh) -> Any:
    """What a run starts from: `load_weights`, or None where no place is named.

    Raises:
      InputError: as `load_weights`; or the place's config.json describes another architecture.
    """
    if place is None:
        return None
    described = Path(place) / "config.json"
    if described.is_file():
        require_same_architecture(config, read_model_config(described), Path(place))
    return load_weights(place, config, mesh)


def save_weights(
    folder: str | Path,
    params: Any,
    config: DiTConfig,
    dtype: WeightsDtype = "float32",
    shard_bytes: int = 5_000_000_000,
) -> list[Path]:
    """Writes parameters as a `transformer/` folder that diffusers loads, whole or not at all.

    Args:
      folder: to be made; must be empty or not exist.
      params: nested dict of arrays, on any devices.
      config: their model's.
      dtype: of the files.
      shard_bytes: most bytes of a file; as many are held on the host at a time.

    Raises:
      InputError: the folder is not empty, or diffusers has no such model.
    """
    folder = Path(folder)
    fields = diffusers_fields(config)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"{folder}: exists already; name another folder or remove it")
    partial_folder = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    arrays = flatten_dict(params, sep="/")
    target = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    groups = _groups(tensors(config, "diffusers"), target.itemsize, shard_bytes)
    names = [_file_name(n, len(groups)) for n in range(len(groups))]
    for name, group in zip(names, groups, strict=True):
        content = {t.key: _theirs(t, arrays[t.path]).astype(target) for t in group}
        safetensors.numpy.save_file(content, partial_folder / name, metadata={"format": "pt"})
        (partial_folder / name).chmod(0o644)  # safetensors lets no one else read it
    if len(groups) > 1:
        weight_map = {t.key: name for name, g in zip(names, groups, strict=True) for t in g}
        total = sum(int(np.prod(t.shape)) for g in groups for t in g) * target.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial_folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (partial_folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    if folder.exists():
        folder.rmdir()
    partial_folder.rename(folder)
    return [folder / name for name in names]


def _files(place: Path) -> list[Path]:
    """The safetensors files that a checkpoint consists of."""
    pickled = [*place.glob("*.pth"), *place.glob("*.pt"), *place.glob("*.bin")]
    if place.suffix in (".pth", ".pt", ".bin", ".ckpt"):
        pickled = [place]
    if place.is_file() and not pickled:
        return [place]
    index = place / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index}: is no index of safetensors; download it again") from error
        if lost := [name for name in names if not (place / name).is_file()]:
            raise InputError(f"{place}: lacks {', '.join(lost)}; download it again")
        return [place / name for name in names]
    if found := sorted(place.glob("*.safetensors")):
        return found
    if pickled:
        raise InputError(
            f"{pickled[0]}: is pickled, which can run code and is not read here; convert it with "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'x.safetensors')"
        )
    raise InputError(
        f"{place}: holds no safetensors; name a folder with config.json and *.safetensors"
    )


def _check_keys(checkpoint: Checkpoint, wanted: list[Tensor]) -> None:
    present = {key for key in checkpoint.keys if _IGNORED not in key}
    names = {tensor.key for tensor in wanted}
    problems = [f"missing {key}" for key in sorted(names - present)]
    problems += [f"surplus {key}" for key in sorted(present - names)]
    for tensor in wanted:
        if tensor.key in present and (shape := checkpoint.shape(tensor.key)) != tensor.shape:
            problems.append(f"{tensor.key} has shape {shape}, not {tensor.shape}")
    if problems:
        raise InputError(
            f"{checkpoint.place}: does not fit the model: {'; '.join(problems)}; "
            "set model.* to the checkpoint's architecture"
        )


def _placed(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """One tensor as float32, each device given its part alone."""
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: np.asarray(value[index], np.float32)
    )


def _zeros(shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=sharding)()


def _of_one_layer(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


@partial(jax.jit, donate_argnums=0)
def _set_layer(stack: jax.Array, layer: jax.Array, index: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)


def _theirs(tensor: Tensor, array: jax.Array) -> np.ndarray:
    part = array if tensor.layer is None else array[tensor.layer]
    return tensor.to_theirs(np.asarray(part))


def _groups(wanted: list[Tensor], itemsize: int, most: int) -> list[list[Tensor]]:
    """Tensors in order, cut where a file would grow beyond its size."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in wanted:
        bytes_ = int(np.prod(tensor.shape)) * itemsize
        if groups[-1] and size + bytes_ > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += bytes_
    return groups


def _file_name(number: int, count: int) -> str:
    if count == 1:
        return f"{_STEM}.safetensors"
    return f"{_STEM}-{number + 1:05d}-of-{count:05d}.safetensors"


def parameter_count(config: DiTConfig) -> int:
    """Parameters of the model."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config)))
