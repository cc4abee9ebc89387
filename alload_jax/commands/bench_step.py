"""`alload bench step`: training steps, by rematerialisation, or by policy."""

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from alload_jax.commands import bench_layouts, bench_profile
from alload_jax.commands.bench_models import MODELS, NAMES, model_fields, training_fields
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
from alload_jax.planning.remat import AUTO_REMAT, RematPolicy, in_words

HELP = "Training steps: by what is kept for the backward pass, by policy, or by part (--profile)."

_WIDTH = 150
_POLICIES = get_args(RematPolicy)

Case = tuple[str, str | Path, dict[str, Any]]
"""A name, the module or script that measures it, and its settings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add_case_arguments(parser)
    bench_profile.add_arguments(parser)
    bench_layouts.add_arguments(parser)


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that say which steps of one shape are measured."""
    add = parser.add_argument
    add("--model", choices=tuple(MODELS), default="1.3b", help=f"{NAMES} (default 1.3b)")
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
    add(
        "--remat",
        nargs="+",
        choices=(*_POLICIES, AUTO_REMAT),
        default=_POLICIES,
        help="what layers keep, as model.remat; default: all but auto",
    )
    add("--memory-budget", type=float, help="GB that --remat auto may fill; default: the device's")
    add("--residual", nargs="+", choices=("compute", "float32"), default=("compute",))
    add(
        "--unrolled",
        action="store_true",
        help="compile each layer by itself, as model.scan_layers: false",
    )
    add("--steps", type=int, default=6, help="timed steps")
    add("--out", default="step.json", help="written after each measurement")


def run(options: argparse.Namespace) -> int:
    """Measures steps of one shape, or (--workload, --same) of the same samples by policy."""
    require_usable("alload bench step", options)
    bench_layouts.check(options)
    bench_profile.check(options)
    if options.profile:
        return bench_profile.run(options, cases(options))
    if not options.workload and not options.same:
        return measure(options, cases(options))
    model = model_fields(options.model, options.layers)
    model = training_fields(model, scan_layers=not options.unrolled)
    return bench_layouts.run(options, model, measured)


def require_usable(command: str, options: argparse.Namespace) -> None:
    """Raises InputError where a flag of `add_case_arguments` makes no sense."""
    require_place(command, "--out", Path(options.out))
    if options.memory_budget is not None and AUTO_REMAT not in options.remat:
        raise InputError(f"{command}: --memory-budget is for --remat auto; give both or neither")
    if options.memory_budget is not None and not 0 < options.memory_budget < math.inf:
        raise InputError(f"{command}: --memory-budget {options.memory_budget}: it must be above 0")
    require_counts(
        command,
        batch=options.batch,
        steps=options.steps,
        layers=options.layers,
        latents=min(options.latents),
    )


def measure(options: argparse.Namespace, cases: Iterable[Case]) -> int:
    """Measures each case in a process of its own, prints a table, writes JSON."""
    out = Path(options.out)
    content: dict[str, Any] = {
        "command": typed(),
        "model": model_fields(options.model, options.layers),
        "batch": options.batch,
        "latents": list(options.latents),
        "cases": [],
    }
    console = Console(markup=False, soft_wrap=True, width=_WIDTH)
    for name, program, settings in cases:
        result = measured(program, settings)
        content["cases"].append({"name": name, **result})
        console.print(f"{name}: {_outcome(result)}")
        # After each, so that a failure loses nothing that was measured.
        out.write_text(json.dumps(content, indent=1) + "\n")
    console.print(_table(content))
    print(f"written: {out}")
    return 0 if any("seconds" in case for case in content["cases"]) else 1


def shared_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What the settings of all cases have in common."""
    latents = list(options.latents)
    return {"batch": options.batch, "latents": latents, "steps": options.steps, "warmup": 2}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Our own: each way of --remat with each of --residual."""
    model, shared = model_fields(options.model, options.layers), shared_settings(options)
    for residual in options.residual:
        for remat in options.remat:
            fields = training_fields(model, remat, residual, not options.unrolled)
            fields["memory_budget"] = options.memory_budget
            name = f"alload, keep {remat}" + (", float32 residual" * (residual == "float32"))
            name += ", unrolled" * options.unrolled
            yield name, "alload_jax.bench.step_process", shared | {"model": fields}


def _outcome(result: dict[str, Any]) -> str:
    if "error" in result:
        return result["error"]
    kept = ""
    if "policies" in result and result["settings"]["model"].get("remat") == AUTO_REMAT:
        kept = f"; auto keeps {in_words(result['policies'])}"
    return f"{result['seconds']:.3f} s, at most {gigabytes(result.get('peak_bytes'))}{kept}"


def _table(content: dict[str, Any]) -> Table:
    latents = "×".join(map(str, content["latents"]))
    title = f"one training step, {content['batch']}×{latents} latents"
    table = markdown_table(
        title, ("", "s", "tokens/s", "model TFLOP/s", "most memory", "to compile, s")
    )
    architecture, batch = from_fields(content["model"]), content["batch"]
    for case in content["cases"]:
        if "error" in case:
            table.add_row(case["name"], case["error"])
            continue
        seconds = case["seconds"]
        tokens = case["tokens"] // batch + case["tokens_beside"]
        flops = architecture.step_flops(np.full(batch, tokens))
        table.add_row(
            case["name"],
            f"{seconds:.3f}",
            f"{case['tokens'] / seconds:,.0f}",
            f"{flops / seconds / 1e12:.0f}",
            gigabytes(case.get("peak_bytes")),
            f"{case.get('compile_seconds', case.get('warmup_seconds', 0)):.0f}",
        )
    return table
