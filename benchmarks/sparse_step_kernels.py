"""Says which kernels a sparse training step of `sparse_step.py` spends its time in.

    python benchmarks/sparse_step_kernels.py --latents 21x60x104 --out kernels.json

XLA runs without CUDA graphs here, which hide kernels from the profiler.
"""

import argparse
import json
import math
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from sparse_step import SPARSE_CASES, add_arguments, compile_all, make_spec, record, set_switches

from alload_jax.bench.device_trace import kernel_seconds
from alload_jax.bench.step import Step
from alload_jax.commands.bench_models import model_fields

NO_GRAPHS = "--xla_gpu_enable_command_buffer="
CASES = SPARSE_CASES[1:2]
LONGEST = 100
GROUPS = (
    ("sparse attention, forward", "block_sparse_attention_forward"),
    ("sparse attention, backward", "block_sparse_attention_d"),
    ("cuDNN attention", r"cudnn|sdpa|fmha|flash|dot_product_attention"),
    ("norms", "layernorm_modulate"),
    ("selection of blocks", r"top_k|topk|pool_blocks|\bselector"),
    ("sorting", "sort|searchsorted"),
    ("moves to and from tiles", r"branch_[1-9].*(gather|select_n)"),
    ("matrix products", "nvjet|gemm|cublas|cutlass|dot_general"),
    ("copies and fills", "Memcpy|Memset|broadcast_fusion|copy"),
    ("other work of conditionals", r"branch_\d|/cond"),
)
"""Names of groups, and patterns of kernels and of the operations that they are for."""


def group_of(name: str) -> str:
    """The first group whose pattern the name has."""
    return next((group for group, pattern in GROUPS if re.search(pattern, name)), "other")


def operations_of(compiled: Any) -> dict[str, str]:
    """The JAX operation that each instruction of a compiled program is for."""
    pattern = r'%?([\w.-]+) = [^\n]*metadata={[^}\n]*op_name="([^"\n]*)"'
    return dict(re.findall(pattern, compiled.as_text()))


def falling(seconds: dict[str, float]) -> list[tuple[str, float]]:
    """Names and seconds, the most first."""
    return sorted(seconds.items(), key=lambda item: -item[1])


def main(argv: list[str]) -> None:
    """Profiles one step of each length and writes the seconds by group and by kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "sparse_step_kernels.json")
    options = parser.parse_args(argv)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_GRAPHS}".strip()
    content = record(options)
    layers = model_fields(options.model, options.layers)["num_layers"]
    step = Step(make_spec("sparse", options))
    for shape, gradient in compile_all(step, options.latents):
        operations, batch = operations_of(gradient), step.batch(shape)
        for case in CASES:
            set_switches(step, case.densities(layers), 1)
            step.run(gradient, batch)
            seconds, kernels = kernel_seconds(partial(step.run, gradient, batch))
            named = {
                f"{kernel} | {operation} | {operations.get(operation, '')}": spent
                for (kernel, operation), spent in kernels.items()
            }
            groups: dict[str, float] = {}
            for name, spent in named.items():
                groups[group_of(name)] = groups.get(group_of(name), 0.0) + spent
            content["cases"].append(
                {
                    "name": case.name(layers),
                    "tokens": math.prod(shape) // math.prod(step.model.patch_size),
                    "seconds": seconds,
                    "kernel_seconds": sum(kernels.values()),
                    "groups": dict(falling(groups)),
                    "longest": dict(falling(named)[:LONGEST]),
                }
            )
            print({k: v for k, v in content["cases"][-1].items() if k != "longest"}, flush=True)
            Path(options.out).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
