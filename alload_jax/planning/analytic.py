"""Predicts cost and memory of a training step from the model's shape and a device's rates.

This needs no measurement and no device; `alload calibrate` gives more accurate models. Matrix
products and attention are counted by their FLOPs, elementwise work and the update by the bytes that
they move, and every kernel by the minimum time that it takes.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.architecture import Architecture
from alload_jax.planning.cost import (
    CostFile,
    MemoryModel,
    QuadraticCost,
    assumed_terms,
    bucketed_cost,
)
from alload_jax.planning.devices import Device
from alload_jax.planning.fit import Point, fit_power

STATE_BYTES = 20
"""Per trained parameter: float32 weights, Adam's two moments, EMA, accumulated gradients."""
WEIGHT_BYTES = 4
"""Per trained parameter: its weights, which every replica holds."""
GRADIENT_BYTES = 4
"""Per trained parameter: the gradient of a micro-batch, before it is accumulated."""
FROZEN_BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
"""Per frozen parameter, which has neither gradient nor moments nor EMA, by its dtype."""

LENGTHS = np.unique(np.geomspace(256, 80_000, 24).astype(int))
"""Sequence lengths, in tokens, to which the power law is fitted."""
_FILLED = 80_000
"""Tokens of a micro-batch that the power law is fitted to. It has no fixed cost, which would make a
single short sequence look as costly as many."""

USABLE_SHARE = 0.945
"""Share of a device's memory that JAX can allocate: 142.6 of 150.8 GB on an H200, with 95 % of it
asked for (XLA_PYTHON_CLIENT_MEM_FRACTION=0.95)."""
SHORTEST = 256
"""Tokens of the samples that M_mem tokens of a micro-batch are assumed to be at worst, as in
`alload calibrate`: each brings its condition."""

_BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward over its forward's: five products in place of two."""
_UPDATE_BYTES = 52
"""Per trained parameter: the norm reads the gradient, the update reads and writes weights, moments,
EMA and gradient, and accumulated gradients are set to zero: (1 + 5 + 6 + 1) · 4."""
_WEIGHT_BYTES = 10
"""Per parameter and pass over the model: cast from float32, written and read as bfloat16, with a
share of slicing the stacked layers. Frozen ones in bfloat16 take less, which is ignored."""
WORKSPACE_BYTES = 500_000_000
"""Bytes for the work spaces of libraries and for small arrays."""
_BACKWARD_KERNELS = 2
"""Kernels of the backward over the forward's."""


@dataclass(frozen=True)
class _Recomputed:
    """The operations that the backward pass recomputes under a rematerialisation policy.

    Attributes:
      matmuls: matrix products.
      attention: attention.
      elementwise: all else.
      but_output: of the products, all but the last one of feed-forward layers.
      but_norms: of all else, what is not an output of norms.
    """

    matmuls: bool
    attention: bool
    elementwise: bool
    but_output: bool = False
    but_norms: bool = False

    @property
    def feed_forward_kept(self) -> bool:
        """Whether the outputs of feed-forward layers are kept."""
        return self.but_output or not self.matmuls

    @property
    def any(self) -> bool:
        """Whether the backward pass recomputes anything."""
        return self.matmuls or self.attention or self.elementwise


Remat = str | Sequence[str]
"""A rematerialisation policy, or several that repeat over the layers."""


def policies_of(remat: Remat) -> tuple[str, ...]:
    """The policies that repeat over the layers."""
    return (remat,) if isinstance(remat, str) else tuple(remat)


_RECOMPUTED = {
    "full": _Recomputed(True, True, True),
    "offload": _Recomputed(True, True, True),
    # The time of the way to the host and back is not counted, nor that of attention over few keys.
    "offload_attention": _Recomputed(True, False, True),
    "offload_feed_forward_and_attention": _Recomputed(True, False, True, but_output=True),
    "attention": _Recomputed(True, False, True),
    "feed_forward_and_attention": _Recomputed(True, False, True, but_output=True),
    "matmuls_and_attention": _Recomputed(False, False, True),
    "norms_matmuls_and_attention": _Recomputed(False, False, True, but_norms=True),
    "none": _Recomputed(False, False, False),
}


def keeps_feed_forward(policy: str) -> bool:
    """Whether the outputs of feed-forward layers are kept, so that they are not applied again."""
    return _RECOMPUTED[policy].feed_forward_kept


