"""Makes the policy and the plan of a config, or the best of several."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile, in_seconds
from alload_jax.planning.metrics import programs_of
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies import PORTFOLIO, find_policy
from alload_jax.planning.policies.balanced import TRIALS, Balanced, RowTrials
from alload_jax.planning.policies.policy import (
    Policy,
    RankTopology,
    makespan,
    predicted_time,
    time_to_loss,
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
    config = with_policy(config, config.policy)
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

    All sizes of a group are tried roughly, each with rows that suit it, and the best three well.

    Args:
      config: the settings, of a policy that splits samples; their `context` is not read.
      samples: of the data set.
      topology: the ranks, whose number the size divides.
      costs: the cost model's file.
    """
    typical, rough = samples.typical(), {}

    def best_tokens(context: int, below: float, trials: int) -> tuple[int, float]:
        policy = make_policy(replace(config, context=context, m_comp=None), costs)
        if not isinstance(policy, Balanced):
            raise InputError(
                f"planning.context is auto, which is known for balanced and not for "
                f"{config.policy}; give a number"
            )
        return RowTrials(policy, typical, topology).best_tokens(below, trials)

    for context in range(1, min(_MOST_CONTEXT, topology.ranks) + 1):
        if topology.ranks % context == 0:
            rough[context] = best_tokens(context, math.inf, _ROUGH)[1]
    best, tokens, least = 1, config.row_tokens, math.inf
    for context in sorted(sorted(rough, key=lambda context: rough[context])[:3]):
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
    curve, model = m_comp_curve(config, samples, topology, costs), config.predictor(costs)

    share = program_share(config, typical, topology, costs)

    def plan_at(m_comp: float | None) -> Plan:
        policy = make_policy(replace(config, m_comp=m_comp), costs)
        policy = policy.fitted(typical, topology, share)
        return Plan(samples, policy, topology, seed)

    open_bound = curve.m_comp[-1].item() if config.traits.m_comp_by_default else None
    alone = longest_alone(make_policy(replace(config, m_comp=None), costs), samples)
    plans = [plan_at(m_comp) for m_comp in dict.fromkeys((curve.chosen, alone, open_bound))]
    return min(plans, key=lambda plan: makespan(plan.epoch(0), model))


_POINTS, _FINE_POINTS = 17, 10
"""Values of M_comp to try over the whole range, then between the neighbours of the best."""
_MOST_DRAWN, _MOST_PER_RANK = 20_000, 200
"""Maximum samples to plan per value, in all or per rank, whichever is more."""


@dataclass(frozen=True)
class MCompCurve:
    """Predicted time of an epoch over M_comp.

    Attributes:
      m_comp: [K] float64, ascending, in the policy's measure.
      cost: [K] float64, predicted time of an epoch, in the cost model's unit.
      chosen: the value with the least cost; of several the largest, which needs the fewest steps.
    """

    m_comp: np.ndarray
    cost: np.ndarray

    @property
    def chosen(self) -> float:
        """See the class."""
        return float(self.m_comp[np.flatnonzero(self.cost == self.cost.min())[-1]])


def longest_alone(policy: Policy, samples: Samples) -> float:
    """The M_comp called `longest`: the most costly sample at B = 1, in the policy's measure.

    That is the longest, unless sparse attention makes it cheaper than a shorter one. AdaptiveLoad
    (arXiv 2605.17923) does not say how it chooses M_comp.

    Raises:
      InputError: the policy has no M_comp.
    """
    return float(policy.m_comp_measure(np.unique(samples.seq_len)).max())


def m_comp_curve(
    config: PlanningConfig, samples: Samples, topology: RankTopology, costs: CostFile | None = None
) -> MCompCurve:
    """Predicted time of an epoch over `m_comp`, with the other settings of the config.

    An epoch is planned at values over the policy's range (`Policy.m_comp_range`).

    Raises:
      InputError: the policy has no M_comp or cannot place a sample.
    """
    costs, samples = costs or config.costs(), samples.typical()
    model = config.predictor(costs)

    def policy_at(m_comp: float) -> Policy:
        return make_policy(replace(config, m_comp=m_comp), costs)

    least, most = policy_at(1.0).m_comp_range(np.unique(samples.seq_len))
    if not least > 0:
        raise InputError("the cost model predicts a cost of 0 for samples; calibrate it again")
    drawn = draw_samples(samples, max(_MOST_DRAWN, _MOST_PER_RANK * topology.ranks))

    def curve(values: np.ndarray) -> MCompCurve:
        plans = (policy_at(float(value)) for value in values)
        cost = [predicted_time(plan, drawn, topology, model) for plan in plans]
        return MCompCurve(values, np.asarray(cost) * len(samples) / len(drawn))

    coarse = curve(np.unique(np.geomspace(least, most, _POINTS)))
    best = int(np.searchsorted(coarse.m_comp, coarse.chosen))
    below, above = coarse.m_comp[max(0, best - 1)], coarse.m_comp[best + 1 :][:1]
    around = np.geomspace(below, float(above[0]) if len(above) else most, _FINE_POINTS + 2)
    inner = np.setdiff1d(around[1:-1], coarse.m_comp)
    fine = curve(inner)
    order = np.argsort(np.r_[coarse.m_comp, fine.m_comp])
    return MCompCurve(
        np.r_[coarse.m_comp, fine.m_comp][order], np.r_[coarse.cost, fine.cost][order]
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

    def seconds(self, epoch_seconds: float, epoch_steps: int, first_step: float) -> float:
        """Seconds of the run for each of its epochs."""
        epochs = self.epochs or self.steps / epoch_steps
        return epoch_seconds + first_step / epochs


ONE_EPOCH = RunLength()


class Choice(NamedTuple):
    """The policy that auto takes.

    Attributes:
      config: the settings, with the policy and its mode of ranks.
      reason: what was compared, in a line.
    """

    config: PlanningConfig
    reason: str


def draw_samples(samples: Samples, most: int) -> Samples:
    """At most so many samples, among them the longest; they depend on the data set alone."""
    if len(samples) <= most:
        return samples
    drawn = np.random.default_rng(0).choice(len(samples), most, replace=False)
    drawn = np.union1d(drawn, np.argmax(samples.seq_len))
    return Samples(samples.shape[drawn], samples.seq_len[drawn])


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
    first_effort: float | None = None
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
        if config.recalibrate and config.recalibrate not in find_policy(policy).recalibrates:
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
        time = share * makespan(epoch, each.predictor(costs))
        time *= (packed and costs.packed_ratio) or 1.0
        if config.noise_scale is not None:  # of as much progress as the first makes in an epoch
            made = time_to_loss(epoch, each.predictor(costs), config.noise_scale)
            effort = made / makespan(epoch, each.predictor(costs))
            time *= effort / (first_effort := first_effort or effort)
        if unit:
            first_step = costs.first_step_seconds(programs_of(epoch))
            time = length.seconds(time, max(1, round(share * epoch.steps)), first_step)
        found.append((time, each))
    if not found and not refusals and config.recalibrate == "window":
        raise InputError(
            "planning.recalibrate is window, which needs packed rows, and they don't run here; "
            "give epoch, or leave it out"
        )
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
