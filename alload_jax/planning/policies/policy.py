"""The interface of all policies, the settings and ranks that they share, and predicted times."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np

from alload_jax.errors import InputError, require_positive
from alload_jax.planning.cost import (
    CostFile,
    CostModel,
    PowerCost,
    micro_batch_costs,
    rank_costs,
    read_cost_file,
    sent_share,
)
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.policies import AUTO, PolicyTraits, find_policy, policy_names
from alload_jax.planning.samples import Samples

RanksMode = Literal["synchronous", "independent"]
"""`synchronous`: all ranks of a micro-batch share one bucket. `independent`: each shape group has
its own.

All ranks of packed policies have rows of the same shape in both modes.
"""


@dataclass(frozen=True)
class RankTopology:
    """The ranks of a step.

    Attributes:
      ranks: number of data-parallel ranks.
      mode: whether ranks share a bucket.
      micro_batches_per_step: micro-batches that a rank accumulates before it updates.
      ranks_per_group: in mode `independent`, number of consecutive ranks of a shape group, which
        share a bucket; it divides `ranks`.
    """

    ranks: int
    mode: RanksMode = "synchronous"
    micro_batches_per_step: int = 1
    ranks_per_group: int = 1

    def __post_init__(self) -> None:
        if self.ranks % self.ranks_per_group:
            raise InputError(
                f"planning.ranks_per_group is {self.ranks_per_group}, which does not divide the "
                f"plan's {self.ranks} ranks; choose one that does"
            )

    @property
    def ranks_per_bucket(self) -> int:
        """Ranks whose bucketed micro-batches share a bucket: all, or those of a shape group."""
        return self.ranks if self.mode == "synchronous" else self.ranks_per_group


MOST, _MOST_P = 10**12, 10.0
"""Of counts in settings, and of `p`."""
MOST_RANKS = 2**20
"""Data-parallel ranks of a plan, at most."""


@dataclass(frozen=True)
class PlanSettings:
    """The settings that policies share. Others stand beside the policies that they are for.

    Attributes:
      policy: bucketed fixed, equal_tokens, sorted or dual_constraint; packed first_fit or balanced,
        where attention runs on packed rows (NVIDIA Ampere or newer); the name of a registered
        policy, or module:Class; or auto, which is balanced unless another that the devices can run
        is predicted to be more than 2 % faster over the run, time to its first step included.
      ranks_mode: of bucketed policies: synchronous (ranks share a bucket) or independent (each
        shape group draws its own; groups of one rank are AdaptiveLoad's setting). Null is
        synchronous, and the faster one where the policy is auto.
      micro_batches_per_step: micro-batches that every rank accumulates before an update.
      m_mem: maximum tokens of a micro-batch on one rank; null takes it from `cost_model`.
      m_comp: maximum cost of a micro-batch, B·S^p for `dual_constraint`, in the cost model's unit
        for `balanced`; `longest` is the cost of the longest sample alone, `auto` the value that
        minimises the predicted time of an epoch. Null takes it from `cost_model`, or else
        for `dual_constraint` auto, or longest without a cost model in seconds; no bound for
        `balanced`.
      p: exponent of cost over sequence length; null takes it from `cost_model`, or else 2.
      ranks: number of data-parallel ranks of the plan; null takes the mesh's. With a multiple of
        the mesh's, fewer devices compute the same steps as more devices would.
      ranks_per_group: in mode independent, number of ranks that share a bucket; null takes those
        of one index along the mesh's `data` axis.
      cost_model: path of a cost-model JSON.
      foreign_cost_model: accept a cost model that was made for another model or device.
      context: ranks of a context-parallel group, over which `balanced` splits samples that are
        too long for one rank's fair share; 1 splits none; auto is the number with the least
        predicted time. In training it follows mesh.context.
      link_bandwidth: bytes per second that a rank sends to its group, to predict the cost of
        splitting; plain all-to-alls between H200s of one host reach 76 GB/s.
      recalibrate: epoch fits the cost model to the step times of the run before each epoch, and
        plans the epoch by it, for the layers whose attention is sparse by then, with the same
        programs; window does so before every 32 to 128 steps, also for the measured speeds of
        ranks, and moves the samples of these steps alone; null plans all epochs by `cost_model`
        and the layers of the first step.
      noise_scale: samples of a step at which its gradient has as much noise as signal, as the
        callback `gradient_noise` measures them: the policy, the rows of `balanced` and its bound
        on a step's samples are then those with the least predicted time to a loss; null for the
        least time of an epoch.
      options: settings of a registered policy that has options.
    """

    policy: str = AUTO
    ranks_mode: RanksMode | None = None
    micro_batches_per_step: int = 1
    m_mem: int | None = None
    m_comp: float | Literal["auto", "longest"] | None = None
    p: float | None = None
    ranks: int | None = None
    ranks_per_group: int | None = None
    cost_model: str | None = None
    foreign_cost_model: bool = False
    context: int | Literal["auto"] = 1
    link_bandwidth: float = 76e9
    recalibrate: Literal["epoch", "window"] | None = None
    noise_scale: float | None = None
    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        choices = {
            "policy": (self.policy,) if ":" in str(self.policy) else (AUTO, *policy_names()),
            "ranks_mode": (None, *get_args(RanksMode)),
            "recalibrate": (None, "epoch", "window"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise InputError(
                    f"planning.{name} is {getattr(self, name)!r}; choose one of "
                    f"{', '.join(each or 'null' for each in known)}"
                )
        if isinstance(self.context, str) and self.context != "auto":
            raise InputError(f"planning.context is {self.context}; it must be a whole number")
        counts = ["micro_batches_per_step", "m_mem", "ranks_per_group"]
        counts += [] if self.context == "auto" else ["context"]
        require_positive("planning.", self, *counts, most=MOST)
        require_positive("planning.", self, "ranks", most=MOST_RANKS)
        for name in ("m_comp", "p", "link_bandwidth", "noise_scale"):
            value = getattr(self, name)
            if isinstance(value, str) and value not in ("auto", "longest"):
                raise InputError(f"planning.{name} is {value!r}; give a number, auto or longest")
            most = math.inf if name == "m_comp" else sys.float_info.max
            if isinstance(value, int | float) and not 0 < value <= most:
                raise InputError(f"planning.{name} is {value}; it must be a number above 0")
        if self.p is not None and self.p > _MOST_P:
            raise InputError(f"planning.p is {self.p}; it must be at most {_MOST_P:g}")

    @property
    def traits(self) -> type[PolicyTraits]:
        """The class of the policy, with its traits.

        Raises:
          ValueError: the policy is auto.
        """
        if self.policy == AUTO:
            raise ValueError("planning.policy is auto; choose one by `choose_policy`")
        return find_policy(self.policy)

    def identity(self) -> dict[str, object]:
        """Settings that a run keeps when it is continued and that its plan's identity lacks."""
        return {"recalibrate": self.recalibrate} if self.recalibrate else {}

    def costs(self) -> CostFile:
        """The content of the cost-model JSON; an empty `CostFile` if none is given."""
        return read_cost_file(Path(self.cost_model)) if self.cost_model else CostFile()

    def exponent(self, costs: CostFile) -> float:
        """The p to use, where the cost model is that of a file."""
        return float(self.p or (costs.power.p if costs.power else 2.0))

    @property
    def single_gradient(self) -> bool:
        """Whether a step has one micro-batch for all ranks, whose gradient is then the step's."""
        return self.micro_batches_per_step == 1 and self.ranks_mode != "independent"

    def tokens_bound(self, costs: CostFile) -> int | None:
        """The M_mem to use, or None; `costs` as in `exponent`."""
        return self.m_mem or costs.m_mem

    def required_m_mem(self, costs: CostFile) -> int:
        """The M_mem to use; `costs` as in `exponent`.

        Raises:
          InputError: neither the config nor the cost model gives it.
        """
        m_mem = self.tokens_bound(costs)
        if m_mem is None:
            raise InputError(
                f"{self.cost_model}: has no m_mem, and planning.m_mem is not given; "
                "give it in tokens"
            )
        return m_mem

    @property
    def m_comp_value(self) -> float | None:
        """The config's M_comp as a number, or None.

        Raises:
          ValueError: it is auto or longest, whose value is not known yet.
        """
        if isinstance(self.m_comp, str):
            raise ValueError(f"planning.m_comp is {self.m_comp}; find its value first")
        return self.m_comp

    def predictor(self, costs: CostFile | None = None) -> CostModel:
        """The model that predicts steps: the cost model's best form, or else B·S^p.

        `costs` replaces the config's cost model if given.
        """
        costs = costs or self.costs()
        if costs.quadratic:
            return costs.quadratic
        if costs.power and self.p is None:
            return costs.power
        return PowerCost(self.exponent(costs))

    @property
    def context_value(self) -> int:
        """Ranks of a context-parallel group.

        Raises:
          ValueError: it is auto, whose value is not known yet.
        """
        if isinstance(self.context, str):
            raise ValueError(f"planning.context is {self.context}; find its value first")
        return self.context

    def seconds_per_split_token(self, costs: CostFile) -> float:
        """Predicted seconds of communication per split token of a rank; 0 if unknown.

        As many ranks exchange heads as divide the group's ranks and the heads. `costs` as in
        `exponent`.
        """
        context = self.context_value
        if not costs.bytes_per_split_token or not costs.quadratic:
            return 0.0
        exchanged = math.gcd(context, int((costs.model or {}).get("num_heads", 0)))
        sent = sent_share(context, exchanged) * costs.bytes_per_split_token
        return sent / self.link_bandwidth

    def refuse_foreign_costs(self, model: Mapping[str, object], device: str | None) -> None:
        """Raises InputError if the cost model was made for another model or device.

        Args:
          model: fields of the model's architecture; those that the cost model has must be equal.
          device: JAX's name of the device; None if unknown.
        """
        costs = self.costs()
        if self.foreign_cost_model or not self.cost_model:
            return
        if unlike := costs.unlike(model, device):
            raise InputError(
                f"{self.cost_model}: was made for {unlike}; run `alload calibrate` "
                "here, or set planning.foreign_cost_model"
            )


class Policy(PolicyTraits, ABC):
    """Turns a data set's columns into an epoch.

    A policy is a frozen dataclass: its fields are its identity. It sets the class attributes of
    `PolicyTraits`. One with an M_comp also defines `m_comp_measure`.
    """

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any, costs: CostFile) -> Self:
        """The policy with the config's bounds.

        Args:
          config: `PlanSettings` with the policy's own; its `m_comp` is a number or None.
          costs: the cost model's file, which may give bounds that the config leaves open.

        Raises:
          InputError: a bound is given nowhere.
        """

    def fitted(
        self, samples: Samples, topology: RankTopology, program_share: float = 0.0
    ) -> "Policy":
        """The policy with a value for whatever its config leaves to the samples.

        Args:
          samples: of a typical epoch.
          topology: ranks and steps.
          program_share: share of the run's time that compiling a program takes.
        """
        del samples, topology, program_share
        return self

    def recalibrated(self, cost: CostModel) -> "Policy":
        """The policy with another cost model; its plans need no other programs.

        Policies whose trait `recalibrates` has epoch define it.

        Raises:
          NotImplementedError: the policy has no cost model that can change.
        """
        raise NotImplementedError(f"policy {self.name} cannot be recalibrated")

    @abstractmethod
    def plan_epoch(
        self, samples: Samples, topology: RankTopology, rng: np.random.Generator
    ) -> EpochPlan:
        """Places every sample once, or as often as it stands in the epoch.

        Args:
          samples: N samples.
          topology: ranks and steps.
          rng: decides the order; equal generators give equal epochs.

        Raises:
          InputError: a sample can't be placed; it names the samples and what would place them.
        """

    def m_comp_measure(self, seq_len: np.ndarray) -> np.ndarray:
        """What M_comp bounds, of micro-batches that hold one sample each.

        Args:
          seq_len: [N] integers.

        Returns:
          [N] float64.

        Raises:
          InputError: the policy has no M_comp.
        """
        others = (name for name in policy_names() if find_policy(name).has_m_comp)
        raise InputError(f"policy {self.name} has no M_comp; choose {' or '.join(others)}")

    def m_comp_range(self, seq_len: np.ndarray) -> tuple[float, float]:
        """The least and the largest M_comp worth trying.

        Args:
          seq_len: [K] integers, the lengths of the data set, each once.

        Raises:
          InputError: the policy has no M_comp.
        """
        alone = self.m_comp_measure(seq_len)
        # Of many samples to a micro-batch: one of four times the mean cost is bound by memory.
        return float(alone.min()), float(max(alone.max(), 4 * alone.mean()))


