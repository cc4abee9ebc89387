"""The update rules of optimizers by name: gradients in, updates of the parameters out.

Each decays matrices only, decoupled from the gradient and times the learning rate, as AdamW (arXiv
1711.05101), so that `learning_rate` and `weight_decay` mean the same for all.

8-bit moments: a block of up to 256 values shares a float32 scale, its largest magnitude. A value is
stored as the number of the nearest code of a fixed table whose codes lie closer together near zero
("dynamic quantisation"). Blocks run along the inputs of a matrix. FSDP splits these: devices gather
blocks of which each has a part.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from jaxtyping import PyTree
from optax.contrib import (
    MuonDimensionNumbers,
    ProdigyState,
    muon,
    prodigy,
    scale_by_ademamix,
    scale_by_adopt,
    schedule_free,
)

from alload_jax.models.common.lora import DOWN, UP
from alload_jax.sharding.mesh import path_name

BLOCK = 256
"""The most values that share a scale, as in bitsandbytes."""
SMALLEST = 4096
"""Parameters of fewer values keep float32 moments, as in bitsandbytes."""
_DECADES = 7
"""Powers of ten that the codes cover below a block's largest magnitude."""


def dynamic_codes(signed: bool) -> np.ndarray:
    """The 256 codes of dynamic quantisation in rising order, [256] float32 within −1 to 1.

    The decade up to 10⁻ᵏ is divided into half as many intervals as the one above it, and a code is
    the middle of an interval; 0 and 1 are codes too. Unsigned codes spend the sign's bit on twice
    as many intervals.
    """
    positive: list[np.ndarray] = []
    for place in range(_DECADES):
        intervals = 2**place if signed else 2 ** (place + 1)
        ends = np.linspace(0.1, 1.0, intervals + 1)
        positive.append((ends[:-1] + ends[1:]) / 2 * 10.0 ** (place - _DECADES + 1))
    values = np.concatenate(positive)
    sides = [-values, values] if signed else [values]
    return np.sort(np.concatenate([*sides, [0.0, 1.0]])).astype(np.float32)


_SIGNED, _UNSIGNED = dynamic_codes(True), dynamic_codes(False)


class Quantised(NamedTuple):
    """An array in eight bits.

    Attributes:
      codes: [..., N, M] uint8, shaped like the array.
      scale: [..., ceil(N / 256), M] float32, the largest magnitude of each block along N.
    """

    codes: jax.Array
    scale: jax.Array


def quantise(values: jax.Array, signed: bool) -> Quantised:
    """Quantises an array [..., N, M] in blocks along N.

    Unsigned values above zero never become zero: a second moment of zero would let the update grow
    without bound.
    """
    blocks = _to_blocks(values)
    scale = jnp.max(jnp.abs(blocks), axis=-2, keepdims=True)
    relative = blocks / jnp.where(scale > 0, scale, 1.0)
    codes = _count_below(_middles(signed), relative)
    if not signed:
        codes = jnp.where((blocks > 0) & (codes == 0), 1, codes)
    codes = _from_blocks(codes.astype(jnp.uint8), values.shape[-2])
    return Quantised(codes, jnp.squeeze(scale, -2))


def _middles(signed: bool) -> np.ndarray:
    """Between neighbouring codes."""
    table = _SIGNED if signed else _UNSIGNED
    return (table[:-1] + table[1:]) / 2


def _count_below(sorted_values: np.ndarray, x: jax.Array) -> jax.Array:
    """How many of 2ⁿ − 1 values are less than each of x, as `jnp.searchsorted`.

    That one begins with a table of one index for all of x, which XLA computes when it compiles: for
    a stack of matrices it takes minutes.
    """
    half = (len(sorted_values) + 1) // 2
    count = (x > sorted_values[half - 1]).astype(jnp.int32) * half
    table = jnp.asarray(sorted_values)
    while half := half // 2:
        count += (x > table[count + (half - 1)]).astype(jnp.int32) * half
    return count


