"""The state with which a run begins or continues."""

from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from alload_jax.errors import InputError
from alload_jax.models.common.lora import DOWN
from alload_jax.models.common.stored import VALUES
from alload_jax.models.families import abstract_model
from alload_jax.models.lora_files import read_lora
from alload_jax.models.lora_merge import given_adapters
from alload_jax.training.base import Base, checksum
from alload_jax.training.checkpoint import Checkpoints, bare
from alload_jax.training.parameters import merge_parameters
from alload_jax.training.restore import given_parameters, is_run, read_base, restore_frozen
from alload_jax.training.state import (
    TrainingSpec,
    TrainState,
    abstract_state,
    continued_state,
    init_state,
)


class Origin(NamedTuple):
    """Where new weights are from; fields as in `RunConfig`.

    Attributes:
      seed: seed of random weights.
      initial_weights: weights in a folder or file, or a run; None for random ones.
      initial_lora: file of adapters; None for new ones.
    """

    seed: int
    initial_weights: str | None
    initial_lora: str | None = None


def new_state(
    spec: TrainingSpec, mesh: Mesh, origin: Origin, checkpoints: Checkpoints
) -> tuple[TrainState, str]:
    """Creates the state of a new run, and tells `checkpoints` what they can leave out.

    Returns:
      The state, and in words which parameters the initial weights lack; empty for none.

    Raises:
      InputError: the weights cannot be read or do not fit the model.
    """
    place = origin.initial_weights
    given, lacking = None, ""
    if place is not None:
        given = given_parameters(place, spec.model, spec.parameters, mesh)
        lacking = _lacking(place, given, spec)
    if origin.initial_lora is not None:
        adapters = given_adapters(read_lora(origin.initial_lora, spec.model), spec.model)
        given = merge_parameters(given or {}, adapters)
    state = init_state(spec, mesh, origin.seed, given)
    # A run goes on and removes the checkpoint that this one began from.
    if place is not None and not is_run(place) and jax.tree.leaves(state.frozen):
        checkpoints.base = Base(place, origin.seed, checksum(state.frozen))
    return state, lacking


def _lacking(place: str, given: Any, spec: TrainingSpec) -> str:
    """Names the layers that begin anew, but for adapters and predictors, which always do.

    Raises:
      InputError: one of them is frozen, so that it would stay random.
    """
    names = flatten_dict(abstract_model(spec.model).params, sep="/")
    found = {name.removesuffix(f"/{VALUES}") for name in flatten_dict(given, sep="/")}
    layers = sorted({name.rpartition("/")[0] for name in names if name not in found})
    new = [name for name in layers if name + "/" + DOWN not in names]
    new = [name for name in new if "sparse_attention" not in name]
    for layer in new:
        if not any(spec.parameters.trains(name) for name in names if name.startswith(f"{layer}/")):
            raise InputError(
                f"{place}: has no {layer} that fits the model, and parameters freezes it, so that "
                f"it would stay random; add ^{layer}/ to parameters.trained"
            )
    return f"{', '.join(new)} begins anew" if new else ""


def state_of_checkpoint(
    spec: TrainingSpec, mesh: Mesh, origin: Origin, checkpoints: Checkpoints, step: int
) -> TrainState:
    """Reads the state of a checkpoint; frozen parameters that it leaves out are read again.

    Raises:
      InputError: the checkpoint is damaged or belongs to another run, or the frozen parameters are
        not those that the run was trained on.
    """
    checkpoints.check(step)
    base = read_base(checkpoints.folder / str(step))
    like = abstract_state(spec, mesh, origin.seed)
    if base is None:
        return continued_state(spec, checkpoints.restore(step, like))
    if origin.initial_weights is None:
        raise InputError(
            f"run.initial_weights is null, but the run was trained on {base.weights}, which its "
            "checkpoints leave out; name that folder"
        )
    base = base._replace(weights=origin.initial_weights)
    state = checkpoints.restore(step, bare(like))
    frozen = restore_frozen(base, spec.model, spec.parameters, mesh)
    checkpoints.base = base
    return continued_state(spec, state._replace(frozen=frozen))
