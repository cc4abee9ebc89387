"""The update rules of optimizers by name: gradients in, updates of the parameters out.

Each decays matrices only, decoupled from the gradient and times the learning rate, as AdamW (arXiv
1711.05101), so that `learning_rate` and `weight_decay` mean the same for all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from alload_jax.models.common.lora import DOWN, UP
from alload_jax.sharding.rules import path_name
from alload_jax.training.adamw8bit import SMALLEST, scale_by_adam8bit

OptimizerName = Literal["adamw", "adamw8bit", "adafactor", "lion", "muon"]
WITHOUT_MU_DTYPE = ("adamw8bit", "adafactor")
"""Optimizers whose first moment has a dtype of its own, or that have none."""
_FACTORED_FROM = 128
"""Length of both axes from which Adafactor keeps means in place of second moments, as in Optax."""
_ADAMW_RMS = 0.2
"""Root mean square of Muon's updates, about that of AdamW's (arXiv 2502.16982)."""


@dataclass(frozen=True)
class UpdateRule:
    """The hyperparameters of an optimizer; see `OptimizerConfig`.

    Attributes:
      learning_rate: schedule of the learning rate.
      beta1, beta2, eps, weight_decay: AdamW's parameters, also for the other optimizers where they
        have them.
      mu_dtype: dtype of the first moment; None for that of the parameters.
    """

    learning_rate: optax.Schedule
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    mu_dtype: Any = None

    def transform(self, name: OptimizerName) -> optax.GradientTransformation:
        """Builds the optimizer of that name."""
        makers: dict[OptimizerName, Callable[[], optax.GradientTransformation]] = {
            "adamw": self._adamw,
            "adamw8bit": self._adamw8bit,
            "adafactor": self._adafactor,
            "lion": self._lion,
            "muon": self._muon,
        }
        return makers[name]()

    def _adamw(self) -> optax.GradientTransformation:
        return optax.adamw(
            self.learning_rate,
            b1=self.beta1,
            b2=self.beta2,
            eps=self.eps,
            mu_dtype=self.mu_dtype,
            weight_decay=self.weight_decay,
            mask=decays,
        )

    def _adamw8bit(self) -> optax.GradientTransformation:
        scaling = {
            "eight_bits": scale_by_adam8bit(self.beta1, self.beta2, self.eps),
            "float32": optax.scale_by_adam(self.beta1, self.beta2, self.eps),
        }
        return self._decayed(optax.partition(scaling, _bits))

    def _adafactor(self) -> optax.GradientTransformation:
        """Without momentum and relative steps, as fine-tuning uses it (arXiv 1804.04235)."""
        return self._decayed(
            optax.chain(_scale_by_factored_rms(), optax.stateless(_clip_matrix_rms))
        )

    def _lion(self) -> optax.GradientTransformation:
        return optax.lion(
            self.learning_rate,
            b1=self.beta1,
            b2=self.beta2,
            mu_dtype=self.mu_dtype,
            weight_decay=self.weight_decay,
            mask=decays,
        )

    def _muon(self) -> optax.GradientTransformation:
        """Muon for the matrices of stacked layers, AdamW for the rest."""
        others = {
            "muon": muon(
                self.learning_rate,
                eps=self.eps,
                weight_decay=self.weight_decay,
                mu_dtype=self.mu_dtype,
                muon_weight_dimension_numbers=_all_matrices,
                consistent_rms=_ADAMW_RMS,
            ),
            "adamw": self._adamw(),
        }
        return optax.partition(others, _muon_labels)

    def _decayed(self, scaling: optax.GradientTransformation) -> optax.GradientTransformation:
        return optax.chain(
            scaling,
            optax.add_decayed_weights(self.weight_decay, decays),
            optax.scale_by_learning_rate(self.learning_rate),
        )


def decays(params: Any) -> Any:
    """Marks the matrices, which decay; biases, norms, embeddings and modulation do not."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _is_matrix(path), params)


def _is_matrix(path: Any) -> bool:
    return path_name(path).endswith(("kernel", DOWN, UP))