@dataclass(frozen=True)
class Trained:
    """How many of a model's parameters are trained.

    Attributes:
      parameters: number of trained parameters; None for all.
      frozen_dtype: dtype of the frozen parameters, one of `FROZEN_BYTES`.
      bytes_each: bytes of each trained parameter: weights, optimizer state, EMA and accumulated
        gradients.
      accumulates: whether the gradient of a micro-batch is held beside the sum of several.
      on_host: number of frozen parameters that are in the host's memory and not on the device.
    """

    parameters: int | None = None
    frozen_dtype: str = "float32"
    bytes_each: float = STATE_BYTES
    accumulates: bool = True
    on_host: int = 0

    def __post_init__(self) -> None:
        if self.frozen_dtype not in FROZEN_BYTES:
            raise InputError(
                f"the dtype of frozen parameters is {self.frozen_dtype!r}; "
                f"choose one of {', '.join(FROZEN_BYTES)}"
            )

    def of(self, total: int) -> int:
        """The number of trained parameters of a model with `total` parameters.

        Raises:
          InputError: `parameters` is not between 1 and `total`.
        """
        if self.parameters is None:
            return total
        if not 1 <= self.parameters <= total:
            raise InputError(
                f"{self.parameters:,} parameters are to be trained, and the model has {total:,}; "
                f"give a number from 1 to {total}"
            )
        return self.parameters


ALL_TRAINED = Trained()


def analytic_costs(
    architecture: Architecture,
    device: Device,
    remat: Remat = "attention",
    *,
    shards: int = 1,
    margin: float = 0.05,
    trained: Trained = ALL_TRAINED,
    budget: float | None = None,
    m_mem: int | None = None,
) -> CostFile:
    """The cost model of a training step: one micro-batch, forward and backward, and the update.

    Args:
      architecture: the model.
      device: the device of every rank.
      remat: rematerialisation policy, as in `model.remat`, or those that repeat over the layers.
      shards: devices that share one copy of weights and state (`mesh.fsdp`). Only memory is
        shared; their communication is not counted.
      margin: share of the budget that M_mem leaves free.
      trained: which parameters are trained.
      budget: bytes of the device for a step; None for what it usually leaves a program.
      m_mem: M_mem, if it is known; None for what fits in the budget.

    Raises:
      InputError: the rematerialisation policy is unknown, more parameters are trained than there
        are, or M_mem is to be found and the state alone does not fit the device.
    """
    for policy in policies_of(remat):
        if policy not in _RECOMPUTED:
            raise InputError(f"model.remat is {policy!r}; choose one of {', '.join(_RECOMPUTED)}")
    if shards < 1:
        raise InputError(f"shards is {shards}; give at least 1")
    quadratic = step_cost(architecture, device, remat, trained)
    memory = step_memory(architecture, device, remat, shards, trained)
    budget = USABLE_SHARE * device.memory if budget is None else budget
    # The power law is fitted in logarithms, to micro-batches of about as many tokens each.
    rows = _FILLED // LENGTHS
    seconds = bucketed_cost(quadratic, rows, LENGTHS)
    columns = zip(rows.tolist(), LENGTHS.tolist(), seconds.tolist(), strict=True)
    details = {"margin": margin, "shards": shards, "device": dataclasses.asdict(device)}
    if trained != ALL_TRAINED:
        details["trained"] = dataclasses.asdict(trained)
    return CostFile(
        power=fit_power([Point(*values) for values in columns]),
        quadratic=quadratic,
        sparse=assumed_terms(quadratic),
        memory=memory,
        m_mem=m_mem or memory.max_tokens(budget, margin, SHORTEST),
        bytes_per_split_token=bytes_per_split_token(architecture, remat, device.compute_bytes),
        model=architecture.fields() | ({"remat": remat} if isinstance(remat, str) else {}),
        device=device.name,
        origin="analytic",
        details=details,
    )


