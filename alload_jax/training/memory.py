"""The memory of a run: what layers keep, chosen for it and for the state, and what XLA lays out."""

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.stages import Compiled
from jaxtyping import PyTree

from alload_jax.data.batch import AnyBatch, PackedBatch
from alload_jax.distributed.cluster import Cluster, first_process
from alload_jax.errors import InputError, out_of_memory
from alload_jax.files import Json, read_json
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.cudnn import launched_tokens
from alload_jax.models.families import abstract_model, gradient_dtypes
from alload_jax.planning.analytic import (
    SHORTEST,
    Remat,
    Trained,
    step_memory,
)
from alload_jax.planning.architecture import from_fields
from alload_jax.planning.cost import MemoryModel
from alload_jax.planning.devices import DEVICES, Device, device_named
from alload_jax.planning.remat import (
    AUTO_REMAT,
    LADDER,
    MARGIN,
    OFFLOADED,
    UNRESOLVED,
    Choice,
    RematPolicy,
    choose_remat,
    in_words,
)
from alload_jax.sharding.host_memory import POOL, bytes_of_one, pool_bytes
from alload_jax.sharding.mesh import MeshConfig, in_host_memory, path_name
from alload_jax.training.optimizer import OptimizerConfig, make_optimizer
from alload_jax.training.parameters import ParametersConfig, split_parameters
from alload_jax.training.run_files import write_json
from alload_jax.training.run_plan import RunPlan
from alload_jax.training.state import TrainState
from alload_jax.training.update_rules import OptimizerName
from pallas_kernels.first_use import path_of, read_file, write_file
from pallas_kernels.lowering import versions

_WEIGHT_BYTES = 4
_LAYERS_ON_DEVICE = 3
"""Of weights in the host's memory: those of the layer that computes, that arrive, and as it reads
them."""


def trained_of(
    model: ModelConfig,
    parameters: ParametersConfig,
    optimizer: OptimizerConfig,
    *,
    single: bool = False,
    kept: float = 0,
) -> Trained:
    """Counts the trained parameters and the bytes of each, for memory models.

    Args:
      model: the model's config.
      parameters: which of its parameters are trained.
      optimizer: the optimizer, whose state is counted without being made.
      single: whether steps have one micro-batch, so that no sum is kept beside its gradient, which
        stays in the dtypes of `gradient_dtypes`.
      kept: bytes of each trained parameter that callbacks take besides.
    """
    trained, frozen = split_parameters(abstract_model(model).params, parameters)
    narrow = gradient_dtypes(model) if single else {}
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float32"), trained)
    state = jax.eval_shape(make_optimizer(optimizer, 1).init, shapes)
    moments = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim
    )
    average = 0 if optimizer.ema_decay is None else _WEIGHT_BYTES
    gradients = sum(
        leaf.size * jnp.dtype(narrow.get(path_name(path), optimizer.accumulate_dtype)).itemsize
        for path, leaf in jax.tree.flatten_with_path(trained)[0]
    )
    each = _WEIGHT_BYTES + average + kept + (gradients + moments) / count
    if parameters.identity():
        named = flatten_dict(frozen, sep="/").items()
        stacks = [leaf.shape for name, leaf in named if parameters.to_host(name, leaf)]
        on_host = sum(math.prod(s[1:]) * max(0, s[0] - _LAYERS_ON_DEVICE) for s in stacks)
        return Trained(count, parameters.stored_dtype, each, not single, on_host)
    return Trained(bytes_each=each, accumulates=not single)


_ASSUMED_DEVICE = "h200"
"""Whose rates say what recomputation costs on devices of which none are known."""
_ERROR = 0.05
"""Share by which predicted memory may be too much."""
_NAMED = 4
"""Most remedies that are named."""


def memory_budget(model: ModelConfig) -> float | None:
    """Bytes that a step may take on a device: the config's, or JAX's limit; None if unknown."""
    if model.memory_budget is not None:
        return model.memory_budget * 1e9
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None if limit is None else float(limit)


