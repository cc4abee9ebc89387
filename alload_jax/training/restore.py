"""Begins from weights or a checkpoint, and reads a model's values without the rest of the state.

The values are placed on one device, because one sample has no rows to split. Trained parameters are
float32, as in training, so a model of N parameters needs 4·N bytes on the device.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from jaxtyping import PyTree

from alload_jax.errors import InputError
from alload_jax.files import Json
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.lora import DOWN, MAGNITUDE, output_lengths
from alload_jax.models.common.safetensor_files import Checkpoint
from alload_jax.models.common.stored import VALUES, readable, stored_as
from alload_jax.models.families import (
    FAMILIES,
    abstract_model,
    config_from_fields,
    family_of,
)
from alload_jax.models.weights import load_weights, read_transformer, require_same_architecture
from alload_jax.processes import waits
from alload_jax.sharding.mesh import MeshConfig, make_mesh, on_device
from alload_jax.training import RunConfig, WeightsKind
from alload_jax.training.checkpoint import Checkpoints, best_step
from alload_jax.training.checkpoint_files import (
    BASE,
    Base,
    as_input_error,
    checksum,
    damage,
    difference,
    not_regular,
    read_part,
)
from alload_jax.training.optimizer import NO_AVERAGE
from alload_jax.training.parameters import (
    ParametersConfig,
    cast_frozen,
    merge_parameters,
    split_parameters,
)
from alload_jax.training.run_files import CHECKPOINTS, is_run, run_around
from alload_jax.training.state import (
    TrainingSpec,
    TrainState,
    Weights,
    abstract_state,
    init_state,
    initial_frozen,
    state_to_draw,
    weights_shardings,
    with_shardings,
)

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
    *,
    trained_only: bool = False,
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
      trained_only: leave out all but the trained parameters.

    Raises:
      InputError: the checkpoint is damaged, its model differs from the config's, the frozen
        parameters are not the run's, or `base` is given and it leaves none out.
    """
    place = folder.absolute() / str(step)
    model = read_identity(place)["model"]
    if model != config.architecture():
        differs = difference(model, config.architecture(), config.later_fields)
        raise InputError(
            f"{place}: its model is not config.yaml's: {differs}; "
            "restore the config that the run was trained with"
        )
    with as_input_error(place, _REMEDY):  # a run may delete it meanwhile
        what = damage(place)
    if what:
        raise InputError(f"{place}: this checkpoint cannot be read ({what}); {_REMEDY}")

    parameters = replace(parameters, frozen_memory="device")  # merged with others, and converted
    abstract = abstract_model(config)
    trained, frozen = split_parameters(abstract.params, parameters)
    frozen = jax.eval_shape(partial(cast_frozen, config=parameters), frozen)
    shapes = Weights(trained, frozen, abstract.variables)
    like = with_shardings(
        shapes, weights_shardings(shapes, mesh, family_of(config).partition_rules)
    )
    left_out = None if trained_only else read_base(place)
    if base and left_out is None:
        raise InputError(f"{place}: lacks no parameters; leave --base {base} out")
    stored = {_FIELDS[weights]: like.params}
    if not trained_only:
        stored["variables"] = like.variables
        if left_out is None:
            stored["frozen"] = like.frozen
    stored = {name: part for name, part in stored.items() if jax.tree.leaves(part)}
    part = ocp.args.PyTreeRestore(
        stored,
        restore_args=ocp.checkpoint_utils.construct_restore_args(stored),
        partial_restore=True,
    )
    with as_input_error(place, _REMEDY):
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        found = dict(reader.restore(place / "state", args=part))
    if left_out is not None:
        left_out = left_out._replace(weights=base or left_out.weights)
        found["frozen"] = restore_frozen(left_out, config, parameters, mesh)
    return Weights(found[_FIELDS[weights]], found.get("frozen", {}), found.get("variables", {}))


def restore_frozen(
    base: Base, config: ModelConfig, parameters: ParametersConfig, mesh: Mesh
) -> PyTree:
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
) -> PyTree:
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
    if (model := described_model(place)) is not None:
        require_same_architecture(config, model, place)  # heads, too, which no shape tells
    return load_weights(place, config, mesh, parameters.dtype_of, wanted, parameters.to_host)


