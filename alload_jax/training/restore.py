"""Reads a model's values from a checkpoint, without the rest of the training state.

The values are placed on one device, because one sample has no rows to split. Trained parameters are
float32, as in training, so a model of N parameters needs 4·N bytes on the device.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.stored import readable, stored_as
from alload_jax.models.families import (
    abstract_model,
    config_from_fields,
    family_of,
    read_model_config,
)
from alload_jax.models.lora_merge import merge_adapters
from alload_jax.models.weights import load_weights, require_same_architecture
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.base import BASE, Base
from alload_jax.training.best import best_step
from alload_jax.training.checkpoint_errors import as_input_error
from alload_jax.training.checkpoint_identity import difference
from alload_jax.training.checksums import damage, not_regular
from alload_jax.training.optimizer import NO_AVERAGE
from alload_jax.training.parameters import (
    ParametersConfig,
    cast_frozen,
    merge_parameters,
    split_parameters,
)
from alload_jax.training.state import Weights, initial_frozen, weights_shardings

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run folder."""

WeightsKind = Literal["ema", "raw"]
"""The moving average of the weights, or the latest weights."""

StepChoice = int | Literal["best"] | None
"""A step, the best one, or None for the newest."""

_REMEDY = "choose another with --step"
_FIELDS: dict[WeightsKind, str] = {"ema": "ema", "raw": "params"}
"""The corresponding fields of `TrainState`."""


def one_device_mesh() -> Mesh:
    """Returns a mesh of this process's first device."""
    return make_mesh(MeshConfig(), jax.local_devices()[:1])


def find_step(folder: Path, step: StepChoice = None) -> int:
    """Finds the newest complete checkpoint of a run, the best, or that of a given step.

    It only reads, so that it does not interfere with a run that writes to the folder.

    Args:
      folder: folder of the checkpoints.
      step: step of the checkpoint; None for the newest, `best` for the lowest validation loss.

    Raises:
      InputError: there is no such checkpoint.
    """
    steps = sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []
    if not steps:
        raise InputError(
            f"{folder}: holds no complete checkpoint; train until the first is saved, or name "
            "another run folder"
        )
    if step == "best":
        return best_step(folder.parent, steps)
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
    base: str | None = None,
) -> Weights:
    """Reads a model's values without the optimizer state and the other weights.

    Args:
      folder: folder of the checkpoints.
      step: step of the checkpoint.
      config: config of the model.
      parameters: which parameters are trained.
      mesh: mesh on which the values are placed; it may differ from the run's.
      weights: which weights to read.
      base: where the frozen parameters are that the checkpoint leaves out; None for where they
        were in training.

    Raises:
      InputError: the checkpoint is damaged, its model differs from the config's, or the frozen
        parameters are not the run's.
    """
    place = _checked(folder, step, config)
    like = _abstract_weights(config, parameters, mesh)
    left_out = read_base(place)
    stored = {_FIELDS[weights]: like.params, "variables": like.variables}
    if left_out is None:
        stored["frozen"] = like.frozen
    found = _read_state(place, stored)
    if left_out is not None:
        left_out = left_out._replace(weights=base or left_out.weights)
        found["frozen"] = restore_frozen(left_out, config, parameters, mesh)
    return Weights(found[_FIELDS[weights]], found.get("frozen", {}), found.get("variables", {}))


def restore_trained(
    folder: Path,
    step: int,
    config: ModelConfig,
    parameters: ParametersConfig,
    mesh: Mesh,
    weights: WeightsKind = "ema",
) -> Any:
    """Reads the trained parameters alone; arguments as `restore_weights`.

    Raises:
      InputError: the checkpoint is damaged, or its model differs from the config's.
    """
    place = _checked(folder, step, config)
    like = _abstract_weights(config, parameters, mesh)
    return _read_state(place, {_FIELDS[weights]: like.params})[_FIELDS[weights]]


def _checked(folder: Path, step: int, config: ModelConfig) -> Path:
    """Returns the folder of a checkpoint that is undamaged and of this model."""
    place = folder.absolute() / str(step)
    model = read_identity(place)["model"]
    if model != config.architecture():
        found = difference(model, config.architecture(), config.later_fields)
        raise InputError(
            f"{place}: its model is not config.yaml's: {found}; "
            "restore the config that the run was trained with"
        )
    with as_input_error(place, _REMEDY):  # a run may delete it meanwhile
        what = damage(place)
    if what:
        raise InputError(f"{place}: this checkpoint cannot be read ({what}); {_REMEDY}")
    return place


