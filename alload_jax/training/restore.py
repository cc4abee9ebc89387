"""Reads a model's values from a checkpoint, without the rest of the training state.

The values are placed on one device, because one sample has no rows to split. Trained parameters are
float32, as in training, so a model of N parameters needs 4·N bytes on the device.
"""

from functools import partial
from pathlib import Path
from typing import Literal

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import abstract_model, family_of
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.checkpoint import as_input_error, difference
from alload_jax.training.checksums import damage
from alload_jax.training.parameters import ParametersConfig, cast_frozen, split_parameters
from alload_jax.training.state import Weights, weights_shardings

WeightsKind = Literal["ema", "raw"]
"""The moving average of the weights, or the latest weights."""

_FIELDS: dict[WeightsKind, str] = {"ema": "ema", "raw": "params"}
"""The corresponding fields of `TrainState`."""


def one_device_mesh() -> Mesh:
    """Returns a mesh of this process's first device."""
    return make_mesh(MeshConfig(), jax.local_devices()[:1])


def find_step(folder: Path, step: int | None = None) -> int:
    """Finds the newest complete checkpoint of a run, or that of a given step.

    It only reads, so that it does not interfere with a run that writes to the folder.

    Args:
      folder: folder of the checkpoints.
      step: step of the checkpoint; None for the newest.

    Raises:
      InputError: there is no such checkpoint.
    """
    steps = sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []
    if not steps:
        raise InputError(
            f"{folder}: holds no complete checkpoint; train until the first is saved, or name "
            "another run folder"
        )
    if step is not None and step not in steps:
        available = ", ".join(map(str, steps))
        raise InputError(f"{folder}: holds no checkpoint of step {step}; choose one of {available}")
    return steps[-1] if step is None else step


def restore_weights(
    folder: Path,
    step: int,
    config: ModelConfig,
    parameters: ParametersConfig,
    mesh: Mesh,
    weights: WeightsKind = "ema",
) -> Weights:
    """Reads a model's values without the optimizer state and the other weights.

    Args:
      folder: folder of the checkpoints.
      step: step of the checkpoint.
      config: config of the model.
      parameters: which parameters are trained.
      mesh: mesh on which the values are placed; it may differ from the run's.
      weights: which weights to read.

    Raises:
      InputError: the checkpoint is damaged, or its model differs from the config's.
    """
    place = folder.absolute() / str(step)
    remedy = "choose another with --step"
    with as_input_error(place, remedy):
        reader = ocp.Checkpointer(ocp.JsonCheckpointHandler())
        model = reader.restore(place / "identity")["model"]
    if model != config.architecture():
        found = difference(model, config.architecture(), config.later_fields)
        raise InputError(
            f"{place}: its model is not config.yaml's: {found}; "
            "restore the config that the run was trained with"
        )
    with as_input_error(place, remedy):  # a run may delete it meanwhile
        what = damage(place)
    if what:
        raise InputError(f"{place}: this checkpoint cannot be read ({what}); {remedy}")
    like = _abstract_weights(config, parameters, mesh)
    stored = {_FIELDS[weights]: like.params, "frozen": like.frozen, "variables": like.variables}
    stored = {name: part for name, part in stored.items() if jax.tree.leaves(part)}
    part = ocp.args.PyTreeRestore(
        stored,
        restore_args=ocp.checkpoint_utils.construct_restore_args(stored),
        partial_restore=True,
    )
    with as_input_error(place, remedy):
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        found = reader.restore(place / "state", args=part)
    return Weights(found[_FIELDS[weights]], found.get("frozen", {}), found.get("variables", {}))


def _abstract_weights(config: ModelConfig, parameters: ParametersConfig, mesh: Mesh) -> Weights:
    """Returns shapes, dtypes and shardings of a model's values."""
    abstract = abstract_model(config)
    trained, frozen = split_parameters(abstract.params, parameters)
    frozen = jax.eval_shape(partial(cast_frozen, config=parameters), frozen)
    shapes = Weights(trained, frozen, abstract.variables)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        weights_shardings(shapes, mesh, family_of(config).partition_rules),
    )
