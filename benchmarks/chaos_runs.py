"""Runs that are interrupted in every phase and continued, until they end as one never stopped."""

import json
import random
import re
import shutil
import signal
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml
from chaos_phases import Aim, read_marker, read_seconds
from chaos_starts import Started, Starter
from safetensors.numpy import load_file

from alload_jax.config import read_config
from alload_jax.data.datasets.digits import Digits
from alload_jax.data.prepare.encoders import ByteText
from alload_jax.data.store import StoreWriter
from alload_jax.files import Json
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import abstract_model
from alload_jax.models.weights import save_weights
from alload_jax.training.checkpoint_files import damage
from alload_jax.training.run_files import is_validation

EVERY, STEPS = 4, 60
"""Steps between checkpoints, as in chaos_runs.yaml, and of a run."""
COMPUTED = ("step", "epoch", "loss", "grad_norm", "samples", "skipped", "tokens", "learning_rate")
PATIENCE = 240.0
_LONGEST_LINES = 8192
LOST_AFTER = 20.0
_RESTORE = 0.2
"""Seconds of a restore, which runs that are never stopped have none of."""
_Sections = dict[str, Json]


class Variant(NamedTuple):
    """Runs of one config.

    Attributes:
      sections: of the config.
      processes: of which a start has one of these numbers; several compute the same up to rounding.
      export: the command that writes its weights for others; none where others lack such models.
    """

    sections: _Sections
    processes: tuple[int, ...] = (1,)
    export: tuple[str, ...] = ()


_FULL = "packed rows, loader processes"
"""Trains all of the model of text, of which another trains adapters."""
_GIVEN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
_BASE: _Sections = _GIVEN["base"]
VARIANTS = {
    name: Variant(
        fields["sections"], tuple(fields.get("processes", (1,))), tuple(fields.get("export", ()))
    )
    for name, fields in _GIVEN["variants"].items()
}


class Kill(NamedTuple):
    """One interruption and what was left.

    Attributes:
      processes: processes of the run.
      aim: the phase that was aimed at.
      phases: those that were open when the signal came, as the run has noted.
      signal: name of the signal; SIGSTOP is followed by SIGKILL.
      step: the last step in metrics.jsonl.
      saved: step of the newest whole checkpoint; 0 for none.
      status: exit status, negative after a signal.
      seconds: from the start of the program until all its processes had ended.
      faults: what is not as it should be, in words.
    """

    processes: int
    aim: str
    phases: tuple[str, ...]
    signal: str
    step: int
    saved: int
    status: int | None
    seconds: float
    faults: list[str]


