"""The training state: everything that training changes, and the frozen parameters."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.stored import readable
from alload_jax.models.families import build_model, family_of, split_model
from alload_jax.objectives import DEFAULT_OBJECTIVE, OBJECTIVES, Objective
from alload_jax.processes import waits
from alload_jax.sharding.mesh import (
    HOST_MEMORY,
    Rules,
    in_host_memory,
    path_name,
    replicated,
    tree_shardings,
    zero_shardings,
)
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.parameters import (
    ALL_TRAINED,
    ParametersConfig,
    cast_frozen,
    merge_parameters,
    split_parameters,
)
from alload_jax.training.update_rules import MUON


class TrainingSpec(NamedTuple):
    """What training computes, independent of devices.

    Attributes:
      model: config of the model.
      objective: training objective.
      optimizer: optimizer of the trained parameters.
      ema_decay: decay of their moving average; None for no average.
      parameters: which parameters are trained.
      accumulate_dtype: dtype of the sum of gradients over the micro-batches of a step.
      step_weight: weight by which the summed gradient of every step is divided; None for each
        step's own.
    """

    model: ModelConfig
    objective: Objective
    optimizer: optax.GradientTransformation
    ema_decay: float | None
    parameters: ParametersConfig = ALL_TRAINED
    accumulate_dtype: str = "float32"
    step_weight: float | None = None

    @property
    def rules(self) -> Rules:
        """Partition rules of the family's parameters."""
        return family_of(self.model).partition_rules


def training_spec(
    model: ModelConfig,
    optimizer: OptimizerConfig | None = None,
    objective: Objective | None = None,
    parameters: ParametersConfig = ALL_TRAINED,
    steps: int = 1000,
    step_weight: float | None = None,
) -> TrainingSpec:
    """What a run of `steps` steps computes; the defaults are those of a config."""
    optimizer = optimizer or OptimizerConfig()
    return TrainingSpec(
        model=model,
        objective=objective or OBJECTIVES.get(DEFAULT_OBJECTIVE)(),
        optimizer=make_optimizer(optimizer, steps),
        ema_decay=optimizer.ema_decay,
        parameters=parameters,
        accumulate_dtype=optimizer.accumulate_dtype,
        step_weight=step_weight,
    )


class Weights(NamedTuple):
    """The values of a model.

    Attributes:
      params: trained parameters, nested dict of float32 arrays.
      frozen: frozen parameters as they are stored, nested dict; empty if all are trained.
      variables: the model's other variables, such as running statistics; often empty.
    """

    params: PyTree
    frozen: PyTree
    variables: PyTree

    def merged(self) -> PyTree:
        """Returns all values as one nested dict for `nnx.merge`."""
        frozen = readable(self.frozen)
        return merge_parameters(merge_parameters(self.params, frozen), self.variables)


class TrainState(NamedTuple):
    """The training state, which checkpoints store.

    Attributes:
      step: int32 scalar, number of optimizer steps done and position in the plan.
      key: [2] uint32, random key data from which the noise of every sample derives.
      params: trained parameters, nested dict of float32 arrays.
      ema: moving average of `params`, with the same structure; empty for none.
      opt_state: state of the optimizer.
      frozen: frozen parameters, nested dict; empty if all are trained.
      variables: the model's other variables, updated in every step; often empty.
    """

    step: PyTree
    key: PyTree
    params: PyTree
    ema: PyTree
    opt_state: PyTree
    frozen: PyTree
    variables: PyTree

    @property
    def weights(self) -> Weights:
        """The model's values for training."""
        return Weights(self.params, self.frozen, self.variables)

    @property
    def averaged_weights(self) -> Weights:
        """The model's values for sampling, with the moving average of the trained parameters.

        Without an average these are the trained parameters themselves.
        """
        return self.weights._replace(params=self.ema) if self.ema else self.weights


@waits("for the weights to be read or drawn")
def init_state(spec: TrainingSpec, mesh: Mesh, seed: int, params: PyTree = None) -> TrainState:
    """Creates a new state; each device creates only its own shards.

    Args:
      spec: the model and the optimizer.
      mesh: mesh on which the state is placed.
      seed: seed of weights and noise.
      params: initial values, on the mesh and stored as in the state, which are donated; what it
        lacks, or None for all, gets random values.

    Raises:
      InputError: a parameter is not divisible by the mesh, or a pattern matches no parameter.
    """
    make = _make_state(spec, seed)
    shardings = state_shardings(jax.eval_shape(make), mesh, spec.rules, spec.parameters)
    return _made(make, shardings, params)


def state_to_draw(
    spec: TrainingSpec, mesh: Mesh, seed: int
) -> tuple[TrainState, Callable[[], TrainState]]:
    """Returns the shapes of a random state, as `abstract_state`, and what draws it.

    XLA compiles the drawing meanwhile, in a thread: it takes as long as a step does.

    Raises:
      InputError: as `init_state`.
    """
    shapes = abstract_state(spec, mesh, seed)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    draw = jax.jit(_make_state(spec, seed), out_shardings=shardings)
    pool = ThreadPoolExecutor(1)
    compiled = pool.submit(lambda: draw.lower().compile())
    pool.shutdown(wait=False)
    return shapes, lambda: compiled.result()()


def initial_frozen(
    model: ModelConfig, parameters: ParametersConfig, mesh: Mesh, seed: int, params: PyTree
) -> PyTree:
    """Creates the frozen parameters alone of `init_state`, with the same arguments."""

    def make(given: PyTree = None) -> Weights:
        return _initial_weights(model, parameters, seed, given)

    shapes, rules = jax.eval_shape(make), family_of(model).partition_rules
    shardings = weights_shardings(shapes, mesh, rules, parameters)
    return _made(lambda given: make(given).frozen, shardings.frozen, params)


