"""Adds adapters to the parameters that they adapt, and turns files into adapters and back."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.lora import DOWN, UP, LoraConfig
from alload_jax.models.families import abstract_model
from alload_jax.models.lora_files import Adapter, LoraFile, Target


def merge_adapters(params: Any, config: LoraConfig) -> Any:
    """Returns parameters without adapters: kernel + scale·lora_down·lora_up, in float32.

    Args:
      params: nested dict of a model's parameters; kernels may be stacked, [..., in, out].
      config: the model's adapters.
    """
    flat = flatten_dict(params, sep="/")
    merged = {name: value for name, value in flat.items() if not name.endswith((DOWN, UP))}
    for name in flat:
        if name.endswith(DOWN):
            layer = name.removesuffix(DOWN)
            kernel = merged[f"{layer}kernel"]
            merged[f"{layer}kernel"] = _adapted(kernel, flat[name], flat[layer + UP], config.scale)
    return unflatten_dict(merged, sep="/")


def merge_file(params: Any, lora: LoraFile, scale: float = 1.0) -> Any:
    """Returns parameters with the content of a file added, times `scale`, in float32.

    Args:
      params: nested dict of a model's parameters, with or without adapters of its own.
      lora: the file.
      scale: factor of everything that the file adds.
    """
    flat = flatten_dict(params, sep="/")
    for path in {target.path for target in (*lora.adapters, *lora.differences)}:
        flat[path] = jnp.asarray(flat[path][...], jnp.float32)
    for target, adapter in lora.adapters.items():
        factor = scale * adapter.scale
        if target.layer is None:
            flat[target.path] = _adapted(flat[target.path], adapter.down, adapter.up, factor)
        else:
            flat[target.path] = _adapted_layer(
                flat[target.path], target.layer, adapter.down, adapter.up, factor
            )
    for target, difference in lora.differences.items():
        place = ... if target.layer is None else target.layer
        flat[target.path] = flat[target.path].at[place].add(scale * difference)
    return unflatten_dict(flat, sep="/")


def adapters_of(params: Any, config: LoraConfig) -> dict[Target, Adapter]:
    """Returns a model's adapters, layer by layer, as files hold them."""
    flat = flatten_dict(params, sep="/")
    found: dict[Target, Adapter] = {}
    for name, value in flat.items():
        if not name.endswith(DOWN):
            continue
        path = name.removesuffix(DOWN) + "kernel"
        down = np.asarray(value)
        up = np.asarray(flat[name.removesuffix(DOWN) + UP])
        if down.ndim == 2:
            found[Target(path, None)] = Adapter(down, up, config.scale)
            continue
        for layer in range(len(down)):
            found[Target(path, layer)] = Adapter(down[layer], up[layer], config.scale)
    return found


def given_adapters(lora: LoraFile, config: ModelConfig) -> Any:
    """Returns a file's adapters as parameters of a model that has adapters.

    Layers that the file does not adapt begin without effect; where all layers of a stack are
    missing, the result lacks them.

    Returns:
      Nested dict of NumPy arrays, float32.

    Raises:
      InputError: the file adapts other layers than the model, or with another rank.
    """
    assert config.lora is not None
    shapes = flatten_dict(abstract_model(config).params, sep="/")
    _check_fits(lora, config.lora, shapes)
    flat: dict[str, np.ndarray] = {}
    for target, adapter in lora.adapters.items():
        up = adapter.up * np.float32(adapter.scale / config.lora.scale)
        for name, value in ((DOWN, adapter.down), (UP, up)):
            path = target.path.removesuffix("kernel") + name
            if target.layer is None:
                flat[path] = value
                continue
            if path not in flat:
                flat[path] = _without_effect(name, shapes[path].shape)
            flat[path][target.layer] = value
    return unflatten_dict(flat, sep="/")


def _without_effect(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """lora_up is zero; lora_down is not, or nothing would ever be learnt."""
    if name == UP:
        return np.zeros(shape, np.float32)
    bound = 1 / math.sqrt(shape[-2])
    return np.random.default_rng(0).uniform(-bound, bound, shape).astype(np.float32)


def _check_fits(lora: LoraFile, config: LoraConfig, shapes: dict[str, Any]) -> None:
    if lora.differences:
        raise InputError(
            f"{lora.place}: also changes weights and biases (diff, diff_b), which are no adapters; "
            "merge it into a folder with `alload lora merge` and start from that"
        )
    for target, adapter in lora.adapters.items():
        layer = target.path.removesuffix("/kernel")
        if f"{layer}/{DOWN}" not in shapes:
            raise InputError(
                f"{lora.place}: adapts {layer}, which model.lora.targets leaves out; add it"
            )
        if adapter.rank != config.rank:
            raise InputError(
                f"{lora.place}: has adapters of rank {adapter.rank}, and model.lora.rank is "
                f"{config.rank}; set it to {adapter.rank}"
            )


@jax.jit
def _adapted(kernel: Any, down: jax.Array, up: jax.Array, scale: float) -> jax.Array:
    product = jnp.matmul(down, up, precision=jax.lax.Precision.HIGHEST)
    return kernel[...].astype(jnp.float32) + scale * product


@jax.jit
def _adapted_layer(
    stack: jax.Array, layer: int, down: jax.Array, up: jax.Array, scale: float
) -> jax.Array:
    return stack.at[layer].set(_adapted(stack[layer], down, up, scale))