class Campaign:
    """Interrupts runs in a folder.

    Attributes:
      folder: where all is written.
      data: the data folder of the first variant.
      steps: of each run.
    """

    def __init__(self, folder: Path, steps: int = STEPS):
        self.folder, self.data, self.steps = folder, folder / "digits", steps
        folder.mkdir(parents=True, exist_ok=True)
        for name, variant in VARIANTS.items():
            self._config(name).write_text(json.dumps(self._settings(variant)))
        if not (folder / "weights").exists():
            config = read_config(self.flags("full", _FULL), "train.py")
            _write_inputs(folder, config.model)
        self.starter = Starter(folder / "output")

    def _config(self, variant: str) -> Path:
        return self.folder / f"{_file_name(variant)}.yaml"

    def _settings(self, variant: Variant) -> Json:
        config: _Sections = {name: dict(values) for name, values in _BASE.items()}
        config["run"] |= {"steps": self.steps, "compilation_cache": str(self.folder / "compiled")}
        for section, values in variant.sections.items():
            config[section] = config.get(section, {}) | values
        for section, key in (("data", "folder"), ("run", "initial_weights")):
            if key in config[section]:
                config[section][key] = str(self.folder / config[section][key])
        return config

    def flags(self, name: str, variant: str = "classes") -> list[str]:
        """The command line of a run."""
        return ["--config", str(self._config(variant)), "--run.folder", str(self.folder / name)]

    def start(
        self, name: str, variant: str, processes: int = 1, victim: int = 0, aim: Aim | None = None
    ) -> list[Started]:
        """Starts a run, on one device a process, of which one interrupts itself."""
        flags = self.flags(name, variant)
        if processes > 1:
            with socket.create_server(("localhost", 0)) as free:
                address = f"localhost:{free.getsockname()[1]}"
            flags += ["--cluster.coordinator", address, "--cluster.processes", str(processes)]
            flags += ["--cluster.lost_after", str(LOST_AFTER), "--cluster.process"]
        numbered = [[*flags, str(n)] for n in range(processes)] if processes > 1 else [flags]
        return [
            self.starter.start("train", each, aim=aim if number == victim else None)
            for number, each in enumerate(numbered)
        ]

    def reference(self, variant: str = "classes") -> Path:
        """The folder of a run that is never stopped, with the seconds of its phases.

        It is run twice: the first time, programs are compiled, and both must be the same.
        """
        first, name = (f"reference-{_file_name(variant)}{end}" for end in ("-first", ""))
        folder = self.folder / name
        if not (folder / "phases.json").exists():
            for each in (first, name):
                shutil.rmtree(self.folder / each, ignore_errors=True)
                (run,) = self.start(each, variant)
                if (status := run.wait(PATIENCE)) != 0:
                    raise RuntimeError(f"a run that is never stopped: {status}, {run.stderr}")
                self._export(each, variant)
            if faults := differences(folder, self.folder / first, exact=True):
                raise RuntimeError(f"two runs of {variant} that are never stopped differ: {faults}")
            (folder / "phases.json").write_text(json.dumps(read_seconds(run.marker)))
        return folder

    def kill(self, name: str, variant: str, phase: str, number: str, chance: random.Random) -> (
        Kill | None
    ):  # fmt: skip
        """Starts or continues a run that gets a signal in a phase; None if it ended before."""
        # Where one ends before it joins, the others wait for it for five minutes.
        processes = 1 if phase == "start" else chance.choice(VARIANTS[variant].processes)
        seconds = json.loads((self.reference(variant) / "phases.json").read_text())
        took = statistics.median(seconds.get(phase, [_RESTORE]))
        time_ = 1 if phase in ("start", "restore", "compile", "end") else chance.randrange(1, 4)
        aim = Aim(phase, time_, chance.uniform(0, 0.9) * took, number)
        before, began = saved_step(self.folder / name), time.monotonic()
        victim = chance.randrange(processes)
        runs = self.start(name, variant, processes, victim, aim)
        killed = runs[victim]
        reached = killed.wait_for(lambda: bool(read_marker(killed.marker).signal), PATIENCE)
        if reached and number == "SIGSTOP":
            time.sleep(0.5)
            killed.kill()
        status = killed.wait(PATIENCE)
        marked = read_marker(killed.marker)
        faults = self._end_of_others(runs, killed, marked.signal)
        if not marked.signal and status == 0 and not faults:
            return None
        faults += faults_of_end(killed, marked.signal, status) + faults_of_start(runs[0], before)
        step = last_step(self.folder / name / "metrics.jsonl")
        saved = saved_step(self.folder / name)
        faults += faults_of_rest(before, step, saved)
        spent = round(time.monotonic() - began, 2)
        return Kill(processes, phase, marked.phases, number, step, saved, status, spent, faults)

    def _end_of_others(self, runs: Sequence[Started], killed: Started, name: str) -> list[str]:
        faults = []
        for other in runs:
            status = other.wait(PATIENCE)
            if status is None:
                other.kill()
                faults.append("a process waits for one that has ended")
            elif other is not killed and name and name != "SIGTERM":
                lines = errors_of(other.stderr)
                # The process that was lost may have been the one that does not say so.
                if len(lines) != 1 or status not in (0, 1, 2):
                    faults.append(f"another process ended with {status} and {lines}")
            if left := other.wait_for_children(PATIENCE):
                faults.append(f"{left} loader processes are left")
        return faults

    def finish(self, name: str, variant: str) -> list[str]:
        """Continues a run until its end, and compares it with the one never stopped."""
        (run,) = self.start(name, variant)
        if (status := run.wait(PATIENCE)) != 0:
            return [f"the run cannot be continued: {status}, {errors_of(run.stderr)}"]
        self._export(name, variant)
        exact = VARIANTS[variant].processes == (1,)
        return differences(self.folder / name, self.reference(variant), exact)

    def _export(self, name: str, variant: str) -> None:
        """Exports a run's weights into its folder, if others have such models."""
        if not (command := VARIANTS[variant].export):
            return
        *words, out = command
        folder = self.folder / name
        flags = [*words, str(folder / "exported" / out), "--checkpoint", str(folder)]
        (folder / "exported").mkdir()
        run = self.starter.start("alload", flags)
        if (status := run.wait(PATIENCE)) != 0:
            raise RuntimeError(f"alload {' '.join(flags)}: {status}, {run.stderr}")


def _file_name(variant: str) -> str:
    return variant.replace(",", "").replace(" ", "_")


def _write_inputs(folder: Path, model: ModelConfig) -> None:
    """Data of classes, of clips and of texts, and weights to begin from."""
    Digits(mix=((1, 8, 8, 64),), frames_per_latent=1).write(folder / "digits")
    mix = ((1, 8, 8, 32), (5, 8, 8, 16), (1, 8, 16, 16))
    Digits(mix=mix, motion="drift", frames_per_latent=1).write(folder / "clips")
    rng, text = np.random.default_rng(0), ByteText(8, 12)
    origin = {"text": text.origin()}
    with StoreWriter(folder / "texts", vae_stride=(1, 1, 1), origin=origin) as writer:
        for number in range(64):
            size = ((1, 4, 4), (2, 4, 4), (1, 4, 8), (3, 4, 8))[number % 4]
            words = f"cat {number}"
            latents = rng.normal(size=(*size, 4)).astype(np.float32)
            writer.add(latents, text.encode(words), size, caption=words)
    shapes = abstract_model(model).params
    values = jax.tree.map(lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(np.float32), shapes)
    save_weights(folder / "weights", values, model)


# ---------------------------------------------------------------- what is left


