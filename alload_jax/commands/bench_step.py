"""`alload bench step`: training steps of one shape, by rematerialisation."""

import argparse
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from rich.table import Table

from alload_jax.bench import harness
from alload_jax.commands.flags import ABOVE_0, COUNT, require_place
from alload_jax.errors import InputError
from alload_jax.files import Json
from alload_jax.planning.architecture import from_fields
from alload_jax.planning.remat import AUTO_REMAT, RematPolicy, in_words

HELP = "Training steps: by what is kept for the backward pass, or by part (--profile)."

_POLICIES = get_args(RematPolicy)
_MEASURE = "alload_jax.bench.step_profile.measure"
_ROOFS = "alload_jax.bench.step_profile.roofs"
_LISTED = 12
"""Kernels that a list shows; the JSON has more."""
_NAME = 60

Case = tuple[str, str | Path, Json]
"""A name, the module or script that measures it, and its settings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add_case_arguments(parser)
    add = parser.add_argument
    add(
        "--profile",
        action="store_true",
        help="trace each case and say which parts its time goes to; a picture beside --out",
    )
    add(
        "--keep-trace",
        metavar="DIR",
        help="with --profile: keep the raw traces and the compiled programs in this folder",
    )


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that say which steps of one shape are measured."""
    add = parser.add_argument
    models = f"{harness.NAMES} (default 1.3b)"
    add("--model", choices=tuple(harness.MODELS), default="1.3b", help=models)
    add("--layers", type=COUNT, help="fewer layers than the model has")
    add("--batch", type=COUNT, default=1, help="rows (default 1)")
    add(
        "--latents",
        nargs=3,
        type=COUNT,
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
    add(
        "--matmul",
        nargs="+",
        choices=("dtype", "float8", "auto"),
        default=["dtype"],
        help="what linear layers multiply, as model.matmul (default dtype)",
    )
    add("--memory-budget", type=ABOVE_0, help="GB for --remat auto; default: the device's")
    add(
        "--unrolled",
        action="store_true",
        help="compile each layer by itself, as model.scan_layers: false",
    )
    add("--steps", type=COUNT, default=6, help="timed steps")
    add("--out", default="step.json", help="written after each measurement")


def run(options: argparse.Namespace) -> int:
    """Measures steps of one shape, or profiles them."""
    command = "alload bench step"
    require_usable(command, options)
    if options.keep_trace is not None:
        if not options.profile:
            raise InputError(f"{command}: --keep-trace needs --profile; add it")
        folder = Path(options.keep_trace)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{command}: --keep-trace {folder}: this is a file; name a folder")
    return (profile if options.profile else measure)(options, cases(options))


def require_usable(command: str, options: argparse.Namespace) -> None:
    """Raises InputError where a flag of `add_case_arguments` makes no sense."""
    require_place(command, "--out", Path(options.out))
    if options.memory_budget is not None and AUTO_REMAT not in options.remat:
        raise InputError(f"{command}: --memory-budget is for --remat auto; give both or neither")


def measure(options: argparse.Namespace, cases: Iterable[Case]) -> int:
    """Measures each case in a process of its own, prints a table, writes JSON."""
    results = ({"name": name} | harness.measured(program, given) for name, program, given in cases)
    return record_of(options).measure(results, "name", _outcome, _table)


def record_of(options: argparse.Namespace) -> harness.Record:
    """The JSON of steps of one shape, without any yet."""
    model, latents = harness.model_fields(options.model, options.layers), list(options.latents)
    return harness.Record(options.out, model=model, batch=options.batch, latents=latents, cases=[])


def shared_settings(options: argparse.Namespace) -> Json:
    """What the settings of all cases have in common."""
    latents = list(options.latents)
    return {"batch": options.batch, "latents": latents, "steps": options.steps, "warmup": 2}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Our own: each way of --remat."""
    model, shared = harness.model_fields(options.model, options.layers), shared_settings(options)
    for remat, matmul in itertools.product(options.remat, options.matmul):
        fields = harness.training_fields(model, remat, scan_layers=not options.unrolled)
        fields |= {"memory_budget": options.memory_budget, "matmul": matmul}
        name = f"alload, keep {remat}" + ", unrolled" * options.unrolled
        name += f", {matmul}" * (matmul != "dtype")
        yield name, "alload_jax.bench.step_process", shared | {"model": fields}


def _outcome(result: Json) -> str:
    kept = ""
    if "policies" in result and result["settings"]["model"].get("remat") == AUTO_REMAT:
        kept = f"; auto keeps {in_words(result['policies'])}"
    return f"{result['seconds']:.3f} s, at most {harness.gigabytes(result.get('peak_bytes'))}{kept}"


def _table(content: Json) -> Table:
    architecture, batch = from_fields(content["model"]), content["batch"]
    latents = "×".join(map(str, content["latents"]))

    def flops_per_second(case: Json) -> float:
        tokens = case["tokens"] // batch + case["tokens_beside"]
        return architecture.step_flops(np.full(batch, tokens)) / case["seconds"]

    return harness.table_of(
        f"one training step, {batch}×{latents} latents",
        {
            "": lambda case: case["name"],
            "s": lambda case: f"{case['seconds']:.3f}",
            "tokens/s": lambda case: f"{case['tokens'] / case['seconds']:,.0f}",
            "model TFLOP/s": lambda case: f"{flops_per_second(case) / 1e12:.0f}",
            "most memory": lambda case: harness.gigabytes(case.get("peak_bytes")),
            "to compile, s": lambda case: (
                f"{case.get('compile_seconds', case.get('warmup_seconds', 0)):.0f}"
            ),
        },
        content["cases"],
    )


# ---------------------------------------------------------------- profiles


def profile(options: argparse.Namespace, cases: Iterable[Case]) -> int:
    """Measures and profiles each case; prints tables, writes JSON and a picture for each."""
    from alload_jax.bench.pictures import draw_profile

    record = record_of(options)
    for name, program, settings in cases:
        # A case's name as part of a file's.
        file = re.sub(r"\W+", "_", name.removeprefix("alload, keep "))
        keep = options.keep_trace and str((Path(options.keep_trace) / file).absolute())
        found, operations = _profiled(program, settings, keep)
        case: Json = {"name": name, **found}
        record.add(case)
        if "error" in case:
            harness.console().print(f"{name}: {case['error']}")
            continue
        _show(case, operations)
        picture = record.path.with_name(f"{record.path.stem}_{file}.png")
        model = case["settings"]["model"]
        title = f"One training step of {model['num_layers']} layers, {options.batch} × "
        title += f"{'×'.join(map(str, options.latents))} latents, remat: {model['remat']}"
        draw_profile(picture, case, title)
        print(f"written: {picture}")
    print(f"written: {record.path}")
    return 0 if any("rows" in case for case in record.content["cases"]) else 1


def _profiled(program: str | Path, settings: Json, keep: str | None) -> tuple[Json, list[Json]]:
    """A case as without a profile, with the rows of its profile; or its error. All operations."""
    from alload_jax.bench.step_profile.measure import NO_GRAPHS
    from alload_jax.bench.step_profile.summary import attention_shapes, records, rows, step_roof

    found = harness.measured(program, settings)
    if "error" in found:
        return found, []
    flags = f"{os.environ.get('XLA_FLAGS', '')} {NO_GRAPHS}".strip()
    traced = harness.measured(_MEASURE, settings | {"keep": keep}, {"XLA_FLAGS": flags})
    if "error" in traced:
        return found | {"error": f"the traced step {traced['error']}"}, []
    operations, roofs = traced["operations"], None
    if traced["backend"] == "gpu":
        roofs = harness.measured(_ROOFS, {"attention": attention_shapes(operations)})
        if "error" in roofs:
            return found | {"error": f"the measurement of roofs {roofs['error']}"}, []
    roof = step_roof(traced, roofs) if roofs else None
    found |= {name: traced[name] for name in ("traced_seconds", "traced_steps", "devices")}
    found |= {
        "roofs": roofs,
        "roof": roof,
        "of_roof": roof and roof["seconds"] / found["seconds"],  # of a step that is not traced
        "rows": [row._asdict() for row in rows(traced, roofs)],
    }
    return found | records(operations), operations


def _show(case: Json, operations: Sequence[Json]) -> None:
    from alload_jax.bench.step_profile.attribution import ELSE

    harness.console().print(_profile_table(case))
    told = (
        f"step {case['seconds'] * 1e3:,.1f} ms, {case['traced_seconds'] * 1e3:,.1f} ms traced, "
        f"at most {harness.gigabytes(case.get('peak_bytes'))}"
    )
    if load := case.get("load"):
        told += (
            f", {load['sm_mhz']:,.0f} of {load['most_sm_mhz']:,.0f} MHz, "
            f"{load['watts']:,.0f} of {load['most_watts']:,.0f} W"
        )
    if case["roof"] is None:
        told += "; roofs are measured on a GPU"
    else:
        roof = {name: f"{seconds * 1e3:,.1f}" for name, seconds in case["roof"].items()}
        told += (
            f"; roof {roof['seconds']} ms (products {roof['products']}, attention "
            f"{roof['attention']}, optimizer {roof['optimizer']}): {case['of_roof']:.3f} of the "
            "roof"
        )
    harness.console().print(told)
    longest = sorted(operations, key=lambda each: -each["seconds"])
    unnamed = [each for each in longest if each["part"] == ELSE]
    _show_kernels("everything else, by kernel", unnamed)
    others = [each for each in longest if not each["flops"]]
    _show_kernels("longest kernels but products and attention", others)
    print()


def _show_kernels(title: str, kernels: Sequence[Json]) -> None:
    """The longest of some kernels, and the sum of the others."""
    print(f"\n{title}:")
    for each in kernels[:_LISTED]:
        part = f"{each['part']}, {each['detail']}" if each["detail"] else each["part"]
        holds = f" with {', '.join(each['also'])}" if each["also"] else ""
        name = each["instruction"] or each["kernel"][:_NAME]
        place = "/".join(each["op_name"].split("/")[-3:]) or each["kernel"][:_NAME]
        print(
            f"  {each['seconds'] * 1e3:9.3f} ms {each['calls']:6.0f}×  {name}: "
            f"{part}{holds} ({each['tensor'] or place})"
        )
    if rest := kernels[_LISTED:]:
        seconds = sum(each["seconds"] for each in rest)
        print(f"  {seconds * 1e3:9.3f} ms in {len(rest)} more")


def _profile_table(case: Json) -> Table:
    """A row for each part, the longest first, and below it one for each pass or kind."""
    from alload_jax.bench.step_profile.summary import Row, totals

    def rates(row: Row) -> tuple[str, str]:
        """Its rate, and that of its roof."""
        if not row.of_roof or not row.roof_seconds:
            return "–", "–"
        by_flops = row.bound == "flops"
        work, unit, digits = (row.flops, "TFLOP/s", 0) if by_flops else (row.bytes, "TB/s", 2)
        roof = work / row.roof_seconds / 1e12
        return f"{roof * row.of_roof:.{digits}f} {unit}", f"{roof:.{digits}f}"

    columns: dict[str, Callable[[Row], str]] = {
        "part": lambda row: f"· {row.detail}" if row.detail else row.part,
        "kernels": lambda row: f"{row.calls:,.0f}" if row.calls else "–",
        "ms": lambda row: f"{row.seconds * 1e3:,.2f}",
        "share": lambda row: f"{row.share:.1%}",
        "rate": lambda row: rates(row)[0],
        "roof": lambda row: rates(row)[1],
        "of roof": lambda row: f"{row.of_roof:.2f}" if row.of_roof and row.roof_seconds else "–",
    }
    found, shown = [Row(**row) for row in case["rows"]], []
    for total in totals(found):
        details = (row for row in found if row.part == total.part and row.detail)
        shown += [total._replace(detail=""), *details]
    return harness.table_of(f"{case['name']}: one step by part", columns, shown)
