"""Plans and evaluates several policies on several numbers of ranks, and advises by it."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from alload_jax.planning.cost import CostFile, CostModel, empty_row_cost, in_seconds, marginal_cost
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.factory import (
    ONE_EPOCH,
    RunLength,
    choose_policy,
    make_plan,
    with_best_context,
)
from alload_jax.planning.metrics import (
    PlanMetrics,
    RepeatedNeighbours,
    Simulation,
    SimulationSettings,
    plan_metrics,
    repeated_neighbours,
    simulate,
)
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies import AUTO, find_policy
from alload_jax.planning.policies.balanced import Balanced, RowTrials
from alload_jax.planning.policies.packed import slots_for
from alload_jax.planning.policies.policy import time_to_loss
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig, case_name, policy_config


@dataclass(frozen=True)
class Case:
    """One policy on one number of ranks.

    Attributes:
      name: name of the policy, with its mode of ranks if it has one.
      ranks: number of data-parallel ranks.
      config: the planning settings.
      plan: the plan.
      epoch: the evaluated epoch.
      metrics: metrics of the epoch.
      neighbours: how much of the rows' company returns in the epoch after it.
      in_seconds: whether costs are seconds; otherwise they have no unit.
      simulation: simulation of the epoch; None if not requested.
      first_step_seconds: predicted time from the start of a run to the end of its first step.
      reason: why auto took the policy; "" if it was named.
    """

    name: str
    ranks: int
    config: PlanningConfig
    plan: Plan
    epoch: EpochPlan
    metrics: PlanMetrics
    neighbours: RepeatedNeighbours
    in_seconds: bool
    simulation: Simulation | None
    first_step_seconds: float
    reason: str = ""

    def figures(self) -> dict[str, Any]:
        """The metrics and the simulation, as JSON values."""
        metrics = asdict(self.metrics) | {
            "repeated_neighbours": self.neighbours.share,
            "repeated_neighbours_random": self.neighbours.random,
            "first_step_seconds": self.first_step_seconds,
        }
        content: dict[str, Any] = {"name": self.name, "metrics": metrics}
        return content | ({"simulation": asdict(self.simulation)} if self.simulation else {})

    @property
    def plan_m_mem(self) -> int | None:
        """The plan's M_mem; None if it has none."""
        return getattr(self.plan.policy, "m_mem", None)


@dataclass(frozen=True)
class Study:
    """The inputs that all cases share.

    Attributes:
      samples: the samples of the data set, with their lengths in packed rows.
      config: settings of all policies.
      costs: the content of the cost model's file.
      seed, epoch: seed and number of the epoch, which determine the order of samples.
      replay: noise and all-reduce of the simulation; None for no simulation.
      bucketed: the samples with their lengths in bucketed rows; None for the same lengths.
      packs: whether the device runs packed rows.
      length: of the run, by which the policy auto is chosen.
    """

    samples: Samples
    config: PlanningConfig
    costs: CostFile
    seed: int = 0
    epoch: int = 0
    replay: SimulationSettings | None = None
    bucketed: Samples | None = None
    packs: bool = True
    length: RunLength = ONE_EPOCH

    def samples_of(self, policy: str) -> Samples:
        """The samples with their lengths in the rows of a policy."""
        if self.bucketed is None or find_policy(policy).packed:
            return self.samples
        return self.bucketed

    @property
    def predictor(self) -> CostModel:
        """The cost model that evaluates all policies."""
        return self.config.predictor(self.costs)

    def cases(self, policies: Sequence[str], ranks: Sequence[int]) -> Iterator[Case]:
        """Plans every policy on every number of ranks; one that auto takes is planned once.

        Args:
          policies: names such as `balanced`, or names with a mode of ranks such as
            `equal_tokens:independent`.
          ranks: numbers of data-parallel ranks.

        Raises:
          InputError: a policy is unknown or cannot place a sample.
        """
        for count in ranks:
            taken = None
            for policy in sorted(policies, key=lambda policy: policy != AUTO):
                if taken is not None and case_name(policy_config(self.config, policy)) == taken:
                    continue
                yield (case := self.case(policy, count))
                taken = case.name if policy == AUTO else taken

    def case(self, policy: str, ranks: int) -> Case:
        """Plans one policy on one number of ranks; see `cases`."""
        if policy == AUTO:
            auto = replace(self.config, policy=AUTO)
            chosen = choose_policy(
                auto,
                self.samples_of,
                ranks,
                self.costs,
                packs=self.packs,
                length=self.length,
            )
            config, reason = chosen
        else:
            config, reason = policy_config(self.config, policy), ""
        samples = self.samples_of(config.policy)
        plan = make_plan(replace(config, ranks=ranks), samples, ranks, self.seed, self.costs)
        if config.context == "auto":  # the plan has chosen it
            config = replace(config, context=getattr(plan.policy, "context", 1))
        epoch = plan.epoch(self.epoch)
        m_mem = config.tokens_bound(self.costs)
        metrics = plan_metrics(epoch, self.predictor, m_mem)
        simulation = None
        if self.replay:
            simulation = simulate(epoch, self.predictor, self.replay)
        neighbours = repeated_neighbours(epoch, plan.epoch(self.epoch + 1))
        return Case(
            case_name(config),
            ranks,
            config,
            plan,
            epoch,
            metrics,
            neighbours,
            in_seconds(self.predictor),
            simulation,
            self.costs.first_step_seconds(metrics.buckets),
            reason,
        )


