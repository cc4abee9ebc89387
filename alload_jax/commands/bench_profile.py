"""`alload bench step --profile`: where the device time of a training step goes, by named part."""

import argparse
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from alload_jax.commands.bench_models import model_fields
from alload_jax.commands.bench_output import gigabytes, markdown_table, typed
from alload_jax.commands.bench_process import measured
from alload_jax.errors import InputError

_WIDTH = 150
_MEASURE = "alload_jax.bench.step_profile.measure"
_ROOFS = "alload_jax.bench.step_profile.roofs"
_LISTED = 12
"""Kernels that a list shows; the JSON has more."""
_NAME = 60
_COLUMNS = ("part", "kernels", "ms", "share", "rate", "roof", "of roof")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of profiles."""
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


def check(options: argparse.Namespace) -> None:
    """Raises InputError where a flag of profiles makes no sense."""
    command = "alload bench step"
    if options.profile and (options.workload or options.same):
        flag = "--workload" if options.workload else "--same"
        raise InputError(f"{command}: --profile and {flag} are both given; give one")
    if options.keep_trace is None:
        return
    if not options.profile:
        raise InputError(f"{command}: --keep-trace needs --profile; add it")
    folder = Path(options.keep_trace)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{command}: --keep-trace {folder}: this is a file; name a folder")


def run(
    options: argparse.Namespace, cases: Iterable[tuple[str, str | Path, dict[str, Any]]]
) -> int:
    """Measures and profiles each case; prints tables, writes JSON and a picture for each."""
    out, console = Path(options.out), Console(markup=False, soft_wrap=True, width=_WIDTH)
    content: dict[str, Any] = {
        "command": typed(),
        "model": model_fields(options.model, options.layers),
        "batch": options.batch,
        "latents": list(options.latents),
        "cases": [],
    }
    for name, program, settings in cases:
        keep = _folder_of(options.keep_trace, name)
        case, operations = _profiled(program, settings, keep)
        case = {"name": name} | case
        content["cases"].append(case)
        # After each, so that a failure loses nothing that was measured.
        out.write_text(json.dumps(content, indent=1) + "\n")
        if "error" in case:
            console.print(f"{name}: {case['error']}")
            continue
        _show(console, case, operations)
        picture = out.with_name(f"{out.stem}_{_as_file(name)}.png")
        _draw(picture, case, content)
        print(f"written: {picture}")
    print(f"written: {out}")
    return 0 if any("rows" in case for case in content["cases"]) else 1


def _profiled(
    program: str | Path, settings: dict[str, Any], keep: str | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A case as without a profile, with the rows of its profile; or its error. All operations."""
    from alload_jax.bench.step_profile.measure import NO_GRAPHS
    from alload_jax.bench.step_profile.summary import attention_shapes

    found = measured(program, settings)
    if "error" in found:
        return found, []
    flags = f"{os.environ.get('XLA_FLAGS', '')} {NO_GRAPHS}".strip()
    traced = measured(_MEASURE, settings | {"keep": keep}, {"XLA_FLAGS": flags})
    if "error" in traced:
        return found | {"error": f"the traced step {traced['error']}"}, []
    roofs = None
    if traced["backend"] == "gpu":
        roofs = measured(_ROOFS, {"attention": attention_shapes(traced["operations"])})
        if "error" in roofs:
            return found | {"error": f"the measurement of roofs {roofs['error']}"}, []
    return found | summarised(found["seconds"], traced, roofs), traced["operations"]