def _read_state(place: Path, like: dict[str, Any]) -> dict[str, Any]:
    """Reads the fields of a checkpoint's state that `like` has and that are not empty."""
    stored = {name: part for name, part in like.items() if jax.tree.leaves(part)}
    part = ocp.args.PyTreeRestore(
        stored,
        restore_args=ocp.checkpoint_utils.construct_restore_args(stored),
        partial_restore=True,
    )
    with as_input_error(place, _REMEDY):
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        return dict(reader.restore(place / "state", args=part))


def restore_frozen(
    base: Base, config: ModelConfig, parameters: ParametersConfig, mesh: Mesh
) -> Any:
    """Reads the frozen parameters that a checkpoint leaves out.

    Raises:
      InputError: they cannot be read, or are others than those that the run was trained on.
    """
    if not Path(base.weights).exists():
        raise InputError(
            f"{base.weights}: the weights that the run was trained on are not there; name their "
            "place as run.initial_weights in training, else as --base"
        )
    given = given_parameters(base.weights, config, parameters, mesh, frozen_only=True)
    frozen = initial_frozen(config, parameters, mesh, base.seed, given)
    base.check(frozen)
    return frozen


def given_parameters(
    place: str | Path,
    config: ModelConfig,
    parameters: ParametersConfig,
    mesh: Mesh,
    *,
    frozen_only: bool = False,
) -> Any:
    """Reads the parameters that weights in a folder or file, or another run, give a model.

    Args:
      place: what `load_weights` reads, or a run folder of train.py.
      config: config of the model.
      parameters: which parameters are trained.
      mesh: mesh on which the parameters are placed.
      frozen_only: leave out trained parameters.

    Returns:
      Nested dict of arrays, stored as in the training state.

    Raises:
      InputError: files are missing or damaged, or belong to another architecture.
    """
    place = Path(place)

    def wanted(name: str) -> bool:
        return not (frozen_only and parameters.trains(name))

    if is_run(place):
        return _of_run(place, config, parameters, mesh, wanted)
    described = place / "config.json"
    if described.is_file():
        require_same_architecture(config, read_model_config(described), place)
    return load_weights(place, config, mesh, parameters.dtype_of, wanted)


def is_run(place: str | Path) -> bool:
    """Returns whether a path is a run folder with checkpoints."""
    return (Path(place) / CHECKPOINTS).is_dir()


def _of_run(
    run: Path,
    config: ModelConfig,
    parameters: ParametersConfig,
    mesh: Mesh,
    wanted: Callable[[str], bool],
) -> Any:
    """Reads the averaged weights, or else the latest, of the newest checkpoint of another run.

    Its adapters are kept where this run has the same, else merged. The embedding of classes begins
    anew where their number differs.
    """
    folder = run / CHECKPOINTS
    step = find_step(folder)
    identity = read_identity(folder.absolute() / str(step))
    kind: WeightsKind = "raw" if NO_AVERAGE in (identity.get("optimizer") or {}) else "ema"
    theirs = config_from_fields(identity["model"])
    require_same_architecture(config, theirs, run)
    of_run = ParametersConfig(**_tuples(identity.get("parameters") or {}))
    found = restore_weights(folder, step, theirs, of_run, mesh, kind)
    params = merge_parameters(found.params, readable(found.frozen))
    if theirs.lora is not None and not same_adapters(theirs, config):
        params = merge_adapters(params, theirs.lora)
    shapes = flatten_dict(abstract_model(config).params, sep="/")
    kept = {
        name: stored_as(name, value[...], parameters.dtype_of(name))
        for name, value in flatten_dict(params, sep="/").items()
        if name in shapes and shapes[name].shape == value.shape and wanted(name)
    }
    return unflatten_dict(kept, sep="/")


def same_adapters(one: ModelConfig, other: ModelConfig) -> bool:
    """Returns whether adapters of one model fit the other."""
    if one.lora is None or other.lora is None:
        return False
    return one.lora.identity() == other.lora.identity()


def read_identity(place: Path) -> dict[str, Any]:
    """Reads what the checkpoint in a folder belongs to.

    Raises:
      InputError: it cannot be read.
    """
    with as_input_error(place, _REMEDY):
        what = not_regular(place)
        reader = ocp.Checkpointer(ocp.JsonCheckpointHandler())
        found = {} if what else dict(reader.restore(place / "identity"))
    if not isinstance(found.get("model"), dict):
        what = what or "its identity names no model"
        raise InputError(f"{place}: this checkpoint cannot be read ({what}); {_REMEDY}")
    return found


def read_base(place: Path) -> Base | None:
    """Reads which frozen parameters the checkpoint in a folder leaves out; None if none.

    Raises:
      InputError: it cannot be read.
    """
    if not (place / BASE).exists():
        return None
    with as_input_error(place, _REMEDY):
        reader = ocp.Checkpointer(ocp.JsonCheckpointHandler())
        return Base(**reader.restore(place / BASE))


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


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
