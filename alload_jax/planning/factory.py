"""Makes the policy and the plan of a config."""

from dataclasses import replace
from typing import cast

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile
from alload_jax.planning.m_comp import MCompCurve, longest_alone, search_m_comp
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.policy import Policy
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.topology import RankTopology


def make_policy(config: PlanningConfig, costs: CostFile | None = None) -> Policy:
    """Makes the policy of the config, whose `m_comp` must be a number or None.

    Args:
      config: the settings.
      costs: the cost model's file; None reads what the config names.

    Raises:
      InputError: a bound that the policy needs is missing, or it has no options but some are given.
      ValueError: the policy is auto.
    """
    policy = cast(type[Policy], config.traits)
    if config.options and not policy.has_options:
        raise InputError(
            f"planning.options is {config.options!r}, but policy {policy.name} has no options; "
            "leave it out"
        )
    return policy.from_config(config, costs or config.costs())


def make_plan(
    config: PlanningConfig,
    samples: Samples,
    ranks: int,
    seed: int,
    costs: CostFile | None = None,
    ranks_per_group: int = 1,
) -> Plan:
    """Makes the plan of the config.

    Args:
      config: the settings.
      samples: the manifest's columns.
      ranks: number of data-parallel ranks, if the config does not give it.
      seed: seed of the order of samples.
      costs: the cost model's file; None reads what the config names.
      ranks_per_group: ranks of a shape group, if the config does not give them.

    Raises:
      InputError: a sample cannot be placed, or a bound is missing.
    """
    topology = _rank_topology(config, ranks, ranks_per_group)
    costs = costs or config.costs()
    if config.m_comp == "longest":
        open_bound = make_policy(replace(config, m_comp=None), costs)
        config = replace(config, m_comp=longest_alone(open_bound, samples))
    elif config.m_comp == "auto":
        config = replace(config, m_comp=m_comp_curve(config, samples, topology, costs).chosen)
    return Plan(samples, make_policy(config, costs), topology, seed)


def m_comp_curve(
    config: PlanningConfig, samples: Samples, topology: RankTopology, costs: CostFile | None = None
) -> MCompCurve:
    """Predicted time of an epoch over `m_comp`, with the other settings of the config.

    Raises:
      InputError: the policy has no M_comp or cannot place a sample.
    """
    costs = costs or config.costs()
    return search_m_comp(
        lambda m_comp: make_policy(replace(config, m_comp=m_comp), costs),
        samples,
        topology,
        config.predictor(costs),
        config.seconds_per_split_token(costs),
    )


def _rank_topology(config: PlanningConfig, ranks: int, ranks_per_group: int) -> RankTopology:
    grouped = config.ranks_mode == "independent" and not config.traits.packed
    return RankTopology(
        config.ranks or ranks,
        config.ranks_mode,
        config.micro_batches_per_step,
        (config.ranks_per_group or ranks_per_group) if grouped else 1,
    )
