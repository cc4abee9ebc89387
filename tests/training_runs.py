import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import jax
import pyarrow as pa
import pyarrow.parquet
import yaml
from patience import PATIENCE, free_port

from alload_jax.config import Config, DataConfig, RunConfig, write_config
from alload_jax.errors import run_command
from alload_jax.models.common.config import TextConfig
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.run import main, training
from alload_jax.sampling import samples
from alload_jax.sharding.mesh import make_mesh
from alload_jax.training import CheckpointConfig, state, step, trainer, validator
from alload_jax.training.checkpoint import Checkpoints
from alload_jax.training.restore import one_device_mesh

ROOT = Path(__file__).parents[1]
WEIGHTS = ROOT / "tests" / "golden" / "wan" / "t2v" / "transformer"
CLASS_MODEL = {"dim": 16, "ffn_dim": 16, "num_heads": 2, "num_layers": 1, "freq_dim": 8}
CLASS_MODEL |= {"patch_size": [1, 4, 4]}
TEXT_MODEL = {"dim": 24, "ffn_dim": 40, "num_heads": 2, "num_layers": 2, "freq_dim": 16}
TEXT_MODEL |= {"in_channels": 4, "text": {"dim": 10, "length": 7}}
"""That of WEIGHTS."""


OF_UPDATES = dict.fromkeys(("optimizer", "ema_decay", "step_weight"))


def of_gradients(make):
    """Keeps what is made of a spec by all but what updates alone depend on."""
    kept = cache(make)
    return lambda spec, *others, **options: kept(spec._replace(**OF_UPDATES), *others, **options)


COMPUTATIONS = [
    mock.patch.object(module, name, kept(getattr(module, name)))
    for kept, module, name in (
        *((cache, training, "training_spec"), (cache, state, "_make_state")),
        *((cache, trainer, "make_update"), (cache, samples, "make_draw")),
        *((of_gradients, trainer, "make_accumulate"), (of_gradients, trainer, "make_is_finite")),
        *((of_gradients, step, "_make_sums"), (of_gradients, validator, "make_measure")),
    )
]
"""Runs that compute the same have the same functions, which are traced once."""


@contextlib.contextmanager
def in_this_process(devices=1):
    """Runs of train.py compute on some devices, and leave the process as it is."""
    some = jax.devices()[:devices]
    with (
        contextlib.ExitStack() as shared,
        mock.patch.object(training, "make_mesh", lambda config: make_mesh(config, some)),
        mock.patch.object(training, "use_compilation_cache"),  # tests have one of their own
        mock.patch.object(training, "gc"),  # which takes long among the objects of tests
        mock.patch.dict(os.environ),  # the program adds to XLA_FLAGS
    ):
        for computation in COMPUTATIONS:
            shared.enter_context(computation)
        yield


