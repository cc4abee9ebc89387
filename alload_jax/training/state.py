"""Everything that training changes, and the parameters that it leaves as they are."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import build_model, family_of, split_model
from alload_jax.objectives.objective import Objective
from alload_jax.sharding.mesh import replicated
from alload_jax.sharding.rules import Rules, tree_shardings, zero_shardings
from alload_jax.training.parameters import (
    ALL_TRAINED,
    ParametersConfig,
    cast_frozen,
    merge_parameters,
    split_parameters,
)


class TrainingSpec(NamedTuple):
    """What a training computes, wherever it runs.

    Attributes:
      model: the model's config.
      objective: what is minimised.
      optimizer: of the trained parameters.
      ema_decay: of their moving average.
      parameters: which parameters are trained.
    """

    model: ModelConfig
    objective: Objective
    optimizer: optax.GradientTransformation
    ema_decay: float
    parameters: ParametersConfig = ALL_TRAINED

    @property
    def rules(self) -> Rules:
        """How the family's parameters are split over a mesh."""
        return family_of(self.model).partition_rules


class Weights(NamedTuple):
    """A model's values.

    Attributes:
      params: trained parameters, nested dict of float32 arrays.
      frozen: parameters that are not trained, nested dict; empty if all are.
      variables: the model's other variables, such as running statistics; often empty.
    """

    params: Any
    frozen: Any
    variables: Any

    def merged(self) -> Any:
        """All values as one nested dict, as `nnx.merge` takes them."""
        return merge_parameters(merge_parameters(self.params, self.frozen), self.variables)


class TrainState(NamedTuple):
    """What a checkpoint holds.

    Attributes:
      step: int32 scalar, optimizer steps done; also the position in the plan.
      key: random key data [2] uint32, from which every sample's noise derives.
      params: the trained parameters, nested dict of float32 arrays.
      ema: like `params`, their moving average.
      opt_state: of the optimizer.
      frozen: parameters that are not trained; empty if all are.
      variables: the model's other variables, updated with every step; often empty.
    """

    step: Any
    key: Any
    params: Any
    ema: Any
    opt_state: Any
    frozen: Any
    variables: Any

    @property
    def weights(self) -> Weights:
        """What training computes with."""
        return Weights(self.params, self.frozen, self.variables)

    @property
    def averaged_weights(self) -> Weights:
        """With the moving average in place of the trained parameters: what is drawn with."""
        return Weights(self.ema, self.frozen, self.variables)


def init_state(spec: TrainingSpec, mesh: Mesh, seed: int, params: Any = None) -> TrainState:
    """A fresh state, each device making only the part that it will hold.

    Args:
      spec: the model and the optimizer.
      mesh: where it all lies.
      seed: of weights and noise.
      params: all parameters to start from, on the mesh; given up to the state. None draws them.

    Raises:
      InputError: the mesh does not divide a parameter, or a pattern matches no parameter.
    """
    make = _maker(spec, seed)
    shardings = state_shardings(jax.eval_shape(make), mesh, spec.rules)
    return jax.jit(make, out_shardings=shardings, donate_argnums=0)(params)


def abstract_state(spec: TrainingSpec, mesh: Mesh, seed: int) -> TrainState:
    """Shapes, dtypes and shardings of the state, for restoring into."""
    shapes = jax.eval_shape(_maker(spec, seed))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(shapes, mesh, spec.rules),
    )


def state_shardings(state: TrainState, mesh: Mesh, rules: Rules) -> TrainState:
    """Where each array of the state (or of its shapes) lies.

    Raises:
      InputError: the mesh does not divide a parameter.
    """
    return TrainState(
        step=replicated(mesh),
        key=replicated(mesh),
        params=tree_shardings(state.params, mesh, rules),
        ema=zero_shardings(state.ema, mesh, rules),
        opt_state=zero_shardings(state.opt_state, mesh, rules),
        frozen=tree_shardings(state.frozen, mesh, rules),
        variables=jax.tree.map(lambda _: replicated(mesh), state.variables),
    )


def weights_shardings(weights: Weights, mesh: Mesh, rules: Rules) -> Weights:
    """Where the values of a model lie."""
    return Weights(
        tree_shardings(weights.params, mesh, rules),
        tree_shardings(weights.frozen, mesh, rules),
        jax.tree.map(lambda _: replicated(mesh), weights.variables),
    )


def _maker(spec: TrainingSpec, seed: int) -> Callable[..., TrainState]:
    def make(params: Any = None) -> TrainState:
        weights, noise = jax.random.split(jax.random.key(seed))
        drawn = split_model(build_model(spec.model, nnx.Rngs(weights)))
        params = drawn.params if params is None else params
        trained, frozen = split_parameters(params, spec.parameters)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            key=jax.random.key_data(noise),
            params=trained,
            ema=jax.tree.map(jnp.copy, trained),
            opt_state=spec.optimizer.init(trained),
            frozen=cast_frozen(frozen, spec.parameters),
            variables=drawn.variables,
        )

    return make
