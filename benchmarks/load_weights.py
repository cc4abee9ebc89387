"""Measures the host memory that reading weights needs in addition to the weights themselves.

    python benchmarks/load_weights.py --out benchmarks/results/load_weights_cpu.json

Writes a transformer folder of random weights (Wan 2.1's 1.3B: 5.7 GB in float32) to a temporary
folder, then reads it onto the CPU in a new process and samples its anonymous memory. Pages of the
files do not count because the kernel can drop them at any time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import abstract_model, config_from_fields, family_of
from alload_jax.models.weights import load_weights, save_weights
from alload_jax.sharding.mesh import MeshConfig, make_mesh


def model_config(layers: int) -> ModelConfig:
    """Config of Wan 2.1's 1.3B with `layers` layers."""
    shape = {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": layers}
    return config_from_fields(shape | {"in_channels": 16, "text": {"dim": 4096, "length": 512}})


def anonymous_bytes() -> int:
    """Bytes of this process's memory that are not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure(folder: str, layers: int) -> dict[str, Any]:
    """Reads the folder and returns bytes of the weights and the peak of additional memory."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    before, most, done = anonymous_bytes(), 0, threading.Event()

    def track_peak() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, anonymous_bytes())

    tracker = threading.Thread(target=track_peak)
    tracker.start()
    begin = time.perf_counter()
    params = jax.block_until_ready(load_weights(folder, model_config(layers), mesh))
    seconds = time.perf_counter() - begin
    done.set()
    tracker.join()
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    config = model_config(layers)
    return {
        "layers": layers,
        "weights_bytes": weights,
        "largest_tensor_bytes": max(
            4 * int(np.prod(t.shape)) for t in family_of(config).tensors(config, "diffusers")
        ),
        "peak_beside_weights_bytes": most - before - weights,
        "seconds": seconds,
    }


def random_params(layers: int) -> Any:
    """Random weights, which cannot be compressed or deduplicated."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape, np.float32),
        abstract_model(model_config(layers)).params,
    )


def main() -> None:
    """Writes the folder, reads it in a separate process and writes the result."""
    parser = benchmark_parser(__doc__, "load_weights.json")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        print(json.dumps(measure(options.folder, options.layers)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "transformer"
        save_weights(folder, random_params(options.layers), model_config(options.layers))
        command = [sys.executable, __file__, "--layers", str(options.layers)]
        done = subprocess.run(
            [*command, "--folder", str(folder)], stdout=subprocess.PIPE, text=True, check=True
        )
    found = json.loads(done.stdout.splitlines()[-1])
    Record(options.out, ["jax", "safetensors"], **found).write()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
