"""What the layers of a model keep, chosen for the memory of this process's devices."""

import dataclasses
from collections.abc import Mapping

import jax

from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import abstract_model, gradient_dtypes
from alload_jax.planning.architectures.registry import from_fields
from alload_jax.planning.devices import DEVICES, Device, device_named
from alload_jax.planning.remat import Choice, RematPolicy, choose_remat
from alload_jax.sharding.host_memory import bytes_of_one
from alload_jax.training.optimizer import OptimizerConfig
from alload_jax.training.parameters import ParametersConfig
from alload_jax.training.state_size import trained_of

_ASSUMED_DEVICE = "h200"
"""Whose rates say what recomputation costs on devices of which none are known."""


def memory_budget(model: ModelConfig) -> float | None:
    """Bytes that a step may take on a device: the config's, or JAX's limit; None if unknown."""
    if model.memory_budget is not None:
        return model.memory_budget * 1e9
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None if limit is None else float(limit)


def choose_for(
    model: ModelConfig,
    tokens: int,
    budget: float,
    parameters: ParametersConfig,
    optimizer: OptimizerConfig,
    *,
    shards: int = 1,
    rows: float | None = None,
    work_space: float = 0.0,
    single: bool = True,
    layer_seconds: Mapping[RematPolicy, float] | None = None,
) -> Choice:
    """The fastest choice for a model that fits; see `choose_remat`.

    Args:
      model: the model's config.
      tokens: of a micro-batch on one device, at most.
      budget: bytes that a step may take.
      parameters: which parameters are trained.
      optimizer: the optimizer, whose state takes memory.
      shards: devices that share one copy of weights and state.
      rows: sequences of a micro-batch; None for as many short ones as M_mem is made for.
      work_space: as in `choose_remat`.
      single: whether steps have one micro-batch, so that no sum is kept beside its gradient.
      layer_seconds: as in `choose_remat`.

    Raises:
      InputError: nothing fits, or no costs of such models are known.
    """
    params = abstract_model(model).params
    return choose_remat(
        from_fields(model.architecture()),
        getattr(model, "num_layers", 1),
        _device(model),
        tokens,
        budget,
        shards=shards,
        rows=rows,
        work_space=work_space,
        trained=trained_of(
            params,
            parameters,
            optimizer,
            accumulates=not single,
            narrow=gradient_dtypes(model) if single else {},
        ),
        layer_seconds=layer_seconds,
        host_budget=bytes_of_one(jax.local_device_count(), on_gpus=jax.default_backend() == "gpu"),
    )


def _device(model: ModelConfig) -> Device:
    """The rates of this process's devices, or those of one that is known."""
    try:
        device = device_named(jax.local_devices()[0].device_kind)
    except InputError:
        device = DEVICES[_ASSUMED_DEVICE]
    return dataclasses.replace(device, compute_bytes=model.compute_dtype.itemsize)
