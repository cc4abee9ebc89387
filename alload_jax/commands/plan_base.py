"""What `alload plan` takes from a training config, where one is given."""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from alload_jax.data.weights import SourceWeight
from alload_jax.planning.analytic import (
    ALL_TRAINED,
    Remat,
    Trained,
)
from alload_jax.planning.geometry import Geometry
from alload_jax.planning.portfolio import ONE_EPOCH, RunLength
from alload_jax.planning.remat import AUTO_REMAT
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.sparse_cost import SparseLayers

if TYPE_CHECKING:  # it needs JAX, which takes a second to import
    from alload_jax.config import Config
    from alload_jax.models.common.config import ModelConfig


class PlanBase(NamedTuple):
    """Values of a training config, or the defaults.

    Attributes:
      planning: fields of `PlanningConfig`.
      patch_size: latents per token (frames, height, width).
      seed: seed of the order of samples.
      model: fields of the model's architecture; None without a config.
      remat: rematerialisation policy of the model, or those that repeat over its layers.
      packs: whether the model can train on packed rows.
      layers: the model's layers as training begins; None if all are always dense.
      trained: which parameters are trained.
      single: the same for steps of one micro-batch, whose gradient takes less.
      weights: of the sources of samples.
      config: the model's config; None without a config.
      length: of the run.
    """

    planning: dict[str, Any]
    patch_size: tuple[int, int, int]
    seed: int
    model: dict[str, Any] | None
    remat: Remat
    packs: bool
    layers: SparseLayers | None = None
    trained: Trained = ALL_TRAINED
    single: Trained = dataclasses.replace(ALL_TRAINED, accumulates=False)
    weights: tuple[SourceWeight, ...] = ()
    config: "ModelConfig | None" = None
    length: RunLength = ONE_EPOCH


def read_base(path: str | None) -> PlanBase:
    """The values of a config, or the defaults without one."""
    if path is None:
        return PlanBase({}, Geometry().patch_size, 0, None, "attention", True)
    # Imported here because a training config needs JAX, which takes a second to import.
    from alload_jax.config import read_config
    from alload_jax.training.plan_costs import first_layers

    config = read_config(["--config", path], prog="alload plan")
    planning = {
        f.name: getattr(config.planning, f.name) for f in dataclasses.fields(PlanningConfig)
    }
    model = config.model
    trained, single = _trained_of(config)
    return PlanBase(
        planning,
        model.patch_size,
        config.run.seed,
        model.architecture(),
        model.step_fields().get("remat", AUTO_REMAT),
        packs=model.attention != "xla" and model.dtype != "float32",
        layers=first_layers(model),
        trained=trained,
        single=single,
        weights=config.data.weights,
        config=model,
        length=RunLength(config.run.epochs, config.run.steps or 0),
    )


def _trained_of(config: "Config") -> tuple[Trained, Trained]:
    """The trained parameters of a config, whose steps have several micro-batches or one.

    Counting them needs the model's shapes.
    """
    from alload_jax.models.families import abstract_model, gradient_dtypes
    from alload_jax.training.state_size import trained_of

    given = (abstract_model(config.model).params, config.parameters, config.optimizer)
    # Planned for a GPU, whatever this machine has.
    model = config.model
    model = dataclasses.replace(model, dtype="bfloat16") if model.dtype == "auto" else model
    narrow = gradient_dtypes(model)
    return trained_of(*given), trained_of(*given, accumulates=False, narrow=narrow)
