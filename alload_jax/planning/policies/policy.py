"""The interface of all policies."""

from abc import ABC, abstractmethod
from typing import Self

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile, CostModel
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.policies.registry import PolicyTraits, find_policy, policy_names
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.topology import RankTopology


class Policy(PolicyTraits, ABC):
    """Turns a data set's columns into an epoch.

    A policy is a frozen dataclass: its fields are its identity. It sets the class attributes of
    `PolicyTraits`. One with an M_comp also defines `m_comp_measure`.
    """

    @classmethod
    @abstractmethod
    def from_config(cls, config: PlanningConfig, costs: CostFile) -> Self:
        """The policy with the config's bounds.

        Args:
          config: whose `m_comp` is a number or None.
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

        Policies whose trait `recalibrates` is set define it.

        Raises:
          NotImplementedError: the policy has no cost model that can change.
        """
        raise NotImplementedError(f"policy {self.name} cannot be recalibrated")

    @abstractmethod
    def plan_epoch(
        self,
        samples: Samples,
        topology: RankTopology,
        rng: np.random.Generator,
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
