"""The planning section of a config, and the plan that it asks for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile, CostModel, PowerCost, read_cost_file
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.bucketed import BucketedPolicy, RankLayout, RanksMode
from alload_jax.planning.policies.dual_constraint import DualConstraint
from alload_jax.planning.policies.equal_tokens import EqualTokens
from alload_jax.planning.policies.fixed import Fixed
from alload_jax.planning.samples import Samples

PolicyName = Literal["fixed", "equal_tokens", "dual_constraint"]


@dataclass(frozen=True)
class PlanningConfig:
    """What a micro-batch may hold, and who runs it.

    Attributes:
      policy: fixed, equal_tokens or dual_constraint.
      ranks_mode: synchronous (ranks share a bucket) or independent (plans only, so far).
      micro_batches_per_step: micro-batches that every rank accumulates before an update.
      m_mem: most tokens of a micro-batch on one rank; null takes it from `cost_model`.
      m_comp: most B·S^p of a micro-batch; null takes it from `cost_model`, or else that of the
        longest sequence at B = 1.
      p: exponent of cost over sequence length; null takes it from `cost_model`, or else 2.
      rows: for `fixed`, a batch size, or one for each bucket's name (`17x16x16`).
      ranks: data-parallel ranks that the plan is made for; null takes the mesh's. A multiple of
        the mesh's lets fewer devices do the work of more, sample for sample.
      cost_model: path of a cost-model JSON.
    """

    policy: PolicyName = "dual_constraint"
    ranks_mode: RanksMode = "synchronous"
    micro_batches_per_step: int = 1
    m_mem: int | None = None
    m_comp: float | None = None
    p: float | None = None
    rows: int | dict[str, int] | None = None
    ranks: int | None = None
    cost_model: str | None = None

    def __post_init__(self) -> None:
        for name, choices in (("policy", PolicyName), ("ranks_mode", RanksMode)):
            if getattr(self, name) not in get_args(choices):
                raise InputError(
                    f"planning.{name} is {getattr(self, name)!r}; "
                    f"choose one of {', '.join(get_args(choices))}"
                )
        for name in ("micro_batches_per_step", "m_mem", "ranks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"planning.{name} is {value}; it must be at least 1")
        for name in ("m_comp", "p"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"planning.{name} is {value}; it must be above 0")
        if self.policy == "fixed" and self.rows is None:
            raise InputError("planning.policy is fixed but planning.rows is not given; give it")
        if self.policy != "fixed" and self.m_mem is None and self.cost_model is None:
            raise InputError(
                f"planning.policy {self.policy} needs planning.m_mem (tokens) or "
                "planning.cost_model; neither is given"
            )

    def costs(self) -> CostFile:
        """What the cost-model JSON says; nothing if there is none."""
        return read_cost_file(Path(self.cost_model)) if self.cost_model else CostFile()

    def exponent(self) -> float:
        """The p in force."""
        power = self.costs().power
        return float(self.p or (power.p if power else 2.0))

    def tokens_bound(self) -> int | None:
        """The M_mem in force."""
        return self.m_mem or self.costs().m_mem

    def predictor(self) -> CostModel:
        """The cost model that predicts steps: the JSON's best one, or else B·S^p."""
        costs = self.costs()
        if costs.quadratic:
            return costs.quadratic
        if costs.power and self.p is None:
            return costs.power
        return PowerCost(self.exponent())


def make_policy(config: PlanningConfig) -> BucketedPolicy:
    """The policy that the config names, with its bounds.

    Raises:
      InputError: a bound that the policy needs is given nowhere.
    """
    m_mem = config.tokens_bound()
    if config.policy == "fixed":
        assert config.rows is not None
        return Fixed(config.rows, m_mem)
    if m_mem is None:
        raise InputError(
            f"{config.cost_model}: has no m_mem, and planning.m_mem is not given; give it in tokens"
        )
    if config.policy == "equal_tokens":
        return EqualTokens(m_mem)
    m_comp = config.m_comp or config.costs().m_comp
    return DualConstraint(m_mem, None if m_comp is None else float(m_comp), config.exponent())


def make_plan(config: PlanningConfig, samples: Samples, ranks: int, seed: int) -> Plan:
    """The plan that the config asks for.

    Args:
      samples: the manifest's columns.
      ranks: data-parallel ranks, where the config leaves them open.
      seed: decides the order of samples.

    Raises:
      InputError: a sample cannot be placed, or a bound is missing.
    """
    layout = RankLayout(config.ranks or ranks, config.ranks_mode, config.micro_batches_per_step)
    return Plan(samples, make_policy(config), layout, seed)
