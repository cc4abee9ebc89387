"""Selects trained and frozen parameters by patterns over their names."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from alload_jax.errors import InputError
from alload_jax.models.common.lora import ADAPTER, LORA_PATTERN, check_patterns
from alload_jax.models.common.stored import SCALE, VALUES, StoredDtype, is_stacked, stored_tree


@dataclass(frozen=True)
class ParametersConfig:
    """Which parameters are trained.

    Names are paths such as `blocks/self_attention/query/kernel`; layers are stacked in one array,
    so a name stands for all layers. Patterns are regular expressions that match anywhere in a name.
    Frozen parameters have no gradients, no optimizer state and no moving average.

    Attributes:
      trained: patterns of trained parameters.
      frozen: patterns of frozen parameters, which take precedence over `trained`.
      frozen_dtype: dtype of frozen parameters; `auto` is bfloat16 with adapters (`model.lora`),
        else float32. With `float8`, the kernels of the blocks have 8 bits per number and a scale
        for each output, and each layer reads them when it is computed; other frozen parameters are
        bfloat16.
      frozen_memory: where the frozen kernels of the blocks are; `host` keeps them in the host's
        memory, and copies those of a block to the device while the block before it computes.
    """

    trained: tuple[str, ...] = (".",)
    frozen: tuple[str, ...] = ()
    frozen_dtype: Literal["auto", "float32", "bfloat16", "float8"] = "auto"
    frozen_memory: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        for key in ("trained", "frozen"):
            check_patterns(f"parameters.{key}", getattr(self, key))

    def trains(self, name: str) -> bool:
        """Returns whether a parameter of this name is trained."""
        return matches(name, self.trained) and not matches(name, self.frozen)

    def identity(self) -> dict[str, object]:
        """Returns the fields that determine a checkpoint's arrays; empty if all are trained."""
        if self.trained == (".",) and not self.frozen:
            return {}
        return {
            "trained": list(self.trained),
            "frozen": list(self.frozen),
            "frozen_dtype": self.stored_dtype,
        }

    @property
    def stored_dtype(self) -> StoredDtype:
        """The dtype of frozen parameters."""
        return "float32" if self.frozen_dtype == "auto" else self.frozen_dtype

    def dtype_of(self, name: str) -> StoredDtype:
        """Returns the dtype in which the parameter of a name is stored."""
        return "float32" if self.trains(name) else self.stored_dtype

    def to_host(self, name: str, stored: jax.Array) -> bool:
        """Returns whether an array of a parameter, as it is stored, is in the host's memory."""
        parameter = name.removesuffix(f"/{VALUES}").removesuffix(f"/{SCALE}")
        on_host = self.frozen_memory == "host" and not self.trains(parameter)
        # Stacks within other modules are small, such as a text's refiner, and no loop fetches them.
        is_block = name.partition("/")[0].endswith("blocks")
        # Of one layer XLA makes no loop, and fails (JAX 0.11.2: "bitcast" of the host's memory).
        return on_host and is_block and is_stacked(name, stored) and stored.shape[0] > 1

    def with_lora(self, others: tuple[str, ...] = ()) -> "ParametersConfig":
        """Completes the settings of a model with adapters.

        Args:
          others: patterns of what is trained beside them by default.
        """
        trained = (LORA_PATTERN, *others) if self.trained == (".",) else self.trained
        dtype = "bfloat16" if self.frozen_dtype == "auto" else self.frozen_dtype
        return replace(self, trained=trained, frozen_dtype=dtype)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether one of the patterns matches a parameter's name."""
    return any(re.search(pattern, name) for pattern in patterns)


ALL_TRAINED = ParametersConfig()


def split_parameters(
    params: optax.Params, config: ParametersConfig
) -> tuple[optax.Params, optax.Params]:
    """Splits parameters into trained and frozen ones, both as nested dicts with the same dtypes.

    Args:
      params: nested dict of arrays or of their shapes.
      config: which parameters are trained.

    Raises:
        InputError: a pattern matches no parameter, or nothing is trained.
    """
    if not config.identity():
        return params, {}
    flat = flatten_dict(params, sep="/")
    for key in ("trained", "frozen"):
        for pattern in getattr(config, key):
            require_match(f"parameters.{key}", pattern, flat)
    trained = {name: value for name, value in flat.items() if config.trains(name)}
    if not trained:
        raise InputError(
            f"parameters.frozen {list(config.frozen)} leaves nothing of parameters.trained "
            f"{list(config.trained)}; leave at least one parameter to train"
        )
    frozen = {name: value for name, value in flat.items() if name not in trained}
    if stuck := [name for name in frozen if name.endswith(ADAPTER)]:
        raise InputError(
            f"model.lora has adapters, but parameters leaves {stuck[0]} and {len(stuck) - 1} more "
            f"untrained; add {LORA_PATTERN} to parameters.trained, or choose model.lora.targets"
        )
    return unflatten_dict(trained, sep="/"), unflatten_dict(frozen, sep="/")


def require_match(place: str, pattern: str, names: Iterable[str], what: str = "parameter") -> None:
    """Raises InputError if a pattern matches none of the parameters' names."""
    if not any(re.search(pattern, name) for name in names):
        examples = ", ".join(sorted(names)[:3])
        raise InputError(
            f"{place}: {pattern!r} matches no {what}; names are, for example, {examples} "
            "(`alload parameters --config FILE` lists them all)"
        )


def merge_parameters(trained: optax.Params, frozen: optax.Params) -> optax.Params:
    """Merges trained and frozen parameters, or other values by name, into one nested dict."""
    if not jax.tree.leaves(frozen):
        return trained
    return unflatten_dict(flatten_dict(trained) | flatten_dict(frozen))


def cast_frozen(frozen: optax.Params, config: ParametersConfig) -> optax.Params:
    """Casts frozen parameters to the dtype of the config."""
    return stored_tree(frozen, lambda _: config.stored_dtype)


def describe_trained(trained: optax.Params, frozen: optax.Params, config: ParametersConfig) -> str:
    """Says how many parameters are trained; empty if all are."""
    if not jax.tree.leaves(frozen):
        return ""
    numbers = sum(leaf.size for leaf in jax.tree.leaves(trained))
    frozen = {k: v for k, v in flatten_dict(frozen).items() if k[-2:] != ("kernel", SCALE)}
    total = numbers + sum(leaf.size for leaf in frozen.values())
    return f"{numbers:,} of {total:,} parameters are trained, the others are {config.stored_dtype}"
