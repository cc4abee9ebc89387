"""Chooses what each layer keeps for the backward pass, so that memory is full and time least.

All layers are alike, so that a choice is how many of them have which policy. A choice repeats every
few layers: a loop over layers then compiles no more than that many.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.analytic import ALL_TRAINED, SHORTEST, Trained, step_cost, step_memory
from alload_jax.planning.architecture import Architecture
from alload_jax.planning.cost import bucketed_cost
from alload_jax.planning.devices import Device

RematPolicy = Literal[
    "none",
    "full",
    "offload",
    "offload_attention",
    "offload_feed_forward_and_attention",
    "attention",
    "feed_forward_and_attention",
    "matmuls_and_attention",
    "norms_matmuls_and_attention",
]
"""`none` keeps all activations; `full` keeps only the block's input; `attention` keeps attention
outputs; `feed_forward_and_attention` keeps those and the outputs of feed-forward layers, whose
product takes the most time for its bytes; `matmuls_and_attention` keeps attention's and those of
all linear layers; `norms_matmuls_and_attention` also those of norms and rotations. For the others,
see `OFFLOADED`."""

RematChoice = Literal[RematPolicy, "auto"]
"""A policy for all blocks, or `auto` for one that is chosen by memory for each of them."""
AUTO_REMAT: Literal["auto"] = "auto"
UNRESOLVED: RematPolicy = "attention"
"""The policy where there is no memory to go by."""

LADDER: tuple[RematPolicy, ...] = (
    "full",
    "attention",
    "feed_forward_and_attention",
    "matmuls_and_attention",
    "norms_matmuls_and_attention",
    "none",
)
"""From the least that is kept to the most."""
OFFLOADED: dict[RematPolicy, RematPolicy] = {
    "offload": "full",
    "offload_attention": "attention",
    "offload_feed_forward_and_attention": "feed_forward_and_attention",
}
"""Policies that keep in the host's memory what another keeps on the device; of attention, outputs
over `HOST_KEYS` or more alone."""
HOST_KEYS = 8192
"""Least keys of attention whose output goes to the host. Computing it again takes 4 K d operations
a token for K keys, and the way there 2 d bytes: as much at 600 TFLOP/s, 50 GB/s and 6,000 keys."""
Measure = Callable[[Sequence[RematPolicy]], Mapping[RematPolicy, float] | None]
"""Seconds of a layer by policy, `full` among them; None if it cannot measure."""
_LONGEST_PATTERN = 10
MARGIN = 0.08
"""Share of the memory that predictions leave free."""


class Choice(NamedTuple):
    """What layers keep.

    Attributes:
      policies: of consecutive layers, repeated over all.
      seconds: predicted for a micro-batch.
      bytes: predicted peak on a device.
      budget: bytes that it may take.
      layer_seconds: measured for a layer by policy; None where arithmetic predicts them.
    """

    policies: tuple[RematPolicy, ...]
    seconds: float
    bytes: float
    budget: float
    layer_seconds: Mapping[RematPolicy, float] | None = None

    def line(self) -> str:
        """The choice in words."""
        by = "by measured time, " if self.layer_seconds else ""
        return (
            f"model.remat: {in_words(self.policies)} ({by}predicted {self.bytes / 1e9:.1f} of "
            f"{self.budget / 1e9:.1f} GB)"
        )


def in_words(policies: Sequence[str]) -> str:
    """How many of the layers have which policy."""
    counts = {name: policies.count(name) for name in dict.fromkeys(policies)}
    if len(counts) == 1:
        return policies[0]
    of = len(policies)
    return ", ".join(f"{name} in {count} of {of} layers" for name, count in counts.items())


def choose_remat(
    architecture: Architecture,
    num_layers: int,
    device: Device,
    tokens: int,
    budget: float,
    *,
    shards: int = 1,
    replicas: int = 1,
    rows: float | None = None,
    work_space: float = 0.0,
    trained: Trained = ALL_TRAINED,
    measure: Measure | None = None,
    host_budget: float = math.inf,
) -> Choice:
    """The fastest choice whose micro-batches of `tokens` tokens fit.

    Args:
      architecture: the model.
      num_layers: its layers.
      device: whose rates say what recomputation costs.
      tokens: of a micro-batch on one device, at most.
      budget: bytes of the device that a step may take.
      shards: devices that share one copy of weights and state.
      replicas: as in `step_memory`.
      rows: sequences of the micro-batch, each with its condition; None for as many of `SHORTEST`
        tokens as there may be.
      work_space: bytes of libraries beyond `WORKSPACE_BYTES`, under any policy.
      trained: which parameters are trained.
      measure: measures seconds of a layer's forward and backward under policies, which is worth it
        only for those of choices that fit, and `full`. Those that it leaves out are not chosen, nor
        what would offload what they keep. If it finds none, or is None, arithmetic predicts them.
      host_budget: bytes of the host's memory that a device may use.

    Raises:
      InputError: no policy fits.
    """

    def needed(policies: tuple[RematPolicy, ...]) -> float:
        memory = step_memory(architecture, device, policies, shards, trained, replicas)
        samples = tokens / SHORTEST if rows is None else rows
        return memory.bytes_of(tokens, samples) + work_space

    def in_host(policies: Sequence[RematPolicy]) -> bool:
        if policies[0] not in OFFLOADED:
            return True
        return host_bytes(architecture, device, tokens, policies[0]) <= host_budget

    fitting = [
        each
        for each in _patterns(num_layers)
        if needed(each) <= budget * (1 - MARGIN) and in_host(each)
    ]
    if not fitting:
        # What lacks memory for the choice that takes least: the device, or else the host.
        if (least := needed(("offload",))) > budget * (1 - MARGIN):
            place = "with offload"
            there = f"has {budget / 1e9:.1f} GB with a margin of {MARGIN:.0%}"
        else:
            least, place = host_bytes(architecture, device, tokens, "offload"), "of the host's"
            there = f"may use {host_budget / 1e9:.1f} GB of them"
        raise InputError(
            f"model.remat: auto finds nothing that fits: {tokens:,} tokens need "
            f"{least / 1e9:.1f} GB {place}, and a device {there}; take fewer tokens "
            "(planning.m_mem), more shards (mesh.fsdp) or more memory (model.memory_budget)"
        )
    computed = {each: {_resident(policy, tokens) for policy in each} for each in fitting}
    asked = {"full"}.union(*computed.values())
    times = None
    if measure is not None and len(asked) > 1:
        times = measure([each for each in LADDER if each in asked])

    def predicted(policies: tuple[RematPolicy, ...]) -> Choice:
        again = [_resident(each, tokens) for each in policies]
        cost = step_cost(architecture, device, ("full",) if times else again, trained)
        seconds = float(bucketed_cost(cost, np.array([1]), np.array([tokens]))[0])
        if times:
            gained = [times["full"] - times[each] for each in again]
            seconds -= num_layers * sum(gained) / len(gained)
        if policies[0] in OFFLOADED:
            seconds += _waiting(architecture, device, tokens, policies[0], trained)
        return Choice(policies, seconds, needed(policies), budget, times)

    return min(
        (predicted(each) for each in fitting if times is None or computed[each] <= times.keys()),
        key=lambda each: (each.seconds, each.policies[0] in OFFLOADED, len(each.policies)),
    )


def host_bytes(
    architecture: Architecture, device: Device, tokens: int, policy: RematPolicy
) -> float:
    """Bytes of the host's memory that a micro-batch takes, at most, under a policy of `OFFLOADED`.

    The residual stream counts as float32.

    Args:
      architecture, device, tokens: as in `choose_remat`.
      policy: the policy.
    """
    inputs = architecture.kept_activations("full")
    others = architecture.kept_activations(OFFLOADED[policy]) - inputs
    return tokens * (4 * inputs + device.compute_bytes * others)


def _resident(policy: RematPolicy, tokens: int) -> RematPolicy:
    """The policy that computes as much again for rows of so many tokens, without the host."""
    if policy not in OFFLOADED:
        return policy
    return OFFLOADED[policy] if tokens >= HOST_KEYS else "full"


def _waiting(
    architecture: Architecture,
    device: Device,
    tokens: int,
    policy: RematPolicy,
    trained: Trained,
) -> float:
    """Seconds that the passes of a step wait for what a policy of `OFFLOADED` moves.

    What a layer keeps moves while the next one computes. The backward pass takes twice as long as
    the forward pass, and as long where adapters are trained.
    """
    moving = host_bytes(architecture, device, tokens, policy) / device.host_bandwidth
    cost = step_cost(architecture, device, "none", trained)
    [seconds] = bucketed_cost(cost, np.array([1]), np.array([tokens]))
    forward = float(seconds) / (3 if trained.parameters is None else 2)
    return sum(max(0.0, moving - one) for one in (forward, float(seconds) - forward))


def _patterns(num_layers: int) -> Iterator[tuple[RematPolicy, ...]]:
    """Policies that repeat: one, or two neighbours on the ladder in some of the layers each.

    Those of `OFFLOADED` stand alone.

    `none` stands alone: beside others it would also keep a copy of its layers' parameters.
    """
    for policy in (*LADDER, *OFFLOADED):
        yield (policy,)
    for length in range(2, min(num_layers, _LONGEST_PATTERN) + 1):
        if num_layers % length:
            continue
        for less, more in pairwise(LADDER[:-1]):
            for count in range(1, length):
                yield (less,) * (length - count) + (more,) * count
