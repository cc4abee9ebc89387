"""Runs that are killed at random moments and continued, until they end as one never stopped."""

import json
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chaos_starts import Started, Starter

from alload_jax.data.datasets.digits import Digits
from alload_jax.training.checksums import damage
from alload_jax.training.run_files import is_validation

EVERY, STEPS = 4, 300
MIX = ((1, 8, 8, 64),)
COMPUTED = ("step", "epoch", "loss", "grad_norm", "samples", "skipped", "tokens", "learning_rate")
PHASES = ("start", "compile", "steps", "saving", "validation", "drawing", "end")
_WEIGHTS = (2, 1, 4, 3, 2, 2, 2)
_SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP")
PATIENCE = 240.0
_LONGEST_LINES = 8192
LOST_AFTER = 20.0


class Kill(NamedTuple):
    """One interruption and what was left.

    Attributes:
      run: name of the run.
      processes: processes of the run.
      phase: what the run was doing, of `PHASES`.
      signal: name of the signal.
      step: the last step in metrics.jsonl.
      saved: step of the newest whole checkpoint; 0 for none.
      status: exit status, negative after a signal.
      seconds: from the start of the program until all its processes had ended.
      faults: what is not as it should be, in words.
    """

    run: str
    processes: int
    phase: str
    signal: str
    step: int
    saved: int
    status: int | None
    seconds: float
    faults: list[str]