_GIANT = 1.5
"""Cost of a sample alone, over that of a mean step, from which it holds up the other ranks."""
_SHARE = 0.02
"""Share of an epoch's time that is worth advice."""
_OUTSIDE = 1.02
"""Samples of a step over the bound from which that is said."""
_LARGER = np.geomspace(1.02, 2.5, 24)
"""M_mem that are tried to make a bound free, over the present one."""
_SLOTS = 4.0
"""Slots of such rows over the mean number of samples."""


def advice(study: Study, cases: Sequence[Case]) -> list[str]:
    """Sentences about the cases of one number of ranks.

    They say which plans are the same and why, which sample holds up a plan and what would help,
    what the bound on a step's samples costs, and the time to a loss.
    """
    found = []
    for case in cases:
        for tell in (_same_as_equal_tokens, _giant, _price_of_spread, _time_to_loss):
            if sentence := tell(study, case):
                found.append(sentence)
    return found


def _same_as_equal_tokens(study: Study, case: Case) -> str | None:
    """Where M_comp does not bind, the plan is that of memory alone."""
    policy, m_mem = case.plan.policy, case.plan_m_mem
    if case.config.traits.packed or not case.config.traits.has_m_comp or not m_mem:
        return None
    buckets = study.samples.buckets()
    rows = policy.rows_per_bucket(buckets)  # type: ignore[attr-defined]
    if not np.array_equal(rows, m_mem // buckets.seq_len):
        return None
    return (
        f"{case.name}: M_comp does not bind. Every bucket gets the rows that M_mem allows, so the "
        "plan is that of equal_tokens."
    )


def _giant(study: Study, case: Case) -> str | None:
    """A few samples whose cost exceeds what the other ranks of their steps have to do."""
    policy = case.plan.policy
    if not isinstance(policy, Balanced) or policy.context > 1:
        return None
    lengths, counts = np.unique(study.samples.typical().seq_len, return_counts=True)
    mean = (1 - case.metrics.idle) * case.metrics.cost / case.metrics.steps
    model = study.predictor
    row = empty_row_cost(model, case.epoch.padded_len[:1], case.epoch.slots()[:1])
    over = (row[0] + marginal_cost(model, lengths)) / mean  # of rows that hold one sample
    count = int(counts[over > _GIANT].sum())
    # From as many on as there are ranks, they meet in steps of their own.
    waste = -(-count // case.ranks) * (over.max() - 1) * mean / case.metrics.cost
    if not 0 < count < case.ranks or waste < _SHARE:
        return None
    samples = f"{count} samples of up to {lengths[-1]:,} tokens take"
    if count == 1:
        samples = f"one sample of {lengths[-1]:,} tokens takes"
    found = (
        f"{case.name}: {samples} up to {over.max():.1f} times as long as the mean rank of a step, "
        "and the other ranks wait."
    )
    topology = case.plan.topology
    best = with_best_context(case.config, study.samples, topology, study.costs)
    if best.context == 1:
        return found
    split = replace(study, config=best, replay=None).case(case.config.policy, case.ranks)
    if split.metrics.cost >= case.metrics.cost:  # a group may do no more than avoid odd rows
        return found
    return f"{found} --context {best.context} splits them and has the least predicted time."


def _price_of_spread(study: Study, case: Case) -> str | None:
    """What the bound on a step's samples costs, where it was relaxed, and what makes it free."""
    policy, wanted = case.plan.policy, case.config.sample_spread
    if not isinstance(policy, Balanced) or wanted in (None, np.inf) or case.metrics.steps < 2:
        return None
    if policy.noise_scale is not None:  # the bound is chosen for the time to a loss
        return None
    trials = RowTrials(policy, study.samples.typical(), case.plan.topology)
    free = trials.time_of(replace(policy, sample_spread=None))
    least, most = case.metrics.step_samples_min, case.metrics.step_samples_max
    found = f"{case.name}: steps hold {least:.2f} to {most:.2f} times the mean number of samples."
    bounded = trials.time_of(replace(policy, sample_spread=wanted)) / free - 1
    if policy.sample_spread == wanted:
        found += f" The bound of {wanted:g} (--sample-spread) costs {max(0.0, bounded):.1%} of time"
        outside = max(1 / least, most) / wanted
        return f"{found}{'; some steps find no way to keep it.' if outside > _OUTSIDE else '.'}"
    taken = "is not kept" if policy.sample_spread is None else f"is {policy.sample_spread:g}"
    found += (
        f" A bound of {wanted:g} (--sample-spread) would cost {bounded:.0%} of time, so it {taken}"
    )
    if m_mem := _free_of_charge(policy, trials, wanted, free):
        found += f"; --m-mem {m_mem} makes it free"
    return found + "."


def _time_to_loss(study: Study, case: Case) -> str | None:
    """How far a step comes with the noise of its gradient."""
    if (scale := case.config.noise_scale) is None:
        return None
    time, model = case.metrics.cost / case.metrics.steps, study.predictor
    share = time / time_to_loss(case.epoch, model, scale)
    unit = " s" if case.in_seconds else ""
    return (
        f"{case.name}: {case.metrics.samples / case.metrics.steps:,.1f} samples a step make "
        f"{share:.0%} of the progress of one without noise; as much takes {time / share:.4g}{unit}."
    )


def _free_of_charge(policy: Balanced, trials: RowTrials, spread: float, time: float) -> int | None:
    """The least M_mem with which the bound on a step's samples takes no more than `time`."""
    for share in _LARGER:
        tokens = int(policy.m_mem * share) // policy.align * policy.align
        slots = slots_for(trials.samples, tokens, _SLOTS)
        larger = replace(policy, m_mem=tokens, row_tokens=tokens, max_segments=slots)
        if trials.time_of(replace(larger, sample_spread=spread)) <= time:
            return tokens
    return None
