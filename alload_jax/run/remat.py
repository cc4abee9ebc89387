"""Resolves `model.remat: auto` for the devices of a run."""

import dataclasses

from alload_jax.config import Config
from alload_jax.distributed.cluster import Cluster, first_process
from alload_jax.errors import InputError
from alload_jax.planning.remat import AUTO_REMAT, UNRESOLVED, Choice
from alload_jax.training.plan_costs import run_costs
from alload_jax.training.remat_choice import choose_for, memory_budget


def with_remat(config: Config, cluster: Cluster) -> Config:
    """Replaces `model.remat: auto` by policies that fit this run's devices, and prints them.

    Policies that the config lists stay: a run goes on with those that it began with.

    Raises:
      InputError: nothing fits, or the tokens of a micro-batch are not known.
    """
    model = config.model
    if model.remat != AUTO_REMAT or model.remat_layers:
        return config
    # Of process 0, since all must compile the same programs.
    budget = cluster.broadcast(lambda: memory_budget(model))
    choice = None if budget is None else _choose(config, budget)
    if first_process():
        unknown = f"model.remat: {UNRESOLVED}, as auto knows no limit of memory here"
        print(choice.line() if choice else unknown, flush=True)
    if choice is None:
        return config
    chosen = dataclasses.replace(model, remat_layers=choice.policies)
    return dataclasses.replace(config, model=chosen)


def _choose(config: Config, budget: float) -> Choice:
    model = config.model
    tokens = config.planning.tokens_bound(run_costs(model, config.planning))
    if tokens is None:
        raise InputError(
            "model.remat is auto, and how many tokens a micro-batch holds is not known; give "
            "planning.m_mem, or a policy such as attention"
        )
    shards = config.mesh.fsdp * config.mesh.tensor
    return choose_for(model, tokens, budget, config.parameters, config.optimizer, shards=shards)
