"""From a checkpoint to parameters without the rest of training's state; and from them to samples.

Parameters come to one device: a sample of one sequence has no rows to split. They are float32, as
in training, so a model of N parameters needs 4·N bytes there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from alload_jax.diffusion.flow import TIMESTEP_SCALE
from alload_jax.diffusion.samplers import guided, sample
from alload_jax.diffusion.schedules import Sampler
from alload_jax.errors import InputError
from alload_jax.models.wan.config import WanConfig
from alload_jax.models.wan.transformer import abstract_params
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.sharding.rules import tree_shardings
from alload_jax.training.checkpoint import damage_named, difference
from alload_jax.training.state import model_graph

WeightsKind = Literal["ema", "raw"]
"""The moving average of the weights, or the weights as the optimizer left them."""

_FIELDS: dict[WeightsKind, str] = {"ema": "ema", "raw": "params"}
"""Of `TrainState`."""


class Condition(NamedTuple):
    """What a model is told beside latents and timestep.

    Attributes:
      tokens: [B, L] int32 classes, or [B, L, text.dim] float32 text embeddings.
      image: [B, N, image.dim] float32 image embeddings; None where the model takes none.
    """

    tokens: Any
    image: Any = None


def one_device_mesh() -> Mesh:
    """A mesh of this process's first device."""
    return make_mesh(MeshConfig(), jax.local_devices()[:1])


def find_step(folder: Path, step: int | None = None) -> int:
    """The newest whole checkpoint of a run, or the one that is named.

    Only looks: a run that is writing to the folder is not disturbed.

    Args:
      folder: of the checkpoints.
      step: of the checkpoint; None for the newest.

    Raises:
      InputError: it is not there.
    """
    steps = sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []
    if not steps:
        raise InputError(
            f"{folder}: holds no whole checkpoint; train until the first is saved, or name "
            "another run folder"
        )
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps))
        raise InputError(f"{folder}: holds no checkpoint of step {step}; there are {there}")
    return steps[-1] if step is None else step


def restore_params(
    folder: Path, step: int, config: WanConfig, mesh: Mesh, weights: WeightsKind = "ema"
) -> Any:
    """Reads the parameters of a run's checkpoint; optimizer state and the other weights stay away.

    Args:
      folder: of the checkpoints.
      step: of the checkpoint.
      config: of its model.
      mesh: whose shardings the parameters get; any, whatever the run's was.
      weights: which of the two that a checkpoint holds.

    Returns:
      Nested dict of float32 arrays, as in `TrainState`.

    Raises:
      InputError: the checkpoint is damaged, or its model is another than the config's.
    """
    place = folder.absolute() / str(step)
    remedy = "choose another by --step"
    with damage_named(place, remedy):
        reader = ocp.Checkpointer(ocp.JsonCheckpointHandler())
        model = reader.restore(place / "identity")["model"]
    if model != config.architecture():
        raise InputError(
            f"{place}: its model is not config.yaml's: {difference(model, config.architecture())}; "
            "restore the config that the run was trained with"
        )
    like = {_FIELDS[weights]: _placed_like(config, mesh)}
    part = ocp.args.PyTreeRestore(
        like,
        restore_args=ocp.checkpoint_utils.construct_restore_args(like),
        partial_restore=True,
    )
    with damage_named(place, remedy):
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        return reader.restore(place / "state", args=part)[_FIELDS[weights]]


Flow = Callable[[Any, Any, Condition, Condition], jax.Array]
"""(params, noise [B, frames, height, width, channels], condition, null condition) → the data."""


def make_flow(config: WanConfig, sampler: Sampler, sigmas: np.ndarray, guidance: float) -> Flow:
    """A function that follows the flow from noise to data; may be called inside `jax.jit`.

    Args:
      config: of the model.
      sampler: how the flow is followed.
      sigmas: [steps + 1] noise levels; see `alload_jax.diffusion.schedules.noise_levels`.
      guidance: classifier-free guidance; 1 is none, and the null condition is not used.
    """
    graph = model_graph(config)

    def draw(params: Any, noise: Any, condition: Condition, null: Condition) -> jax.Array:
        def velocity(latents: jax.Array, sigma: jax.Array, condition: Condition) -> jax.Array:
            transformer = nnx.merge(graph, params)
            return transformer(latents, sigma * TIMESTEP_SCALE, condition.tokens, condition.image)

        return sample(sampler, guided(velocity, null, guidance), noise, condition, sigmas)

    return draw


def _placed_like(config: WanConfig, mesh: Mesh) -> Any:
    shapes = abstract_params(config)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        tree_shardings(shapes, mesh),
    )
