"""The training step: gradients of micro-batches of any shape, followed by one update.

Micro-batches accumulate weighted sums of loss, gradient and auxiliary values, independent of their
grouping into micro-batches and ranks. The update divides the gradient by the mean weight of the
plan's steps, so that each sample counts the same over the run, or by the step's own; loss and
auxiliary values are means over the step.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped
from jaxtyping import Array, Bool, Float, PyTree

from alload_jax.data.batch import AnyBatch
from alload_jax.models.common.lora import dropout_keys
from alload_jax.models.common.parts import ACCUMULATION, OBJECTIVE, OPTIMIZER, Auxiliary
from alload_jax.models.common.stored import with_slots
from alload_jax.models.families import compiler_options, family_of, gradient_dtypes, training_graph
from alload_jax.objectives import LossSums
from alload_jax.sharding.mesh import (
    GROUP_AXIS,
    AnyMesh,
    batch_sharding,
    path_name,
    replicated,
    zero_shardings,
)
from alload_jax.training.optimizer import skipped_updates, update_ema
from alload_jax.training.parameters import merge_parameters
from alload_jax.training.state import (
    TrainingSpec,
    TrainState,
    Weights,
    optimizer_shardings,
    state_shardings,
)


class GradientAccumulator(NamedTuple):
    """Sums over micro-batches.

    Attributes:
      grads: gradient of the weighted sum of minimised losses, like the trained parameters, of the
        spec's `accumulate_dtype`, or of `gradient_dtypes` where steps have one micro-batch.
      loss: weighted sum of losses, float32 scalar.
      weight: sum of weights, float32 scalar.
      auxiliary: weighted sum of each auxiliary value; often empty.

    Shape groups have sums of their own, which then are the first axis of each array: [groups, ...].
    """

    grads: PyTree
    loss: Float[Array, ""]
    weight: Float[Array, ""]
    auxiliary: Auxiliary


Accumulate = Callable[[Weights, GradientAccumulator, AnyBatch, jax.Array], GradientAccumulator]
Metrics = dict[str, jax.Array]


def make_accumulate(
    spec: TrainingSpec, mesh: AnyMesh, *, single: bool = False, grouped: bool = False
) -> Wrapped:
    """Builds a jitted function (weights, accumulator, batch, key) → accumulator.

    It is compiled for each shape of batch. `accumulator` is donated. Arguments are those of
    `accumulation`. With `grouped` the mesh is that of any shape group, and sums are [1, ...], the
    group's part of all sums.
    """
    accumulate = accumulation(spec, mesh, single=single)

    def add(
        weights: Weights, accumulator: GradientAccumulator, batch: AnyBatch, key: jax.Array
    ) -> GradientAccumulator:
        squeezed = jax.tree.map(lambda part: jnp.squeeze(part, 0), accumulator)
        added = accumulate(weights, squeezed, batch, key)
        stacked = jax.tree.map(lambda part: part[None], added)
        shardings = accumulator_shardings(accumulator, spec, mesh, grouped=True)
        return jax.lax.with_sharding_constraint(stacked, shardings)

    # Where nothing is added, the accumulator's gradient is an unused argument: kept, so that the
    # result takes its memory.
    return jax.jit(
        add if grouped else accumulate,
        donate_argnums=1,
        keep_unused=single,
        compiler_options=compiler_options(
            spec.model, weights_on_host=spec.parameters.frozen_memory == "host"
        ),
    )


def accumulation(spec: TrainingSpec, mesh: AnyMesh, *, single: bool) -> Accumulate:
    """Builds a function (weights, accumulator, batch, key) → accumulator.

    Args:
      spec: what training computes.
      mesh: mesh of the devices, or an abstract one.
      single: whether steps have one micro-batch. Its gradient is then written in place of the one
        that the accumulator holds, so that memory holds one gradient and not two. That of
        `gradient_dtypes` stays in the dtype in which it is computed.
    """
    sums_of = _make_sums(spec, mesh)
    narrow = gradient_dtypes(spec.model) if single else {}

    def sums_at(inputs: PyTree, weights: Weights, *others: PyTree) -> tuple[jax.Array, LossSums]:
        params = with_slots(weights.params, inputs, narrow) if narrow else inputs
        return sums_of(params, weights, *others)

    def accumulate(
        weights: Weights, accumulator: GradientAccumulator, batch: AnyBatch, key: jax.Array
    ) -> GradientAccumulator:
        gradient = jax.value_and_grad(sums_at, has_aux=True)
        run_key = jax.random.wrap_key_data(key)
        inputs = jax.tree.map_with_path(
            lambda path, grad, value: grad if path_name(path) in narrow else value,
            accumulator.grads,
            weights.params,
        )
        (_, sums), grads = gradient(inputs, weights, batch, run_key)
        added = GradientAccumulator(grads, sums.loss, sums.weight, sums.auxiliary)
        with jax.named_scope(ACCUMULATION):
            # With the precision of the more precise one, stored in the total's dtype.
            total = jax.tree.map(
                lambda sum, part: (sum + part).astype(sum.dtype), accumulator, added
            )
            if single:
                kept = jax.tree.map(
                    lambda new, old: new.astype(old.dtype), grads, accumulator.grads
                )
                total = total._replace(grads=kept)
        shardings = accumulator_shardings(accumulator, spec, mesh)
        return jax.lax.with_sharding_constraint(total, shardings)

    return accumulate


def make_update(
    spec: TrainingSpec, mesh: Mesh, *, single: bool = False, grouped: bool = False
) -> Wrapped:
    """Builds a jitted function (state, accumulator) → (next state, emptied accumulator, metrics).

    Both arguments are donated. The metrics are `loss`, `grad_norm` (before clipping) and what the
    family says of the step. If one of them is not finite, the state stays as it is, and so do all
    later updates until `make_is_finite` has cleared the accumulator.

    Args:
      spec: what training computes.
      mesh: mesh of the devices.
      single: as in `make_accumulate`; the gradient is then left as it is.
      grouped: whether the sums are those of shape groups, which XLA reduces and scatters.
    """

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(
        state: TrainState, accumulator: GradientAccumulator
    ) -> tuple[TrainState, GradientAccumulator, Metrics]:
        total = _total(spec, mesh, accumulator) if grouped else accumulator
        after, metrics = apply_gradients(spec, mesh, state, total)
        with jax.named_scope(ACCUMULATION):
            # After a step whose metrics are not finite the loss is not a number, so that a step
            # that is already under way changes nothing either.
            emptied = jax.tree.map(jnp.zeros_like, accumulator)
            mark = jnp.where(_all_finite(metrics), 0.0, jnp.nan).astype(accumulator.loss.dtype)
            emptied = emptied._replace(loss=emptied.loss + mark)
            if single:
                emptied = emptied._replace(grads=accumulator.grads)
        shardings = accumulator_shardings(accumulator, spec, mesh, grouped=grouped)
        return after, jax.lax.with_sharding_constraint(emptied, shardings), metrics

    return update


def make_is_finite(spec: TrainingSpec, mesh: Mesh, *, grouped: bool = False) -> Wrapped:
    """Builds a jitted function accumulator → (whether its means are finite, zeroed accumulator).

    The accumulator is donated; `grouped` as in `make_update`.
    """

    @partial(jax.jit, donate_argnums=0)
    def is_finite(accumulator: GradientAccumulator) -> tuple[jax.Array, GradientAccumulator]:
        total = _total(spec, mesh, accumulator) if grouped else accumulator
        mean = 1 / jnp.maximum(total.weight, 1e-20)
        norm = optax.tree.norm(jax.tree.map(lambda g: g * mean, total.grads))
        auxiliary = jax.tree.map(lambda value: value * mean, total.auxiliary)
        finite = _all_finite((total.loss * mean, norm, auxiliary))
        zeroed = _zeroed(spec, mesh, accumulator, grouped=grouped)
        return jax.lax.with_sharding_constraint(finite, replicated(mesh)), zeroed

    return is_finite


class NoiseSums(NamedTuple):
    """Sums over steps whose gradients are those of the same weights.

    Attributes:
      grads: of the mean gradients of steps, like the trained parameters, float32.
      squares: of their squared norms, float32 scalar.
      inverse: of the inverses of the steps' weights, float32 scalar.
      steps: their number, float32 scalar.
    """

    grads: PyTree
    squares: Float[Array, ""]
    inverse: Float[Array, ""]
    steps: Float[Array, ""]

    def noise_scale(self) -> float:
        """The weight of a step at which noise equals signal: tr Σ / |G|² (arXiv 1812.06162).

        With mean gradients g of K steps, |G|² is estimated as (K²·|mean g|² − Σ|g|²) / (K·(K − 1)),
        free of bias, and the noise of a step as what its squared norm has beyond that. May be below
        0, infinite or NaN where K is too small to tell.
        """
        count, squares = float(self.steps), float(self.squares)
        whole = float(optax.tree.norm(self.grads, squared=True))
        signal = (whole - squares) / (count * (count - 1))
        noise = squares / count - signal
        return noise / signal / (float(self.inverse) / count) if signal else math.inf


def make_add_noise(spec: TrainingSpec, mesh: Mesh, *, grouped: bool = False) -> Wrapped:
    """Builds a jitted function (sums, accumulator) → (sums with the step's, zeroed accumulator).

    Both arguments are donated; sums of None are those of no steps. `grouped` as in `make_update`.
    """

    @partial(jax.jit, donate_argnums=(0, 1))
    def add(
        sums: NoiseSums | None, accumulator: GradientAccumulator
    ) -> tuple[NoiseSums, GradientAccumulator]:
        total = _total(spec, mesh, accumulator) if grouped else accumulator
        inverse = 1 / jnp.maximum(total.weight, 1e-20)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) * inverse, total.grads)
        one = NoiseSums(grads, optax.tree.norm(grads, squared=True), inverse, jnp.ones(()))
        found = one if sums is None else jax.tree.map(jnp.add, sums, one)
        shardings: PyTree = jax.tree.map(lambda _: replicated(mesh), found)
        shardings = shardings._replace(grads=zero_shardings(grads, mesh, spec.rules))
        zeroed = _zeroed(spec, mesh, accumulator, grouped=grouped)
        return jax.lax.with_sharding_constraint(found, shardings), zeroed

    return add


def _total(spec: TrainingSpec, mesh: Mesh, accumulator: GradientAccumulator) -> GradientAccumulator:
    """The sums over all groups."""
    summed = jax.tree.map(lambda part: jnp.sum(part, 0, jnp.float32), accumulator)
    return jax.lax.with_sharding_constraint(summed, accumulator_shardings(summed, spec, mesh))


def _zeroed(
    spec: TrainingSpec, mesh: Mesh, accumulator: GradientAccumulator, *, grouped: bool
) -> GradientAccumulator:
    shardings = accumulator_shardings(accumulator, spec, mesh, grouped=grouped)
    return jax.lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, accumulator), shardings)


def _all_finite(values: PyTree) -> Bool[Array, ""]:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(each)) for each in jax.tree.leaves(values)]))


@jax.named_scope(OPTIMIZER)
def apply_gradients(
    spec: TrainingSpec, mesh: Mesh, state: TrainState, accumulator: GradientAccumulator
) -> tuple[TrainState, Metrics]:
    """Returns the next state and the metrics of the step; called in a jitted update."""
    mean = 1 / jnp.maximum(accumulator.weight, 1e-20)
    divided = mean if spec.step_weight is None else 1 / spec.step_weight
    grads = jax.tree.map(lambda g: g * divided, accumulator.grads)
    updates, opt_state = spec.optimizer.update(grads, state.opt_state, state.params)
    shardings = optimizer_shardings(opt_state, mesh, spec.rules)
    opt_state = jax.lax.with_sharding_constraint(opt_state, shardings)
    params = optax.apply_updates(state.params, updates)
    ema = update_ema(state.ema, params, state.step, spec.ema_decay, opt_state)
    auxiliary = jax.tree.map(lambda value: value * mean, accumulator.auxiliary)
    family = family_of(spec.model)
    trains = accumulator.weight > 0
    variables = _chosen(
        trains, family.update_variables(spec.model, state.variables, auxiliary), state.variables
    )
    metrics = {"loss": accumulator.loss * mean, "grad_norm": optax.tree.norm(grads)}
    metrics |= family.step_metrics(spec.model, variables, auxiliary)
    finite = _all_finite(metrics)
    # A step of padding only changes nothing but the step number.
    params, ema, opt_state, variables = _chosen(
        finite & trains,
        (params, ema, opt_state, variables),
        (state.params, state.ema, state.opt_state, state.variables),
    )
    after = state._replace(
        step=state.step + finite, params=params, ema=ema, opt_state=opt_state, variables=variables
    )
    before, now = skipped_updates(state.opt_state), skipped_updates(opt_state)
    if before is not None and now is not None:
        metrics["update_skipped"] = now - before
    shardings = state_shardings(after, mesh, spec.rules, spec.parameters)
    return jax.lax.with_sharding_constraint(after, shardings), metrics


def _chosen(condition: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda one, other: jnp.where(condition, one, other), new, old)


def zero_accumulator(
    spec: TrainingSpec,
    mesh: Mesh,
    weights: Weights,
    batch: AnyBatch[Any],
    *,
    single: bool = False,
    group: Mesh | None = None,
) -> GradientAccumulator:
    """Builds an accumulator of zeros.

    Args:
      spec: what training computes.
      mesh: mesh on which the accumulator is placed.
      weights: values of the model, or their shapes.
      batch: any micro-batch, or its shapes; auxiliary values have the same shapes for all.
      single: as in `make_accumulate`.
      group: mesh of one of the shape groups, to which the batch belongs; None for no groups.
    """
    narrow = gradient_dtypes(spec.model) if single else {}
    auxiliary = auxiliary_shapes(spec, group or mesh, weights, batch)
    lead = (mesh.shape[GROUP_AXIS],) if group else ()

    def make() -> GradientAccumulator:
        zero = jnp.zeros(lead)
        return GradientAccumulator(
            jax.tree.map_with_path(
                lambda path, value: jnp.zeros(
                    (*lead, *value.shape), narrow.get(path_name(path), spec.accumulate_dtype)
                ),
                weights.params,
            ),
            zero,
            zero,
            jax.tree.map(lambda value: jnp.zeros((*lead, *value.shape), jnp.float32), auxiliary),
        )

    shardings = accumulator_shardings(jax.eval_shape(make), spec, mesh, grouped=bool(lead))
    return jax.jit(make, out_shardings=shardings)()


def auxiliary_shapes(
    spec: TrainingSpec, mesh: Mesh, weights: Weights, batch: AnyBatch
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the auxiliary sums without computing them."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
    _, sums = jax.eval_shape(_make_sums(spec, mesh), shapes.params, shapes, batch, key)
    return sums.auxiliary


def accumulator_shardings(
    accumulator: GradientAccumulator, spec: TrainingSpec, mesh: AnyMesh, *, grouped: bool = False
) -> GradientAccumulator:
    """Gradients are sharded like the optimizer's state; other sums are replicated.

    Sums of shape groups, [groups, ...], are split along `data`, each as on the mesh of its group.
    """
    shardings: PyTree = jax.tree.map(lambda _: replicated(mesh), accumulator)
    if not grouped:
        return shardings._replace(grads=zero_shardings(accumulator.grads, mesh, spec.rules))
    one = jax.tree.map(
        lambda part: jax.ShapeDtypeStruct(part.shape[1:], part.dtype), accumulator.grads
    )
    shardings = shardings._replace(grads=zero_shardings(one, mesh, spec.rules, over=("context",)))
    return jax.tree.map(
        lambda each: NamedSharding(mesh, PartitionSpec(GROUP_AXIS, *each.spec)), shardings
    )


def _make_sums(spec: TrainingSpec, mesh: AnyMesh) -> Callable[..., tuple[jax.Array, LossSums]]:
    """Builds (trained parameters, weights, batch, key) → minimised sum, all sums."""
    graph, dropout = training_graph(spec.model)

    def sums_of(
        params: PyTree, weights: Weights, batch: AnyBatch, key: jax.Array
    ) -> tuple[jax.Array, LossSums]:
        values = weights._replace(params=params).merged()
        if dropout:
            # A key of the samples and their epochs alone, mixed, so that sums differ where sets
            # of samples do.
            epoch, sample = (part.astype(jnp.uint32) for part in (batch.epoch, batch.sample))
            place = epoch * jnp.uint32(0x9E3779B1) + sample
            mixed = (place ^ (place >> 15)) * jnp.uint32(0x85EBCA6B)
            mixed ^= mixed >> 13  # else equal sums of small numbers stayed equal
            of_batch = jax.random.fold_in(key, jnp.sum(mixed, dtype=jnp.uint32))
            values = merge_parameters(values, dropout_keys(dropout, of_batch))
        model = nnx.merge(graph, values)
        with jax.named_scope(OBJECTIVE):
            sums = spec.objective(model, batch, key, batch_sharding(mesh))
        return sums.minimised, sums

    return sums_of
