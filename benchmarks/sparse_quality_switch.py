"""The switches of sparse layers, in the variables of a model of benchmarks/sparse_quality.py."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def switch_of(variables: Any) -> dict[str, Any]:
    """The state by which layers switch, stacked over layers."""
    return variables["blocks"]["sparse_attention"]["switch"]


def with_switch(variables: Any, **values: Any) -> Any:
    """The variables with other values of that state."""
    blocks = variables["blocks"]
    sparse = blocks["sparse_attention"]
    sparse = sparse | {"switch": sparse["switch"] | values}
    return variables | {"blocks": blocks | {"sparse_attention": sparse}}


class Choice(NamedTuple):
    """Which layers are sparse, [layers] bool, and the densities of heads, [layers, num_heads]."""

    sparse: jax.Array
    density: jax.Array


def choice_of(variables: Any) -> Choice:
    """A copy of the layers' choice, which the next step does not overwrite."""
    state = switch_of(variables)
    return Choice(jnp.copy(state["sparse"]), jnp.copy(state["density"]))
