"""Chooses the policy of `planning.policy: auto`: the fastest that the devices can run."""

from collections.abc import Callable
from typing import NamedTuple

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile, in_seconds
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import programs_of
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.registry import PORTFOLIO, find_policy
from alload_jax.planning.predicted_time import draw_samples, makespan
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig, case_name, policy_config

_MOST_SAMPLES = 100_000
"""Samples with which policies are compared."""
_WORTH = 0.02
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
      InputError: no policy can place all samples; the message is that of the first.
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
        share = len(samples_of(policy)) / len(samples)
        found.append((_seconds(plan, each, costs, unit, share, length), each))
    if not found:
        raise refusals[0]
    least = min(seconds for seconds, _ in found)
    chosen = next(each for each in found if each[0] <= (1 + _WORTH) * least)
    others = sorted((each for each in found if each is not chosen), key=lambda each: each[0])
    reason = f"planning.policy auto takes {case_name(chosen[1])}"
    if others:
        ratio = others[0][0] / chosen[0]
        reason += f"; {case_name(others[0][1])}, the next, is predicted at {ratio:.2f} of its time"
    return Choice(chosen[1], reason)


def _seconds(
    plan: Plan,
    config: PlanningConfig,
    costs: CostFile,
    in_seconds: bool,
    share: float,
    length: RunLength,
) -> float:
    """Predicted time of the run for each of its epochs, of `share` times the plan's samples."""
    epoch, split = plan.epoch(0), config.seconds_per_split_token(costs)
    time = share * makespan(epoch, plan.samples.seq_len, config.predictor(costs), split)
    if not in_seconds:
        return time
    first_step = costs.first_step_seconds(programs_of(epoch))
    return length.seconds(time, max(1, round(share * epoch.steps)), first_step)
