"""The cost model of a run, for the attention that the model's layers begin with."""

from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.sparse_attention import SparseAttentionConfig
from alload_jax.planning.analytic import bytes_per_split_token, step_cost
from alload_jax.planning.architectures.registry import from_fields
from alload_jax.planning.cost import CostFile
from alload_jax.planning.devices import DEVICES
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.sparse_cost import SparseLayers, with_layers

_ASSUMED_DEVICE = "h200"
"""Whose rates stand for those of any device, so that the plan does not depend on the device."""

_LEAST_DENSITY = 1e-6


def first_layers(model: ModelConfig) -> SparseLayers | None:
    """The layers as training begins; None for a model whose layers are always dense."""
    sparse = model.sparse_attention
    if sparse is None:
        return None
    densities = sparse.forced or (1.0,)
    share = sum(density < 1 for density in densities) / len(densities)
    return sparse_layers(sparse, share, sum(densities) / len(densities))


def sparse_layers(config: SparseAttentionConfig, share: float, density: float) -> SparseLayers:
    """The layers of a model as its steps log them.

    Args:
      config: of the model's sparse attention.
      share: share of the layers that are sparse.
      density: mean over all layers; 1 for dense ones.
    """
    if not share or config.selector == "all":  # which attends to all blocks
        density = 1.0
    else:
        density = min(1.0, max(_LEAST_DENSITY, round(1 - (1 - density) / share, 6)))
    return SparseLayers(share, density, config.min_tokens, config.block)


def run_costs(model: ModelConfig, planning: PlanningConfig) -> CostFile:
    """The cost model by which a run is planned from its first step on.

    Without `planning.cost_model` and `planning.p`, a run is planned by arithmetic, with the rates
    of an H200: B·S^p knows neither what padding costs nor which layers are sparse.

    Raises:
      InputError: the file of the cost model cannot be read.
    """
    costs, layers = planning.costs(), first_layers(model)
    if not planning.cost_model and planning.p is None:
        costs = _analytic(model)
    return costs if layers is None else with_layers(costs, layers)


def _analytic(model: ModelConfig) -> CostFile:
    """Time by arithmetic; an empty file for models of which no costs are known."""
    try:
        architecture = from_fields(model.architecture())
    except InputError:
        return CostFile()
    device = DEVICES[_ASSUMED_DEVICE]
    return CostFile(
        quadratic=step_cost(architecture, device, model.policies),
        bytes_per_split_token=bytes_per_split_token(
            architecture, model.policies, device.compute_bytes
        ),
    )