def choose_for(
    model: ModelConfig,
    tokens: int,
    budget: float,
    parameters: ParametersConfig,
    optimizer: OptimizerConfig,
    *,
    single: bool = True,
    kept: float = 0,
    **options: Any,
) -> Choice:
    """The fastest choice for a model that fits; see `choose_remat`.

    Args:
      model: the model's config.
      tokens: of a micro-batch on one device, at most.
      budget: bytes that a step may take.
      parameters: which parameters are trained.
      optimizer: the optimizer, whose state takes memory.
      single, kept: as in `trained_of`.
      options: of `choose_remat`: shards, replicas, rows, work_space and measure.

    Raises:
      InputError: nothing fits, or no costs of such models are known.
    """
    options["trained"] = trained_of(model, parameters, optimizer, single=single, kept=kept)
    on_gpus = jax.default_backend() == "gpu"
    options["host_budget"] = bytes_of_one(jax.local_device_count(), on_gpus=on_gpus)
    architecture, layers = from_fields(model.architecture()), getattr(model, "num_layers", 1)
    return choose_remat(architecture, layers, _device(model), tokens, budget, **options)


def require_fit(
    model: ModelConfig,
    tokens: int,
    budget: float,
    parameters: ParametersConfig,
    optimizer: OptimizerConfig,
    mesh: MeshConfig,
    *,
    replicas: int,
    single: bool,
    kept: float = 0,
) -> None:
    """Refuses a model whose step is predicted not to fit, by more than a prediction may err.

    Models of which no costs are known are left to the compiler.

    Args:
      model, tokens, budget, parameters, optimizer, single, kept: as in `choose_for`; conditions do
        not count.
      mesh: how weights and state are sharded.
      replicas: as in `step_memory`.

    Raises:
      InputError: it does not fit; the message says what would.
    """
    try:
        architecture = from_fields(model.architecture())
    except InputError:
        return
    # A GPU's, whose activations are bfloat16, also where a budget stands for an absent one.
    device = DEVICES[_ASSUMED_DEVICE]

    @cache
    def trained(name: OptimizerName) -> Trained:
        others: Json = {} if name == optimizer.name else {"mu_dtype": "float32"}
        own = dataclasses.replace(optimizer, name=name, **others)
        return trained_of(model, parameters, own, single=single, kept=kept)

    def memory(
        remat: Remat = model.policies, times: int = 1, name: OptimizerName = optimizer.name
    ) -> MemoryModel:
        shards, copies = mesh.fsdp * mesh.tensor * times, max(1, replicas // times)
        found = step_memory(architecture, device, remat, shards, trained(name), copies)
        return MemoryModel(found.base, found.per_token / mesh.tensor)

    def needed(**changes: Any) -> float:
        return memory(**changes).bytes_of(tokens)

    if needed() <= budget * (1 + _ERROR):
        return
    free = budget * (1 - MARGIN)
    more = [(mesh.fsdp * times, {"times": times}) for times in (2, 4, 8, 16, 32)]
    choices: dict[str, list[tuple[Any, Json]]] = {
        "model.remat": [(each, {"remat": each}) for each in (*LADDER[::-1], *OFFLOADED)],
        "mesh.fsdp": more,
        "optimizer.name": [(each, {"name": each}) for each in ("adamw8bit", "adafactor")],
        "model.remat offload with mesh.fsdp": [
            (fsdp, times | {"remat": "offload"}) for fsdp, times in more
        ],
    }
    fitting = {
        key: next((value for value, changes in each if needed(**changes) <= free), None)
        for key, each in choices.items()
    }
    found = [f"{key} {value}" for key, value in fitting.items() if value is not None]
    least = memory().bytes_of(0)
    if least + memory().per_token * SHORTEST < free:
        found.insert(0, f"planning.m_mem {memory().max_tokens(budget, MARGIN)}")
    raise InputError(
        f"a step of {tokens:,} tokens is predicted to need {needed() / 1e9:.1f} GB of a device, "
        f"{least / 1e9:.1f} GB of them before any token, and it has {budget / 1e9:.1f} GB; "
        f"what fits: {', or '.join(found[:_NAMED]) or 'a smaller model'}"
    )


def _device(model: ModelConfig) -> Device:
    """The rates of this process's devices, or those of one that is known."""
    try:
        device = device_named(jax.local_devices()[0].device_kind)
    except InputError:
        device = DEVICES[_ASSUMED_DEVICE]
    return dataclasses.replace(device, compute_bytes=model.compute_dtype.itemsize)


# ---------------------------------------------------------------- of a run

CHOICE = "remat.json"
"""In the run folder: what was chosen, and for which memory and micro-batches."""
_LAYERS = "alload-layers-1"
"""The format of measured times."""
_CODE = Path(__file__).parents[1]
"""The package, whose models, losses and steps are timed."""


def fitting_model(
    model: ModelConfig,
    parameters: ParametersConfig,
    optimizer: OptimizerConfig,
    mesh: MeshConfig,
    run_plan: RunPlan,
    shapes: Callable[[], Sequence[AnyBatch]],
    cluster: Cluster,
    folder: Path,
    kept: float,
) -> ModelConfig:
    """The model with policies that fit this run's devices in place of `remat: auto`; prints them.

    A run that goes on with the same memory and micro-batches keeps what it began with.

    Args:
      model, parameters, optimizer, mesh: the run's settings.
      run_plan: the plan of the run.
      shapes: gives those of its micro-batches.
      cluster: its processes.
      folder: of the run.
      kept: as in `trained_of`.

    Raises:
      InputError: nothing fits, the tokens of a micro-batch are not known, or a step of the policies
        that the config names does not fit.
    """
    budgets = cluster.all_gather(memory_budget(model))
    budget = min((each for each in budgets if each is not None), default=None)
    planning = run_plan.planning
    single, tokens = planning.single_gradient, planning.tokens_bound(run_plan.costs)

    def choose() -> tuple[Sequence[str], str]:
        """The policies, and what is said of them."""
        if budget is None:
            return [UNRESOLVED], f"model.remat: {UNRESOLVED}, as auto knows no limit of memory here"
        if tokens is None:
            raise InputError(
                "model.remat is auto, and how many tokens a micro-batch holds is not known; give "
                "planning.m_mem, or a policy such as attention"
            )
        batches, independent = shapes(), planning.ranks_mode == "independent"
        conditions: Json = {
            "tokens": tokens,
            "samples": max(math.prod(each.sample.shape) for each in batches),
            "work_space": _work_space(model, mesh, batches),
            "budget": budget,
            "shards": mesh.fsdp * mesh.tensor,
            # Shape groups have sums of gradients of their own, not split over the others.
            "replicas": 1 if independent else replicas_of(mesh),
            "device": jax.local_devices()[0].device_kind,
            "kept": kept,
        }
        policies, changed = _kept_choice(path := folder / CHOICE, conditions)
        if policies:
            return policies, f"model.remat: {in_words(policies)}, as this run began"
        options = {name: conditions[name] for name in ("shards", "replicas", "work_space", "kept")}
        options |= {"rows": conditions["samples"], "single": single}
        options["measure"] = partial(_measured_seconds, model, tokens, parameters, optimizer)
        choice = choose_for(model, tokens, budget, parameters, optimizer, **options)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"policies": choice.policies, "for": conditions}
        write_json(path, content | {"layer_seconds": choice.layer_seconds})
        return choice.policies, "; ".join([choice.line(), *changed])

    if model.remat == AUTO_REMAT:  # by process 0, since all must compile the same programs
        policies, line = cluster.broadcast(choose)
        if first_process():
            print(line, flush=True)
        chosen: Json = {"remat": "none", "remat_layers": tuple(policies)}
        model = dataclasses.replace(model, **chosen)
    if budget is not None:
        epoch, replicas = run_plan.plan.epoch(0), replicas_of(mesh)
        most = int((epoch.rows * epoch.padded_len).max())
        options: Json = {"replicas": replicas, "single": single, "kept": kept}
        require_fit(model, most, budget, parameters, optimizer, mesh, **options)
    return model


