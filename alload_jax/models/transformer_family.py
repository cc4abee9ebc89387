"""A family whose model is a stack of equal blocks, of which some may have sparse attention."""

from typing import Any

import jax

from alload_jax.models.common.attention import packing_unsupported_reason
from alload_jax.models.common.config import TransformerConfig
from alload_jax.models.common.sparse_attention import (
    forced_state,
    switch_metrics,
    switch_records,
    update_switches,
)
from alload_jax.models.families import Family


class TransformerFamily(Family):
    """A family whose config is a `TransformerConfig`; see `Family`.

    The sparse attention of its blocks is their module `sparse_attention`.
    """

    def packing_unsupported_reason(self, config: TransformerConfig) -> str:
        """See `Family.packing_unsupported_reason`."""
        return packing_unsupported_reason(config.attention, config.head_dim, config.compute_dtype)

    def update_variables(
        self, config: TransformerConfig, variables: Any, auxiliary: dict[str, Any]
    ) -> Any:
        """See `Family.update_variables`; layers switch between dense and sparse attention."""
        if config.sparse_attention is None:
            return variables
        state = variables["blocks"]["sparse_attention"]["switch"]
        return _switched(variables, update_switches(config.sparse_attention, state, auxiliary))

    def resumed_variables(self, config: TransformerConfig, variables: Any) -> Any:
        """See `Family.resumed_variables`; forced densities are those of the config."""
        if config.sparse_attention is None:
            return variables
        state = variables["blocks"]["sparse_attention"]["switch"]
        return _switched(variables, forced_state(config.sparse_attention, state))

    def step_metrics(
        self, config: TransformerConfig, variables: Any, auxiliary: dict[str, Any]
    ) -> dict[str, jax.Array]:
        """See `Family.step_metrics`."""
        if config.sparse_attention is None:
            return super().step_metrics(config, variables, auxiliary)
        state = variables["blocks"]["sparse_attention"]["switch"]
        return switch_metrics(config.sparse_attention, state, auxiliary)

    def layer_records(self, config: TransformerConfig, variables: Any) -> dict[str, jax.Array]:
        """See `Family.layer_records`."""
        if config.sparse_attention is None:
            return {}
        state = variables["blocks"]["sparse_attention"]["switch"]
        return switch_records(config.sparse_attention, state)


def _switched(variables: Any, state: dict[str, Any]) -> Any:
    """Variables with another state of the layers' switches."""
    blocks = variables["blocks"]
    sparse = blocks["sparse_attention"] | {"switch": state}
    return variables | {"blocks": blocks | {"sparse_attention": sparse}}