def summarised(
    seconds: float, traced: Mapping[str, Any], roofs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the JSON says of a profile.

    Args:
      seconds: of a step that is not traced.
      traced: what `step_profile.measure` prints.
      roofs: what `step_profile.roofs` prints; None without a GPU.
    """
    from alload_jax.bench.step_profile.summary import records, rows, step_roof

    roof = step_roof(traced, roofs) if roofs else None
    return (
        {name: traced[name] for name in ("traced_seconds", "traced_steps", "devices")}
        | {
            "roofs": roofs,
            "roof": roof and roof._asdict() | {"seconds": roof.seconds},
            "of_roof": roof and roof.seconds / seconds,
            "rows": [row._asdict() for row in rows(traced, roofs)],
        }
        | records(traced["operations"])
    )


def _as_file(name: str) -> str:
    """A case's name as part of a file's."""
    return re.sub(r"\W+", "_", name.removeprefix("alload, keep "))


def _folder_of(folder: str | None, name: str) -> str | None:
    return None if folder is None else str((Path(folder) / _as_file(name)).absolute())


def _show(
    console: Console, case: Mapping[str, Any], operations: Sequence[Mapping[str, Any]]
) -> None:
    from alload_jax.bench.step_profile.attribution import ELSE

    console.print(_table(case))
    console.print(_outcome(case))
    longest = sorted(operations, key=lambda each: -each["seconds"])
    unnamed = [each for each in longest if each["part"] == ELSE]
    _show_kernels(console, "everything else, by kernel", unnamed)
    others = [each for each in longest if not each["flops"]]
    _show_kernels(console, "longest kernels but products and attention", others)
    print()


def _outcome(case: Mapping[str, Any]) -> str:
    told = (
        f"step {case['seconds'] * 1e3:,.1f} ms, {case['traced_seconds'] * 1e3:,.1f} ms traced, "
        f"at most {gigabytes(case.get('peak_bytes'))}"
    )
    if load := case.get("load"):
        told += (
            f", {load['sm_mhz']:,.0f} of {load['most_sm_mhz']:,.0f} MHz, "
            f"{load['watts']:,.0f} of {load['most_watts']:,.0f} W"
        )
    if case["roof"] is None:
        return f"{told}; roofs are measured on a GPU"
    roof = {name: f"{seconds * 1e3:,.1f}" for name, seconds in case["roof"].items()}
    return (
        f"{told}; roof {roof['seconds']} ms (products {roof['products']}, attention "
        f"{roof['attention']}, optimizer {roof['optimizer']}): {case['of_roof']:.3f} of the roof"
    )


def _show_kernels(console: Console, title: str, kernels: Sequence[Mapping[str, Any]]) -> None:
    """The longest of some kernels, and the sum of the others."""
    console.print(f"\n{title}:")
    for each in kernels[:_LISTED]:
        part = f"{each['part']}, {each['detail']}" if each["detail"] else each["part"]
        holds = f" with {', '.join(each['also'])}" if each["also"] else ""
        name = each["instruction"] or each["kernel"][:_NAME]
        place = "/".join(each["op_name"].split("/")[-3:]) or each["kernel"][:_NAME]
        place = each["tensor"] or place
        console.print(
            f"  {each['seconds'] * 1e3:9.3f} ms {each['calls']:6.0f}×  {name}: "
            f"{part}{holds} ({place})",
            highlight=False,
            markup=False,
        )
    if rest := kernels[_LISTED:]:
        seconds = sum(each["seconds"] for each in rest)
        console.print(f"  {seconds * 1e3:9.3f} ms in {len(rest)} more", highlight=False)


def _table(case: Mapping[str, Any]) -> Table:
    """A row for each part, the longest first, and below it one for each pass or kind."""
    from alload_jax.bench.step_profile.summary import Row, totals

    table = markdown_table(f"{case['name']}: one step by part", _COLUMNS)
    found = [Row(**row) for row in case["rows"]]
    for total in totals(found):
        table.add_row(total.part, *_cells(total))
        details = [row for row in found if row.part == total.part and row.detail]
        for row in details:
            table.add_row(f"· {row.detail}", *_cells(row))
    return table


def _cells(row: Any) -> tuple[str, ...]:
    """Kernels, ms, share, rate, roof and fraction of the roof of a `Row`."""
    calls = f"{row.calls:,.0f}" if row.calls else "–"
    time = (calls, f"{row.seconds * 1e3:,.2f}", f"{row.share:.1%}")
    if not row.of_roof:
        return (*time, "–", "–", "–")
    by_flops = row.bound == "flops"
    work, unit, digits = (row.flops, "TFLOP/s", 0) if by_flops else (row.bytes, "TB/s", 2)
    roof = work / row.roof_seconds / 1e12
    of_roof = f"{row.of_roof:.2f}"
    return (*time, f"{roof * row.of_roof:.{digits}f} {unit}", f"{roof:.{digits}f}", of_roof)


def _draw(path: Path, case: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    from alload_jax.bench.step_profile.picture import write_picture

    frames, height, width = content["latents"]
    settings = case["settings"]
    write_picture(
        path,
        case,
        f"One training step of {settings['model']['num_layers']} layers, "
        f"{content['batch']} × {frames}×{height}×{width} latents, "
        f"remat: {settings['model']['remat']}",
    )
