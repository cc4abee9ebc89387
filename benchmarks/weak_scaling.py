"""Measures weak scaling of packed steps with FSDP on 1, 2, 4, ... GPUs of this host.

    python benchmarks/weak_scaling.py --out benchmarks/results/weak_scaling_h200.json

Every GPU has the same row: samples of 81 frames of 480×832, 32,760 tokens each. Parameters,
gradients and optimizer state are sharded over all GPUs.
"""

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

SHAPE = (81, 480, 832)
SHARED = ("date", "device", "driver", "versions")


def main(argv: list[str]) -> int:
    """Measures all cases, prints a line for each and writes JSON."""
    parser = benchmark_parser(__doc__, "weak_scaling.json")
    add = parser.add_argument
    add("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--model", choices=tuple(MODELS), default="1.3b")
    add("--layers", type=int)
    add("--m-mem", type=int, default=65_536)
    add("--steps", type=int, default=6)
    options = parser.parse_args(argv)
    model = training_fields(model_fields(options.model, options.layers))
    record = Record(options.out, model=model, shape=SHAPE, m_mem=options.m_mem, cases=[])
    for devices in options.devices:
        settings = {
            "model": model,
            "planning": {"policy": "first_fit", "m_mem": options.m_mem},
            "workload": None,
            "shape": SHAPE,
            "samples": 40 * devices,
            "one_aspect": True,
            "steps": options.steps,
            "fsdp": devices,
        }
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices)))}
        case = measured("alload_jax.bench.balance", settings, visible)
        record.content |= {key: case.pop(key) for key in SHARED if key in case}
        if "seconds" in case:
            case["median_seconds"] = statistics.median(case["seconds"])
        record.add({"devices": devices} | case)
        print(f"{devices} devices: {case.get('median_seconds', case)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
