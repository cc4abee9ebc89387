"""The interface of training objectives, and a registry of objectives by name."""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
from jax.sharding import NamedSharding

from alload_jax.data.batch import AnyBatch, Batch
from alload_jax.diffusion.timesteps import TimestepConfig
from alload_jax.models.common.parts import Auxiliary
from alload_jax.models.families import Model
from alload_jax.registry import Registry


class LossSums(NamedTuple):
    """Weighted sums over the samples of a micro-batch, float32.

    Attributes:
      minimised: Σ weight·loss that is differentiated.
      loss: Σ weight·loss of the model's prediction, logged as `loss`.
      weight: Σ weight, by which the sums of a step are divided.
      auxiliary: Σ weight·value of each auxiliary value, of any shape. Their means over a step's
        samples are logged and passed to the family's `update_variables`.
    """

    minimised: jax.Array
    loss: jax.Array
    weight: jax.Array
    auxiliary: Auxiliary


class Objective(Protocol):
    """A frozen dataclass whose fields are its config; `name` is its name in the config.

    Attributes:
      timesteps: distribution of noise levels, which sampling uses too.
    """

    @property
    def timesteps(self) -> TimestepConfig:
        """Distribution of noise levels."""
        ...

    def __call__(
        self, model: Model, batch: AnyBatch, key: jax.Array, sharding: NamedSharding
    ) -> LossSums:
        """Computes weighted sums of loss and auxiliary values over a micro-batch.

        Args:
          model: the model.
          batch: a bucketed or packed micro-batch.
          key: the run's key; a sample's random values also depend on its epoch.
          sharding: sharding of rows over the mesh.
        """
        ...


@runtime_checkable
class MeasuresLevels(Protocol):
    """What an objective adds so that a run can be validated: its errors at a fixed noise level."""

    def errors_at(
        self, model: Model, batch: Batch, key: jax.Array, sigma: jax.Array, sharding: NamedSharding
    ) -> jax.Array:
        """Computes the error of each sample at a noise level, always with its condition.

        Args:
          model: the model.
          batch: a bucketed micro-batch. Random values depend on `key`, `epoch` and `sample` alone.
          key: of the noise.
          sigma: float32 scalar, the noise level after any shift, 0 (data) to 1 (noise).
          sharding: sharding of rows over the mesh.

        Returns:
          [B] float32, unweighted; any value for padding.
        """
        ...


OBJECTIVES: Registry[type[Objective]] = Registry(
    "objective.name", {"flow_matching": "alload_jax.objectives.flow_matching:FlowMatching"}
)
"""Classes of objectives, each an `Objective`."""
DEFAULT_OBJECTIVE = "flow_matching"
