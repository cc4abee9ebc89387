"""A training step of a model beside diffusers' model in PyTorch, in one run.

    python benchmarks/diffusers_step.py --out benchmarks/results/diffusers_step_h200.json

measures the cases of `alload bench step` and those of `torch_step.py`, each in a process of its
own, and writes the command's JSON. Needs the extra `parity`.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from alload_jax.bench.harness import model_fields
from alload_jax.commands import bench_step
from alload_jax.errors import InputError, run_command
from alload_jax.files import Json

COMMAND = "diffusers_step.py"
TORCH_STEP = Path(__file__).with_name("torch_step.py")

_USUAL = {"precision": "bf16_copy", "attention": "cudnn", "compile": "blocks", "remat": "full"}
TORCH_CASES: tuple[Json, ...] = (
    _USUAL,
    _USUAL | {"compile": "whole"},
    _USUAL | {"attention": "flash"},
    _USUAL | {"precision": "autocast"},
    _USUAL | {"remat": "none"},
)
"""PyTorch at its best is not known beforehand: all of these are measured."""
SELECTIVE_CASES: tuple[Json, ...] = (_USUAL | {"remat": "attention"},)
"""Further cases of Wan: selective checkpointing, which keeps the outputs of attention."""
MASKED_CASES: tuple[Json, ...] = (_USUAL | {"attention": "default", "masked": True},)
"""Further cases of models whose attention has masks: as diffusers has it."""


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
        help="which of the PyTorch variants, from 0; default: all",
    )
    options = parser.parse_args(argv)
    bench_step.require_usable(COMMAND, options)
    known = range(len(variants(options.model)))
    options.torch_cases = known if options.torch_cases is None else options.torch_cases
    for number in options.torch_cases:
        if number not in known:
            raise InputError(
                f"{COMMAND}: --torch-cases {number} is unknown; there are 0 to {known[-1]}"
            )
    return options


def variants(model: str) -> tuple[Json, ...]:
    """The variants of PyTorch for a model of `harness.MODELS`."""
    further = MASKED_CASES if _kind(model) == "hunyuan_video" else SELECTIVE_CASES
    return TORCH_CASES + further


def torch_cases(options: argparse.Namespace) -> Iterator[bench_step.Case]:
    """The variants of PyTorch that the flags name."""
    shared = bench_step.shared_settings(options) | {"kind": _kind(options.model)}
    shared["model"] = diffusers_arguments(model_fields(options.model, options.layers))
    for number in options.torch_cases:
        case = variants(options.model)[number]
        name = f"diffusers, {case['precision']}, {case['attention']}, compiled {case['compile']}"
        name += ", masks" * case.get("masked", False)
        yield f"{name}, checkpointing {case['remat']}", TORCH_STEP, shared | case


def diffusers_arguments(model: Json) -> Json:
    """Arguments of diffusers' class for a model; its other defaults are the published model's."""
    heads = model["num_heads"]
    arguments = {"num_attention_heads": heads, "attention_head_dim": model["dim"] // heads}
    arguments |= {"num_layers": model["num_layers"]}
    if model.get("family") == "hunyuan_video":
        return arguments | {"mlp_ratio": model["ffn_dim"] / model["dim"]}
    return arguments | {"ffn_dim": model["ffn_dim"]}


def _kind(model: str) -> str:
    return model_fields(model).get("family", "wan")


def main(argv: list[str]) -> int:
    """Measures our cases, then PyTorch's."""
    options = parse(argv)
    for module in ("torch", "diffusers"):
        if importlib.util.find_spec(module) is None:
            raise InputError(f"{COMMAND}: it needs {module}; install alload-jax[parity]")
    return bench_step.measure(options, [*bench_step.cases(options), *torch_cases(options)])


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
