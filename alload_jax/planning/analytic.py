"""Cost and memory of a training step from the model's shape and a device's rates alone.

A first answer before anything is measured, and where no device is at hand; `alload calibrate`
gives the better one. What is counted: matrix products and attention by their FLOPs, elementwise
work and the update by the bytes that they move, kernels by the least time that each takes.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.architecture import Architecture
from alload_jax.planning.cost import CostFile, MemoryModel, PowerCost, QuadraticCost, bucketed_cost
from alload_jax.planning.devices import Device
from alload_jax.planning.fit import Point, fit_power

STATE_BYTES = 20
"""Per parameter: float32 weights, Adam's two moments, EMA, sums of gradients."""
GRADIENT_BYTES = 4
"""Per parameter: the micro-batch's own gradient, before it is added to the sums."""

LENGTHS = np.unique(np.geomspace(256, 80_000, 24).astype(int))
"""Over which the power law is fitted."""
_FILLED = 80_000
"""Tokens of a micro-batch that the power law is fitted to: it has no term for launches, which
would make a single short sequence look as costly as many."""

_BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward over its forward's: five products in place of two."""
_UPDATE_BYTES = 52
"""Per parameter: the norm reads the gradient, the update reads and writes weights, moments, EMA
and gradient, and sums are set to zero: (1 + 5 + 6 + 1) · 4."""
_WEIGHT_BYTES = 10
"""Per parameter and pass over the model: cast from float32, written and read as bfloat16, with a
share of slicing the stacked layers."""
_KERNELS = 60
"""Of a block, forward; the backward has twice as many."""

# Tensors of S × dim (and of S × ffn_dim) that a block reads and writes beside matrix products and
# attention. Forward: three norms with residual and gate 10, query and key norms with rotary
# embedding 9, the last gate 3; GELU reads and writes the hidden layer.
_FORWARD_PASSES = (22, 2)
# Backward: norms 15, query and key norms 12, gates 3, gradients of biases 8, sums of gradients 4;
# the hidden layer: GELU 3, gradient of bias 1.
_BACKWARD_PASSES = (42, 4)
_WORKING_SET = (19, 4)
"""Tensors of S × dim and S × ffn_dim alive at most while one block goes backward."""


@dataclass(frozen=True)
class _Remat:
    """What a rematerialisation policy computes again, and keeps of each block.

    Attributes:
      matmuls, attention, elementwise: whether the backward pass runs them forward again.
      kept: tensors of S × dim and S × ffn_dim of every block, its input among them.
    """

    matmuls: bool
    attention: bool
    elementwise: bool
    kept: tuple[float, float]


_REMAT = {
    "full": _Remat(True, True, True, (1, 0)),
    # Both attentions' outputs, each twice: by its name, and as cuDNN put it out.
    "attention": _Remat(True, False, True, (1 + 4, 0)),
    # Besides: query, key, value, out; cross-attention's query and out; both feed-forward layers.
    "matmuls_and_attention": _Remat(False, False, True, (1 + 4 + 7, 1)),
    # An estimate: what autodiff keeps of norms, rotary embedding and GELU, partly in float32.
    "none": _Remat(False, False, False, (28, 3)),
}


def analytic_costs(
    architecture: Architecture,
    device: Device,
    remat: str = "attention",
    *,
    shards: int = 1,
    margin: float = 0.05,
) -> CostFile:
    """The cost model of a training step: one micro-batch, forward and backward, and the update.

    Args:
      architecture: the model.
      device: that every rank has.
      remat: what blocks keep, as `model.remat` says.
      shards: devices that share one copy of weights and state (`mesh.fsdp`). Only memory is
        shared; their communication is not counted.
      margin: share of the device's memory that `m_mem` leaves free.

    Raises:
      InputError: the policy is unknown, or the state alone does not fit the device.
    """
    if remat not in _REMAT:
        raise InputError(f"model.remat is {remat!r}; choose one of {', '.join(_REMAT)}")
    if shards < 1:
        raise InputError(f"shards is {shards}; give at least 1")
    quadratic = step_cost(architecture, device, remat)
    memory = step_memory(architecture, device, remat, shards)
    return CostFile(
        power=_power_law(quadratic),
        quadratic=quadratic,
        memory=memory,
        m_mem=memory.max_tokens(device.memory, margin),
        bytes_per_split_token=bytes_per_split_token(architecture, remat, device.compute_bytes),
        model=architecture.fields() | {"remat": remat},
        device=device.name,
        origin="analytic",
        details={"margin": margin, "shards": shards, "device": dataclasses.asdict(device)},
    )


