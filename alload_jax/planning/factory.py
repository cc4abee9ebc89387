"""Makes the policy and the plan of a config."""

from dataclasses import replace
from typing import cast

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile
from alload_jax.planning.m_comp import MCompCurve, longest_alone, search_m_comp
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.policy import Policy
from alload_jax.planning.predicted_time import draw_samples, epoch_time, predicted_time
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.topology import RankTopology

_MOST_CONTEXT = 16
"""Of the sizes of a context-parallel group that are tried: groups of more span hosts."""
_MOST_SAMPLES = 200_000
"""Samples with which they are tried."""


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
    topology, typical = _rank_topology(config, ranks, ranks_per_group), samples.typical()
    costs = costs or config.costs()
    if config.context == "auto":
        config = replace(config, context=choose_context(config, samples, topology, costs))
    if config.m_comp == "longest":
        open_bound = make_policy(replace(config, m_comp=None), costs).fitted(typical, topology)
        config = replace(config, m_comp=longest_alone(open_bound, samples))
    elif config.m_comp == "auto":
        return _with_best_m_comp(config, samples, topology, seed, costs)
    policy = make_policy(config, costs).fitted(typical, topology)
    return Plan(samples, policy, topology, seed)


def choose_context(
    config: PlanningConfig, samples: Samples, topology: RankTopology, costs: CostFile
) -> int:
    """The number of ranks of a context-parallel group with the least predicted time.

    Args:
      config: the settings; their `context` is not read.
      samples: of the data set, or a draw of it.
      topology: the ranks, whose number it divides.
      costs: the cost model's file.

    Raises:
      InputError: no number can place all samples.
    """
    times: dict[int, float] = {}
    refusals = []
    drawn = draw_samples(samples.typical(), _MOST_SAMPLES)
    for context in (c for c in range(1, _MOST_CONTEXT + 1) if topology.ranks % c == 0):
        tried = replace(config, context=context, m_comp=None)
        try:
            policy = make_policy(tried, costs).fitted(drawn, topology)
            model, split = tried.predictor(costs), tried.seconds_per_split_token(costs)
            times[context] = predicted_time(policy, drawn, topology, model, split)
        except InputError as error:  # a sample is too long for so few ranks
            refusals.append(error)
    if not times:
        raise refusals[-1]
    return min(times, key=lambda context: times[context])


def _with_best_m_comp(
    config: PlanningConfig, samples: Samples, topology: RankTopology, seed: int, costs: CostFile
) -> Plan:
    """The faster of the plan with the searched M_comp and the one that only memory bounds.

    The search plans a draw of the samples, so the whole plans are compared.
    """
    typical = samples.typical()
    curve = m_comp_curve(config, samples, topology, costs)
    model, split = config.predictor(costs), config.seconds_per_split_token(costs)

    def plan_at(m_comp: float | None) -> Plan:
        policy = make_policy(replace(config, m_comp=m_comp), costs).fitted(typical, topology)
        return Plan(samples, policy, topology, seed)

    open_bound = curve.m_comp[-1].item() if config.traits.m_comp_by_default else None
    plans = [plan_at(m_comp) for m_comp in dict.fromkeys((curve.chosen, open_bound))]
    return min(plans, key=lambda plan: epoch_time(plan.epoch(0), samples.seq_len, model, split))


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
        samples.typical(),
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
