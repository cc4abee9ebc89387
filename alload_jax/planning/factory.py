"""Makes the policy and the plan of a config."""

import math
from dataclasses import replace
from typing import cast

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile, in_seconds
from alload_jax.planning.m_comp import MCompCurve, longest_alone, search_m_comp
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.balanced import Balanced
from alload_jax.planning.policies.policy import Policy
from alload_jax.planning.policies.row_search import TRIALS
from alload_jax.planning.predicted_time import makespan
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.topology import RankTopology

_MOST_CONTEXT = 64
"""Of the sizes of a context-parallel group that are tried."""
_SHORTEST_RUN = 3600.0
"""Seconds of a run of which programs may take their share; small data sets are trained often."""
_ROUGH, _WORTH = 6, 0.003
"""Epochs that are planned for each of them at first; share of the time that a larger group must
save."""


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
    if isinstance(config.context, int) and (heads := costs.heads_left_by(config.context)):
        raise InputError(
            f"planning.context is {config.context}, which does not divide the model's {heads} "
            "heads, and training splits samples by heads; choose a divisor"
        )
    if config.context == "auto":
        config = with_best_context(config, samples, topology, costs)
    if config.m_comp == "longest":
        open_bound = make_policy(replace(config, m_comp=None), costs).fitted(typical, topology)
        config = replace(config, m_comp=longest_alone(open_bound, samples))
    elif config.m_comp == "auto" or _searches_m_comp(config, costs):
        return _with_best_m_comp(config, samples, topology, seed, costs)
    share = program_share(config, typical, topology, costs)
    policy = make_policy(config, costs).fitted(typical, topology, share)
    return Plan(samples, policy, topology, seed)


def _searches_m_comp(config: PlanningConfig, costs: CostFile) -> bool:
    """Whether an M_comp that nothing gives is searched: by default, if costs are seconds."""
    given = config.m_comp is not None or costs.m_comp is not None
    return config.traits.m_comp_by_default and not given and in_seconds(config.predictor(costs))


def program_share(
    config: PlanningConfig, samples: Samples, topology: RankTopology, costs: CostFile
) -> float:
    """Share of the time of a run that compiling a program takes.

    Of a run of one epoch, or of `_SHORTEST_RUN`, and not of the run's own length: a run that is
    continued for longer has the same plan.
    """
    model, epoch = config.predictor(costs), 0.0
    if in_seconds(model):
        epoch = float(model.sequence_cost(samples.seq_len).sum()) / topology.ranks
    return costs.seconds_of_program / max(epoch, _SHORTEST_RUN)


def with_best_context(
    config: PlanningConfig, samples: Samples, topology: RankTopology, costs: CostFile
) -> PlanningConfig:
    """The config with the context-parallel group and the rows of the least predicted time.

    All sizes of a group are tried roughly, each with rows that suit it, and the best two well.

    Args:
      config: the settings, of a policy that splits samples; their `context` is not read.
      samples: of the data set.
      topology: the ranks, whose number the size divides.
      costs: the cost model's file; if it names the model's heads, their number is divided too.
    """
    typical, rough = samples.typical(), {}

    def best_tokens(context: int, below: float, trials: int) -> tuple[int, float]:
        policy = make_policy(replace(config, context=context, m_comp=None), costs)
        assert isinstance(policy, Balanced)
        given = config.row_tokens
        most = given or policy.m_mem
        return policy.row_trials(typical, topology).best_tokens(most, below, trials, given)

    for context in range(1, min(_MOST_CONTEXT, topology.ranks) + 1):
        if topology.ranks % context == 0 and not costs.heads_left_by(context):
            rough[context] = best_tokens(context, math.inf, _ROUGH)[1]
    best, tokens, least = 1, config.row_tokens, math.inf
    for context in sorted(sorted(rough, key=lambda context: rough[context])[:2]):
        bound = (1 - _WORTH) * least
        found, time = best_tokens(context, bound, TRIALS)
        if time < bound:
            best, tokens, least = context, found, time
    if config.m_comp is not None:  # it makes other rows the best
        tokens = config.row_tokens
    return replace(config, context=best, row_tokens=tokens)


def _with_best_m_comp(
    config: PlanningConfig, samples: Samples, topology: RankTopology, seed: int, costs: CostFile
) -> Plan:
    """The fastest of the plans with the searched M_comp, with `longest`, and without a bound.

    The search plans a draw of the samples, so the whole plans are compared.
    """
    typical = samples.typical()
    curve = m_comp_curve(config, samples, topology, costs)
    model, split = config.predictor(costs), config.seconds_per_split_token(costs)

    share = program_share(config, typical, topology, costs)

    def plan_at(m_comp: float | None) -> Plan:
        policy = make_policy(replace(config, m_comp=m_comp), costs)
        policy = policy.fitted(typical, topology, share)
        return Plan(samples, policy, topology, seed)

    open_bound = curve.m_comp[-1].item() if config.traits.m_comp_by_default else None
    alone = longest_alone(make_policy(replace(config, m_comp=None), costs), samples)
    plans = [plan_at(m_comp) for m_comp in dict.fromkeys((curve.chosen, alone, open_bound))]
    return min(plans, key=lambda plan: makespan(plan.epoch(0), samples.seq_len, model, split))


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
        config.ranks_mode or "synchronous",
        config.micro_batches_per_step,
        (config.ranks_per_group or ranks_per_group) if grouped else 1,
    )
