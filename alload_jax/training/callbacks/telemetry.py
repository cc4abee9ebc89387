"""Writes the metrics of each step and those of layers; measures devices, and names slow ones.

In a step all devices wait for the slowest, so that its time says nothing of one of them. Between
two steps each device computes the same work by itself. That does not find slow links.
"""

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from typing_extensions import override

from alload_jax.data.loader import PlacedStep
from alload_jax.distributed.cluster import Cluster, first_process
from alload_jax.errors import print_stderr
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import family_of
from alload_jax.processes import waits
from alload_jax.sharding.mesh import ranks_of
from alload_jax.training.divergence import DivergenceGuard
from alload_jax.training.loop import Callback, Loop
from alload_jax.training.progress import ProgressBar
from alload_jax.training.run_files import BadRecords, MetricsLog, drop_later, open_own
from alload_jax.training.run_plan import RunPlan
from alload_jax.training.trackers import Tracker

_SMOOTHING = 0.95
_RATES = 2**17
"""Learning rates that are computed at once."""


class Telemetry(Callback):
    """Reads the metrics of each step after the next step is dispatched, so that devices never wait.

    It is the first callback, so that metrics are written before later callbacks act.
    """

    def __init__(
        self,
        plan: RunPlan,
        learning_rate: optax.Schedule,
        log: MetricsLog,
        tracker: Tracker,
        bad_records: BadRecords,
        max_bad_records: int,
        bar: ProgressBar,
        guard: DivergenceGuard | None = None,
    ):
        """Observes the steps of a plan.

        Args:
          plan: the plan of the run, which is told the steps' times.
          learning_rate: schedule of the learning rate.
          log: log of the metrics.
          tracker: shows the metrics and the tokens per second of each step.
          bad_records: log of damaged records.
          max_bad_records: number of damaged records to skip before the run stops.
          bar: progress bar.
          guard: is told the metrics of each step, and ends a run that diverges; None for none.
        """
        self._plan = plan
        self._schedule = learning_rate
        self._first, self._rates = 0, np.empty(0, np.float32)
        self._log, self._tracker, self._bar = log, tracker, bar
        self._bad_records, self._max_bad_records = bad_records, max_bad_records
        self._guard = guard
        # Without its arrays, and with its metrics.
        self._in_flight: tuple[PlacedStep, dict[str, jax.Array]] | None = None
        self._settled_at = self._waited = 0.0
        self._loss = self._tokens_per_second = math.nan

    @override
    def on_start(self, run: Loop) -> None:
        self._rate(run.done)
        self._bar.start()
        self._restart_clock()

    @override
    def on_step_start(self, run: Loop, step: PlacedStep) -> None:
        """Refuses a step with more damaged records than allowed."""
        if self._in_flight is not None and self._in_flight[0].number == step.number:
            self._in_flight = None  # its metrics were not finite, and it starts again
            self._restart_clock()
        self._waited += step.wait_seconds
        for problem in self._bad_records.add(step.problems):
            self._bar.say(f"skipped: {problem}")
        if step.problems and len(self._bad_records) > self._max_bad_records:
            run.refuse(
                f"{step.problems[-1]}; restore the record, or allow more than "
                f"data.loader.max_bad_records = {self._max_bad_records} to be skipped"
                f"{self._bad_records.others(step.problems)}"
            )

    @override
    def on_step_end(self, run: Loop, step: PlacedStep, metrics: dict[str, jax.Array]) -> None:
        """Settles the previous step."""
        self.settle()
        self._in_flight = step._replace(batches=()), metrics

    @override
    def on_pause(self, run: Loop) -> None:
        self.settle()

    on_stop = on_pause

    @override
    def on_resume(self, run: Loop) -> None:
        self._restart_clock()

    @override
    def close(self) -> None:
        self._log.close()
        self._tracker.close()
        self._bar.stop()

    def _rate(self, number: int) -> float:
        """The learning rate of a step that is not before those of the last calls."""
        if number >= self._first + len(self._rates):
            # Many at once: each by itself, they would be computed behind the step in flight.
            self._first, many = number, np.arange(number, number + _RATES)
            self._rates = np.asarray(jax.jit(jax.vmap(self._schedule))(many))
        return float(self._rates[number - self._first])

    def _restart_clock(self) -> None:
        """Restarts the time measurement of the next step."""
        self._settled_at, self._waited = time.perf_counter(), 0.0

    @waits("for the devices to finish the step before")
    def settle(self) -> None:
        """Waits for the step in flight and writes its metrics.

        Raises:
          InputError: training diverges.
        """
        if self._in_flight is None:
            return
        (step, metrics), self._in_flight = self._in_flight, None
        values = {name: float(value) for name, value in metrics.items()}
        now = time.perf_counter()
        seconds, waited = now - self._settled_at, self._waited
        self._restart_clock()
        planned = self._plan.metrics(step.number)
        if values.get("update_skipped"):
            norm = values["grad_norm"]
            self._bar.say(
                f"step {step.number + 1}: update skipped, gradient norm {norm:.3g} is more than "
                "optimizer.skip_above times the mean"
            )
        drift = self._plan.drift(step.number, planned.cost_terms, seconds - waited)
        self._plan.observe(step.number, values)
        trained = planned.samples - len(step.problems)
        speed = planned.tokens / seconds
        row = (
            {"epoch": step.epoch}
            | values
            | planned._asdict()
            | {
                "samples": trained,
                "step_seconds": seconds,
                **({} if drift is None else {"cost_drift": drift}),
                "input_wait_seconds": waited,
                "learning_rate": self._rate(step.number),
                "skipped": len(step.problems),
            }
        )
        self._log.write({"step": step.number + 1} | row)
        figures = {name: value for name, value in row.items() if isinstance(value, int | float)}
        self._tracker.log(step.number + 1, figures | {"tokens_per_second": speed})
        self._loss = _smoothed(self._loss, values["loss"])
        self._tokens_per_second = _smoothed(self._tokens_per_second, speed)
        self._bar.advance(f"loss {self._loss:.4f} · {self._tokens_per_second:,.0f} tokens/s")
        if self._guard is not None:
            self._guard.add(step.number, values["loss"], values["grad_norm"])


