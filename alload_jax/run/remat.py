"""Resolves `model.remat: auto` for the devices of a run."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import jax

from alload_jax.bench.remat_times import (
    CONDITION_TOKENS,
    layer_seconds,
    measurable,
    square_latents,
)
from alload_jax.bench.step import tokens_beside
from alload_jax.config import Config
from alload_jax.data.batch import AnyBatch, PackedBatch
from alload_jax.distributed.cluster import Cluster, first_process
from alload_jax.errors import InputError
from alload_jax.files import read_json
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.length_classes import launched_tokens
from alload_jax.planning.plan import Plan
from alload_jax.planning.remat import AUTO_REMAT, UNRESOLVED, RematPolicy, in_words
from alload_jax.training.plan_costs import run_costs
from alload_jax.training.remat_choice import choose_for, memory_budget, require_fit
from alload_jax.training.run_files import write_json

CHOICE = "remat.json"
"""In the run folder: what was chosen, and for which memory and micro-batches."""


def resolved_model(
    config: Config, cluster: Cluster, shapes: Callable[[], Sequence[AnyBatch]]
) -> ModelConfig:
    """The model with policies that fit this run's devices in place of `remat: auto`; prints them.

    A run that goes on with the same memory and micro-batches keeps what it began with.

    Args:
      config: the run's.
      cluster: its processes.
      shapes: gives those of its micro-batches.

    Raises:
      InputError: nothing fits, or the tokens of a micro-batch are not known.
    """
    model = config.model
    if model.remat != AUTO_REMAT:
        return model
    # Of process 0, since all must compile the same programs.
    least = _budget(model, cluster)
    policies, line = cluster.broadcast(lambda: _choice(config, least, shapes()))
    if first_process():
        print(line, flush=True)
    chosen: dict[str, Any] = {"remat": "none", "remat_layers": tuple(policies)}
    return dataclasses.replace(model, **chosen)


def require_memory(config: Config, cluster: Cluster, model: ModelConfig, plan: Plan) -> None:
    """Checks before anything is compiled that a step can fit a device; see `require_fit`.

    Args:
      config: the run's.
      cluster: its processes.
      model: the model, with its policies.
      plan: the plan.

    Raises:
      InputError: it cannot.
    """
    if (budget := _budget(model, cluster)) is None:
        return
    epoch, mesh = plan.epoch(0), config.mesh
    require_fit(
        *(model, int((epoch.rows * epoch.padded_len).max()), budget),
        *(config.parameters, config.optimizer, mesh),
        replicas=max(1, jax.device_count() // (mesh.fsdp * mesh.tensor)),
        single=config.planning.single_gradient,
    )


def _budget(model: ModelConfig, cluster: Cluster) -> float | None:
    """The least that a device of any process has, in bytes; None if unknown."""
    budgets = [each for each in cluster.all_gather(memory_budget(model)) if each is not None]
    return min(budgets, default=None)


def _choice(
    config: Config, budget: float | None, shapes: Sequence[AnyBatch]
) -> tuple[list[str], str]:
    """The policies and what is said of them."""
    if budget is None:
        return [UNRESOLVED], f"model.remat: {UNRESOLVED}, as auto knows no limit of memory here"
    conditions = _conditions(config, budget, shapes)
    place = Path(config.run.folder) / CHOICE
    before = _read(place)
    changed = _changed(before["for"], conditions) if before else []
    if before and not changed:
        policies = before["policies"]
        return policies, f"model.remat: {in_words(policies)}, as this run began"
    choice = choose_for(
        config.model,
        conditions["tokens"],
        budget,
        config.parameters,
        config.optimizer,
        shards=conditions["shards"],
        rows=conditions["samples"],
        work_space=conditions["work_space"],
        single=config.planning.single_gradient,
        layer_seconds=(seconds := _measured(config, conditions["tokens"])),
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    found = {"policies": choice.policies, "for": conditions, "layer_seconds": seconds}
    write_json(place, found)
    return list(choice.policies), "; ".join([choice.line(), *changed])


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Says which conditions are others than before; an older version wrote fewer of them."""
    return [
        f"{name} was {before[name]} and is {value}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]


def _measured(config: Config, tokens: int) -> dict[RematPolicy, float] | None:
    """Seconds of a layer by policy on this process's device; None where they are predicted."""
    if not measurable(config.model):
        return None
    print("model.remat: auto times two layers under each policy", flush=True)
    # As one row, whose condition a joint model counts among the tokens.
    beside = tokens_beside(config.model, CONDITION_TOKENS)
    latents = square_latents(config.model, max(1, tokens - beside))
    return layer_seconds(
        config.model, latents, optimizer=config.optimizer, parameters=config.parameters
    )


def _read(place: Path) -> dict[str, Any] | None:
    """What an earlier start of the run chose; None if there is none.

    Raises:
      InputError: the file holds something else.
    """
    content = read_json(place)
    if content is None:
        return None
    known = isinstance(content, dict) and isinstance(content.get("for"), dict) and content["for"]
    policies = content.get("policies") if known else None
    chosen = set(policies) if isinstance(policies, list) else set()
    if not chosen or not chosen <= set(get_args(RematPolicy)):
        raise InputError(f"{place}: is not a choice of model.remat auto; remove it")
    return content


def _conditions(config: Config, budget: float, shapes: Sequence[AnyBatch]) -> dict[str, Any]:
    """What a choice depends on.

    Raises:
      InputError: the tokens of a micro-batch are not known.
    """
    tokens = config.planning.tokens_bound(run_costs(config.model, config.planning))
    if tokens is None:
        raise InputError(
            "model.remat is auto, and how many tokens a micro-batch holds is not known; give "
            "planning.m_mem, or a policy such as attention"
        )
    return {
        "tokens": tokens,
        "samples": max(math.prod(each.sample.shape) for each in shapes),
        "work_space": _work_space(config, shapes),
        "budget": budget,
        "shards": config.mesh.fsdp * config.mesh.tensor,
        "device": jax.local_devices()[0].device_kind,
    }


def _work_space(config: Config, shapes: Sequence[AnyBatch]) -> int:
    """Bytes that attention within packed rows takes beyond that of as many tokens in one row.

    cuDNN's backward pass takes float32 gradients of queries for the longest segment in each slot.
    """
    width = config.model.architecture().get("dim", 0) // config.mesh.tensor
    most = 0
    for each in shapes:
        if isinstance(each, PackedBatch):
            rows, tokens = each.tokens.shape[:2]
            beyond = launched_tokens(rows, tokens, each.metadata.lengths) - rows * tokens
            most = max(most, beyond)
    return 4 * width * most
