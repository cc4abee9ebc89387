"""Everything that training changes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from alload_jax.models.wan.config import WanConfig
from alload_jax.models.wan.transformer import WanTransformer
from alload_jax.sharding.mesh import replicated
from alload_jax.sharding.rules import tree_shardings, zero_shardings


class TrainState(NamedTuple):
    """What a checkpoint holds.

    Attributes:
      step: int32 scalar, optimizer steps done; also the position in the plan.
      key: random key data [2] uint32, from which every sample's noise derives.
      params: nested dict of float32 arrays.
      ema: like `params`, their moving average.
      opt_state: of the optimizer.
    """

    step: Any
    key: Any
    params: Any
    ema: Any
    opt_state: Any


def model_graph(config: WanConfig) -> nnx.GraphDef:
    """The transformer without its parameters: `nnx.merge(graph, params)` gives the model."""
    return nnx.split(nnx.eval_shape(lambda: WanTransformer(config, rngs=nnx.Rngs(0))))[0]


def init_state(
    config: WanConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    seed: int,
    params: Any = None,
) -> TrainState:
    """A fresh state, each device making only the part that it will hold.

    Args:
      config: the transformer.
      optimizer: whose state is made.
      mesh: where it all lies.
      seed: of weights and noise.
      params: weights to start from, on the mesh; given up to the state. None draws them.

    Raises:
      InputError: the mesh does not divide a parameter.
    """
    make = _maker(config, optimizer, seed)
    shardings = state_shardings(jax.eval_shape(make), mesh)
    return jax.jit(make, out_shardings=shardings, donate_argnums=0)(params)


def abstract_state(
    config: WanConfig, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int
) -> TrainState:
    """Shapes, dtypes and shardings of the state, for restoring into."""
    shapes = jax.eval_shape(_maker(config, optimizer, seed))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(shapes, mesh),
    )


def state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """Where each array of the state (or of its shapes) lies.

    Raises:
      InputError: the mesh does not divide a parameter.
    """
    return TrainState(
        step=replicated(mesh),
        key=replicated(mesh),
        params=tree_shardings(state.params, mesh),
        ema=zero_shardings(state.ema, mesh),
        opt_state=zero_shardings(state.opt_state, mesh),
    )


def _maker(config: WanConfig, optimizer: optax.GradientTransformation, seed: int) -> Any:
    def make(params: Any = None) -> TrainState:
        weights, noise = jax.random.split(jax.random.key(seed))
        if params is None:
            model = WanTransformer(config, rngs=nnx.Rngs(weights))
            params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            key=jax.random.key_data(noise),
            params=params,
            ema=jax.tree.map(jnp.copy, params),
            opt_state=optimizer.init(params),
        )

    return make