def predicted_time(
    policy: Policy, samples: Samples, topology: RankTopology, model: CostModel
) -> float:
    """Predicted time of a policy's first epoch, in the cost model's unit.

    Raises:
      InputError: the policy cannot place a sample.
    """
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, 0])))
    return makespan(policy.plan_epoch(samples, topology, rng), model)


def time_to_loss(epoch: EpochPlan, model: CostModel, noise_scale: float) -> float:
    """Predicted time of as much progress as a step without noise makes, in the model's unit.

    A step whose gradient has noise of r times the signal, in squares, makes 1/(1 + r) of that
    progress with the learning rate that suits it (arXiv 1812.06162, eq. 2.7). Gradients are divided
    by the mean number n of samples of a step. Then r = (B + var(n_t)/n)/n, with the noise scale B:
    samples differ, and so do their numbers n_t.

    Args:
      epoch: the plan.
      model: predicts times.
      noise_scale: B, in samples.
    """
    samples = epoch.samples_per_step()
    mean = samples.mean()
    noise = (noise_scale + samples.var() / mean) / mean
    return float((1 + noise) * makespan(epoch, model) / epoch.steps)


def makespan(epoch: EpochPlan, model: CostModel) -> float:
    """Sum over an epoch's steps of the predicted time of their slowest ranks."""
    return float(rank_costs(epoch, micro_batch_costs(epoch, model)).max(axis=1).sum())


_NAMED = 5


def named(numbers: np.ndarray, seq_len: np.ndarray) -> str:
    """Names the first few samples, with their tokens, for messages.

    Args:
      numbers, seq_len: [N] integers.
    """
    pairs = zip(numbers[:_NAMED].tolist(), seq_len[:_NAMED].tolist(), strict=True)
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return ", ".join(f"{sample} ({tokens} tokens)" for sample, tokens in pairs) + more
