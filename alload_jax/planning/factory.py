"""Makes the policy and the plan of a config, or the best of several."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, cast

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile, in_seconds
from alload_jax.planning.metrics import programs_of
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies import PORTFOLIO, find_policy
from alload_jax.planning.policies.balanced import TRIALS, Balanced, RowTrials
from alload_jax.planning.policies.policy import Policy, RankTopology
from alload_jax.planning.policies.search import (
    MCompCurve,
    draw_samples,
    longest_alone,
    makespan,
    search_m_comp,
)
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig, case_name, policy_config, with_policy
from alload_jax.processes import waits

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
    config = with_policy(config, policy.name)
    return policy.from_config(config, costs or config.costs())


@waits("for the plan")
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
    grouped = config.ranks_mode == "independent" and not config.traits.packed
    topology = RankTopology(
        config.ranks or ranks,
        config.ranks_mode or "synchronous",
        config.micro_batches_per_step,
        (config.ranks_per_group or ranks_per_group) if grouped else 1,
    )
    typical = samples.typical()
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
    elif config.m_comp == "auto" or (
        config.traits.m_comp_by_default
        and config.m_comp is None
        and costs.m_comp is None
        and in_seconds(config.predictor(costs))
    ):
        return _with_best_m_comp(config, samples, topology, seed, costs)
    share = program_share(config, typical, topology, costs)
    policy = make_policy(config, costs).fitted(typical, topology, share)
    return Plan(samples, policy, topology, seed)


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
        return RowTrials(policy, typical, topology).best_tokens(below, trials)

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


_MOST_SAMPLES = 100_000
"""Samples with which policies are compared."""
_SPEED_WORTH = 0.02
"""How much faster a policy must be than one that stands before it in the portfolio."""


class RunLength(NamedTuple):
    """How long a run trains, by which the time to its first step counts.

    Attributes:
      epochs: passes over the data; None where `steps` counts.
      steps: optimizer steps.
    """

    epochs: float | None = 1.0
    steps: int = 0


ONE_EPOCH = RunLength()


class Choice(NamedTuple):
    """The policy that auto takes.

    Attributes:
      config: the settings, with the policy and its mode of ranks.
      reason: what was compared, in a line.
    """

    config: PlanningConfig
    reason: str


@waits("for the plan")
def choose_policy(
    config: PlanningConfig,
    samples_of: Callable[[str], Samples],
    ranks: int,
    costs: CostFile,
    *,
    packs: bool,
    independent: bool = True,
    ranks_per_group: int = 1,
    length: RunLength = ONE_EPOCH,
) -> Choice:
    """The config with auto replaced by a policy of the portfolio.

    None that the devices can run is predicted to be more than 2 % faster over the run.

    Args:
      config: settings whose policy is auto; a mode of ranks that they give is kept, and so is a
        size of context groups where rows can be packed.
      samples_of: the samples with their lengths in the rows of a policy.
      ranks: number of data-parallel ranks, if the config does not give it.
      costs: the cost model's file.
      packs: whether the devices run packed rows.
      independent: whether ranks may have shapes of their own.
      ranks_per_group: ranks of a shape group, if the config does not give them.
      length: of the run.

    Raises:
      InputError: no policy can place all samples, or run with the mode of ranks; the message is
        that of the first.
    """
    found: list[tuple[float, PlanningConfig]] = []
    refusals: list[InputError] = []
    unit = in_seconds(config.predictor(costs))
    for name in PORTFOLIO:
        policy, _, mode = name.partition(":")
        packed = find_policy(policy).packed
        if (packed and not packs) or (mode == "independent" and not independent):
            continue
        if packs and config.context not in (1, "auto") and not find_policy(policy).splits_samples:
            continue
        if not packed and config.ranks_mode not in (None, mode):
            continue
        if mode == "independent" and (config.ranks or ranks) == 1:
            continue
        each = policy_config(config, name)
        samples = draw_samples(samples_of(policy), _MOST_SAMPLES)
        try:
            plan = make_plan(each, samples, ranks, 0, costs, ranks_per_group)
        except InputError as error:
            refusals.append(error)
            continue
        epoch, share = plan.epoch(0), len(samples_of(policy)) / len(samples)
        model, split = each.predictor(costs), each.seconds_per_split_token(costs)
        time = share * makespan(epoch, samples.seq_len, model, split)
        if unit:
            first_step = costs.first_step_seconds(programs_of(epoch))
            epochs = length.epochs or length.steps / max(1, round(share * epoch.steps))
            time += first_step / epochs  # for each epoch of the run
        found.append((time, each))
    if not found and not refusals:
        raise InputError(
            f"planning.ranks_mode is {config.ranks_mode}, but one rank, or devices of one shape "
            "group, take the same shape in each step, and packed rows don't run here; leave it out"
        )
    if not found:
        raise refusals[0]
    least = min(seconds for seconds, _ in found)
    chosen = next(each for each in found if each[0] <= (1 + _SPEED_WORTH) * least)
    others = sorted((each for each in found if each is not chosen), key=lambda each: each[0])
    reason = f"planning.policy auto takes {case_name(chosen[1])}"
    if others:
        ratio = others[0][0] / chosen[0]
        reason += f"; {case_name(others[0][1])}, the next, is predicted at {ratio:.2f} of its time"
    return Choice(chosen[1], reason)