def _kept_choice(path: Path, conditions: Json) -> tuple[list[str], list[str]]:
    """The policies that an earlier start chose for the same conditions, and what has changed.

    Raises:
      InputError: the file holds no choice.
    """
    if (before := read_json(path)) is None:
        return [], []
    known = isinstance(before, dict) and isinstance(before.get("for"), dict)
    policies = before.get("policies") if known and before["for"] else None
    chosen = set(policies) if isinstance(policies, list) else set()
    if not chosen or not chosen <= set(get_args(RematPolicy)):
        raise InputError(f"{path}: is not a choice of model.remat auto; remove it")
    changed = [  # an older version wrote fewer conditions
        f"{name} was {before['for'][name]} and is {value}"
        for name, value in conditions.items()
        if before["for"].get(name, value) != value
    ]
    return (policies if policies and not changed else []), changed


def _measured_seconds(
    model: ModelConfig,
    tokens: int,
    parameters: ParametersConfig,
    optimizer: OptimizerConfig,
    policies: Sequence[RematPolicy],
) -> Mapping[RematPolicy, float] | None:
    """Seconds of a layer under policies, where a model of two layers tells them; else None.

    Another run of such a model on this machine finds them in the user's cache.
    """
    from alload_jax.training import trial_step as trial  # what other policies don't need

    if not trial.measurable(model):
        return None
    # As one row, whose condition a joint model counts among the tokens.
    latents = max(1, tokens - trial.tokens_beside(model, trial.CONDITION_TOKENS))
    shape = trial.square_latents(model, latents)
    device, timed = jax.local_devices()[0], model.with_layers(1)
    kind, platform = device.device_kind, device.client.platform_version
    programs = versions(_CODE), platform, os.environ.get("XLA_FLAGS")
    case = repr((timed, shape, parameters, optimizer, policies, programs))
    path = path_of("layers", f"{kind} {hashlib.sha256(case.encode()).hexdigest()[:16]}")

    def parsed(content: Mapping[str, PyTree]) -> dict[RematPolicy, float]:
        seconds = {each: float(content["seconds"][each]) for each in policies}
        if content["case"] != case or not all(0 < each < math.inf for each in seconds.values()):
            raise ValueError("it is of another model")
        return seconds

    if found := read_file(path, _LAYERS, kind, parsed, "it holds no times of layers"):
        print(f"model.remat: auto takes times of layers from {path}; delete it to measure again")
        return found
    print(f"model.remat: auto times two layers with {', '.join(policies)}", flush=True)
    times = trial.layer_seconds(model, shape, policies, optimizer=optimizer, parameters=parameters)
    if times is not None and set(policies) <= times.keys():
        content = {"format": _LAYERS, "device": kind, "case": case, "seconds": dict(times)}
        with suppress(OSError):  # it is measured again
            write_file(path, content)
    return times