def described_model(place: Path) -> ModelConfig | None:
    """Reads the model of a place of initial weights; None where nothing describes it.

    Raises:
      InputError: the file, config.json, or the newest checkpoint of a run is damaged; or the place
        holds a whole pipeline.
    """
    if is_run(place):
        step = find_step(place / CHECKPOINTS)
        return config_from_fields(
            read_identity(place.absolute() / CHECKPOINTS / str(step))["model"]
        )
    inner = place / "transformer"
    if not (place / "config.json").is_file() and (inner / "config.json").is_file():
        raise InputError(f"{place}: is a whole pipeline; did you mean {inner}?")
    if place.is_file():
        with Checkpoint(place) as checkpoint:
            shapes = {key: checkpoint.header_of(key)[0] for key in checkpoint.keys}
        families = (FAMILIES.get(name) for name in FAMILIES.names())
        try:
            return next(filter(None, (each.config_of_tensors(shapes) for each in families)), None)
        except KeyError as error:
            raise InputError(f"{place}: lacks {error}; download it again") from error
        except (IndexError, ZeroDivisionError) as error:
            raise InputError(
                f"{place}: has tensors of shapes that no model has; download it again"
            ) from error
    if (place / "config.json").is_file():
        return read_transformer(place)
    if run := run_around(place):
        raise InputError(f"{place}: is a part of a run; did you mean {run}, its newest step?")
    return None


def _of_run(
    run: Path,
    config: ModelConfig,
    parameters: ParametersConfig,
    mesh: Mesh,
    wanted: Callable[[str], bool],
) -> PyTree:
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
    fields = (identity.get("parameters") or {}).items()
    trained: Json = {name: tuple(v) if isinstance(v, list) else v for name, v in fields}
    found = restore_weights(folder, step, theirs, ParametersConfig(**trained), mesh, kind)
    params = merge_parameters(found.params, readable(found.frozen))
    own = config.lora.identity() if config.lora else None
    if theirs.lora is not None and theirs.lora.identity() != own:
        from alload_jax.models.lora_files import merge_adapters

        params = merge_adapters(params, theirs.lora)
    shapes = flatten_dict(abstract_model(config).params, sep="/")
    kept = {
        name: stored_as(name, value[...], parameters.dtype_of(name))
        for name, value in flatten_dict(params, sep="/").items()
        if name in shapes and shapes[name].shape == value.shape and wanted(name)
    }
    return unflatten_dict(kept, sep="/")


def read_identity(place: Path) -> Json:
    """Reads what the checkpoint in a folder belongs to.

    Raises:
      InputError: it cannot be read.
    """
    with as_input_error(place, _REMEDY):
        what = not_regular(place)
    identity = {} if what else read_part(place, "identity", _REMEDY)
    if not isinstance(identity.get("model"), dict):
        what = what or "its identity names no model"
        raise InputError(f"{place}: this checkpoint cannot be read ({what}); {_REMEDY}")
    return identity


def read_base(place: Path) -> Base | None:
    """Reads which frozen parameters the checkpoint in a folder leaves out; None if none.

    Raises:
      InputError: it cannot be read.
    """
    if not (place / BASE).exists():
        return None
    fields = read_part(place, BASE, _REMEDY)
    with as_input_error(place, _REMEDY):
        return Base(**fields)


