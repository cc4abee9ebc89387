"""Says what steps on two GPUs hold on each, from programs that XLA compiles without any.

    python benchmarks/compiled_sharded.py

A few layers of a model, with a row for each GPU or one for both, on meshes of which each has
another axis of two. `temporary` is what the gradient's program takes beside its arguments. See
`benchmarks/gpu_target.py` for what the programs lack.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import gpu_target
from compiled_gradient import compiled_gradient

from alload_jax.bench.step import training_spec
from alload_jax.commands.bench_models import model_fields, training_fields
from alload_jax.errors import run_command
from alload_jax.models.families import config_from_fields
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.sharding.xla_flags import set_xla_flags

LAYERS = 4
LATENTS = {"1.3b": (21, 60, 104), "hunyuan-video-1.5": (9, 30, 52)}
"""Of a row, by model."""
AXES = ("data", "fsdp", "tensor")
REMAT = ("attention", "offload_feed_forward_and_attention")


def main(argv: list[str]) -> int:
    """Compiles all cases, and writes the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default="compiled_sharded.json")
    options = parser.parse_args(argv)
    gpu_target.require_no_backend_but_cpu()
    set_xla_flags()
    devices = gpu_target.devices_of_host("h200", 2)
    result: dict[str, Any] = {
        **gpu_target.heading(devices[0], ["flax"]),
        "layers": LAYERS,
        "cases": [],
    }
    for model, latents in LATENTS.items():
        for axis in AXES:
            for remat in REMAT:
                fields = training_fields(model_fields(model, LAYERS), remat)
                sizes = {"data": 1} | {axis: 2}
                with gpu_target.traced_for(devices[0]):
                    spec = training_spec(config_from_fields(fields))
                    mesh = make_mesh(MeshConfig(**sizes), devices)
                    ranks = mesh.size // mesh.shape["tensor"]
                    found = compiled_gradient(spec, mesh, ranks, latents)
                held = found.program.memory_analysis().temp_size_in_bytes
                row = {"model": model, "axis": axis, "remat": remat, "temporary": held}
                result["cases"].append(row)
                options.out.write_text(json.dumps(result, indent=1) + "\n")
                print(f"{model}, {axis}: 2, {remat}: {held / 1e9:.2f} GB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