def replicas_of(mesh: MeshConfig) -> int:
    """Number of replicas of the weights, over which the rest of the state is split."""
    return max(1, jax.device_count() // (mesh.fsdp * mesh.tensor))


def _work_space(model: ModelConfig, mesh: MeshConfig, shapes: Sequence[AnyBatch]) -> int:
    """Bytes that attention within packed rows takes beyond that of as many tokens in one row.

    cuDNN's backward pass takes float32 gradients of queries for the longest segment in each slot.
    """
    width = model.architecture().get("dim", 0) // mesh.tensor
    most = 0
    for each in shapes:
        if isinstance(each, PackedBatch):
            rows, tokens = each.tokens.shape[:2]
            beyond = launched_tokens(rows, tokens, each.metadata.lengths) - rows * tokens
            most = max(most, beyond)
    return 4 * width * most


REMEDY = "lower planning.m_mem, set model.remat to full or offload, or raise mesh.fsdp"
STATE_REMEDY = "raise mesh.fsdp, or choose a smaller model or optimizer"
HOST_REMEDY = f"lower planning.m_mem, set model.remat to offload or full, or raise {POOL}"
_OF_HOST = "host_bfc"
"""In the name of XLA's allocator of the host's memory."""


class RunMemory(NamedTuple):
    """Bytes on one device.

    Attributes:
      state: weights, optimizer state and moving average.
      step: at most beside the state in a micro-batch: gradients, activations, the batch.
      limit: what JAX may use; None if it does not say.
      host: of the host's memory, at most in a micro-batch; frozen weights there included.
      host_limit: of that, what XLA may use for the device; None if it has no limit.
    """

    state: int
    step: int
    limit: int | None
    host: int = 0
    host_limit: float | None = None

    def line(self) -> str:
        """The figures in words."""
        of = "" if self.limit is None else f", of {size_in_words(self.limit)}"
        return (
            f"memory of a device: {size_in_words(self.state)} for weights and optimizer, "
            f"{size_in_words(self.step)} for a step{of}"
            + (f"; {size_in_words(self.host)} of the host's memory" if self.host else "")
        )

    def warning(self) -> str:
        """What is likely to run out; empty if nothing is."""
        needed = self.state + self.step
        if self.limit is not None and needed > self.limit:
            has = size_in_words(self.limit)
            return f"a step needs {size_in_words(needed)} and a device has {has}; {REMEDY}"
        if self.host_limit is not None and self.host > self.host_limit:
            may = size_in_words(int(self.host_limit))
            return (
                f"a step needs {size_in_words(self.host)} of the host's memory and a device may "
                f"use {may} of it; {HOST_REMEDY}"
            )
        return ""


@contextmanager
def memory_named(what: str = "a step", remedy: str = REMEDY) -> Iterator[None]:
    """Tells that a training run is out of a device's or the host's memory, in place of JAX's error.

    Args:
      what: takes a device's memory.
      remedy: for it.

    Raises:
      InputError: it is.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        said = " ".join(str(error).split()).partition("RESOURCE_EXHAUSTED: ")[2] or str(error)
        reason = said.partition(" with allocator")[0][:200].rstrip(". ")
        of_host = _OF_HOST in str(error)
        place = "the host's memory" if of_host else "a device's memory"
        helps = HOST_REMEDY if of_host else remedy
        raise InputError(f"{what} does not fit {place} ({reason}); {helps}") from error


def size_in_words(size: int) -> str:
    """Bytes as GB, or as MB where they are few."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def run_memory(state: TrainState, programs: Iterable[Compiled]) -> RunMemory | None:
    """Reads the memory of compiled gradient programs; None where XLA does not say.

    Args:
      state: the state that they train.
      programs: as `Trainer.programs` holds them, at least one.
    """
    weights, on_host = _bytes_of(state.weights), _bytes_of(state.frozen, in_host=True)
    steps, kept = [], []
    for program in programs:
        found = program.memory_analysis()
        if found is None:
            return None
        inputs = found.argument_size_in_bytes - weights
        outputs = found.output_size_in_bytes - found.alias_size_in_bytes
        steps.append(inputs + outputs + found.temp_size_in_bytes)
        kept.append(found.host_temp_size_in_bytes)
    if not steps:
        return None
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    host_limit = pool_bytes() / jax.local_device_count() if device.platform == "gpu" else None
    return RunMemory(_bytes_of(state), max(0, *steps), limit, max(kept) + on_host, host_limit)


def _bytes_of(tree: PyTree, *, in_host: bool = False) -> int:
    """Bytes of the shards of a tree's arrays on one device, or in the host's memory for it."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.addressable_shards]
    leaves = [leaf for leaf in leaves if in_host_memory(leaf) == in_host]
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
