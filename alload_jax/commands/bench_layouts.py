"""`alload bench step --workload`: measures training steps of several policies on one workload."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from alload_jax.commands.bench_output import gigabytes, markdown_table, require_counts, typed
from alload_jax.errors import InputError
from alload_jax.planning.devices import DEVICES
from alload_jax.planning.policies.registry import find_policy
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import names

_POLICIES = ("balanced", "first_fit", "dual_constraint", "equal_tokens")
_SHARED = ("date", "device", "driver", "versions", "samples", "tokens")
_WIDTH = 150
Measure = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Runs a module with settings in a separate process and returns its result."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags for benchmarks of policies."""
    add = parser.add_argument
    add("--workload", choices=names(), help="measure a named workload under --policies")
    add(
        "--same",
        nargs=3,
        type=int,
        metavar=("FRAMES", "HEIGHT", "WIDTH"),
        help="instead of --workload: all samples have this shape in pixels",
    )
    add(
        "--policies",
        nargs="+",
        choices=_POLICIES,
        default=("balanced", "dual_constraint", "equal_tokens"),
        help="default: balanced (packed), dual_constraint, equal_tokens",
    )
    add("--m-mem", type=int, default=65_536, help="tokens of a micro-batch (default 65,536)")
    add("--samples", type=int, default=2000, help="samples of the epoch (default 2000)")
    add("--one-aspect", action="store_true", help="only 16:9 samples: fewer buckets to compile")
    add("--cost-model", help="JSON of `alload calibrate`, for policies that balance by cost")


def run(options: argparse.Namespace, model: dict[str, Any], measure: Measure) -> int:
    """Measures each policy, prints a table and writes JSON.

    Args:
      options: the parsed command line.
      model: fields of the model's config.
      measure: see `Measure`.
    """
    if options.workload and options.same:
        raise InputError("alload bench step: --workload and --same are both given; give one")
    out = Path(options.out)
    console = Console(markup=False, soft_wrap=True, width=_WIDTH)
    content: dict[str, Any] = {
        "command": typed(),
        "model": model,
        "workload": options.workload or f"all samples {'x'.join(map(str, options.same))}",
        "m_mem": options.m_mem,
        "cases": [],
    }
    for settings in _settings(options, model):
        found = measure("alload_jax.bench.workload_step", settings)
        for case in _cases(found, settings):
            if "seconds" in case:
                case["mfu"] = _utilisation(found, case)
            content["cases"].append(case)
            console.print(f"{case['policy']}: {_outcome(case)}")
        content |= {key: found[key] for key in _SHARED if key in found}
        # After each process, so that a failure loses no measurement.
        out.write_text(json.dumps(content, indent=1) + "\n")
    console.print(_table(content))
    print(f"written: {out}")
    return 0 if any("seconds" in case for case in content["cases"]) else 1


def _settings(options: argparse.Namespace, model: dict[str, Any]) -> list[dict[str, Any]]:
    """Settings of each process: one per packed policy, and one for all bucketed policies.

    Bucketed policies share programs, so they share a process.
    """
    shared = {
        "model": model,
        "workload": options.workload,
        "shape": options.same,
        "samples": options.samples,
        "one_aspect": options.one_aspect,
        "steps": options.steps,
    }
    plannings = [_planning(options, policy) for policy in options.policies]
    groups = [[each] for each in plannings if find_policy(each["policy"]).packed]
    groups.append([each for each in plannings if not find_policy(each["policy"]).packed])
    return [shared | {"plannings": group} for group in groups if group]


def _planning(options: argparse.Namespace, policy: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"policy": policy, "m_mem": options.m_mem}
    if options.cost_model:
        fields["cost_model"] = options.cost_model
    if find_policy(policy).m_comp_by_default:
        fields["m_comp"] = "auto"
    PlanningConfig(**fields)
    return fields


def _cases(found: dict[str, Any], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of each policy of a process, with the peak memory of the process."""
    if "error" in found:
        names = [planning["policy"] for planning in settings["plannings"]]
        return [{"policy": name, "error": found["error"]} for name in names]
    return [case | {"peak_bytes": found["peak_bytes"]} for case in found["cases"]]


def _utilisation(found: dict[str, Any], case: dict[str, Any]) -> float | None:
    """Model FLOPs utilisation (MFU) of a case; None if the device's peak is unknown."""
    peaks = [device.peak_flops for device in DEVICES.values() if device.name == found["device"]]
    if not peaks:
        return None
    return case["flops"] / case["seconds"] / peaks[0]


def _outcome(case: dict[str, Any]) -> str:
    if "error" in case:
        return case["error"]
    return f"{case['tokens_per_second']:,.0f} tokens/s"


def _table(content: dict[str, Any]) -> Table:
    title = f"{content['workload']}, {content['m_mem']:,} tokens per micro-batch"
    columns = ("policy", "tokens/s", "samples/s", "MFU", "peak memory", "padding", "steps")
    table = markdown_table(title, (*columns, "programs", "compilation, s"))
    for case in content["cases"]:
        if "error" in case:
            table.add_row(case["policy"], case["error"])
            continue
        mfu = case["mfu"]
        table.add_row(
            case["policy"],
            f"{case['tokens_per_second']:,.0f}",
            f"{case['samples_per_second']:.3f}",
            "not known" if mfu is None else f"{mfu:.3f}",
            gigabytes(case["peak_bytes"]),
            f"{case['padding']:.2%}",
            f"{case['steps']:,}",
            f"{case['programs']}",
            f"{case['compile_seconds']:.0f}",
        )
    return table


def check(options: argparse.Namespace) -> None:
    """Raises InputError if a flag's value is invalid."""
    same = min(options.same) if options.same else None
    require_counts("alload bench step", m_mem=options.m_mem, samples=options.samples, same=same)
    if options.cost_model and not Path(options.cost_model).is_file():
        raise InputError(
            f"alload bench step: --cost-model {options.cost_model}: no such file; name one"
        )
