"""AdamW with warm-up, cosine decay and clipping, and the moving average of the weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from alload_jax.errors import InputError
from alload_jax.models.common.lora import DOWN, UP
from alload_jax.sharding.rules import path_name
from alload_jax.training.parameters import check_patterns, matches, require_match
from alload_jax.training.spikes import skip_spikes

NO_AVERAGE = "without_ema"
"""Part of the identity of an optimizer that keeps no moving average."""
_MATRICES = ("kernel", DOWN, UP)
_MAIN = "main"
"""Label of parameters that belong to no group."""


@dataclass(frozen=True)
class OptimizerGroup:
    """Separate AdamW and gradient clipping for some of the trained parameters.

    Attributes:
      parameters: regular expressions for parameter names; a parameter belongs to the first group
        that matches.
      learning_rate, warmup_steps, weight_decay, clip_norm: as in `OptimizerConfig`; null for the
        value of the main optimizer.
    """

    parameters: tuple[str, ...]
    learning_rate: float | None = None
    warmup_steps: int | None = None
    weight_decay: float | None = None
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if not self.parameters:
            raise InputError("optimizer.groups: parameters is empty; give at least one pattern")
        check_patterns("optimizer.groups: parameters", self.parameters)

    def filled(self, main: "OptimizerConfig") -> "OptimizerConfig":
        """Returns the group's settings, completed from the main optimizer's."""
        names = ("learning_rate", "warmup_steps", "weight_decay", "clip_norm")
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(main, groups=(), **own)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) and the EMA of the weights.

    Attributes:
      learning_rate: peak learning rate.
      warmup_steps: number of steps of linear warm-up; the first step has 1 / warmup_steps of the
        peak.
      final_fraction: learning rate at the last step, as a fraction of the peak.
      beta1, beta2, eps, weight_decay: AdamW's parameters; only matrices decay.
      clip_norm: maximum global norm of the gradient.
      skip_above: skip updates whose gradient norm is more than this many times the running mean of
        the norms before; null for none.
      ema_decay: decay of the moving average; the decay is at most (1 + step) / (10 + step). null
        for no moving average, which saves 4 bytes per trained parameter.
      groups: parameters with a separate optimizer.
    """

    learning_rate: float = 1e-4
    warmup_steps: int = 100
    final_fraction: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    skip_above: float | None = None
    ema_decay: float | None = 0.999
    groups: tuple[OptimizerGroup, ...] = ()

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip_norm", "eps"):
            if not getattr(self, name) > 0:
                raise InputError(f"optimizer.{name} is {getattr(self, name)}; it must be above 0")
        for name in ("beta1", "beta2", "ema_decay"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise InputError(f"optimizer.{name} is {value}; it must be from 0 to below 1")
        for name in ("weight_decay", "final_fraction"):
            if not getattr(self, name) >= 0:
                raise InputError(f"optimizer.{name} is {getattr(self, name)}; it must be 0 or more")
        if self.skip_above is not None and not self.skip_above > 1:
            raise InputError(
                f"optimizer.skip_above is {self.skip_above}; it must be above 1, such as 5, or null"
            )
        if self.warmup_steps < 0:
            raise InputError(f"optimizer.warmup_steps is {self.warmup_steps}; it must be 0 or more")
        for group in self.groups:
            group.filled(self)  # checks its values

    def identity(self) -> dict[str, Any]:
        """What a checkpoint's arrays depend on, as JSON values; empty where all is usual."""
        spikes = {} if self.skip_above is None else {"skip_above": "set"}
        average = {NO_AVERAGE: True} if self.ema_decay is None else {}
        return _group_identity(self.groups) | spikes | average


def _group_identity(groups: Sequence[OptimizerGroup]) -> dict[str, Any]:
    return {"groups": [list(group.parameters) for group in groups]} if groups else {}


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the schedule of the learning rate over `steps` optimizer steps."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / max(1, config.warmup_steps),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_fraction,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Builds clipping and AdamW with a schedule over `steps`, separately for each group.

    With `skip_above`, the norm of all groups together decides whether an update is skipped.

    The optimizer's `init` raises InputError if a group's pattern matches no parameter.
    """
    optimizer = _grouped(config, steps) if config.groups else _clipped_adamw(config, steps)
    return optimizer if config.skip_above is None else skip_spikes(optimizer, config.skip_above)


def _grouped(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    transforms = {_MAIN: _clipped_adamw(config, steps)}
    for number, group in enumerate(config.groups):
        transforms[str(number)] = _clipped_adamw(group.filled(config), steps)

    def labels(params: Any) -> Any:
        return _labels(params, config.groups)

    return optax.partition(transforms, labels)


def _clipped_adamw(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=_decays,
        ),
    )


def group_of(name: str, groups: Sequence[OptimizerGroup]) -> int | None:
    """Returns the number of the group of a parameter; None for the main optimizer."""
    found = (n for n, group in enumerate(groups) if matches(name, group.parameters))
    return next(found, None)


def _labels(params: Any, groups: tuple[OptimizerGroup, ...]) -> Any:
    """Returns the label of each parameter: the number of its group, or `_MAIN`."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    names = [path_name(path) for path, _ in leaves]
    for group in groups:
        for pattern in group.parameters:
            require_match("optimizer.groups: parameters", pattern, names, "trained parameter")

    def label(path: Any, _: Any) -> str:
        group = group_of(path_name(path), groups)
        return _MAIN if group is None else str(group)

    return jax.tree_util.tree_map_with_path(label, params)


def update_ema(ema: Any, params: Any, step: jax.Array, decay: float | None) -> Any:
    """Updates the moving average with the parameters; `step` counts updates from 0.

    Without a decay there is no average, an empty dict.
    """
    if decay is None:
        return ema
    count = step.astype(jnp.float32)
    rate = 1 - jnp.minimum(decay, (1 + count) / (10 + count))
    return jax.tree.map(lambda old, new: old + rate * (new - old), ema, params)


def _decays(params: Any) -> Any:
    """Marks the matrices, which decay; biases, norms, embeddings and modulation do not."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path_name(path).endswith(_MATRICES), params
    )
