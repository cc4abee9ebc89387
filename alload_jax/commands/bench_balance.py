"""`alload bench balance`: time and idle share of each policy on all GPUs of this host."""

import argparse
import statistics
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table

from alload_jax.bench.harness import (
    MODELS,
    NAMES,
    Record,
    console,
    gigabytes,
    markdown_table,
    measured,
    model_fields,
    training_fields,
)
from alload_jax.commands.flags import require_flags, require_place
from alload_jax.errors import InputError
from alload_jax.files import Json, read_json
from alload_jax.planning.cost import CostFile, read_cost_file
from alload_jax.planning.metrics import coefficient_of_variation, imbalance
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import names

HELP = "Measure training steps on all devices of this host under each policy: time and idle share."

_COMMAND = "alload bench balance"
_DEVICE_COLUMNS = ("imbalance", "CV", "idle", "exposed")
COLUMNS = (
    *("tokens/s", "spread", "epoch, s", *_DEVICE_COLUMNS, "memory", "memory range"),
    *("programs", "to compile", "predicted off by"),
)
_SHARED = ("date", "device", "devices", "driver", "versions", "samples", "tokens")


class Case(NamedTuple):
    """One way to plan and run the samples.

    Attributes:
      planning: fields of `PlanningConfig`.
      split: whether the devices form context groups that split samples.
    """

    planning: Json
    split: bool = False