class Campaign:
    """Kills runs of one config in a folder.

    Attributes:
      folder: where all is written.
      data: the data folder.
      steps: of each run.
    """

    def __init__(self, folder: Path, steps: int = STEPS):
        self.folder, self.data, self.steps = folder, folder / "data", steps
        folder.mkdir(parents=True, exist_ok=True)
        if not self.data.exists():
            Digits(mix=MIX, frames_per_latent=1).write(self.data)
        self._config = folder / "chaos.yaml"
        self._config.write_text(json.dumps(self._settings()))
        self.starter = Starter(folder / "output")

    def _settings(self) -> dict[str, Any]:
        model = {"dim": 16, "ffn_dim": 16, "num_heads": 2, "num_layers": 1, "freq_dim": 8}
        grid = {"frames": 1, "height": 8, "width": 8, "rows": 1}
        return {
            "run": {"steps": self.steps, "compilation_cache": str(self.folder / "compiled")},
            "data": {"folder": str(self.data)},
            "planning": {"m_mem": 40, "micro_batches_per_step": 2, "ranks": 4},
            "model": model | {"patch_size": [1, 4, 4]},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "final_fraction": 1.0},
            "checkpoint": {"every": EVERY},
            "validation": {"share": 0.1, "every": 9},
            "sampling": {"every": 13, "steps": 2, "grids": [grid]},
        }

    def flags(self, name: str) -> list[str]:
        """The command line of a run."""
        return ["--config", str(self._config), "--run.folder", str(self.folder / name)]

    def start(self, name: str, processes: int = 1, from_shell: bool = False) -> list[Started]:
        """Starts a run, on one device a process; a process alone takes the place of all."""
        flags = self.flags(name)
        if processes == 1:
            return [self.starter.start("train", flags, from_shell=from_shell)]
        with socket.create_server(("localhost", 0)) as free:
            address = f"localhost:{free.getsockname()[1]}"
        flags += ["--cluster.coordinator", address, "--cluster.processes", str(processes)]
        flags += ["--cluster.lost_after", str(LOST_AFTER), "--cluster.process"]
        return [self.starter.start("train", [*flags, str(n)]) for n in range(processes)]

    def reference(self) -> list[dict[str, Any]]:
        """Metrics of a run that is never stopped."""
        (run,) = self.start("reference")
        if status := run.wait(PATIENCE):
            raise RuntimeError(f"the run that is never stopped ended with {status}: {run.stderr}")
        return rows_of(self.folder / "reference")

    def metrics(self, name: str) -> Path:
        """The file of a run's metrics."""
        return self.folder / name / "metrics.jsonl"

    def kill(self, name: str, chance: random.Random, processes: int = 1) -> Kill | None:
        """Starts or continues a run and interrupts it; None if it ended before."""
        phase = chance.choices(PHASES, _WEIGHTS)[0]
        if processes > 1 and phase == "start":  # they wait five minutes for one that never joins
            phase = "compile"
        number = chance.choice(_SIGNALS)
        before, began = saved_step(self.folder / name), time.monotonic()
        runs = self.start(name, processes, from_shell=phase == "start" and chance.random() < 0.5)
        reached = runs[0].wait_for(self._trigger(name, phase, before, chance), PATIENCE)
        time.sleep(chance.uniform(0, 0.05))
        victim = chance.choice(runs)
        status = interrupt(victim, number) if reached else victim.wait(PATIENCE)
        others = [each for each in runs if each is not victim]
        faults = self._end_of_others(others, number, reached)
        if not reached and status == 0:
            return None
        faults += faults_of_end(victim, number if reached else "", status)
        faults += faults_of_start(runs[0], before)
        step, saved = last_step(self.metrics(name)), saved_step(self.folder / name)
        if max(step, before) - saved > 2 * EVERY:
            faults.append(f"{step - saved} steps are lost")
        if saved < before:
            faults.append(f"the checkpoint of step {before} is gone")
        seconds = round(time.monotonic() - began, 2)
        return Kill(name, processes, phase, number, step, saved, status, seconds, faults)

    def _trigger(
        self, name: str, phase: str, before: int, chance: random.Random
    ) -> Callable[[], bool]:
        """Says when the run is in a phase."""
        folder, metrics = self.folder / name, self.metrics(name)
        environment = folder / "environment.json"
        began, starts = time.monotonic(), times_started(environment)
        if phase == "start":
            delay = chance.uniform(0, 3)
            return lambda: time.monotonic() - began > delay
        if phase == "compile":
            return lambda: times_started(environment) > starts
        if phase == "saving":
            begun = chance.randrange(1, 4) * EVERY + before
            return lambda: any(
                int(path.name.split(".")[0]) >= begun
                for path in (folder / "checkpoints").glob("*.orbax-checkpoint-tmp*")
            )
        due = {"validation": 9, "drawing": 13}.get(phase, 1)
        step = (before // due + chance.randrange(1, 3 if due > 1 else 30)) * due
        step = self.steps if phase == "end" and before > self.steps // 2 else step
        old = file_number(metrics)  # a start replaces the file
        return lambda: file_number(metrics) != old and last_step(metrics) >= min(step, self.steps)

    def _end_of_others(self, others: Sequence[Started], name: str, reached: bool) -> list[str]:
        faults = []
        for other in others:
            status = other.wait(PATIENCE)
            if status is None:
                other.kill()
                faults.append("a process waits for one that has ended")
            elif reached and name != "SIGTERM":
                lines = errors_of(other.stderr)
                # The process that was lost may have been the one that does not say so.
                if len(lines) != 1 or status not in (0, 1, 2):
                    faults.append(f"another process ended with {status} and {lines}")
        return faults

    def finish(self, name: str, expected: list[dict[str, Any]], exact: bool) -> list[str]:
        """Continues a run until its end, and compares it with the one never stopped."""
        (run,) = self.start(name)
        if (status := run.wait(PATIENCE)) != 0:
            return [f"the run cannot be continued: {status}, {errors_of(run.stderr)}"]
        return differences(rows_of(self.folder / name), expected, exact)


def interrupt(run: Started, name: str) -> int | None:
    """Sends a signal and returns the exit status; a stopped run is killed at last."""
    run.signal(signal.Signals[name])
    if name == "SIGSTOP":
        time.sleep(0.5)
        run.kill()
    return run.wait(PATIENCE)


def faults_of_end(run: Started, name: str, status: int | None) -> list[str]:
    """What is wrong with the end of a run that got a signal."""
    faults = []
    if name == "SIGTERM" and status not in (0, 143, -15):
        faults.append(f"SIGTERM gave status {status}")
    if not name:
        faults.append(f"the run ended by itself with {status}: {errors_of(run.stderr)}")
    if "Traceback" in run.stderr:
        faults.append(f"a traceback: {run.stderr.strip().splitlines()[-1]}")
    return faults


def faults_of_start(run: Started, before: int) -> list[str]:
    """Whether a run began where its newest whole checkpoint stands."""
    said = [line for line in run.stdout.splitlines() if "weights:" in line]
    expected = f"checkpoint of step {before} " if before else "new, drawn with"
    return [] if not said or expected in said[0] else [f"began from {said[0]}, not {expected}"]


def errors_of(stderr: str) -> list[str]:
    """The lines of stderr that are no warnings, of the run or of the server that forks it."""
    passed = ("warning: ", "  warnings.warn(")
    return [
        line
        for line in stderr.splitlines()
        if line and not line.startswith(passed) and "resource_tracker: " not in line
    ]


def saved_step(folder: Path) -> int:
    """The step of the newest whole checkpoint of a run; 0 for none."""
    places = (folder / "checkpoints").glob("*")
    steps = sorted((int(each.name) for each in places if each.name.isdigit()), reverse=True)
    return next((step for step in steps if not damage(folder / "checkpoints" / str(step))), 0)


def last_step(metrics: Path) -> int:
    """The last step in a file of metrics, without a torn last line."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - _LONGEST_LINES))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def file_number(path: Path) -> int:
    """The number of a file in its file system; 0 if it does not exist."""
    return path.stat().st_ino if path.exists() else 0


def times_started(environment: Path) -> int:
    """How often a run has been started and has reached compilation."""
    try:
        return len(json.loads(environment.read_text()))
    except FileNotFoundError:
        return 0


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, with their validations."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def differences(
    found: list[dict[str, Any]], expected: list[dict[str, Any]], exact: bool
) -> list[str]:
    """How the metrics of a run differ from those of one never stopped.

    Args:
      found: lines of metrics.
      expected: lines of metrics.
      exact: whether losses must agree bit for bit; else within 1e-4, as on other devices.
    """
    ours, theirs = (
        [[row[name] for name in COMPUTED] for row in rows if not is_validation(row)]
        for rows in (found, expected)
    )
    faults = []
    if [row[0] for row in ours] != [row[0] for row in theirs]:
        faults.append("steps are missing or repeated")
    for name, of_run in (("samples", ours), ("validations", validations(found))):
        of_other = theirs if name == "samples" else validations(expected)
        if len(of_run) != len(of_other) or not all(map(_agree(exact), of_run, of_other)):
            faults.append(f"{name} or their losses differ")
    return faults


def validations(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Step and loss of each validation."""
    return [[row["step"], row["validation/loss"]] for row in rows if is_validation(row)]


def _agree(exact: bool) -> Callable[[list[Any], list[Any]], bool]:
    def agree(one: list[Any], other: list[Any]) -> bool:
        near = (abs(a - b) <= 1e-4 * max(abs(a), abs(b)) for a, b in zip(one, other, strict=True))
        return one == other if exact else all(near)

    return agree
