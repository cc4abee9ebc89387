"""Plans and evaluates several policies on several numbers of ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from alload_jax.planning.cost import CostFile, CostModel, in_seconds
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import (
    PlanMetrics,
    RepeatedNeighbours,
    plan_metrics,
    repeated_neighbours,
)
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.registry import AUTO, find_policy
from alload_jax.planning.portfolio import ONE_EPOCH, RunLength, choose_policy
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig, case_name, policy_config
from alload_jax.planning.simulation import Simulation, SimulationSettings, simulate


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
      predictor: the cost model.
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
    predictor: CostModel
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
    def in_seconds(self) -> bool:
        """Whether costs are seconds; otherwise they have no unit."""
        return in_seconds(self.predictor)

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
        """Plans every policy on every number of ranks.

        Args:
          policies: names such as `balanced`, or names with a mode of ranks such as
            `equal_tokens:independent`.
          ranks: numbers of data-parallel ranks.

        Raises:
          InputError: a policy is unknown or cannot place a sample.
        """
        for count in ranks:
            for policy in policies:
                yield self.case(policy, count)

    def case(self, policy: str, ranks: int) -> Case:
        """Plans one policy on one number of ranks; see `cases`."""
        if policy == AUTO:
            auto = replace(self.config, policy=AUTO)
            chosen = choose_policy(
                *(auto, self.samples_of, ranks, self.costs), packs=self.packs, length=self.length
            )
            config, reason = chosen
        else:
            config, reason = policy_config(self.config, policy), ""
        samples = self.samples_of(config.policy)
        plan = make_plan(replace(config, ranks=ranks), samples, ranks, self.seed, self.costs)
        if config.context == "auto":  # the plan has chosen it
            config = replace(config, context=getattr(plan.policy, "context", 1))
        epoch = plan.epoch(self.epoch)
        seq_len = samples.seq_len
        seconds_per_split_token = config.seconds_per_split_token(self.costs)
        m_mem = config.tokens_bound(self.costs)
        metrics = plan_metrics(epoch, seq_len, self.predictor, m_mem, seconds_per_split_token)
        simulation = None
        if self.replay:
            simulation = simulate(
                epoch, seq_len, self.predictor, self.replay, seconds_per_split_token
            )
        neighbours = repeated_neighbours(epoch, plan.epoch(self.epoch + 1), seq_len)
        return Case(
            case_name(config),
            ranks,
            config,
            plan,
            epoch,
            metrics,
            neighbours,
            self.predictor,
            simulation,
            self.costs.first_step_seconds(metrics.buckets),
            reason,
        )
