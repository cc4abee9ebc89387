"""What the layers of a model keep, chosen for the memory of this process's devices."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

import jax

from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import abstract_model, gradient_dtypes
from alload_jax.planning.analytic import SHORTEST, Remat, Trained, state_bytes, step_memory
from alload_jax.planning.architectures.registry import from_fields
from alload_jax.planning.cost import MemoryModel
from alload_jax.planning.devices import DEVICES, Device, device_named
from alload_jax.planning.remat import (
    LADDER,
    MARGIN,
    OFFLOADED,
    Choice,
    RematPolicy,
    choose_remat,
)
from alload_jax.sharding.host_memory import bytes_of_one
from alload_jax.sharding.mesh import MeshConfig
from alload_jax.training.optimizer import OptimizerConfig
from alload_jax.training.parameters import ParametersConfig
from alload_jax.training.state_size import trained_of
from alload_jax.training.update_rules import OptimizerName

_ASSUMED_DEVICE = "h200"
"""Whose rates say what recomputation costs on devices of which none are known."""
_ERROR = 0.05
"""Share by which predicted memory may be too much."""
_WEIGHT_BYTES = 4
"""Of a trained parameter."""
_NAMED = 4
"""Most remedies that are named."""


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


def require_fit(
    model: ModelConfig,
    tokens: int,
    budget: float,
    parameters: ParametersConfig,
    optimizer: OptimizerConfig,
    mesh: MeshConfig,
    *,
    replicas: int = 1,
    single: bool = True,
) -> None:
    """Refuses a model whose step is predicted not to fit, by more than a prediction may err.

    Models of which no costs are known are left to the compiler.

    Args:
      model, tokens, budget, parameters, optimizer, single: as in `choose_for`; conditions do not
        count.
      mesh: how weights and state are sharded.
      replicas: of the weights, over which the optimizer's state and gradients are split too (ZeRO).

    Raises:
      InputError: it does not fit; the message says what would.
    """
    try:
        architecture = from_fields(model.architecture())
    except InputError:
        return
    # A GPU's, whose activations are bfloat16, also where a budget stands for an absent one.
    device, params = DEVICES[_ASSUMED_DEVICE], abstract_model(model).params
    narrow = gradient_dtypes(model) if single else {}

    @cache
    def trained(name: OptimizerName) -> Trained:
        others: dict[str, Any] = {} if name == optimizer.name else {"mu_dtype": "float32"}
        own = dataclasses.replace(optimizer, name=name, **others)
        return trained_of(params, parameters, own, accumulates=not single, narrow=narrow)

    def memory(
        remat: Remat = model.policies, times: int = 1, name: OptimizerName = optimizer.name
    ) -> MemoryModel:
        shards, copies = mesh.fsdp * mesh.tensor * times, max(1, replicas // times)
        found = step_memory(architecture, device, remat, shards, trained(name))
        state = state_bytes(architecture.parameters(), trained(name))
        weights = min(state, _WEIGHT_BYTES * architecture.parameters())
        split = (state - weights) * (1 - 1 / copies) / shards
        return MemoryModel(found.base - split, found.per_token / mesh.tensor)

    def needed(**changes: Any) -> float:
        return memory(**changes).bytes_of(tokens)

    if needed() <= budget * (1 + _ERROR):
        return
    free = budget * (1 - MARGIN)
    more = [(mesh.fsdp * times, {"times": times}) for times in (2, 4, 8, 16, 32)]
    choices: dict[str, list[tuple[Any, dict[str, Any]]]] = {
        "model.remat": [(each, {"remat": each}) for each in (*LADDER[::-1], *OFFLOADED)],
        "mesh.fsdp": more,
        "optimizer.name": [(each, {"name": each}) for each in ("adamw8bit", "adafactor")],
        "model.remat offload with mesh.fsdp": [
            (fsdp, times | {"remat": "offload"}) for fsdp, times in more
        ],
    }
    fitting = {
        key: next((value for value, changes in each if needed(**changes) <= free), None)
        for key, each in choices.items()
    }
    found = [f"{key} {value}" for key, value in fitting.items() if value is not None]
    least = memory().bytes_of(0)
    if least + memory().per_token * SHORTEST < free:
        found.insert(0, f"planning.m_mem {memory().max_tokens(budget, MARGIN)}")
    raise InputError(
        f"a step of {tokens:,} tokens is predicted to need {needed() / 1e9:.1f} GB of a device, "
        f"{least / 1e9:.1f} GB of them before any token, and it has {budget / 1e9:.1f} GB; "
        f"what fits: {', or '.join(found[:_NAMED]) or 'a smaller model'}"
    )


def _device(model: ModelConfig) -> Device:
    """The rates of this process's devices, or those of one that is known."""
    try:
        device = device_named(jax.local_devices()[0].device_kind)
    except InputError:
        device = DEVICES[_ASSUMED_DEVICE]
    return dataclasses.replace(device, compute_bytes=model.compute_dtype.itemsize)
