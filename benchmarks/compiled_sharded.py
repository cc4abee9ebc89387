"""Says what steps on two GPUs hold on each, from programs that XLA compiles without any.

    python benchmarks/compiled_sharded.py

A few layers of a model, with a row for each GPU or one for both, on meshes of which each has
another axis of two. `temporary` is what the gradient's program takes beside its arguments. See
`benchmarks/gpu_target.py` for what the programs lack.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import gpu_target
import jax
from jax.sharding import Mesh

from alload_jax.bench.provenance import provenance
from alload_jax.bench.step import random_batch, training_spec
from alload_jax.commands.bench_models import model_fields, training_fields
from alload_jax.errors import run_command
from alload_jax.models.families import config_from_fields
from alload_jax.sharding.mesh import MeshConfig, batch_sharding, make_mesh, replicated
from alload_jax.sharding.xla_flags import set_xla_flags
from alload_jax.training.state import TrainingSpec, abstract_state
from alload_jax.training.step import accumulator_shardings, make_accumulate, zero_accumulator

_TEXT = 512
LAYERS = 4
LATENTS = {"1.3b": (21, 60, 104), "hunyuan-video-1.5": (9, 30, 52)}
"""Of a row, by model."""
AXES = ("data", "fsdp", "tensor")
REMAT = ("attention", "offload_feed_forward_and_attention")


def temporary_bytes(spec: TrainingSpec, mesh: Mesh, latents: tuple[int, ...]) -> int:
    """What the gradient's program takes on a device beside its arguments."""

    def batch_of(latents: tuple[int, ...]) -> Any:
        return jax.eval_shape(lambda: random_batch(spec.model, latents, _TEXT))

    def placed(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            *(tree, shardings),
        )

    state = abstract_state(spec, mesh, 0)
    ranks = mesh.size // mesh.shape["tensor"]
    smallest = batch_of((ranks, *spec.model.patch_size))
    sums = jax.eval_shape(
        lambda: zero_accumulator(spec, mesh, state.weights, smallest, single=True)
    )
    batch = batch_of((ranks, *latents))
    rows, everywhere = batch_sharding(mesh), replicated(mesh)
    program = gpu_target.compiled(
        make_accumulate(spec, mesh, single=True),
        state.weights,
        placed(sums, accumulator_shardings(sums, spec, mesh)),
        placed(batch, jax.tree.map(lambda _: rows, batch)),
        placed(state.key, everywhere),
    )
    return program.memory_analysis().temp_size_in_bytes


def main(argv: list[str]) -> int:
    """Compiles all cases, and writes the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default="compiled_sharded.json")
    options = parser.parse_args(argv)
    gpu_target.require_no_backend_but_cpu()
    set_xla_flags()
    devices = gpu_target.devices_of_host("h200", 2)
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        **provenance(("jax", "jaxlib", "flax", "jax-cuda12-plugin")),
        "compiled_for": devices[0].device_kind,
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
                    held = temporary_bytes(spec, mesh, latents)
                row = {"model": model, "axis": axis, "remat": remat, "temporary": held}
                result["cases"].append(row)
                options.out.write_text(json.dumps(result, indent=1) + "\n")
                print(f"{model}, {axis}: 2, {remat}: {held / 1e9:.2f} GB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