def step_cost(architecture: Architecture, device: Device, remat: str) -> QuadraticCost:
    """Seconds of a step, recomputation by the policy included; arguments as `analytic_costs`."""
    policy = _REMAT[remat]
    matmul = device.peak_flops * device.matmul_share
    products = (3 + policy.matmuls) / matmul
    attention = (1 + _BACKWARD_ATTENTION) / (device.peak_flops * device.attention_share)
    attention += policy.attention / (device.peak_flops * device.attention_forward_share)
    elementwise = _elementwise_bytes(architecture, device, policy) / (
        device.bandwidth * device.elementwise_share
    )
    return QuadraticCost(
        c0=_launch_seconds(architecture, device, policy),
        c1=architecture.matmul_flops_per_token * products
        + architecture.cross_flops_per_token * attention
        + elementwise,
        c2=architecture.attention_flops_per_pair * attention,
        c_sequence=architecture.matmul_flops_per_sequence * products,
    )


def step_memory(
    architecture: Architecture, device: Device, remat: str, shards: int = 1
) -> MemoryModel:
    """Most bytes in use during a step on one device; arguments as `analytic_costs`.

    Keys and values of the condition are left out, which counts where sequences are as short as it.
    """
    state = architecture.parameters() * (STATE_BYTES + GRADIENT_BYTES) / shards
    kept, working = _REMAT[remat].kept, _WORKING_SET
    per_token = architecture.num_layers * _tensor_bytes(architecture, device, kept)
    per_token += _tensor_bytes(architecture, device, working)
    return MemoryModel(base=float(state), per_token=per_token)


def bytes_per_split_token(architecture: Architecture, remat: str, compute_bytes: int = 2) -> float:
    """Bytes that a token of a sequence split over devices sends in a step, at most.

    Self-attention alone needs the other devices' tokens (heads for tokens by all-to-all, as in
    DeepSpeed-Ulysses, arXiv 2309.14509): query, key, value and output forward (4), the gradients
    of these four (4), and once more query, key, value and output where the backward pass computes
    the block again (4; none where all is kept). Of the bytes, 1/c stay on their device in a group
    of c.
    """
    tensors = 8 if remat == "none" else 12
    return float(tensors * compute_bytes * architecture.dim * architecture.num_layers)


def _elementwise_bytes(architecture: Architecture, device: Device, policy: _Remat) -> float:
    """Read and written for each token of a step."""
    passes = [_FORWARD_PASSES, _BACKWARD_PASSES] + [_FORWARD_PASSES] * policy.elementwise
    return architecture.num_layers * sum(
        _tensor_bytes(architecture, device, tensors) for tensors in passes
    )


def _launch_seconds(architecture: Architecture, device: Device, policy: _Remat) -> float:
    """Of every step, however little it holds: kernels, passes over the weights, the update."""
    kernels = architecture.num_layers * _KERNELS * (3 + policy.elementwise)
    passes = 3 + policy.elementwise
    per_parameter = _UPDATE_BYTES + _WEIGHT_BYTES * passes
    moved = architecture.parameters() * per_parameter / device.bandwidth
    return kernels * device.kernel_seconds + moved


def _tensor_bytes(
    architecture: Architecture, device: Device, tensors: tuple[float, float]
) -> float:
    """Bytes for each token of so many tensors of (S × dim, S × ffn_dim)."""
    narrow, wide = tensors
    return device.compute_bytes * (narrow * architecture.dim + wide * architecture.ffn_dim)


def _power_law(quadratic: QuadraticCost) -> PowerCost:
    """Fitted over `LENGTHS` in logarithms, to micro-batches of as many rows as policies make."""
    rows = _FILLED // LENGTHS
    seconds = bucketed_cost(quadratic, rows, LENGTHS)
    columns = zip(rows.tolist(), LENGTHS.tolist(), seconds.tolist(), strict=True)
    return fit_power([Point(*values) for values in columns]).model
