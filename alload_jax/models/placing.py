"""Places the tensors of a checkpoint on a mesh, in the dtype in which they are stored."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.stored import DtypeOf, StoredDtype, stored_as
from alload_jax.models.families import abstract_model, family_of
from alload_jax.sharding.rules import tree_shardings


class Place(NamedTuple):
    """Where a parameter lies and how it is stored.

    Attributes:
      name: name of the parameter.
      shape: its shape, with all layers.
      sharding: its sharding.
      dtype: dtype in which it is stored.
    """

    name: str
    shape: tuple[int, ...]
    sharding: NamedSharding
    dtype: StoredDtype

    def whole(self, value: np.ndarray) -> Any:
        """Places a parameter that is not stacked; each device receives only its shard."""
        return _stored(_float32(value, self.sharding), self.name, self.dtype)

    def layer(self, value: np.ndarray) -> Any:
        """Places one layer of a stacked parameter."""
        spec = PartitionSpec(*self.sharding.spec[1:])
        placed = _float32(value, NamedSharding(self.sharding.mesh, spec))
        return _stored_layer(placed, self.name, self.dtype)

    def zeros(self) -> Any:
        """All layers, to be filled."""

        def make() -> Any:
            return jax.tree.map(
                jnp.zeros_like,
                stored_as(self.name, jnp.zeros(self.shape, jnp.float32), self.dtype),
            )

        shapes = jax.eval_shape(make)
        replicated = NamedSharding(self.sharding.mesh, PartitionSpec())
        shardings = jax.tree.map(
            lambda part: self.sharding if part.shape == self.shape else replicated, shapes
        )
        return jax.jit(make, out_shardings=shardings)()


def places_of(config: ModelConfig, mesh: Mesh, dtype_of: DtypeOf) -> dict[str, Place]:
    """Returns the place of every parameter of a model by name.

    Raises:
      InputError: a parameter is not divisible by the mesh.
    """
    abstract = abstract_model(config).params
    shardings = tree_shardings(abstract, mesh, family_of(config).partition_rules)
    flat = flatten_dict(shardings, sep="/")
    return {
        name: Place(name, leaf.shape, flat[name], dtype_of(name))
        for name, leaf in flatten_dict(abstract, sep="/").items()
    }


@partial(jax.jit, donate_argnums=0)
def set_layer(stack: Any, layer: Any, index: int) -> Any:
    """Writes a layer of `Place.layer` into what `Place.zeros` returned, which is donated."""
    return jax.tree.map(
        lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, index, 0),
        stack,
        layer,
    )


def _float32(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: np.asarray(value[index], np.float32)
    )


@partial(jax.jit, static_argnums=(1, 2), donate_argnums=0)
def _stored(value: jax.Array, name: str, dtype: StoredDtype) -> Any:
    return stored_as(name, value, dtype)


@partial(jax.jit, static_argnums=(1, 2), donate_argnums=0)
def _stored_layer(value: jax.Array, name: str, dtype: StoredDtype) -> Any:
    return jax.tree.map(lambda part: part[0], stored_as(name, value[None], dtype))