def _smoothed(before: float, now: float) -> float:
    return now if math.isnan(before) else _SMOOTHING * before + (1 - _SMOOTHING) * now


LAYER_LOG = "layers.jsonl"
"""Name of the file in a run's folder: a line for each recorded step."""
_EVERY = 10


class LayerLog(Callback):
    """Writes a line every ten steps; nothing for families that have nothing to record."""

    def __init__(self, folder: Path, model: ModelConfig, resumed_at: int):
        """Goes on behind the lines of an earlier start.

        Args:
          folder: of the run.
          model: its config.
          resumed_at: number of steps that are done; lines of later steps are dropped.

        Raises:
          InputError: a line of the file is not a JSON object.
        """
        self._path, self._model, self._records = folder / LAYER_LOG, model, False
        if first_process():
            deque(drop_later(self._path, resumed_at), maxlen=0)

    @override
    def on_start(self, run: Loop) -> None:
        found = partial(family_of(self._model).layer_records, self._model)
        self._records = bool(jax.eval_shape(found, run.state.variables))

    @override
    def due(self, run: Loop) -> bool:
        return self._records and run.done % _EVERY == 0  # it waits for the step in flight

    @override
    def act(self, run: Loop) -> None:
        if not self._records:
            return
        found = family_of(self._model).layer_records(self._model, run.state.variables)
        values = {name: np.asarray(value).tolist() for name, value in found.items()}
        with open_own(self._path) as file:
            file.write(json.dumps({"step": run.done} | values) + "\n")

    @override
    def on_finish(self, run: Loop) -> None:
        self.act(run)


_WIDTH, _PRODUCTS, _SECONDS, _REPEATS = 4096, 8, 0.02, 3
"""Of a square matrix; of a program; of a measurement, about; of whose times the median counts."""
_INTERVAL, _SHARE = 32, 0.001
"""Steps between measurements, at least; share of the time that they may take."""
_SLOW = 0.95
"""Speed beside the median rank's of a rank that is named."""

Probe = Callable[[], Sequence[float]]
"""Seconds that each of this process's devices of the mesh takes for the same work, in its order."""


class DeviceProbe:
    """A `Probe`: products of matrices, each normalised, as in the layers of a transformer.

    Programs are sent ahead, as steps are: another program that shares a device takes more of the
    time of work that has gaps.
    """

    def __init__(self, mesh: Mesh, cluster: Cluster):
        """Of the devices of a mesh; the first call is a collective operation, and compiles."""
        self._devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        self._cluster, self._rounds = cluster, 0
        self._matrix, self._work = jax.jit(_matrix), jax.jit(_work)

    def __call__(self) -> list[float]:
        """See `Probe`."""
        with ThreadPoolExecutor(len(self._devices)) as pool:  # all at once, as in a step
            if not self._rounds:
                list(pool.map(partial(self._seconds, rounds=1), self._devices))
                each = self._seconds(self._devices[0], 4) / 4
                self._rounds = self._cluster.broadcast(lambda: max(1, round(_SECONDS / each)))
            return list(pool.map(partial(self._seconds, rounds=self._rounds), self._devices))

    def _seconds(self, device: jax.Device, rounds: int) -> float:
        first = self._matrix(jax.device_put(np.float32(0), device))
        found = []
        for _ in range(_REPEATS):
            x = first.block_until_ready()
            began = time.perf_counter()
            for _ in range(rounds):
                x = self._work(x)
            x.block_until_ready()
            found.append(time.perf_counter() - began)
        return statistics.median(found)


def _matrix(first: jax.Array) -> jax.Array:
    return jnp.sin(first + jnp.arange(_WIDTH**2)).reshape(_WIDTH, _WIDTH).astype(jnp.bfloat16)


def _work(x: jax.Array) -> jax.Array:
    for _ in range(_PRODUCTS):
        y = jnp.dot(x, x, preferred_element_type=jnp.float32)
        x = (y * jax.lax.rsqrt(jnp.mean(y * y, axis=1, keepdims=True))).astype(x.dtype)
    return x


class DeviceSpeeds(Callback):
    """Measures devices every 32 steps, and then as rarely as it takes a thousandth of the time.

    Where the plan follows windows of steps, and the mesh has several ranks. Not on CPUs, whose
    devices share the cores.
    """

    def __init__(self, plan: RunPlan, mesh: Mesh, cluster: Cluster, probe: Probe):
        """Tells the plan of the run what its ranks take on the devices of a mesh."""
        self._plan, self._mesh, self._cluster, self._probe = plan, mesh, cluster, probe
        self._first, self._named = True, set[int]()
        self._due, self._since, self._step = 0, 0.0, 0
        unlike = ranks_of(mesh) > 1 and mesh.devices.flat[0].platform != "cpu"
        self._measures = unlike and plan.planning.recalibrate == "window"

    @override
    def on_start(self, run: Loop) -> None:
        self._due, self._since, self._step = (run.done + _INTERVAL, time.perf_counter(), run.done)

    @override
    def due(self, run: Loop) -> bool:
        return self._measures and run.done >= self._due

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
        known = self._plan.add_probe(of_rank.repeat(each).tolist())
        rarely = max(took for took, *_ in found) / _SHARE / min(times[1] for times in found)
        self._due = run.done + (max(_INTERVAL, int(rarely)) if known else _INTERVAL)
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
