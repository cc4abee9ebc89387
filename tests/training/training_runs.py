import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


class Runs:
    """Starts train.py on a tiny config, each run in a process of its own.

    Runs share compiled programs, as a restarted run does.
    """

    def __init__(self, folder, data):
        self.folder, self.data = folder, data
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
        return [sys.executable, str(ROOT / "train.py"), "--config", str(self.config), *flags]

    def start(self, *flags, devices=1):
        count = f"--xla_force_host_platform_device_count={devices}"
        environment = os.environ | {"XLA_FLAGS": count, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            self.command(*flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self.folder,
        )

    def run(self, *flags, devices=1):
        process = self.start(*flags, devices=devices)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def metrics(self, name="run"):
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]
