"""The planning section of a config."""

from dataclasses import dataclass, fields, is_dataclass
from typing import cast, get_args

from alload_jax.errors import InputError
from alload_jax.planning.policies import AUTO, candidates, find_policy, policy_names
from alload_jax.planning.policies.balanced import BalancedSettings
from alload_jax.planning.policies.bucketed import FixedSettings
from alload_jax.planning.policies.policy import Policy, RanksMode


@dataclass(frozen=True)
class PlanningConfig(FixedSettings, BalancedSettings):
    """The planning section of a config: what policies share, and the settings of each of them.

    A registered policy may extend it, see `PolicyTraits.config`.
    """

    def __post_init__(self) -> None:
        """Checks that required settings are given and that the policy supports the others."""
        super().__post_init__()
        policies = candidates(self.policy)
        for name in dict.fromkeys(name for policy in policies for name in policy.required):
            by_cost_model = name == "m_mem"
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
        follows, names = self.recalibrate, policy_names()
        if follows and not any(follows in policy.recalibrates for policy in policies):
            able = [name for name in names if follows in find_policy(name).recalibrates]
            raise InputError(
                f"planning.recalibrate is {self.recalibrate}, but the plan of {self.policy} does "
                f"not follow step times; choose planning.policy {' or '.join(able)}, or leave "
                "recalibrate out"
            )


def _name_and_mode(policy: str) -> tuple[str, str]:
    """The parts of `equal_tokens:independent` or `module:Class:independent`; no mode is ""."""
    parts = policy.split(":")
    own = 1 if parts[0] in (AUTO, *policy_names()) else 2
    return ":".join(parts[:own]), ":".join(parts[own:])


def config_type(policy: str) -> type[PlanningConfig]:
    """The dataclass of the planning section for a policy; that of all for an unknown one."""
    name, _ = _name_and_mode(str(policy))
    own = find_policy(name).config if name in policy_names() or ":" in name else None
    return cast(type[PlanningConfig], own or PlanningConfig)


def read_by_others(config: PlanningConfig) -> list[str]:
    """Names of settings that differ from the defaults and that only other policies read."""
    read = set[str]()
    for policy in candidates(config.policy):
        kind = cast(type[Policy], policy).from_config.__annotations__.get("config")
        if not is_dataclass(kind):  # a registered policy that does not say
            return []
        read |= {field.name for field in fields(kind)}
    own = (field for field in fields(PlanningConfig) if field.name not in read)
    return [field.name for field in own if getattr(config, field.name) != field.default]


def policy_config(config: PlanningConfig, policy: str) -> PlanningConfig:
    """`config` with the policy `balanced` or the policy and mode `equal_tokens:independent`.

    Raises:
      InputError: the policy or the mode is unknown.
    """
    name, mode = _name_and_mode(policy)
    traits = find_policy(name)
    if mode and mode not in get_args(RanksMode):
        raise InputError(
            f"policy {policy!r}: choose {name}:{f' or {name}:'.join(get_args(RanksMode))}"
        )
    if mode and traits.packed:
        raise InputError(f"policy {policy!r}: packed rows have one shape on all ranks; give {name}")
    settings = {
        "context": traits.splits_samples,
        "m_comp": traits.has_m_comp,
        "options": traits.has_options,
    }
    changed = {each: getattr(PlanningConfig, each) for each, known in settings.items() if not known}
    if mode:
        changed["ranks_mode"] = mode
    return with_policy(config, name, **changed)


def with_policy(config: PlanningConfig, policy: str, **changed: object) -> PlanningConfig:
    """The settings for a policy: its own that `config` lacks have their defaults.

    Args:
      config: the settings.
      policy: name of the policy.
      changed: other settings in place of those of `config`.

    Raises:
      InputError: the policy does not support them.
    """
    kind = config_type(policy)
    values = {f.name: getattr(config, f.name) for f in fields(kind) if hasattr(config, f.name)}
    return kind(**values | {"policy": policy} | changed)


def case_name(config: PlanningConfig) -> str:
    """The displayed name of the policy and its mode."""
    if not config.traits.packed:
        return f"{config.policy} ({config.ranks_mode or 'synchronous'})"
    return config.policy + (f" (split, c = {config.context})" if config.context != 1 else "")