@waits("for the weights to be read or drawn")
def new_state(
    spec: TrainingSpec, mesh: Mesh, run: RunConfig, checkpoints: Checkpoints
) -> tuple[TrainState, Callable[[], TrainState], str]:
    """Creates the state of a new run, and tells `checkpoints` what they can leave out.

    Returns:
      The state, or the shapes of one that is all random, see `state_to_draw`; a function that
      returns the state; and in words what the initial weights and adapters lack, empty for nothing.

    Raises:
      InputError: the weights cannot be read or do not fit the model.
    """
    place = run.initial_weights
    given, lacking = None, ""
    if place is not None:
        given = given_parameters(place, spec.model, spec.parameters, mesh)
        # Layers begin anew that are not there; adapters and predictors always do.
        names = flatten_dict(abstract_model(spec.model).params, sep="/")
        found = {name.removesuffix(f"/{VALUES}") for name in flatten_dict(given, sep="/")}
        layers = sorted({name.rpartition("/")[0] for name in names if name not in found})
        new = [name for name in layers if name + "/" + DOWN not in names]
        new = [name for name in new if "sparse_attention" not in name]
        for layer in new:
            of_layer = [name for name in names if name.startswith(f"{layer}/")]
            if not any(map(spec.parameters.trains, of_layer)):
                raise InputError(
                    f"{place}: has no {layer} that fits the model, and parameters freezes it, so "
                    f"that it would stay random; add ^{layer}/ to parameters.trained"
                )
        lacking = f"{', '.join(new)} begins anew" if new else ""
    if run.initial_lora is not None:
        from alload_jax.models.lora_files import given_adapters, read_lora

        file = read_lora(run.initial_lora, spec.model)
        given = merge_parameters(given or {}, given_adapters(file, spec.model))
        shapes = flatten_dict(abstract_model(spec.model).params, sep="/")
        stacks = [value.shape[:-2] for name, value in shapes.items() if name.endswith(f"/{DOWN}")]
        count = sum(map(math.prod, stacks))
        if missing := count - len(file.adapters):
            told = f"{run.initial_lora} lacks {missing} of {count} adapters, which begin anew"
            lacking += f"; {told}" if lacking else told
    if given is None:
        return *state_to_draw(spec, mesh, run.seed), ""
    given = _with_magnitudes(given, spec.model)
    state = init_state(spec, mesh, run.seed, given)
    # A run goes on and removes the checkpoint that this one began from.
    if place is not None and not is_run(place) and jax.tree.leaves(state.frozen):
        checkpoints.base = Base(place, run.seed, checksum(state.frozen))
    return state, lambda: state, lacking


def _with_magnitudes(given: PyTree, config: ModelConfig) -> PyTree:
    """Parameters with the lengths of kernels where adapters that need them have none or NaN."""
    flat, kernels = flatten_dict(given, sep="/"), flatten_dict(readable(given), sep="/")
    for name in flatten_dict(abstract_model(config).params, sep="/"):
        kernel = kernels.get(name.removesuffix(MAGNITUDE) + "kernel")
        if name.endswith(MAGNITUDE) and kernel is not None:
            lengths = output_lengths(jax.tree.map(on_device, kernel)[...])
            found = flat.get(name, jnp.nan)
            flat[name] = jnp.where(jnp.isnan(found), lengths, found)
    return unflatten_dict(flat, sep="/")


@waits("for the weights to be read or drawn")
def state_of_checkpoint(
    spec: TrainingSpec, mesh: Mesh, run: RunConfig, checkpoints: Checkpoints, step: int
) -> TrainState:
    """Reads the state of a checkpoint; frozen parameters that it leaves out are read again.

    Raises:
      InputError: the checkpoint is damaged or belongs to another run, or the frozen parameters are
        not those that the run was trained on.
    """
    checkpoints.check(step)
    base = read_base(checkpoints.folder / str(step))
    state = abstract_state(spec, mesh, run.seed)
    if base is None:
        state = checkpoints.restore(step, state)
    elif run.initial_weights is None:
        raise InputError(
            f"run.initial_weights is null, but the run was trained on {base.weights}, which its "
            "checkpoints leave out; name that folder"
        )
    else:
        checkpoints.base = base._replace(weights=run.initial_weights)
        state = checkpoints.restore(step, state._replace(frozen={}))
        frozen = restore_frozen(checkpoints.base, spec.model, spec.parameters, mesh)
        state = state._replace(frozen=frozen)
    variables = family_of(spec.model).resumed_variables(spec.model, state.variables)
    placed = jax.tree.map(
        lambda new, old: jax.device_put(new, old.sharding), variables, state.variables
    )
    return state._replace(variables=placed)