def run_here(*argv, devices=1):
    """train.py in this process, with its errors as one line; as a process that has ended."""
    out, err = io.StringIO(), io.StringIO()
    with (
        in_this_process(devices),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = run_command(main, list(argv))
    return subprocess.CompletedProcess(argv, status, out.getvalue(), err.getvalue())


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


COMPUTED = ("step", "epoch", "loss", "grad_norm", "learning_rate", "samples", "skipped")
COMPUTED += ("tokens", "imbalance", "padding")


def computed(folder, names=COMPUTED):
    """What a run has computed in each step of training."""
    return [[row[name] for name in names] for row in metrics_of(folder) if "loss" in row]


def forget_last(folder, step):
    """As if a run had been lost before its last checkpoint, that of `step`, was written."""
    shutil.rmtree(folder / "checkpoints" / str(step))
    (folder / "summary.json").unlink()


OF_TEXT = {"num_layers": 2, "patch_size": (1, 2, 2), "in_channels": 4, "text": TextConfig(6, 4)}
UNTRAINED = WanConfig(**CLASS_MODEL | OF_TEXT)


def save_untrained(folder, **sections):
    """A run of UNTRAINED that is saved at step 7; returns its state."""
    config = Config(RunConfig(str(folder)), DataConfig("none"), model=UNTRAINED, **sections)
    write_config(config, folder / "config.yaml")
    begun = state.init_state(state.training_spec(UNTRAINED), one_device_mesh(), 0)
    begun = begun._replace(ema=jax.tree.map(lambda p: p + 0.01, begun.params))
    identity = {"model": UNTRAINED.architecture()}
    with Checkpoints(folder / "checkpoints", CheckpointConfig(), identity) as checkpoints:
        checkpoints.save(7, begun)
    return begun


class Runs:
    """Starts train.py on a tiny config, each run in a separate process.

    Runs share compiled programs, as a restarted run does.
    """

    def __init__(self, folder, data):
        self.folder, self.data = folder, data
        self.program = ROOT / "train.py"
        self.compiled = data.parent / "compiled"
        self.config = folder / "tiny.yaml"
        self.config.write_text(yaml.safe_dump(self.tiny()))

    def tiny(self):
        return {
            "run": {
                "folder": str(self.folder / "run"),
                "steps": 14,
                "compilation_cache": str(self.compiled),
            },
            "data": {"folder": str(self.data)},
            "planning": {"m_mem": 40, "micro_batches_per_step": 2},
            "model": dict(CLASS_MODEL),
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 2},
            "checkpoint": {"every": 5},
            "sampling": {"steps": 2, "grids": [{"frames": 1, "height": 8, "width": 8, "rows": 1}]},
        }

    def command(self, *flags):
        return [sys.executable, str(self.program), "--config", str(self.config), *flags]

    def start(self, *flags, devices=1):
        xla_flags = os.environ["XLA_FLAGS"].replace("count=8", f"count={devices}")
        environment = os.environ | {"XLA_FLAGS": xla_flags, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            self.command(*flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self.folder,
        )

    def start_together(self, processes, *flags):
        """Starts several processes of one run, with one device each.

        Unless flags say otherwise, none counts as lost because the machine is busy.
        """
        patient = ("--cluster.lost_after", "300")
        address = f"localhost:{free_port()}"
        together = ("--cluster.coordinator", address, "--cluster.processes", str(processes))
        return [
            self.start(*patient, *flags, *together, "--cluster.process", str(number))
            for number in range(processes)
        ]

    def hold_clocks(self, monkeypatch):
        """Holds the clocks of runs that start from now on; returns what starts them."""
        begins = self.folder / "time begins"
        begins.unlink(missing_ok=True)
        monkeypatch.setattr(self, "program", ROOT / "tests" / "training" / "held_clock.py")
        monkeypatch.setenv("TIME_BEGINS", str(begins))
        return begins.touch

    def run(self, *flags, devices=1):
        process = self.start(*flags, devices=devices)
        out, err = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def here(self, *flags, devices=1):
        """The same in this process, in the folder; much cheaper."""
        with contextlib.chdir(self.folder):
            return run_here("--config", str(self.config), *flags, devices=devices)

    def finish(self, *flags, **options):
        """Runs in this process to an end without errors."""
        finished = self.here(*flags, **options)
        assert finished.returncode == 0, finished.stderr
        return finished

    def refused(self, *flags, **options):
        """Runs in this process what must be refused in one line; returns the line."""
        return line_of(self.here(*flags, **options))

    def spoil(self, sample):
        """A copy of the data in which one sample's manifest row has another checksum."""
        shutil.copytree(self.data, self.folder / "spoilt")
        path = self.folder / "spoilt" / "manifest.parquet"
        table = pyarrow.parquet.read_table(path)
        sums = table["checksum"].to_pylist()
        sums[sample] ^= 1
        place = table.column_names.index("checksum")
        table = table.set_column(place, table.schema.field(place), pa.array(sums, pa.uint32()))
        pyarrow.parquet.write_table(table, path)
        return str(self.folder / "spoilt")

    def metrics(self, name="run"):
        return metrics_of(self.folder / name)


class Sections:
    """train.py in this process and folder; changes are sections of the config."""

    def __init__(self, **config):
        self.config = config

    def told(self, *flags, folder="run", devices=1, **changes):
        config = self.config | {"run": self.config["run"] | {"folder": folder}}
        for section, values in changes.items():
            config[section] = config.get(section, {}) | values
        Path("config.yaml").write_text(yaml.safe_dump(config))
        return run_here("--config", "config.yaml", *flags, devices=devices)

    def train(self, *flags, folder="run", **changes):
        """Runs to the end; returns the run's folder."""
        finished = self.told(*flags, folder=folder, **changes)
        assert finished.returncode == 0, finished.stderr
        self.said = finished.stderr
        return Path(folder).absolute()

    def refused(self, **changes):
        """Runs what must be refused in one line; returns the line."""
        return line_of(self.told(**changes))


def line_of(ended):
    """What a run said that was refused in one line."""
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    return ended.stderr


def descendants(pid):
    """The processes that a process has started, and theirs."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    children = [int(child) for found in lists for child in found.split()]
    return children + [each for child in children for each in descendants(child)]


def lines_of(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def errors(stderr):
    """The lines of a run's stderr that are no warnings."""
    return [line for line in stderr.splitlines() if not line.startswith("warning: ")]
