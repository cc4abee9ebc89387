"""Optimizers with a schedule and clipping, and the moving average of the weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from alload_jax.errors import InputError
from alload_jax.sharding.rules import path_name
from alload_jax.training.parameters import check_patterns, matches, require_match
from alload_jax.training.schedules import Curve, DecayShape, ScheduleName
from alload_jax.training.spikes import skip_spikes
from alload_jax.training.update_rules import WITHOUT_MU_DTYPE, OptimizerName, UpdateRule

NO_AVERAGE = "without_ema"
"""Part of the identity of an optimizer that keeps no moving average."""
_MAIN = "main"
"""Label of parameters that belong to no group."""


GradientMean = Literal["plan", "step"]


@dataclass(frozen=True)
class OptimizerGroup:
    """Separate optimizer and gradient clipping for some of the trained parameters.

    Attributes:
      parameters: regular expressions for parameter names; a parameter belongs to the first group
        that matches.
      name, learning_rate, warmup_steps, weight_decay, clip_norm: as in `OptimizerConfig`; null for
        the value of the main optimizer.
    """

    parameters: tuple[str, ...]
    name: OptimizerName | None = None
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
        names = ("name", "learning_rate", "warmup_steps", "weight_decay", "clip_norm")
        own: dict[str, Any] = {
            name: getattr(self, name) for name in names if getattr(self, name) is not None
        }
        return replace(main, groups=(), **own)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and the EMA of the weights.

    Attributes:
      name: adamw (arXiv 1711.05101); adamw8bit, the same with moments in eight bits (arXiv
        2110.02861); adafactor, with factored second moments and no first (arXiv 1804.04235); lion
        (arXiv 2302.06675); muon, with AdamW for what is no matrix of a layer (arXiv 2502.16982).
      learning_rate: peak learning rate.
      schedule: after the warm-up: cosine or linear decay, constant, or wsd, which stays at the peak
        until its decay at the end (arXiv 2404.06395).
      schedule_steps: number of steps of the schedule; null for run.steps. Later steps have its last
        learning rate.
      warmup_steps: number of steps of linear warm-up; the first step has 1 / warmup_steps of the
        peak.
      final_fraction: learning rate at the last step, as a fraction of the peak; not for `constant`.
      decay_steps: number of steps of the decay of `wsd`; null for decay_fraction.
      decay_fraction: the same as a fraction of the schedule.
      decay_shape: shape of the decay of `wsd`: linear, or sqrt for 1 − √progress (arXiv
        2405.18392).
      beta1, beta2, eps, weight_decay: parameters of AdamW, and of the others where they have them;
        only matrices decay.
      mu_dtype: dtype of the first moment of adamw, lion and muon.
      accumulate_dtype: dtype of the sum of gradients over the micro-batches of a step; of a single
        one's gradient where that is not computed in 16 bits.
      gradient_mean: what the summed gradient of a step is divided by: plan, the mean number of
        samples of the plan's steps, so that each sample counts the same over the run; or step, the
        step's own number, so that a sample of a step with few counts for more. With the objective's
        weighting token it is the step's tokens in both cases.
      clip_norm: maximum global norm of the gradient.
      clip_value: maximum magnitude of each value of the gradient, before the norm is clipped; null
        for none.
      skip_above: skip updates whose gradient norm is more than this many times the running mean of
        the norms before; null for none.
      ema_decay: decay of the moving average; the decay is at most (1 + step) / (10 + step). null
        for no moving average, which saves 4 bytes per trained parameter.
      groups: parameters with a separate optimizer.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = 1e-4
    schedule: ScheduleName = "cosine"
    schedule_steps: int | None = None
    warmup_steps: int = 100
    final_fraction: float = 0.0
    decay_steps: int | None = None
    decay_fraction: float = 0.2
    decay_shape: DecayShape = "linear"
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.01
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    accumulate_dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_mean: GradientMean = "plan"
    clip_norm: float = 1.0
    clip_value: float | None = None
    skip_above: float | None = None
    ema_decay: float | None = 0.999
    groups: tuple[OptimizerGroup, ...] = ()

    usual_identity: ClassVar[dict[str, Any]] = {"name": "adamw", "mu_dtype": "float32"}
    """What `identity` leaves out, by the names of fields."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip_norm", "clip_value", "eps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"optimizer.{name} is {value}; it must be above 0")
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
        if self.gradient_mean not in get_args(GradientMean):
            raise InputError(
                f"optimizer.gradient_mean is {self.gradient_mean!r}; choose plan or step"
            )
        if self.warmup_steps < 0:
            raise InputError(f"optimizer.warmup_steps is {self.warmup_steps}; it must be 0 or more")
        self._check_schedule()
        if self.mu_dtype != "float32" and self.name in WITHOUT_MU_DTYPE:
            raise InputError(
                f"optimizer.mu_dtype is {self.mu_dtype}, but {self.name} has no first moment of "
                "its own dtype; leave it out"
            )
        for group in self.groups:
            group.filled(self)  # checks its values

    def _check_schedule(self) -> None:
        for name in ("schedule_steps", "decay_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"optimizer.{name} is {value}; it must be at least 1, or null")
        if not 0 < self.decay_fraction <= 1:
            raise InputError(
                f"optimizer.decay_fraction is {self.decay_fraction}; it must be above 0 and at "
                "most 1"
            )

    def identity(self) -> dict[str, Any]:
        """What a checkpoint's arrays depend on, as JSON values; empty where all is usual."""
        found: dict[str, Any] = {} if self.skip_above is None else {"skip_above": "set"}
        for name, usual in self.usual_identity.items():
            if getattr(self, name) != usual:
                found[name] = getattr(self, name)
        if self.ema_decay is None:
            found[NO_AVERAGE] = True
        return _group_identity(self.groups) | found


def _group_identity(groups: Sequence[OptimizerGroup]) -> dict[str, Any]:
    if not groups:
        return {}
    names = [group.name for group in groups]
    own = {"group_names": names} if any(names) else {}
    return {"groups": [list(group.parameters) for group in groups]} | own


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the schedule of the learning rate of a run of `steps` optimizer steps.

    Raises:
      InputError: warm-up and decay of `wsd` are longer than the schedule.
    """
    curve = Curve(
        config.schedule,
        config.learning_rate,
        config.warmup_steps,
        config.final_fraction,
        config.decay_steps,
        config.decay_fraction,
        config.decay_shape,
    )
    return curve.schedule(config.schedule_steps or steps)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Builds clipping and the optimizer with its schedule, separately for each group.

    With `skip_above`, the norm of all groups together decides whether an update is skipped.

    The optimizer's `init` raises InputError if a group's pattern matches no parameter.
    """
    optimizer = _grouped(config, steps) if config.groups else _clipped(config, steps)
    return optimizer if config.skip_above is None else skip_spikes(optimizer, config.skip_above)


def _grouped(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    transforms = {_MAIN: _clipped(config, steps)}
    for number, group in enumerate(config.groups):
        transforms[str(number)] = _clipped(group.filled(config), steps)

    def labels(params: Any) -> Any:
        return _labels(params, config.groups)

    return optax.partition(transforms, labels)


def _clipped(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    rule = UpdateRule(
        learning_rate_schedule(config, steps),
        config.beta1,
        config.beta2,
        config.eps,
        config.weight_decay,
        None if config.mu_dtype == "float32" else config.mu_dtype,
    )
    return optax.chain(_clip(config), rule.transform(config.name))


def _clip(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clips the gradient; its state is the same with and without `clip_value`."""
    by_norm = optax.clip_by_global_norm(config.clip_norm)
    if config.clip_value is None:
        return by_norm
    by_value = optax.clip(config.clip_value)

    def clip(updates: Any, params: Any) -> Any:
        for each in (by_value, by_norm):
            updates, _ = each.update(updates, optax.EmptyState(), params)
        return updates

    return optax.stateless(clip)


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
