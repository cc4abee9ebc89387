"""The planning section of a config."""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile, CostModel, PowerCost, read_cost_file
from alload_jax.planning.policies.registry import (
    AUTO,
    PolicyTraits,
    candidates,
    find_policy,
    policy_names,
)
from alload_jax.planning.topology import RanksMode

_MOST, _MOST_P, _MOST_RANKS = 10**12, 10.0, 2**20
_IN_COST_FILES = ("m_mem",)
"""Required settings that a cost model may give."""


@dataclass(frozen=True)
class PlanningConfig:
    """The planning section of a config: the policy, its bounds and the ranks.

    Attributes:
      policy: bucketed fixed, equal_tokens, sorted or dual_constraint; packed first_fit or balanced,
        where attention runs on packed rows (NVIDIA Hopper or newer); the name of a registered
        policy; or auto, which is balanced unless another that the devices can run is predicted to
        be more than 2 % faster over the run, time to its first step included.
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
      rows: for `fixed`, a batch size, or one for each bucket's name (`17x16x16`).
      ranks: number of data-parallel ranks of the plan; null takes the mesh's. With a multiple of
        the mesh's, fewer devices compute the same steps as more devices would.
      ranks_per_group: in mode independent, number of ranks that share a bucket; null takes those
        of one index along the mesh's `data` axis.
      cost_model: path of a cost-model JSON.
      foreign_cost_model: accept a cost model that was made for another model or device.
      align: samples in packed rows begin at multiples of this many tokens.
      row_tokens: tokens of a packed row of `balanced`, at most m_mem; null for the number with the
        least predicted time.
      max_programs: maximum number of buckets of a bucketed policy, each of which is a program to
        compile; shapes of similar length share one. Null for what compiles in ten minutes, at most
        64.
      max_segments: maximum samples of a packed row; null for the number with the least predicted
        time (`first_fit`: 4 times the mean).
      sample_spread: a step of `balanced` holds at most this many times the mean number of samples,
        and at least the mean over it, so that each sample weighs about the same; null for no bound.
      look_ahead: steps in a window, within which packed policies place samples.
      context: ranks of a context-parallel group, over which `balanced` splits samples that are
        too long for one rank's fair share; 1 splits none; auto is the number with the least
        predicted time. In training it follows mesh.context.
      split_above: samples whose cost exceeds this many times that of a mean row are split: 1 is
        the fair share, 0 splits all.
      link_bandwidth: bytes per second that a rank sends to its group, to predict the cost of
        splitting; plain all-to-alls between H200s of one host reach 76 GB/s.
      recalibrate: epoch fits the cost model to the step times of the run before each epoch, and
        plans the epoch by it, for the layers whose attention is sparse by then, with the same
        programs; null plans all epochs by `cost_model` and the layers of the first step.
      options: settings of a registered policy that has options.
    """

    policy: str = AUTO
    ranks_mode: RanksMode | None = None
    micro_batches_per_step: int = 1
    m_mem: int | None = None
    m_comp: float | Literal["auto", "longest"] | None = None
    p: float | None = None
    rows: int | dict[str, int] | None = None
    ranks: int | None = None
    ranks_per_group: int | None = None
    cost_model: str | None = None
    foreign_cost_model: bool = False
    align: int = 1
    row_tokens: int | None = None
    max_programs: int | None = None
    max_segments: int | None = None
    sample_spread: float | None = 2.5
    look_ahead: int = 32
    context: int | Literal["auto"] = 1
    split_above: float = 1.0
    link_bandwidth: float = 76e9
    recalibrate: Literal["epoch"] | None = None
    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._check_names()
        self._check_numbers()
        self._check_policy()

    def _check_names(self) -> None:
        choices = {
            "policy": (AUTO, *policy_names()),
            "ranks_mode": (None, *get_args(RanksMode)),
            "recalibrate": (None, "epoch"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise InputError(
                    f"planning.{name} is {getattr(self, name)!r}; choose one of "
                    f"{', '.join(each or 'null' for each in known)}"
                )

    def _check_numbers(self) -> None:
        at_least_one = ("micro_batches_per_step", "m_mem", "ranks", "ranks_per_group", "align")
        counts = ("row_tokens", "max_programs", "max_segments", "look_ahead", "context")
        for name in (*at_least_one, *counts):
            value = getattr(self, name)
            if value is None or (name == "context" and value == "auto"):
                continue
            limit = _MOST_RANKS if name == "ranks" else _MOST
            if isinstance(value, str) or not 1 <= value <= limit:
                bound = "a whole number" if isinstance(value, str) else "at least 1"
                bound = bound if isinstance(value, str) or value < 1 else f"at most {limit:,}"
                raise InputError(f"planning.{name} is {value}; it must be {bound}")
        for name in ("m_comp", "p", "link_bandwidth"):
            value = getattr(self, name)
            if isinstance(value, str) and value not in ("auto", "longest"):
                raise InputError(f"planning.{name} is {value!r}; give a number, auto or longest")
            most = math.inf if name == "m_comp" else sys.float_info.max
            if isinstance(value, int | float) and not 0 < value <= most:
                raise InputError(f"planning.{name} is {value}; it must be a number above 0")
        if self.sample_spread is not None and not self.sample_spread > 1:
            raise InputError(
                f"planning.sample_spread is {self.sample_spread}; it must be above 1, "
                "and null sets no bound"
            )
        if not 0 <= self.split_above < math.inf:
            raise InputError(
                f"planning.split_above is {self.split_above}; it must be 0 or more, and finite"
            )
        if self.p is not None and self.p > _MOST_P:
            raise InputError(f"planning.p is {self.p}; it must be at most {_MOST_P:g}")

    def _check_policy(self) -> None:
        """Checks that required settings are given and that the policy supports the others."""
        policies = candidates(self.policy)
        for name in dict.fromkeys(name for policy in policies for name in policy.required):
            by_cost_model = name in _IN_COST_FILES
            if getattr(self, name) is None and not (by_cost_model and self.cost_model):
                other = " or planning.cost_model" if by_cost_model else ""
                raise InputError(
                    f"planning.policy is {self.policy} but planning.{name} is not given; "
                    f"give planning.{name}{other}"
                )
        if self.policy == AUTO and isinstance(self.m_comp, int | float):
            raise InputError(
                f"planning.m_comp is {self.m_comp}, whose unit depends on the policy, and "
                "planning.policy is auto; name the policy, or give auto or longest"
            )
        if self.context != 1 and not any(policy.splits_samples for policy in policies):
            splitting = [name for name in policy_names() if find_policy(name).splits_samples]
            raise InputError(
                f"planning.context is {self.context}, but {self.policy} splits no sample; "
                f"choose planning.policy {' or '.join(splitting)}, or leave context at 1"
            )

        if self.recalibrate and not any(policy.recalibrates for policy in policies):
            able = [name for name in policy_names() if find_policy(name).recalibrates]
            raise InputError(
                f"planning.recalibrate is {self.recalibrate}, but the plan of {self.policy} does "
                f"not follow step times; choose planning.policy {' or '.join(able)}, or leave "
                "recalibrate out"
            )

    @property
    def traits(self) -> type[PolicyTraits]:
        """The class of the policy, with its traits.

        Raises:
          ValueError: the policy is auto.
        """
        if self.policy == AUTO:
            raise ValueError("planning.policy is auto; choose one by `choose_policy`")
        return find_policy(self.policy)

    def identity(self) -> dict[str, Any]:
        """Settings that a run keeps when it is continued and that its plan's identity lacks."""
        return {"recalibrate": self.recalibrate} if self.recalibrate else {}

    def costs(self) -> CostFile:
        """The content of the cost-model JSON; an empty `CostFile` if none is given."""
        return read_cost_file(Path(self.cost_model)) if self.cost_model else CostFile()

    def exponent(self, costs: CostFile | None = None) -> float:
        """The p to use; `costs` replaces the config's cost model if given."""
        power = (costs or self.costs()).power
        return float(self.p or (power.p if power else 2.0))

    @property
    def single_gradient(self) -> bool:
        """Whether a step has one micro-batch for all ranks, whose gradient is then the step's."""
        return self.micro_batches_per_step == 1 and self.ranks_mode != "independent"

    def tokens_bound(self, costs: CostFile | None = None) -> int | None:
        """The M_mem to use, or None; `costs` as in `exponent`."""
        return self.m_mem or (costs or self.costs()).m_mem

    def required_m_mem(self, costs: CostFile | None = None) -> int:
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
        """The model that predicts steps: the cost model's best form, or else B·S^p."""
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

    def seconds_per_split_token(self, costs: CostFile | None = None) -> float:
        """Predicted seconds of communication per split token of a rank; 0 if unknown.

        In an all-to-all a rank keeps 1/c of its bytes and sends the rest. `costs` as in
        `exponent`.
        """
        costs = costs or self.costs()
        if not costs.bytes_per_split_token or not costs.quadratic:
            return 0.0
        return costs.bytes_per_split_token * (1 - 1 / self.context_value) / self.link_bandwidth

    def refuse_foreign_costs(self, model: dict[str, Any], device: str | None) -> None:
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


def policy_config(config: PlanningConfig, policy: str) -> PlanningConfig:
    """`config` with the policy `balanced` or the policy and mode `equal_tokens:independent`.

    Raises:
      InputError: the policy or the mode is unknown.
    """
    name, _, mode = policy.partition(":")
    traits = find_policy(name)
    if mode and mode not in get_args(RanksMode):
        raise InputError(
            f"policy {policy!r}: choose {name}:{f' or {name}:'.join(get_args(RanksMode))}"
        )
    if mode and traits.packed:
        raise InputError(f"policy {policy!r}: packed rows have one shape on all ranks; give {name}")
    named = replace(
        config,
        policy=name,
        context=config.context if traits.splits_samples else 1,
        m_comp=config.m_comp if traits.has_m_comp else None,
        options=config.options if traits.has_options else None,
    )
    return replace(named, ranks_mode=cast(RanksMode, mode)) if mode else named


def case_name(config: PlanningConfig) -> str:
    """The displayed name of the policy and its mode."""
    if not config.traits.packed:
        return f"{config.policy} ({config.ranks_mode or 'synchronous'})"
    return config.policy + (f" (split, c = {config.context})" if config.context != 1 else "")
