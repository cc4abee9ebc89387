"""Says what training steps hold and move on a GPU, from programs that XLA compiles without one.

    python benchmarks/compiled_step.py

`bytes` is what the state and the gradient's program take together, and `host` what the program
takes of the host's memory. `moved` are the bytes that its kernels must read and write, by part and
pass, matrix products and fused attention left out; for layers that are compiled one by one alone,
since a loop's passes are not counted. See `benchmarks/gpu_target.py` for what the programs lack.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpu_target
from compiled_gradient import compiled_gradient
from step_parts import CLIP, IMAGES, Case

from alload_jax.bench.step import training_spec
from alload_jax.bench.step_profile.attribution import PRODUCTS, attributions
from alload_jax.bench.step_profile.hlo import read_program
from alload_jax.commands.bench_models import MODELS, model_fields, training_fields
from alload_jax.errors import run_command
from alload_jax.models.families import config_from_fields
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.sharding.xla_flags import set_xla_flags

CASES = (
    Case(*IMAGES, "matmuls_and_attention", unrolled=True),
    Case(*CLIP, "full"),
    Case(*CLIP, "offload_attention"),
    Case(*CLIP, "offload_feed_forward_and_attention"),
    Case(*CLIP, "attention"),
    Case(*CLIP, "feed_forward_and_attention"),
    Case(*CLIP, "matmuls_and_attention", unrolled=True),
    Case(*CLIP, "norms_matmuls_and_attention", unrolled=True),
    Case(*CLIP, "none", unrolled=True),
)


def moved(text: str) -> dict[str, float]:
    """Bytes that kernels move by part and pass, without products and fused attention."""
    program, found = read_program(text), defaultdict[str, float](float)
    for name, each in attributions(program).items():
        views = program.executed[name][0].opcode == "bitcast"
        if not views and each.part != PRODUCTS and each.attention is None:
            found[" ".join(filter(None, (each.part, each.detail)))] += each.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def measured(case: Case, fields: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """What a case's step holds and moves."""
    chosen = training_fields(dict(fields), case.remat, scan_layers=not case.unrolled)
    with gpu_target.traced_for(device):
        spec = training_spec(config_from_fields(chosen))
        mesh = make_mesh(MeshConfig(), [device])
        gradient = compiled_gradient(spec, mesh, case.rows, case.latents)
    found = gradient.program.memory_analysis()
    row = {"name": case.name, **case._asdict()}
    row |= {"bytes": gradient.bytes, "temporary": found.temp_size_in_bytes}
    row["host"] = found.host_temp_size_in_bytes
    return row | ({"moved": moved(gradient.program.as_text())} if case.unrolled else {})


def main(argv: list[str]) -> int:
    """Compiles the cases and writes the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=gpu_target.KINDS, default="h200")
    parser.add_argument("--model", choices=tuple(MODELS), default="1.3b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--out", type=Path, default="compiled_step.json")
    options = parser.parse_args(argv)
    gpu_target.require_no_backend_but_cpu()
    set_xla_flags()
    device = gpu_target.device(options.device)
    fields = model_fields(options.model, options.layers)
    result: dict[str, Any] = {
        **gpu_target.heading(device, ["flax"]),
        "model": fields,
        "cases": [],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")  # or fails before it compiles
    for case in CASES:
        row = measured(case, fields, device)
        result["cases"].append(row)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        total = sum(row.get("moved", {}).values())
        words = f", moves {total / 1e9:.1f} GB beside products and attention" if total else ""
        print(f"{case.name}: {row['bytes'] / 1e9:.1f} GB{words}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
