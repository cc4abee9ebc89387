"""A training step of a Wan-shaped model beside diffusers' model in PyTorch, in one run.

    python benchmarks/diffusers_step.py --out benchmarks/results/diffusers_step_h200.json

measures the cases of `alload bench step` and those of `torch_step.py`, each in a process of its
own, and writes the command's JSON. Needs the extra `parity`.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alload_jax.commands import bench_step
from alload_jax.commands.bench_models import TEXT, shape_of
from alload_jax.errors import InputError, run_command

COMMAND = "diffusers_step.py"
TORCH_STEP = Path(__file__).with_name("torch_step.py")

TORCH_CASES: tuple[dict[str, Any], ...] = (
    {"precision": "bf16_copy", "attention": "cudnn", "compile": "blocks", "remat": "full"},
    {"precision": "bf16_copy", "attention": "cudnn", "compile": True, "remat": "full"},
    {"precision": "bf16_copy", "attention": "flash", "compile": "blocks", "remat": "full"},
    {"precision": "autocast", "attention": "cudnn", "compile": "blocks", "remat": "full"},
    {"precision": "bf16_copy", "attention": "cudnn", "compile": "blocks", "remat": "none"},
)
"""PyTorch at its best is not known beforehand: all of these are measured."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line.

    Raises:
      InputError: a flag makes no sense.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    bench_step.add_case_arguments(parser)
    parser.add_argument(
        "--torch-cases",
        nargs="+",
        type=int,
        metavar="N",
        default=range(len(TORCH_CASES)),
        help=f"which of the {len(TORCH_CASES)} PyTorch variants, from 0; default: all",
    )
    options = parser.parse_args(argv)
    bench_step.require_usable(COMMAND, options)
    for number in options.torch_cases:
        if not 0 <= number < len(TORCH_CASES):
            raise InputError(
                f"{COMMAND}: --torch-cases {number} is unknown; "
                f"there are 0 to {len(TORCH_CASES) - 1}"
            )
    return options


def torch_cases(options: argparse.Namespace) -> Iterator[bench_step.Case]:
    """The variants of PyTorch that the flags name."""
    model: dict[str, Any] = shape_of(options.model, options.layers)
    heads = {
        "num_attention_heads": model.pop("num_heads"),
        "attention_head_dim": model.pop("head_dim"),
    }
    shared = bench_step.shared_settings(options)
    shared |= {"model": model | heads, "text_length": TEXT["length"]}
    for number in options.torch_cases:
        case = TORCH_CASES[number]
        compiled = "whole" if case["compile"] is True else case["compile"]
        name = f"diffusers, {case['precision']}, {case['attention']}, compiled {compiled}"
        yield f"{name}, checkpointing {case['remat']}", TORCH_STEP, shared | case


def main(argv: list[str]) -> int:
    """Measures our cases, then PyTorch's."""
    options = parse(argv)
    for module in ("torch", "diffusers"):
        if importlib.util.find_spec(module) is None:
            raise InputError(f"{COMMAND}: it needs {module}; install alload-jax[parity]")
    return bench_step.measure(options, [*bench_step.cases(options), *torch_cases(options)])


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
