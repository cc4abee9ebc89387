"""Measures weak scaling of packed steps with FSDP on 1, 2, 4, ... GPUs of this host.

    python benchmarks/weak_scaling.py --out benchmarks/results/weak_scaling_h200.json

Every GPU has the same row: samples of 81 frames of 480×832, 32,760 tokens each. Parameters,
gradients and optimizer state are sharded over all GPUs. `--flags` compares XLA's options: each
value is a comma-separated list of `name=value` that replaces the flags set by `train.py`.
"""

import argparse
import statistics
import sys

from alload_jax.bench.harness import (
    MODELS,
    Record,
    benchmark_parser,
    measured,
    model_fields,
    training_fields,
)
from alload_jax.errors import run_command
from alload_jax.files import Json
from alload_jax.sharding.host_memory import OVERLAP_FLAGS

SHARED = ("date", "device", "driver", "versions")


def main(argv: list[str]) -> int:
    """Measures all cases, prints a line for each and writes JSON."""
    parser = benchmark_parser(__doc__, "weak_scaling.json")
    add = parser.add_argument
    add("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--model", choices=tuple(MODELS), default="1.3b")
    add("--layers", type=int)
    add("--shape", type=int, nargs=3, default=[81, 480, 832], help="frames, height, width")
    add("--m-mem", type=int, default=65_536)
    add("--steps", type=int, default=6)
    add("--flags", nargs="+", help="flags of XLA; default: those set by train.py")
    options = parser.parse_args(argv)
    model = training_fields(model_fields(options.model, options.layers))
    record = Record(options.out, model=model, shape=options.shape, m_mem=options.m_mem, cases=[])
    default = ",".join(f"{name}={value}" for name, value in OVERLAP_FLAGS.items())
    for flags in options.flags or [default]:
        for devices in options.devices:
            case = measure(options, model, devices, flags)
            record.content |= {key: case.pop(key) for key in SHARED if key in case}
            record.add({"devices": devices, "flags": flags} | case)
            print(line(record.content["cases"]), flush=True)
    return 0


def measure(options: argparse.Namespace, model: Json, devices: int, flags: str) -> Json:
    """Measures steps on `devices` devices with the XLA flags."""
    settings = {
        "model": model,
        "planning": {"policy": "first_fit", "m_mem": options.m_mem},
        "workload": None,
        "shape": options.shape,
        "samples": 40 * devices,
        "one_aspect": True,
        "steps": options.steps,
        "fsdp": devices,
    }
    visible = ",".join(map(str, range(devices)))
    xla_flags = " ".join(f"--{flag}" for flag in flags.split(",") if flag)
    variables = {"CUDA_VISIBLE_DEVICES": visible, "XLA_FLAGS": xla_flags}
    found = measured("alload_jax.bench.balance", settings, variables)
    if "seconds" in found:
        found["median_seconds"] = statistics.median(found["seconds"])
    return found


def line(cases: list[Json]) -> str:
    """The last case as text, with its scaling efficiency against the first with its flags."""
    case = cases[-1]
    if "error" in case:
        return f"{case['devices']} devices: {case['error']}"
    first = next(c for c in cases if c["flags"] == case["flags"])
    efficiency = first.get("median_seconds", case["median_seconds"]) / case["median_seconds"]
    return (
        f"{case['devices']} devices: {case['median_seconds']:.3f} s per step, "
        f"{efficiency:.1%} scaling efficiency"
        f" ({case['flags'] or 'no flags'}; compilation {case['compile_seconds']:.0f} s)"
    )


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