def _made(make: Callable[..., PyTree], shardings: PyTree, params: PyTree) -> PyTree:
    """What a function of given parameters makes; those in the host's memory pass its program by."""
    flat = flatten_dict(params or {}, sep="/")
    passing = {name: value for name, value in flat.items() if in_host_memory(value)}

    def without(made: PyTree) -> PyTree:
        return jax.tree.map_with_path(
            lambda path, leaf: None if _of_frozen(path) in passing else leaf, made
        )

    def program(given: PyTree) -> PyTree:
        unused = {name: jnp.zeros(value.shape, value.dtype) for name, value in passing.items()}
        return without(make(unflatten_dict(flatten_dict(given or {}, sep="/") | unused, sep="/")))

    given = {name: value for name, value in flat.items() if name not in passing}
    run = jax.jit(program, out_shardings=without(shardings), donate_argnums=0)
    return jax.tree.map_with_path(
        lambda path, leaf: passing.get(_of_frozen(path), leaf),
        run(unflatten_dict(given, sep="/")),
        is_leaf=lambda leaf: leaf is None,
    )


def _of_frozen(path: tuple[object, ...]) -> str:
    """The name of a parameter in the state or among the frozen ones."""
    return path_name(path).removeprefix("frozen/")


def abstract_state(spec: TrainingSpec, mesh: Mesh, seed: int) -> TrainState:
    """Returns shapes, dtypes and shardings of the state, for restoring checkpoints."""
    shapes = jax.eval_shape(_make_state(spec, seed))
    shardings = state_shardings(shapes, mesh, spec.rules, spec.parameters)
    return with_shardings(shapes, shardings)


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    """Shapes and dtypes of a tree with its shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def state_shardings(
    state: TrainState, mesh: Mesh, rules: Rules, parameters: ParametersConfig = ALL_TRAINED
) -> TrainState:
    """Returns the sharding of each array of the state, or of its shapes.

    Args:
      state: the state.
      mesh: the devices.
      rules: of the family's parameters.
      parameters: says where frozen ones are.

    Raises:
      InputError: a parameter is not divisible by the mesh.
    """
    return TrainState(
        step=replicated(mesh),
        key=replicated(mesh),
        ema=zero_shardings(state.ema, mesh, rules),
        opt_state=optimizer_shardings(state.opt_state, mesh, rules),
        **weights_shardings(state.weights, mesh, rules, parameters)._asdict(),
    )


def optimizer_shardings(opt_state: PyTree, mesh: Mesh, rules: Rules) -> PyTree:
    """Returns `zero_shardings`; Muon's stacked matrices are split between layers where that goes.

    Muon multiplies each matrix with itself several times, which would sum over the parts of a
    matrix. A replica that has whole matrices communicates nothing meanwhile.
    """

    def sharding(path: tuple[object, ...], leaf: jax.Array, part: NamedSharding) -> NamedSharding:
        parts = tuple(jax.tree.leaves(tuple(part.spec)))
        size = math.prod(mesh.shape[axis] for axis in parts)
        if MUON not in path_name(path).split("/") or leaf.ndim < 3 or leaf.shape[0] % size:
            return part
        return NamedSharding(mesh, PartitionSpec(parts))

    shardings = zero_shardings(opt_state, mesh, rules)
    return jax.tree.map_with_path(sharding, opt_state, shardings)


def weights_shardings(
    weights: Weights, mesh: Mesh, rules: Rules, parameters: ParametersConfig = ALL_TRAINED
) -> Weights:
    """Returns the sharding of each value of a model; arguments as `state_shardings`."""

    def placed(path: tuple[object, ...], leaf: jax.Array, sharding: NamedSharding) -> NamedSharding:
        to_host = parameters.to_host(path_name(path), leaf)
        return sharding.with_memory_kind(HOST_MEMORY) if to_host else sharding

    frozen = tree_shardings(weights.frozen, mesh, rules)
    return Weights(
        tree_shardings(weights.params, mesh, rules),
        jax.tree.map_with_path(placed, weights.frozen, frozen),
        jax.tree.map(lambda _: replicated(mesh), weights.variables),
    )


def _make_state(spec: TrainingSpec, seed: int) -> Callable[..., TrainState]:
    def make(params: PyTree = None) -> TrainState:
        weights = _initial_weights(spec.model, spec.parameters, seed, params)
        _, noise = jax.random.split(jax.random.key(seed))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            key=jax.random.key_data(noise),
            params=weights.params,
            ema={} if spec.ema_decay is None else jax.tree.map(jnp.copy, weights.params),
            opt_state=spec.optimizer.init(weights.params),
            frozen=weights.frozen,
            variables=weights.variables,
        )

    return make


def _initial_weights(
    model: ModelConfig, parameters: ParametersConfig, seed: int, given: PyTree
) -> Weights:
    """Draws the values of a new model, but for those given."""
    key, _ = jax.random.split(jax.random.key(seed))
    drawn = split_model(build_model(model, nnx.Rngs(key)))
    trained, frozen = split_parameters(drawn.params, parameters)
    # Released weights lack what this project adds, such as predictors of sparse attention.
    frozen, found = cast_frozen(frozen, parameters), flatten_dict(given or {})
    trained, frozen = (
        unflatten_dict({path: found.get(path, value) for path, value in flatten_dict(part).items()})
        for part in (trained, frozen)
    )
    return Weights(trained, frozen, drawn.variables)
