"""Policies by name, and the traits of each before it is built.

To add a policy, write a frozen dataclass that is a `Policy` (`policy.py`), or a `Bucketed` one with
`rows_per_bucket` like `EqualTokens` (`bucketed.py`): it says what it can do and builds itself from
the config. Name it in the table below, or decorate it with `register_policy` in code of your own;
or name it `module:Class` in the config.
Nothing here imports a policy: settings know policies by this module, and policies know settings.
"""

from typing import ClassVar, TypeVar

from alload_jax.registry import Registry

AUTO = "auto"
PORTFOLIO = (
    *("balanced", "equal_tokens:synchronous", "dual_constraint:synchronous", "first_fit"),
    *("dual_constraint:independent", "equal_tokens:independent", "sorted:independent"),
)
"""What auto selects from, with the mode of ranks: of about equal speed, the first.

Steps mix lengths best under the first, and least under the last. `sorted` is `equal_tokens` where
ranks share buckets.
"""


class PolicyTraits:
    """Class attributes that describe a policy.

    Attributes:
      name: in configs and on the command line.
      packed: its micro-batches are packed rows; else rows of one shape.
      splits_samples: it can split a sample over `planning.context` ranks.
      has_m_comp: it can bound the cost of a micro-batch by `planning.m_comp`.
      m_comp_by_default: it does so even where `planning.m_comp` is not given.
      recalibrates: values of `planning.recalibrate` that it can follow.
      has_options: it reads `planning.options`.
      config: what its `from_config` reads beyond the keys of built-in policies: a frozen dataclass
        that extends `PlanningConfig`; None for nothing.
      required: settings without which it cannot plan.
    """

    name: ClassVar[str]
    packed: ClassVar[bool] = False
    splits_samples: ClassVar[bool] = False
    has_m_comp: ClassVar[bool] = False
    m_comp_by_default: ClassVar[bool] = False
    recalibrates: ClassVar[tuple[str, ...]] = ()
    has_options: ClassVar[bool] = False
    config: ClassVar[type | None] = None
    required: ClassVar[tuple[str, ...]] = ("m_mem",)


_POLICIES: Registry[type[PolicyTraits]] = Registry(
    "policy",
    {
        "fixed": "alload_jax.planning.policies.bucketed:Fixed",
        "equal_tokens": "alload_jax.planning.policies.bucketed:EqualTokens",
        "sorted": "alload_jax.planning.policies.bucketed:Sorted",
        "dual_constraint": "alload_jax.planning.policies.bucketed:DualConstraint",
        "first_fit": "alload_jax.planning.policies.packed:FirstFit",
        "balanced": "alload_jax.planning.policies.balanced:Balanced",
    },
    "plan_epoch",
)

PolicyT = TypeVar("PolicyT", bound=type[PolicyTraits])


def register_policy(policy: PolicyT) -> PolicyT:
    """Makes a policy's class known by its `name`; also as a decorator.

    Args:
      policy: a frozen dataclass that is a `Policy` (`policy.py`).

    Raises:
      ValueError: another policy has the name.
    """
    _POLICIES.register(policy.name, policy)
    return policy


def find_policy(name: str) -> type[PolicyTraits]:
    """The class of a policy.

    Raises:
      InputError: there is none of that name; the message lists the names.
    """
    return _POLICIES.get(name)


def policy_names() -> tuple[str, ...]:
    """The names of all policies; auto is none of them."""
    return _POLICIES.names()


def candidates(name: str) -> tuple[type[PolicyTraits], ...]:
    """The class of a policy; for auto, the classes of all that it can select."""
    names = (each.partition(":")[0] for each in PORTFOLIO) if name == AUTO else (name,)
    return tuple(find_policy(each) for each in dict.fromkeys(names))
