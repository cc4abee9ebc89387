"""Train video diffusion transformers in JAX on mixed images and clips, planned by cost.

What is named here is the public API; docs/library.md shows it. Names are imported where they are
used, so that `import alload_jax` imports no JAX.
"""

from importlib import import_module
from typing import Any

_API = {
    # data
    "StoreWriter": "data.store",
    "merge_stores": "data.store",
    "open_source": "data.sources.opening",
    "read_manifest": "data.manifest",
    # plans
    "DEVICES": "planning.devices",
    "PlanningConfig": "planning.settings",
    "Study": "planning.study",
    "analytic_costs": "planning.analytic",
    "architecture_named": "planning.architecture",
    "make_plan": "planning.factory",
    "make_workload": "planning.workloads",
    # models
    "build_model": "models.families",
    "config_from_fields": "models.families",
    "parameter_count": "models.families",
    "read_model_config": "models.families",
    # steps
    "Collator": "data.collate",
    "FlowMatching": "objectives",
    "MeshConfig": "sharding.mesh",
    "OptimizerConfig": "training.optimizer",
    "Trainer": "training.trainer",
    "TrainingSpec": "training.state",
    "collation_for": "data.collate",
    "conditions_for": "data.condition",
    "init_state": "training.state",
    "make_mesh": "sharding.mesh",
    "make_optimizer": "training.optimizer",
    "place_ahead": "data.loader",
    # samples
    "SamplingConfig": "sampling.config",
    "make_draw": "sampling.samples",
}
"""The module of each name."""
__all__ = list(_API)


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module 'alload_jax' has no attribute {name!r}")
    return getattr(import_module(f"alload_jax.{_API[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_API]