def zeros_like(values: jax.Array, signed: bool) -> Quantised:
    """Zeros, quantised; XLA would take minutes to compute as much when it compiles."""
    *lead, rows, columns = values.shape
    code = np.sum(_middles(signed) < 0)
    blocks = -(-rows // min(BLOCK, rows))
    scale = jnp.zeros((*lead, blocks, columns), jnp.float32)
    return Quantised(jnp.full(values.shape, code, jnp.uint8), scale)


def dequantise(found: Quantised, signed: bool) -> jax.Array:
    """The float32 values of a quantised array."""
    table = jnp.asarray(_SIGNED if signed else _UNSIGNED)
    blocks = table[_to_blocks(found.codes)] * found.scale[..., None, :]
    return _from_blocks(blocks, found.codes.shape[-2])


def _to_blocks(values: jax.Array) -> jax.Array:
    """[..., N, M] → [..., blocks, values of a block, M], with zeros at the end."""
    *lead, rows, columns = values.shape
    size = min(BLOCK, rows)
    missing = -rows % size
    padded = jnp.pad(values, [(0, 0)] * len(lead) + [(0, missing), (0, 0)])
    return padded.reshape(*lead, (rows + missing) // size, size, columns)


def _from_blocks(blocks: jax.Array, rows: int) -> jax.Array:
    """The inverse of `_to_blocks` for arrays [..., rows, M]."""
    *lead, count, size, columns = blocks.shape
    return blocks.reshape(*lead, count * size, columns)[..., :rows, :]


class Adam8bitState(NamedTuple):
    """State of `scale_by_adam8bit`; trees are like the parameters.

    Attributes:
      steps: int32 scalar, number of updates.
      mu, mu_scale: codes and scales of the first moment.
      nu, nu_scale: codes and scales of the second moment.
    """

    steps: jax.Array
    mu: optax.Updates
    mu_scale: optax.Updates
    nu: optax.Updates
    nu_scale: optax.Updates


def scale_by_adam8bit(beta1: float, beta2: float, eps: float) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with quantised moments, for matrices and stacks of them.

    An update is computed from float32 moments, which are quantised for the next one.
    """

    def init(params: optax.Params) -> Adam8bitState:
        zeros = jax.tree.map(lambda x: (*zeros_like(x, True), *zeros_like(x, False)), params)
        return Adam8bitState(jnp.zeros((), jnp.int32), *_parts(4, params, zeros))

    def update(
        updates: optax.Updates, state: Adam8bitState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Adam8bitState]:
        del params
        count = optax.safe_increment(state.steps)

        def of_matrix(g: jax.Array, *stored: jax.Array) -> tuple[jax.Array, ...]:
            first, second = Quantised(*stored[:2]), Quantised(*stored[2:])
            mu = beta1 * dequantise(first, signed=True) + (1 - beta1) * g
            nu = beta2 * dequantise(second, signed=False) + (1 - beta2) * g * g
            mu_hat = optax.tree.bias_correction(mu, beta1, count)
            nu_hat = optax.tree.bias_correction(nu, beta2, count)
            found = mu_hat / (jnp.sqrt(nu_hat) + eps)
            return found, *quantise(mu, signed=True), *quantise(nu, signed=False)

        def of_parameter(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            """Layer by layer: devices have room for what they gather of one, not of all."""
            if arrays[0].ndim == 2:
                return of_matrix(*arrays)
            return jax.lax.map(lambda of_layer: of_parameter(*of_layer), arrays)

        found: list[tuple[jax.Array, ...]] = []
        for arrays in zip(*map(jax.tree.leaves, (updates, *state[1:])), strict=True):
            if found:  # one parameter after another
                arrays, _ = jax.lax.optimization_barrier((arrays, found[-1][-1]))
            found.append(of_parameter(*arrays))
        tuples = jax.tree.unflatten(jax.tree.structure(updates), found)
        scaled, *moments = _parts(5, updates, tuples)
        return scaled, Adam8bitState(count, *moments)

    return optax.GradientTransformation(init, update)


def _parts(count: int, tree: PyTree, tuples: PyTree) -> list[PyTree]:
    """A tree for each part of the tuples that stand in place of a tree's arrays, if it has any."""
    return [
        jax.tree.map(lambda _, each, part=part: each[part], tree, tuples) for part in range(count)
    ]


OptimizerName = Literal[
    "adamw",
    "adamw8bit",
    "adafactor",
    "lion",
    "muon",
    "prodigy",
    "schedule_free_adamw",
    "ademamix",
    "adopt",
    "radam",
    "sgd",
]
WITHOUT_MU_DTYPE = ("adamw8bit", "adafactor", "prodigy", "schedule_free_adamw", "radam")
"""Optimizers whose first moment has a dtype of its own, or that have none."""
_FACTORED_FROM = 128
"""Length of both axes from which Adafactor keeps means in place of second moments, as in Optax."""
_SLOW = 5.0
"""Weight of AdEMAMix's slow average, as in the paper and `optax.contrib.ademamix`."""
MUON = "muon"
"""Names Muon's part of an optimizer's state."""
_ADAMW_RMS = 0.2
"""Root mean square of Muon's updates, about that of AdamW's (arXiv 2502.16982)."""


def update_rule(
    name: OptimizerName,
    learning_rate: optax.Schedule,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    mu_dtype: str | None,
) -> optax.GradientTransformation:
    """The optimizer of a name, without clipping.

    Muon takes the matrices of stacked layers, and AdamW the rest. Adafactor has neither momentum
    nor relative steps, as fine-tuning uses it. What is not set here is as in Optax.

    Args:
      name, beta1, beta2, eps, weight_decay: see `OptimizerConfig`.
      learning_rate: its schedule.
      mu_dtype: dtype of the first moment; None for that of the parameters.
    """
    moments = {"b1": beta1, "b2": beta2, "mu_dtype": mu_dtype}
    decay = {"weight_decay": weight_decay, "mask": decays}
    adamw = optax.adamw(learning_rate, eps=eps, **moments, **decay)
    if name == "adamw":
        return adamw
    if name == "lion":
        return optax.lion(learning_rate, **moments, **decay)
    if name == "muon":

        def matrices(params: optax.Params) -> optax.Params:
            """The last two axes, [inputs, outputs]; the axis of layers is a batch axis."""
            return jax.tree.map(lambda _: MuonDimensionNumbers(-2, -1), params)

        of_layers = muon(
            learning_rate,
            eps=eps,
            weight_decay=weight_decay,
            mu_dtype=mu_dtype,
            muon_weight_dimension_numbers=matrices,
            consistent_rms=_ADAMW_RMS,
        )
        # The first and the last matrices of a model, which are not stacked, train with AdamW.
        return _of_matrices(MUON, of_layers, "adamw", adamw, lambda leaf: leaf.ndim >= 3)
    if name == "prodigy":
        return _prodigy(learning_rate, beta1, beta2, eps, weight_decay)
    if name == "adamw8bit":
        # Embeddings, vectors and small matrices keep float32 moments (arXiv 2110.02861, §2.3).
        scaling = _of_matrices(
            "eight_bits",
            scale_by_adam8bit(beta1, beta2, eps),
            "float32",
            optax.scale_by_adam(beta1, beta2, eps),
            lambda leaf: leaf.size >= SMALLEST,
        )
    elif name == "schedule_free_adamw":
        scaling = optax.scale_by_rms(beta2, eps, eps_in_sqrt=False, bias_correction=True)
    elif name == "ademamix":
        scaling = scale_by_ademamix(eps=eps, alpha=_SLOW, **moments)
    elif name == "adopt":
        scaling = scale_by_adopt(eps=eps, **moments)
    elif name == "radam":
        scaling = optax.scale_by_radam(beta1, beta2, eps)
    elif name == "sgd":
        scaling = optax.trace(beta1, accumulator_dtype=mu_dtype)
    else:
        scaling = optax.chain(_scale_by_factored_rms(), optax.stateless(_clip_matrix_rms))
    rule = optax.chain(
        scaling,
        optax.add_decayed_weights(weight_decay, decays),
        optax.scale_by_learning_rate(learning_rate),
    )
    return schedule_free(rule, learning_rate, beta1) if name == "schedule_free_adamw" else rule


def _prodigy(
    learning_rate: optax.Schedule, beta1: float, beta2: float, eps: float, weight_decay: float
) -> optax.GradientTransformation:
    """`optax.contrib.prodigy`, whose weight decay is that of matrices alone."""
    rule = prodigy(learning_rate, (beta1, beta2), eps=eps)

    def init(params: optax.Params) -> ProdigyState:
        return rule.init(jax.tree.map(jnp.copy, params))  # which it keeps

    def update(
        grads: optax.Updates, state: ProdigyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ProdigyState]:
        updates, after = rule.update(grads, state, params)
        corrected = jnp.sqrt(1 - beta2**after.count) / (1 - beta1**after.count)
        rate = state.estim_lr * learning_rate(state.count) * corrected
        decay = optax.add_decayed_weights(-weight_decay * rate, decays)
        updates, _ = decay.update(updates, decay.init(params), params)
        # Before a gradient that is not zero the estimate is zero over zero.
        none = jnp.isnan(after.estim_lr)
        updates = jax.tree.map(lambda update: jnp.where(none, 0, update), updates)
        return updates, jax.tree.map(lambda new, old: jnp.where(none, old, new), after, state)

    return optax.GradientTransformation(init, update)


def decays(params: optax.Params) -> optax.Params:
    """Marks the matrices, which decay; biases, norms, embeddings and modulation do not."""
    return jax.tree.map_with_path(lambda path, _: _is_matrix(path), params)


def _is_matrix(path: KeyPath) -> bool:
    return path_name(path).endswith(("kernel", DOWN, UP))


def _of_matrices(
    label: str,
    rule: optax.GradientTransformation,
    other_label: str,
    other: optax.GradientTransformation,
    takes: Callable[[jax.Array], bool],
) -> optax.GradientTransformation:
    """`rule` for the matrices that it takes, and `other` for what else there is."""

    def labels(params: optax.Params) -> optax.Params:
        return jax.tree.map_with_path(
            lambda path, leaf: label if _is_matrix(path) and takes(leaf) else other_label, params
        )

    return optax.partition({label: rule, other_label: other}, labels)


def _scale_by_factored_rms() -> optax.GradientTransformation:
    """Adafactor's second moments (arXiv 1804.04235, algorithm 4), of each layer by itself.

    By `optax.scale_by_factored_rms`, whose state it has. That factors the two longest axes, of
    which one counts layers in a stack of many; here they are the last two, of matrices and tables
    of embeddings alone.
    """
    of_layers = optax.FactoredState(None, 0, 0, None)  # axes of what each layer has of its own

    def rule_of(path: KeyPath, leaf: jax.Array) -> optax.GradientTransformation:
        is_table = _is_matrix(path) or path_name(path).endswith("embedding")
        factored = is_table and leaf.ndim >= 2 and min(leaf.shape[-2:]) >= _FACTORED_FROM
        init, update = optax.scale_by_factored_rms(factored, min_dim_size_to_factor=_FACTORED_FROM)
        for _ in range(leaf.ndim - 2 if factored else 0):
            init = jax.vmap(init, out_axes=of_layers)
            update = jax.vmap(update, (0, of_layers, 0), (0, of_layers))
        return optax.GradientTransformation(init, update)

    def init(params: optax.Params) -> optax.FactoredState:
        found = jax.tree.map_with_path(lambda *leaf: rule_of(*leaf).init(leaf[1])[1:], params)
        return optax.FactoredState(jnp.zeros((), jnp.int32), *_parts(3, params, found))

    def update(
        grads: optax.Updates, state: optax.FactoredState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.FactoredState]:
        del params

        def moved(path: KeyPath, grad: jax.Array, *moments: jax.Array) -> tuple[PyTree, ...]:
            before = optax.FactoredState(state.count, *moments)
            scaled, after = rule_of(path, grad).update(grad, before, grad)
            return scaled, *after[1:]

        found = jax.tree.map_with_path(moved, grads, *state[1:])
        updates, *moments = _parts(4, grads, found)
        return updates, optax.FactoredState(optax.safe_increment(state.count), *moments)

    return optax.GradientTransformation(init, update)


def _clip_matrix_rms(updates: optax.Updates, params: optax.Params) -> optax.Params:
    """Scales updates to a root mean square of at most 1 (arXiv 1804.04235, §6).

    Of stacked layers, each layer's matrix is scaled by itself; other arrays are scaled as a whole.
    """
    del params

    def clip(path: KeyPath, update: jax.Array) -> jax.Array:
        axes = tuple(range(-2, 0)) if _is_matrix(path) and update.ndim > 2 else None
        rms = jnp.sqrt(jnp.mean(jnp.square(update), axis=axes, keepdims=True))
        return update / jnp.maximum(1.0, rms)

    return jax.tree.map_with_path(clip, updates)