def step_cost(
    architecture: Architecture, device: Device, remat: Remat, trained: Trained = ALL_TRAINED
) -> QuadraticCost:
    """Seconds of a step, including recomputation; arguments as `analytic_costs`.

    Frozen parameters need no update and no matrix product for their gradient, which is one of the
    two products of a layer's backward pass. The saved time is assumed to be proportional to their
    number.
    """
    flops, counts = architecture.flops(), architecture.activations()
    total = architecture.parameters()
    frozen_share = 1 - trained.of(total) / total
    rate = device.peak_flops * device.matmul_share

    def by_policy(policy: str) -> QuadraticCost:
        """Of layers that all have the same policy."""
        again = _RECOMPUTED[policy]
        products = (3 - frozen_share + again.matmuls) / rate
        kept = flops.feed_forward_output / rate if again.but_output else 0.0
        attention = (1 + _BACKWARD_ATTENTION) / (device.peak_flops * device.attention_share)
        attention += again.attention / (device.peak_flops * device.attention_forward_share)
        repeated = counts.forward_traffic - counts.once_traffic * again.feed_forward_kept
        repeated -= counts.norms_traffic * again.but_norms
        values = counts.forward_traffic + repeated * again.elementwise + counts.backward_traffic
        elementwise = device.compute_bytes * values / (device.bandwidth * device.elementwise_share)
        # Kernels, passes over the weights, the update.
        kernels = architecture.kernels() * (1 + _BACKWARD_KERNELS + again.elementwise)
        moved = trained.of(total) * _UPDATE_BYTES + total * _WEIGHT_BYTES * (3 + again.elementwise)
        return QuadraticCost(
            c0=kernels * device.kernel_seconds + moved / device.bandwidth,
            c1=flops.matmul_per_token * products
            - kept
            + flops.attention_per_token * attention
            + elementwise,
            c2=flops.attention_per_pair * attention,
            c_sequence=flops.matmul_per_sequence * products
            + flops.attention_per_sequence * attention,
        )

    found = [by_policy(each) for each in policies_of(remat)]
    terms = (f.name for f in dataclasses.fields(QuadraticCost))
    return QuadraticCost(**{name: _mean(getattr(cost, name) for cost in found) for name in terms})


def step_memory(
    architecture: Architecture,
    device: Device,
    remat: Remat,
    shards: int = 1,
    trained: Trained = ALL_TRAINED,
    replicas: int = 1,
) -> MemoryModel:
    """Peak bytes in use during a step on one device.

    Args:
      architecture, device, remat, shards, trained: as `analytic_costs`.
      replicas: of the weights, over which all else of the state is split too (ZeRO).
    """
    fixed = state_bytes(architecture.parameters(), trained, replicas) / shards + WORKSPACE_BYTES
    activations = architecture.activations()
    policies = policies_of(remat)
    # Of what layers keep, the share that a loop holds besides where policies repeat: at most twice
    # an iteration's, as compiled for an H200; a loop of one layer copies as it goes.
    layers = getattr(architecture, "num_layers", len(policies))
    copied = 2 * len(policies) / layers if len(policies) > 1 else 0.0
    kept = _mean(map(architecture.kept_activations, policies)) * (1 + copied)
    values = kept + activations.working_set
    if trained.parameters is not None:
        values += activations.adapters
    condition = _mean(map(architecture.kept_condition, policies)) * (1 + copied)
    condition += activations.condition
    size = device.compute_bytes
    return MemoryModel(float(fixed), size * values, size * condition)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def state_bytes(parameters: int, trained: Trained = ALL_TRAINED, replicas: int = 1) -> int:
    """Bytes of parameters, gradients, optimizer state and EMA, independent of the batch.

    Args:
      parameters: number of parameters of the model.
      trained: which of them are trained.
      replicas: as in `step_memory`.
    """
    count = trained.of(parameters)
    frozen = (parameters - count - trained.on_host) * FROZEN_BYTES[trained.frozen_dtype]
    gradient = GRADIENT_BYTES if trained.accumulates else 0
    split = trained.bytes_each + gradient - WEIGHT_BYTES
    return round(count * (WEIGHT_BYTES + split / replicas)) + frozen


def bytes_per_split_token(
    architecture: Architecture, remat: Remat, compute_bytes: int = 2
) -> float:
    """Bytes of the arrays that a token of a split sequence exchanges in a step.

    Only self-attention needs the other devices' tokens; all-to-alls exchange heads for tokens, as
    in DeepSpeed-Ulysses (arXiv 2309.14509). Query, key, value and output are sent in the forward
    pass, their gradients in the backward pass, and query, key, value and output again if the
    backward pass recomputes the block. `sent_share` says how many of them leave a device.
    """
    passes = 2 + any(_RECOMPUTED[each].any for each in policies_of(remat))
    return float(passes * compute_bytes * architecture.activations().split_exchange)
