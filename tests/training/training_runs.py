import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import yaml
from patience import PATIENCE

ROOT = Path(__file__).parents[2]


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
            "model": {
                "dim": 16,
                "ffn_dim": 16,
                "num_heads": 2,
                "num_layers": 1,
                "freq_dim": 8,
                "patch_size": [1, 4, 4],
            },
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
        with socket.create_server(("localhost", 0)) as free:
            address = f"localhost:{free.getsockname()[1]}"
        together = ("--cluster.coordinator", address, "--cluster.processes", str(processes))
        return [
            self.start(*patient, *flags, *together, "--cluster.process", str(number))
            for number in range(processes)
        ]

    def hold_clocks(self, monkeypatch):
        """Holds the clocks of runs that start from now on; returns what starts them."""
        begins = self.folder / "time begins"
        begins.unlink(missing_ok=True)
        monkeypatch.setattr(self, "program", Path(__file__).with_name("held_clock.py"))
        monkeypatch.setenv("TIME_BEGINS", str(begins))
        return begins.touch

    def run(self, *flags, devices=1):
        process = self.start(*flags, devices=devices)
        out, err = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

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
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def lines_of(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def errors(stderr):
    """The lines of a run's stderr that are no warnings."""
    return [line for line in stderr.splitlines() if not line.startswith("warning: ")]