def _bits(params: Any) -> Any:
    """Embeddings, vectors and small matrices keep float32 moments (arXiv 2110.02861, §2.3)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            "eight_bits" if _is_matrix(path) and leaf.size >= SMALLEST else "float32"
        ),
        params,
    )


def _muon_labels(params: Any) -> Any:
    """The first and the last matrices of a model, which are not stacked, train with AdamW."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: "muon" if _is_matrix(path) and leaf.ndim >= 3 else "adamw", params
    )


def _all_matrices(params: Any) -> Any:
    """The last two axes are a matrix [inputs, outputs]; the axis of layers is a batch axis."""
    return jax.tree.map(lambda _: MuonDimensionNumbers(-2, -1), params)


def _scale_by_factored_rms() -> optax.GradientTransformation:
    """Adafactor's second moments (arXiv 1804.04235, algorithm 4), of each layer by itself.

    As `optax.scale_by_factored_rms`, whose state it has. That factors the two longest axes, of
    which one counts layers in a stack of many; here they are the last two, of matrices alone.
    """

    def init(params: Any) -> optax.FactoredState:
        def moments(path: Any, leaf: jax.Array) -> tuple[jax.Array, ...]:
            axes, none = _factored_axes(path, leaf), jnp.zeros(1, leaf.dtype)
            if axes is None:
                return none, none, jnp.zeros_like(leaf)
            return *(jnp.zeros_like(leaf.mean(axis)) for axis in axes), none

        return optax.FactoredState(
            jnp.zeros((), jnp.int32),
            *_apart(params, jax.tree_util.tree_map_with_path(moments, params)),
        )

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, optax.FactoredState]:
        del params
        keep = 1 - (state.count + 1.0) ** -0.8

        def moved(path: Any, grad: jax.Array, *moments: jax.Array) -> tuple[jax.Array, ...]:
            square = jnp.square(grad) + 1e-30
            axes = _factored_axes(path, grad)
            if axes is None:
                whole = keep * moments[2] + (1 - keep) * square
                return grad * jax.lax.rsqrt(whole), *moments[:2], whole
            rows, columns = (
                keep * moment + (1 - keep) * square.mean(axis)
                for moment, axis in zip(moments, axes, strict=False)
            )
            relative = rows / rows.mean(axis=-1, keepdims=True)
            for factor, axis in zip((relative, columns), axes, strict=True):
                grad = grad * jnp.expand_dims(jax.lax.rsqrt(factor), axis)
            return grad, rows, columns, moments[2]

        found = jax.tree_util.tree_map_with_path(moved, grads, *state[1:])
        updates, *moments = _apart(grads, found)
        return updates, optax.FactoredState(optax.safe_increment(state.count), *moments)

    return optax.GradientTransformation(init, update)


def _factored_axes(path: Any, leaf: jax.Array) -> tuple[int, int] | None:
    """The longer and the shorter axis of a matrix or a table of embeddings; None if too short."""
    is_table = _is_matrix(path) or path_name(path).endswith("embedding")
    if not is_table or leaf.ndim < 2 or min(leaf.shape[-2:]) < _FACTORED_FROM:
        return None
    return (-1, -2) if leaf.shape[-1] >= leaf.shape[-2] else (-2, -1)


def _apart(like: Any, found: Any) -> list[Any]:
    """A tree of tuples as a list of trees."""
    return [*jax.tree.transpose(jax.tree.structure(like), None, found)]


def _clip_matrix_rms(updates: Any, params: Any) -> Any:
    """Scales updates to a root mean square of at most 1 (arXiv 1804.04235, §6).

    Of stacked layers, each layer's matrix is scaled by itself; other arrays are scaled as a whole.
    """
    del params

    def clip(path: Any, update: jax.Array) -> jax.Array:
        axes = tuple(range(-2, 0)) if _is_matrix(path) and update.ndim > 2 else None
        rms = jnp.sqrt(jnp.mean(jnp.square(update), axis=axes, keepdims=True))
        return update / jnp.maximum(1.0, rms)

    return jax.tree_util.tree_map_with_path(clip, updates)
