"""Optimizers with a schedule, clipping and the guard against spikes; the average of the weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from optax.contrib import ScheduleFreeState

from alload_jax.errors import InputError, require_fields
from alload_jax.models.common.lora import check_patterns
from alload_jax.sharding.mesh import path_name
from alload_jax.training.parameters import matches, require_match
from alload_jax.training.update_rules import WITHOUT_MU_DTYPE, OptimizerName, update_rule

ScheduleName = Literal["cosine", "constant", "linear", "wsd"]
DecayShape = Literal["linear", "sqrt"]


_DECAY = 0.99
"""Decay of the running mean of gradient norms, about 100 steps."""
_FIRST = 20
"""Number of steps before the first that can be skipped."""


class SpikeState(NamedTuple):
    """State of `skip_spikes`.

    Attributes:
      mean: running mean of the gradient norms, each counted up to the bound; not corrected for its
        start at 0.
      steps: number of steps.
      skipped: number of steps that were skipped.
      inner: state of the optimizer.
    """

    mean: jax.Array
    steps: jax.Array
    skipped: jax.Array
    inner: optax.OptState


def skip_spikes(
    optimizer: optax.GradientTransformation, times: float
) -> optax.GradientTransformation:
    """Wraps an optimizer so that it skips updates of large gradients.

    Updates are zero, and the optimizer's state is unchanged, where the gradient's global norm is
    more than `times` its running mean. A skipped norm counts in the mean with the bound's value, so
    that the bound follows gradients that stay large.
    """

    def init(params: optax.Params) -> SpikeState:
        zero = jnp.zeros((), jnp.int32)
        return SpikeState(jnp.zeros((), jnp.float32), zero, zero, optimizer.init(params))

    def update(
        updates: optax.Updates, state: SpikeState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, SpikeState]:
        norm = optax.tree.norm(updates).astype(jnp.float32)
        mean = state.mean / (1 - _DECAY ** jnp.maximum(state.steps, 1).astype(jnp.float32))
        bound = jnp.where(state.steps < _FIRST, jnp.inf, times * mean)
        skip = norm > bound
        found, inner = optimizer.update(updates, state.inner, params)
        found = jax.tree.map(lambda value: jnp.where(skip, jnp.zeros_like(value), value), found)
        inner = jax.tree.map(lambda new, old: jnp.where(skip, old, new), inner, state.inner)
        counted = jnp.minimum(norm, bound)
        after = SpikeState(
            _DECAY * state.mean + (1 - _DECAY) * counted,
            state.steps + 1,
            state.skipped + skip,
            inner,
        )
        return found, after

    return optax.GradientTransformation(init, update)


def skipped_updates(opt_state: optax.OptState) -> jax.Array | None:
    """Returns the number of updates that were skipped; None if none can be."""
    return opt_state.skipped if isinstance(opt_state, SpikeState) else None


NO_AVERAGE = "without_ema"
"""Part of the identity of an optimizer that keeps no moving average."""
_MAIN = "main"
"""Label of parameters that belong to no group."""


_LEAST_FACTOR = 0.1
"""A smaller factor of Prodigy's learning rate is one that was meant for another optimizer."""


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
        rule, rate = self.name or main.name, self.learning_rate
        inherits = rate is None and rule != main.name and "prodigy" in (rule, main.name)
        if inherits or (rule == "prodigy" and rate is not None and rate < _LEAST_FACTOR):
            raise InputError(
                f"optimizer.groups: the learning_rate of {', '.join(self.parameters)} is "
                f"{'that of the main optimizer' if rate is None else format(rate, 'g')}, but "
                "prodigy multiplies the learning rate that it finds by its own; give "
                + ("1.0" if rule == "prodigy" else f"one for {rule}")
                + (", or a name such as adamw" if rate is not None else "")
            )
        return replace(main, groups=(), **own)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and the EMA of the weights.

    Attributes:
      name: adamw (arXiv 1711.05101); adamw8bit, the same with moments in eight bits (arXiv
        2110.02861); adafactor, with factored second moments and no first (arXiv 1804.04235); lion
        (arXiv 2302.06675); muon, with AdamW for what is no matrix of a layer (arXiv 2502.16982);
        prodigy, which finds the learning rate (arXiv 2306.06101); schedule_free_adamw, whose
        average takes the place of the EMA (arXiv 2405.15682); ademamix (arXiv 2409.03137), adopt
        (arXiv 2411.02853), radam (arXiv 1908.03265) and sgd with momentum.
      learning_rate: peak learning rate; for prodigy the factor of the one that it finds, 1.
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

    usual_identity: ClassVar[dict[str, object]] = {"name": "adamw", "mu_dtype": "float32"}
    """What `identity` leaves out, by the names of fields."""

    def __post_init__(self) -> None:
        for names, holds, bound in (
            ("learning_rate clip_norm clip_value eps", lambda value: value > 0, "above 0"),
            ("beta1 beta2 ema_decay", lambda value: 0 <= value < 1, "from 0 to below 1"),
            ("weight_decay final_fraction warmup_steps", lambda value: value >= 0, "0 or more"),
            ("skip_above", lambda value: value > 1, "above 1, such as 5, or null"),
            ("decay_fraction", lambda value: 0 < value <= 1, "above 0 and at most 1"),
            ("schedule_steps decay_steps", lambda value: value >= 1, "at least 1, or null"),
        ):
            require_fields("optimizer.", self, names, holds, bound)
        if self.gradient_mean not in get_args(GradientMean):
            raise InputError(
                f"optimizer.gradient_mean is {self.gradient_mean!r}; choose plan or step"
            )
        if self.mu_dtype != "float32" and self.name in WITHOUT_MU_DTYPE:
            raise InputError(
                f"optimizer.mu_dtype is {self.mu_dtype}, but {self.name} has no first moment of "
                "its own dtype; leave it out"
            )
        if self.name == "prodigy" and self.learning_rate < _LEAST_FACTOR:
            raise InputError(
                f"optimizer.learning_rate is {self.learning_rate:g}, but prodigy multiplies the "
                "learning rate that it finds by it; set 1.0"
            )
        if self.name == "schedule_free_adamw":
            for key, is_good, wanted in (
                ("schedule", self.schedule == "constant", "constant"),
                ("ema_decay", self.ema_decay is not None, "a number, as its average is the EMA"),
                ("beta1", self.beta1 > 0, "above 0"),
            ):
                if not is_good:
                    raise InputError(
                        f"optimizer.{key} is {getattr(self, key)}, but schedule_free_adamw needs "
                        f"{wanted}; set it, or choose another optimizer.name"
                    )
        for group in self.groups:
            group.filled(self)  # checks its values

    def identity(self) -> dict[str, object]:
        """What a checkpoint's arrays depend on, as JSON values; empty where all is usual."""
        parts: dict[str, object] = {}
        if self.groups:
            parts["groups"] = [list(group.parameters) for group in self.groups]
        if any(names := [group.name for group in self.groups]):
            parts["group_names"] = names
        if self.skip_above is not None:
            parts["skip_above"] = "set"
        for name, usual in self.usual_identity.items():
            if getattr(self, name) != usual:
                parts[name] = getattr(self, name)
        return parts if self.ema_decay is not None else parts | {NO_AVERAGE: True}


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the schedule of a run of `steps` optimizer steps; later steps have its last value.

    Raises:
      InputError: warm-up and decay of `wsd` are longer than the schedule.
    """
    steps, peak, warmup = config.schedule_steps or steps, config.learning_rate, config.warmup_steps
    first, end = peak / max(1, warmup), peak * config.final_fraction
    after, steps_after = optax.constant_schedule(peak), max(1, steps - warmup)
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, steps_after, config.final_fraction)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, end, steps_after)
    elif config.schedule == "wsd":
        decay = config.decay_steps or max(1, round(config.decay_fraction * steps))
        if warmup + decay > steps:
            raise InputError(
                f"optimizer.warmup_steps is {warmup} and the decay of optimizer.schedule wsd takes "
                f"{decay} steps, more than the {steps} of the schedule; lower "
                "optimizer.warmup_steps, optimizer.decay_steps or optimizer.decay_fraction"
            )

        def one_minus_sqrt(count: jax.Array) -> jax.Array:
            progress = jnp.clip(jnp.asarray(count, jnp.float32) / decay, 0.0, 1.0)
            return end + (peak - end) * (1 - jnp.sqrt(progress))

        linear = optax.linear_schedule(peak, end, decay)
        falling = one_minus_sqrt if config.decay_shape == "sqrt" else linear
        after = optax.join_schedules([after, falling], [steps - decay - warmup])
    return optax.join_schedules([optax.linear_schedule(first, peak, warmup), after], [warmup])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Builds clipping and the optimizer with its schedule, separately for each group.

    With `skip_above`, the norm of all groups together decides whether an update is skipped.

    The optimizer's `init` raises InputError if a group's pattern matches no parameter.
    """
    optimizer = _clipped(config, steps)
    if config.groups:
        transforms = {_MAIN: optimizer}
        for number, group in enumerate(config.groups):
            transforms[str(number)] = _clipped(group.filled(config), steps)
        optimizer = optax.partition(transforms, partial(_labels, groups=config.groups))
    return optimizer if config.skip_above is None else skip_spikes(optimizer, config.skip_above)


