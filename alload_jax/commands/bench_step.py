"""`alload bench step`: training steps, by rematerialisation, against PyTorch, by policy."""

import argparse
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from alload_jax.commands import bench_layouts
from alload_jax.commands.bench_models import (
    MODELS,
    TEXT,
    config_fields,
    shape_of,
    training_fields,
)
from alload_jax.commands.bench_output import (
    gigabytes,
    markdown_table,
    require_counts,
    require_place,
    typed,
)
from alload_jax.commands.bench_process import measured
from alload_jax.errors import InputError
from alload_jax.planning.architectures.registry import from_fields

HELP = "Training steps of a Wan-shaped model: against diffusers in PyTorch, or by planning policy."

_COMMAND = "alload bench step"
_WIDTH = 150
_POLICIES = ("full", "attention", "matmuls_and_attention", "none")
"""As in `model.remat`, whose module would import JAX."""

_TORCH_CASES: tuple[dict[str, Any], ...] = (
    {"precision": "bf16_copy", "attention": "cudnn", "compile": "blocks", "remat": "full"},
    {"precision": "bf16_copy", "attention": "cudnn", "compile": True, "remat": "full"},
    {"precision": "bf16_copy", "attention": "flash", "compile": "blocks", "remat": "full"},
    {"precision": "autocast", "attention": "cudnn", "compile": "blocks", "remat": "full"},
    {"precision": "bf16_copy", "attention": "cudnn", "compile": "blocks", "remat": "none"},
)
"""PyTorch at its best is not known beforehand: all of these are measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add("--model", choices=tuple(MODELS), default="1.3b", help="Wan 2.1's; tiny is for trying")
    add("--layers", type=int, help="fewer layers than the model has")
    add("--batch", type=int, default=1, help="rows (default 1)")
    add(
        "--latents",
        nargs=3,
        type=int,
        metavar=("FRAMES", "HEIGHT", "WIDTH"),
        default=(21, 60, 104),
        help="of a row; default 21 60 104, 81 frames of 480×832: 32,760 tokens",
    )
    add("--remat", nargs="+", choices=_POLICIES, default=_POLICIES, help="default: all")
    add("--residual", nargs="+", choices=("compute", "float32"), default=("compute",))
    add("--against", choices=("diffusers",), help="also diffusers' model in PyTorch")
    add(
        "--torch-cases",
        nargs="+",
        type=int,
        metavar="N",
        help=f"which of the {len(_TORCH_CASES)} PyTorch variants, from 0; default: all",
    )
    bench_layouts.add_arguments(parser)
    add("--steps", type=int, default=6, help="timed steps")
    add("--out", default="step.json", help="written after each measurement")


def run(options: argparse.Namespace) -> int:
    """Measures each case in a process of its own, prints a table, writes JSON."""
    out = Path(options.out)
    require_place(_COMMAND, "--out", out)
    require_counts(
        _COMMAND,
        batch=options.batch,
        steps=options.steps,
        layers=options.layers,
        latents=min(options.latents),
    )
    bench_layouts.check(options)
    if options.workload or options.same:
        return bench_layouts.run(
            options, training_fields(shape_of(options.model, options.layers)), measured
        )
    for module in ("torch", "diffusers") if options.against else ():
        if importlib.util.find_spec(module) is None:
            raise InputError(
                f"alload bench step: --against diffusers needs {module}; "
                "install alload-jax[parity], or leave the flag out"
            )
    cases = list(_cases(options))
    content: dict[str, Any] = {
        "command": typed(),
        "model": shape_of(options.model, options.layers),
        "batch": options.batch,
        "latents": list(options.latents),
        "cases": [],
    }
    console = Console(soft_wrap=True, width=_WIDTH)
    for name, module, settings in cases:
        result = measured(module, settings)
        content["cases"].append({"name": name, **result})
        console.print(f"{name}: {_outcome(result)}")
        # After each, so that a failure loses nothing that was measured.
        out.write_text(json.dumps(content, indent=1) + "\n")
    console.print(_table(content))
    print(f"written: {out}")
    return 0 if any("seconds" in case for case in content["cases"]) else 1


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, module, settings) of each measurement."""
    model = shape_of(options.model, options.layers)
    shared = {"batch": options.batch, "latents": list(options.latents), "steps": options.steps}
    for residual in options.residual:
        for remat in options.remat:
            fields = training_fields(model, remat, residual)
            name = f"alload, keep {remat}" + (", float32 residual" * (residual == "float32"))
            yield name, "alload_jax.bench.step", shared | {"model": fields, "warmup": 2}
    if not options.against:
        return
    theirs = {k: v for k, v in model.items() if k not in ("num_heads", "head_dim")}
    theirs |= {"num_attention_heads": model["num_heads"], "attention_head_dim": model["head_dim"]}
    for number in options.torch_cases or range(len(_TORCH_CASES)):
        if not 0 <= number < len(_TORCH_CASES):
            raise InputError(
                f"alload bench step: --torch-cases {number} is unknown; "
                f"there are 0 to {len(_TORCH_CASES) - 1}"
            )
        case = _TORCH_CASES[number]
        compiled = "whole" if case["compile"] is True else case["compile"]
        name = f"diffusers, {case['precision']}, {case['attention']}, compiled {compiled}"
        name += f", checkpointing {case['remat']}"
        settings = shared | case | {"model": theirs, "text_length": TEXT["length"], "warmup": 2}
        yield name, "benchmarks.torch_step", settings


def _outcome(result: dict[str, Any]) -> str:
    if "error" in result:
        return result["error"]
    return f"{result['seconds']:.3f} s, at most {gigabytes(result.get('peak_bytes'))}"


def _table(content: dict[str, Any]) -> Table:
    latents = "×".join(map(str, content["latents"]))
    title = f"one training step, {content['batch']}×{latents} latents"
    table = markdown_table(
        title, ("", "s", "tokens/s", "model TFLOP/s", "most memory", "to compile, s")
    )
    architecture, batch = from_fields(config_fields(content["model"])), content["batch"]
    for case in content["cases"]:
        if "error" in case:
            table.add_row(case["name"], case["error"])
            continue
        seconds = case["seconds"]
        flops = architecture.step_flops(np.full(batch, case["tokens"] // batch))
        table.add_row(
            case["name"],
            f"{seconds:.3f}",
            f"{case['tokens'] / seconds:,.0f}",
            f"{flops / seconds / 1e12:.0f}",
            gigabytes(case.get("peak_bytes")),
            f"{case.get('compile_seconds', case.get('warmup_seconds', 0)):.0f}",
        )
    return table
