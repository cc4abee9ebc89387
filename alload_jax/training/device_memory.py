"""The memory of a run on one device, as XLA has laid it out."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax
from jax.stages import Compiled
from jaxtyping import PyTree

from alload_jax.errors import InputError
from alload_jax.sharding.host_memory import POOL, pool_bytes
from alload_jax.sharding.mesh import in_host_memory
from alload_jax.training.state import TrainState

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
        of = "" if self.limit is None else f", of {in_words(self.limit)}"
        return (
            f"memory of a device: {in_words(self.state)} for weights and optimizer, "
            f"{in_words(self.step)} for a step{of}"
            + (f"; {in_words(self.host)} of the host's memory" if self.host else "")
        )

    def warning(self) -> str:
        """What is likely to run out; empty if nothing is."""
        needed = self.state + self.step
        if self.limit is not None and needed > self.limit:
            has = in_words(self.limit)
            return f"a step needs {in_words(needed)} and a device has {has}; {REMEDY}"
        if self.host_limit is not None and self.host > self.host_limit:
            may = in_words(int(self.host_limit))
            return (
                f"a step needs {in_words(self.host)} of the host's memory and a device may use "
                f"{may} of it; {HOST_REMEDY}"
            )
        return ""


def out_of_memory(error: Exception) -> bool:
    """Whether an error of JAX's runtime says that a device is out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


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


def in_words(size: int) -> str:
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
