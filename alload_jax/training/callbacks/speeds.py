"""Measures how fast devices are beside each other, and names slow ones.

In a step all devices wait for the slowest, so that its time says nothing of one of them. Between
two steps each device computes the same work by itself. That does not find slow links.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from typing_extensions import override

from alload_jax.distributed.cluster import Cluster, first_process
from alload_jax.errors import print_stderr
from alload_jax.sharding.mesh import ranks_of
from alload_jax.training.loop import Callback, Loop
from alload_jax.training.run_plan import RunPlan

_WIDTH, _SECONDS, _REPEATS = 4096, 0.02, 3
"""Of a square matrix; of a measurement, about; of whose times the median counts."""
_EVERY, _SHARE = 32, 0.001
"""Steps between measurements, at least; share of the time that they may take."""
_SLOW = 0.95
"""Speed beside the median rank's of a rank that is named."""

Probe = Callable[[], Sequence[float]]
"""Seconds that each of this process's devices of the mesh takes for the same work, in its order."""


class DeviceProbe:
    """A `Probe`: products of matrices, each normalised, as in the layers of a transformer."""

    def __init__(self, mesh: Mesh, cluster: Cluster):
        """Of the devices of a mesh; the first call is a collective operation, and compiles."""
        self._devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        self._cluster, self._rounds = cluster, 0
        self._work = jax.jit(_work)

    def __call__(self) -> list[float]:
        """See `Probe`."""
        with ThreadPoolExecutor(len(self._devices)) as pool:  # all at once, as in a step
            if not self._rounds:
                list(pool.map(self._seconds, self._devices))
                each = self._seconds(self._devices[0], 16) / 16
                self._rounds = self._cluster.broadcast(lambda: max(1, round(_SECONDS / each)))
            return list(pool.map(self._seconds, self._devices))

    def _seconds(self, device: jax.Device, rounds: int | None = None) -> float:
        operand = jax.device_put(np.int32(rounds or self._rounds), device)
        found = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            self._work(operand).block_until_ready()
            found.append(time.perf_counter() - began)
        return statistics.median(found)


def _work(rounds: jax.Array) -> jax.Array:
    def one(_: int, x: jax.Array) -> jax.Array:
        y = jnp.dot(x, x, preferred_element_type=jnp.float32)
        return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=1, keepdims=True))).astype(x.dtype)

    x = jnp.sin(jnp.arange(_WIDTH**2, dtype=jnp.float32)).reshape(_WIDTH, _WIDTH)
    return jax.lax.fori_loop(0, rounds, one, x.astype(jnp.bfloat16))[0, 0]


class DeviceSpeeds(Callback):
    """Measures devices every 32 steps, or as rarely as it takes a thousandth of the time."""

    def __init__(self, plan: RunPlan, mesh: Mesh, cluster: Cluster, probe: Probe):
        """Tells the plan of the run what its ranks take on the devices of a mesh."""
        self._plan, self._mesh, self._cluster, self._probe = plan, mesh, cluster, probe
        self._first, self._named = True, set[int]()
        self._due, self._since, self._step = 0, 0.0, 0

    @override
    def on_start(self, run: Loop) -> None:
        self._due, self._since, self._step = run.done + _EVERY, time.perf_counter(), run.done

    @override
    def due(self, run: Loop) -> bool:
        return run.done >= self._due

    @override
    def act(self, run: Loop) -> None:
        of_step = (time.perf_counter() - self._since) / max(1, run.done - self._step)
        if self._first:
            self._first = False
            self._probe()  # compiles
        began = time.perf_counter()
        mine = list(self._probe())
        found = self._cluster.all_gather([time.perf_counter() - began, of_step, *mine])
        by_process = {process: iter(seconds) for process, (_, _, *seconds) in enumerate(found)}
        devices = self._mesh.devices.flatten()
        seconds = np.asarray([next(by_process[device.process_index]) for device in devices])
        of_rank = seconds.reshape(ranks_of(self._mesh), -1).max(axis=1)
        each = self._plan.plan.topology.ranks // len(of_rank)
        self._plan.add_probe(of_rank.repeat(each).tolist())
        rarely = max(took for took, *_ in found) / _SHARE / min(times[1] for times in found)
        self._due = run.done + max(_EVERY, int(rarely))
        self._name(devices.reshape(len(of_rank), -1), each)
        self._since, self._step = time.perf_counter(), run.done

    def _name(self, devices: np.ndarray, each: int) -> None:
        """Warns once of each slow rank; devices are [ranks of the mesh, devices of each]."""
        speeds = self._plan.speeds()[::each]
        slow = [n for n, speed in enumerate(speeds) if speed <= _SLOW and n not in self._named]
        self._named.update(slow)
        if not slow or not first_process():
            return
        names = (
            f"rank {n * each} (device {devices[n, 0].id} of process {devices[n, 0].process_index}) "
            f"takes {1 / speeds[n] - 1:.0%} longer"
            for n in slow
        )
        print_stderr(
            f"warning: {', '.join(names)} than the median rank for the same work, and all wait for "
            "it; rows are planned to that"
        )