def faults_of_end(run: Started, name: str, status: int | None) -> list[str]:
    """What is wrong with the end of a run that got a signal."""
    faults = []
    if name == "SIGTERM" and status not in (0, 143, -signal.SIGTERM):
        faults.append(f"SIGTERM gave status {status}")
    if not name:
        faults.append(f"the run ended by itself with {status}: {errors_of(run.stderr)}")
    if "Traceback" in run.stderr:
        faults.append(f"a traceback: {run.stderr.strip().splitlines()[-1]}")
    return faults


def faults_of_start(run: Started, before: int) -> list[str]:
    """Whether a run began where its newest whole checkpoint stands."""
    said = [line for line in run.stdout.splitlines() if "weights:" in line]
    begins = said and "checkpoint of step" not in said[0]
    right = begins if before == 0 else said and f"checkpoint of step {before} " in said[0]
    return [] if not said or right else [f"began from {said[0]}, not step {before}"]


def faults_of_rest(before: int, step: int, saved: int) -> list[str]:
    """What is lost of a run that stood at step `step`, and was saved at step `before`."""
    faults = []
    if (lost := max(step, before) - saved) > 2 * EVERY:
        faults.append(f"{lost} steps are lost")
    if saved < before:
        faults.append(f"the checkpoint of step {before} is gone")
    return faults


def errors_of(stderr: str) -> list[str]:
    """The lines of stderr that are no warnings, of the run, XLA or the server that forks it."""
    passed = re.compile(r"warning: |  warnings\.warn\(|[IW]\d{4} [\d:.]+ +\d+ \w+\.cc:")
    return [
        line
        for line in stderr.splitlines()
        if line and not passed.match(line) and "resource_tracker: " not in line
    ]


def steps_of(folder: Path) -> list[int]:
    """The steps of a run's checkpoints, in order."""
    return sorted(
        int(each.name) for each in (folder / "checkpoints").glob("*") if each.name.isdigit()
    )


def saved_step(folder: Path) -> int:
    """The step of the newest whole checkpoint of a run; 0 for none."""
    whole = (step for step in steps_of(folder)[::-1] if not damage(_checkpoint(folder, step)))
    return next(whole, 0)


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / str(step)


def last_step(metrics: Path) -> int:
    """The last step in a file of metrics, without a torn last line."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - _LONGEST_LINES))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


# ---------------------------------------------------------------- comparison


def differences(found: Path, expected: Path, exact: bool) -> list[str]:
    """How a finished run differs from one that was never stopped.

    Args:
      found: its folder.
      expected: the folder of the other.
      exact: whether losses, arrays, checkpoints and exports must agree bit for bit; else only
        losses are compared, within 1e-4, as on other devices.
    """
    faults = _differences_of_metrics(rows_of(found), rows_of(expected), exact)
    if not exact:
        return faults
    steps = [steps_of(folder) for folder in (found, expected)]
    if steps[0] != steps[1]:
        faults.append(f"there are checkpoints of steps {steps[0]}, not {steps[1]}")

    def exports(folder: Path) -> dict[str, np.ndarray]:
        files = (folder / "exported").rglob("*.safetensors")
        return {name: value for file in files for name, value in load_file(file).items()}

    def bits(value: np.ndarray) -> tuple[Any, ...]:
        return value.shape, value.dtype, value.tobytes()

    for what, read in (("last arrays", last_arrays), ("exports", exports)):
        ours, theirs = read(found), read(expected)
        if ours.keys() != theirs.keys():
            faults.append(f"{what} have other names")
        both = ours.keys() & theirs.keys()
        wrong = [name for name in both if bits(ours[name]) != bits(theirs[name])]
        faults += [f"{what} differ: {min(wrong)} and {len(wrong) - 1} more"] if wrong else []
    return faults


def last_arrays(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of the newest checkpoint of a run, by path."""
    place = _checkpoint(folder, steps_of(folder)[-1])
    state = ocp.PyTreeCheckpointer().restore(place.absolute() / "state")
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def rows_of(folder: Path) -> list[Json]:
    """The lines of a run's metrics, with their validations."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _differences_of_metrics(found: list[Json], expected: list[Json], exact: bool) -> list[str]:
    ours, theirs = (
        [[row[name] for name in COMPUTED] for row in rows if not is_validation(row)]
        for rows in (found, expected)
    )

    def agree(one: list[Any], other: list[Any]) -> bool:
        near = (abs(a - b) <= 1e-4 * max(abs(a), abs(b)) for a, b in zip(one, other, strict=True))
        return one == other if exact else all(near)

    faults = []
    if [row[0] for row in ours] != [row[0] for row in theirs]:
        faults.append("steps are missing or repeated")
    for name, of_run in (("samples", ours), ("validations", _validations(found))):
        of_other = theirs if name == "samples" else _validations(expected)
        if len(of_run) != len(of_other) or not all(map(agree, of_run, of_other)):
            faults.append(f"{name} or their losses differ")
    return faults


def _validations(rows: list[Json]) -> list[list[Any]]:
    """Step and loss of each validation."""
    return [[row["step"], row["validation/loss"]] for row in rows if is_validation(row)]