def _clipped(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clips the gradient; its state is the same with and without `clip_value`."""
    by_norm = optax.clip_by_global_norm(config.clip_norm)
    clip = by_norm
    if config.clip_value is not None:
        by_value = optax.clip(config.clip_value)

        def clip_both(updates: optax.Updates, params: optax.Params) -> optax.Updates:
            for each in (by_value, by_norm):
                updates, _ = each.update(updates, optax.EmptyState(), params)
            return updates

        clip = optax.stateless(clip_both)
    rule = update_rule(
        config.name,
        learning_rate_schedule(config, steps),
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mu_dtype=None if config.mu_dtype == "float32" else config.mu_dtype,
    )
    return optax.chain(clip, rule)


def group_of(name: str, groups: Sequence[OptimizerGroup]) -> int | None:
    """Returns the number of the group of a parameter; None for the main optimizer."""
    found = (n for n, group in enumerate(groups) if matches(name, group.parameters))
    return next(found, None)


def _labels(params: optax.Params, groups: tuple[OptimizerGroup, ...]) -> optax.Params:
    """Returns the label of each parameter: the number of its group, or `_MAIN`."""
    leaves = jax.tree.flatten_with_path(params)[0]
    names = [path_name(path) for path, _ in leaves]
    for group in groups:
        for pattern in group.parameters:
            require_match("optimizer.groups: parameters", pattern, names, "trained parameter")

    def label(path: KeyPath, _: jax.Array) -> str:
        group = group_of(path_name(path), groups)
        return _MAIN if group is None else str(group)

    return jax.tree.map_with_path(label, params)


def update_ema(
    ema: optax.Params,
    params: optax.Params,
    step: jax.Array,
    decay: float | None,
    opt_state: optax.OptState = (),
) -> optax.Params:
    """Updates the moving average with the parameters; `step` counts updates from 0.

    Of parameters that schedule-free AdamW trains it is the average by `opt_state`, after the
    update. Without a decay there is no average, an empty dict.
    """
    if decay is None:
        return ema
    count = step.astype(jnp.float32)
    rate = 1 - jnp.minimum(decay, (1 + count) / (10 + count))
    ema = jax.tree.map(lambda old, new: old + rate * (new - old), ema, params)

    def average(z: Any, new: jax.Array, old: jax.Array) -> jax.Array:
        """As `optax.contrib.schedule_free_eval_params`; masked are parameters of other groups."""
        return old if isinstance(z, optax.MaskedNode) else (new - (1 - state.b1) * z) / state.b1

    for state in jax.tree.leaves(opt_state, is_leaf=_is_own(ScheduleFreeState)):
        if isinstance(state, ScheduleFreeState):
            ema = jax.tree.map(average, state.z, params, ema, is_leaf=_is_own(optax.MaskedNode))
    return ema


def _is_own(kind: type[Any]) -> Callable[[Any], bool]:
    return lambda node: isinstance(node, kind)