_DUAL = {"policy": "dual_constraint", "m_comp": "auto"}
CASES = {
    "equal_tokens-independent": Case({"policy": "equal_tokens", "ranks_mode": "independent"}),
    "sorted-independent": Case({"policy": "sorted", "ranks_mode": "independent"}),
    "dual_constraint-independent": Case(_DUAL | {"ranks_mode": "independent"}),
    "dual_constraint": Case(_DUAL),
    "first_fit": Case({"policy": "first_fit"}),
    "balanced": Case({"policy": "balanced"}),
    "balanced-split": Case({"policy": "balanced"}, split=True),
    "everything-split": Case({"policy": "balanced", "split_above": 0.0}, split=True),
}
"""AdaptiveLoad's baseline; the same sorted by cost; its method; its method with one bucket per
step; first-fit packing, as in other data loaders; `balanced`; `balanced` with long samples split;
Ulysses over all ranks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add("--workload", choices=names(), default="mixed-resolution", help="default mixed-resolution")
    add(
        "--cases",
        nargs="+",
        metavar="NAME[:M_MEM]",
        default=tuple(CASES),
        help=f"of {', '.join(CASES)} (default: all); :M_MEM replaces --m-mem in one case",
    )
    add("--model", choices=tuple(MODELS), default="1.3b", help=f"{NAMES} (default 1.3b)")
    add("--layers", type=int, help="number of layers, if fewer than the model has")
    add("--m-mem", type=int, default=81_920, help="tokens of a micro-batch (default 81,920)")
    add("--samples", type=int, default=4000, help="samples of the epoch (default 4000)")
    add("--steps", type=int, default=8, help="steps to run, spread over the range of cost")
    add("--repeats", type=int, default=3, help="how often the steps are run (default 3)")
    add("--one-aspect", action="store_true", help="only 16:9 samples: fewer buckets to compile")
    add("--longest", type=int, help="maximum tokens of a sample; longer ones are excluded")
    add("--context", type=int, help="ranks that split a sample (default: all)")
    add("--fsdp", type=int, default=1, help="devices that shard the parameters (default 1)")
    add("--cost-model", required=True, help="JSON of `alload calibrate`")
    add(
        "--out",
        default="balance.json",
        help="JSON of the results, written after each case; other cases in it are kept",
    )
    add("--picture", help="PNG of busy and idle times in the first and the fastest balanced case")


def run(options: argparse.Namespace) -> int:
    """Measures each case in a separate process, prints a table and writes JSON."""
    costs = _checked(options)
    model = training_fields(model_fields(options.model, options.layers))
    a_layer = {name: value for name, value in model.items() if name != "num_layers"}
    if unlike := costs.unlike(a_layer):
        print(f"{options.cost_model}: was made for {unlike}; plans and predictions are inaccurate")
    record = Record(options.out, model=model, workload=options.workload, m_mem=options.m_mem)
    content, cases = record.content, _kept(record, options.cases)
    content["cases"] = cases
    for name in options.cases:
        settings = _settings(options, model, name)
        digests = {c["digest"]: c["case"] for c in cases if "digest" in c}
        found = measured("alload_jax.bench.balance", settings | {"measured": digests})
        content |= {key: found.pop(key) for key in _SHARED if key in found}
        cases.append({"case": name} | found)
        summarise(content)
        console().print(f"{name}: {_outcome(cases[-1])}")
        record.write()
    console().print(_table(content))
    print(f"written: {record.path}")
    if options.picture:
        _draw(Path(options.picture), content)
    return 0 if any("seconds" in case for case in cases) else 1


def _kept(record: Record, measured_anew: list[str]) -> list[Json]:
    """The cases of an existing file of the same measurement that are not measured anew.

    Each keeps the command that measured it.
    """
    if (before := read_json(record.path, "name a new file for --out")) is None:
        return []
    same = ("model", "workload", "m_mem")
    if not isinstance(before, dict) or any(before.get(n) != record.content[n] for n in same):
        return []
    kept = [case for case in before["cases"] if case["case"] not in measured_anew]
    if kept:
        print(f"{record.path}: keeps {', '.join(case['case'] for case in kept)}")
    return [{"command": before["command"]} | case for case in kept]


def _draw(picture: Path, content: Json) -> None:
    from alload_jax.bench.pictures import draw_balance

    try:
        draw_balance(picture, content)
    except ValueError as error:
        raise InputError(f"{_COMMAND}: --picture {error}; the JSON was written") from error
    print(f"written: {picture}")


def _checked(options: argparse.Namespace) -> CostFile:
    """Checks the flags and reads the cost model; raises InputError if one is invalid."""
    require_place(_COMMAND, "--out", Path(options.out))
    if options.picture is not None:
        require_place(_COMMAND, "--picture", Path(options.picture))
    counts = ("m_mem", "samples", "steps", "repeats", "fsdp", "layers", "longest", "context")
    require_flags(_COMMAND, **{name: getattr(options, name) for name in counts})
    for name in options.cases:
        _case(name, options.m_mem)
    try:
        return read_cost_file(options.cost_model)
    except InputError as error:
        raise InputError(f"{_COMMAND}: --cost-model {error}") from error


def _case(name: str, m_mem: int) -> tuple[Case, int]:
    """The case and the M_mem of `NAME[:M_MEM]`."""
    case, _, tokens = name.partition(":")
    if case not in CASES:
        raise InputError(f"{_COMMAND}: --cases {name}: unknown; use one of {', '.join(CASES)}")
    if not tokens:
        return CASES[case], m_mem
    if not tokens.isdecimal() or int(tokens) < 1:
        raise InputError(f"{_COMMAND}: --cases {name}: M_mem {tokens} is no number of tokens >= 1")
    return CASES[case], int(tokens)


def _settings(options: argparse.Namespace, model: Json, name: str) -> Json:
    case, m_mem = _case(name, options.m_mem)
    planning = case.planning | {"m_mem": m_mem, "cost_model": options.cost_model}
    PlanningConfig(**planning)
    same = ("workload", "samples", "one_aspect", "steps", "repeats", "longest", "context", "fsdp")
    given = {name: getattr(options, name) for name in same}
    return given | {"model": model, "planning": planning, "split": case.split}


def summarise(content: Json) -> None:
    """Adds figures to each measured case, from the steps that were run.

    The cost model may have been measured with another number of layers, so one factor for all
    cases scales its seconds to this model. The time of an epoch is its predicted time times the
    ratio of measured to predicted time of the case's steps, the median over the repeats; `spread`
    is the range over the repeats, as a share of it. Imbalance and CV are those of the
    devices' compute time. `idle` is the share of time in which devices do not compute, for any
    reason; `exposed` is the share in which only collectives run.
    """
    cases = [case for case in content["cases"] if "seconds" in case]
    ratios = [
        s / p for case in cases for s, p in zip(case["seconds"], case["predicted"], strict=True)
    ]
    content["factor"] = factor = statistics.median(ratios) if ratios else None
    for case in cases:
        seconds, predicted = np.asarray(case["seconds"]), np.asarray(case["predicted"])
        rounds = np.asarray(case.get("rounds", [case["seconds"]])).sum(axis=1)
        epoch = case["predicted_epoch"] * float(np.median(rounds) / predicted.sum())
        case["figures"] = {
            "epoch_seconds": epoch,
            "spread": float(np.ptp(rounds) / np.median(rounds)),
            "tokens_per_second": content["tokens"] / epoch,
            "prediction_error": float(np.abs(predicted * factor / seconds - 1).mean()),
        }
        if case["busy"]:
            case["figures"] |= _device_figures(
                seconds, np.asarray(case["busy"]), np.asarray(case["exposed"])
            )


def _device_figures(seconds: np.ndarray, busy: np.ndarray, exposed: np.ndarray) -> dict[str, float]:
    """Shares of time from seconds [steps], and from busy and exposed seconds [steps, devices]."""
    return {
        "imbalance": float(imbalance(busy).mean()),
        "CV": float(coefficient_of_variation(busy).mean()),
        "idle": float(1 - busy.mean(axis=1).sum() / seconds.sum()),
        "exposed": float(exposed.mean(axis=1).sum() / seconds.sum()),
    }


def _outcome(case: Json) -> str:
    if "figures" in case:
        return f"{case['figures']['tokens_per_second']:,.0f} tokens/s"
    return case["error"] if "error" in case else f"the same steps as {case['same_as']}"


def cells(case: Json) -> dict[str, str]:
    """A measured case's figures as text, by the names in `COLUMNS`."""
    figures = case["figures"]
    devices = (f"{figures[key]:.1%}" if key in figures else "-" for key in _DEVICE_COLUMNS)
    texts = (
        f"{figures['tokens_per_second']:,.0f}",
        f"{figures['spread']:.1%}" if "spread" in figures else "-",
        f"{figures['epoch_seconds']:,.1f}",
        *devices,
        *_mean_and_spread(case["peak_bytes"]),
        f"{case['programs']}",
        _compilation(case),
        f"{figures['prediction_error']:.1%}",
    )
    return dict(zip(COLUMNS, texts, strict=True))


def _compilation(case: Json) -> str:
    """Seconds and number of programs; a run that read programs from a cache has no seconds."""
    seconds = case["compile_seconds"]
    return f"{case['compiled']}" if seconds is None else f"{seconds:.0f} s ({case['compiled']})"


def _mean_and_spread(peak_bytes: list[int] | None) -> tuple[str, str]:
    """Mean and range of the devices' peak memory, as text."""
    if peak_bytes is None:
        return gigabytes(None), "-"
    mean = round(statistics.fmean(peak_bytes))
    return gigabytes(mean), gigabytes(max(peak_bytes) - min(peak_bytes))


def _table(content: Json) -> Table:
    layers = content["model"]["num_layers"]
    title = (
        f"{content['workload']} on {content.get('devices', 0)} devices, {layers} layers, "
        f"{content['m_mem']:,} tokens per rank"
    )
    table = markdown_table(title, ("case", *COLUMNS))
    for case in content["cases"]:
        name = case["case"]
        if "error" in case:
            table.add_row(f"{name}: {case['error']}")
            continue
        if "same_as" in case:
            name += f" = {case['same_as']}"
            case = next(c for c in content["cases"] if c["case"] == case["same_as"])
        table.add_row(name, *cells(case).values())
    return table
