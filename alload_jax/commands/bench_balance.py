"""`alload bench balance`: time and idle share of each policy on all GPUs of this host."""

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.table import Table

from alload_jax.bench import harness
from alload_jax.commands.flags import COUNT, require_picture, require_place
from alload_jax.errors import InputError
from alload_jax.files import Json, read_json
from alload_jax.planning.cost import CostFile, read_cost_file
from alload_jax.planning.devices import DEVICES
from alload_jax.planning.metrics import coefficient_of_variation, imbalance
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import names

HELP = "Measure training steps on all devices of this host under each policy: time and idle share."

_COMMAND = "alload bench balance"
_DEVICE_FIGURES = ("imbalance", "CV", "idle", "exposed")
_SHARED = ("date", "device", "devices", "driver", "versions", "samples", "tokens", "flops")


_DUAL = {"policy": "dual_constraint", "m_comp": "auto"}
CASES: dict[str, Json] = {
    "equal_tokens-independent": {"policy": "equal_tokens", "ranks_mode": "independent"},
    "sorted-independent": {"policy": "sorted", "ranks_mode": "independent"},
    "dual_constraint-independent": _DUAL | {"ranks_mode": "independent"},
    "dual_constraint": _DUAL,
    "first_fit": {"policy": "first_fit"},
    "balanced": {"policy": "balanced"},
    "balanced-split": {"policy": "balanced"},
    "everything-split": {"policy": "balanced", "split_above": 0.0},
}
"""Fields of `PlanningConfig` for AdaptiveLoad's baseline; the same sorted by cost; its method; its
method with one bucket per step; first-fit packing, as in other data loaders; `balanced`; `balanced`
with long samples split; Ulysses over all ranks. In those that end in "split", the devices form
context groups that split samples."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    samples = parser.add_mutually_exclusive_group()
    samples.add_argument(
        "--workload", choices=names(), default="mixed-resolution", help="default mixed-resolution"
    )
    samples.add_argument(
        "--same",
        nargs=3,
        type=COUNT,
        metavar=("FRAMES", "HEIGHT", "WIDTH"),
        help="instead of a workload: all samples have this shape in pixels",
    )
    add(
        "--cases",
        nargs="+",
        metavar="NAME[:M_MEM]",
        default=tuple(CASES),
        help=f"of {', '.join(CASES)} (default: all); :M_MEM replaces --m-mem in one case",
    )
    models = f"{harness.NAMES} (default 1.3b)"
    add("--model", choices=tuple(harness.MODELS), default="1.3b", help=models)
    add("--layers", type=COUNT, help="number of layers, if fewer than the model has")
    add("--m-mem", type=COUNT, default=81_920, help="tokens of a micro-batch (default 81,920)")
    add("--samples", type=COUNT, default=4000, help="samples of the epoch (default 4000)")
    add("--steps", type=COUNT, default=8, help="steps to run, spread over the range of cost")
    add("--repeats", type=COUNT, default=3, help="how often the steps are run (default 3)")
    add("--one-aspect", action="store_true", help="only 16:9 samples: fewer buckets to compile")
    add("--longest", type=COUNT, help="maximum tokens of a sample; longer ones are excluded")
    add("--context", type=COUNT, help="ranks that split a sample (default: all)")
    add("--fsdp", type=COUNT, default=1, help="devices that shard the parameters (default 1)")
    add("--cost-model", required=True, help="JSON of `alload calibrate`")
    add(
        "--out",
        default="balance.json",
        help="JSON of the results, written after each case; its other cases stay",
    )
    add("--picture", help="PNG of busy and idle times in the first and the fastest balanced case")


def run(options: argparse.Namespace) -> int:
    """Measures each case in a separate process, prints a table and writes JSON."""
    model = harness.training_fields(harness.model_fields(options.model, options.layers))
    costs, settings = _checked(options, model)
    a_layer = {name: value for name, value in model.items() if name != "num_layers"}
    if unlike := costs.unlike(a_layer):
        print(f"{options.cost_model}: was made for {unlike}; plans and predictions are inaccurate")
    same = options.same and f"all samples {'x'.join(map(str, options.same))}"
    workload = same or options.workload
    drawn = {name: getattr(options, name) for name in ("samples", "one_aspect", "longest")}
    ways = {name: getattr(options, name) for name in ("steps", "repeats", "context", "fsdp")}
    record = harness.Record(
        options.out, model=model, workload=workload, m_mem=options.m_mem, drawn=drawn, ways=ways
    )
    content = record.content
    content["cases"] = kept = _kept(record, options.cases)

    def cases() -> Iterator[Json]:
        for name, given in settings.items():
            digests = {each["digest"]: each["case"] for each in kept if "digest" in each}
            found = harness.measured("alload_jax.bench.balance", given | {"measured": digests})
            content.update((key, found.pop(key)) for key in _SHARED if key in found)
            case = {"case": name} | found
            with_case = content | {"cases": [*kept, case]}
            summarise(with_case)
            content["factor"] = with_case["factor"]
            yield case

    status = record.measure(cases(), "case", _outcome, _table)
    if options.picture:
        from alload_jax.bench.pictures import draw_balance

        try:
            draw_balance(Path(options.picture), content)
        except ValueError as error:
            raise InputError(f"{_COMMAND}: --picture {error}; the JSON was written") from error
        print(f"written: {options.picture}")
    return status


def _kept(record: harness.Record, measured_anew: list[str]) -> list[Json]:
    """The cases of an existing file of the same measurement that are not measured anew.

    Each keeps the command that measured it. Figures of all follow from the same samples.

    Raises:
      InputError: the file is of something else.
    """
    remedy = "name a new file for --out"
    if (before := read_json(record.path, remedy)) is None:
        return []
    same = {"model": "model", "workload": "workload", "m_mem": "m_mem", "drawn": "set of samples"}
    same |= {"ways": "number of steps, repeats, context or fsdp"}
    held = before if isinstance(before, dict) and "cases" in before else {}
    if other := [word for name, word in same.items() if held.get(name) != record.content[name]]:
        raise InputError(f"{record.path}: its {', '.join(other)} is another; {remedy}")
    kept = [case for case in before["cases"] if case["case"] not in measured_anew]
    if kept:
        print(f"{record.path}: keeps {', '.join(case['case'] for case in kept)}")
    return [{"command": before["command"]} | case for case in kept]


def _checked(options: argparse.Namespace, model: Json) -> tuple[CostFile, dict[str, Json]]:
    """Checks the flags and reads the cost model.

    Returns:
      The cost model, and what `bench.balance` measures by the name of the case.

    Raises:
      InputError: a flag is invalid.
    """
    require_place(_COMMAND, "--out", Path(options.out))
    if options.picture is not None:
        require_picture(_COMMAND, "--picture", Path(options.picture))
    passed = ("samples", "one_aspect", "steps", "repeats", "longest", "context", "fsdp")
    shared = {name: getattr(options, name) for name in passed} | {"model": model}
    shared |= {"workload": None if options.same else options.workload, "shape": options.same}
    settings: dict[str, Json] = {}
    for word in options.cases:  # NAME[:M_MEM]
        name, _, tokens = word.partition(":")
        if name not in CASES:
            raise InputError(f"{_COMMAND}: --cases {word}: unknown; use one of {', '.join(CASES)}")
        if tokens and (not tokens.isdecimal() or int(tokens) < 1):
            raise InputError(
                f"{_COMMAND}: --cases {word}: M_mem {tokens} is no number of tokens >= 1"
            )
        m_mem = int(tokens) if tokens else options.m_mem
        planning = CASES[name] | {"m_mem": m_mem, "cost_model": options.cost_model}
        settings[word] = shared | {"planning": planning, "split": name.endswith("split")}
    try:
        costs = read_cost_file(options.cost_model)
    except InputError as error:
        raise InputError(f"{_COMMAND}: --cost-model {error}") from error
    for given in settings.values():
        PlanningConfig(**given["planning"])
    return costs, settings


def summarise(content: Json) -> None:
    """Adds figures to each measured case, from the steps that were run.

    The cost model may have been measured with another number of layers, so one factor for all
    cases scales its seconds to this model. The time of an epoch is its predicted time times the
    ratio of measured to predicted time of the case's steps, the median over the repeats; `spread`
    is the range over the repeats, as a share of it. Imbalance and CV are those of the
    devices' compute time. `idle` is the share of time in which devices do not compute, for any
    reason; `exposed` is the share in which only collectives run. `MFU` is the model FLOPs
    utilisation, of devices whose peak is known.
    """
    peaks = [each.peak_flops for each in DEVICES.values() if each.name == content.get("device")]
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
        if peaks and "flops" in content:
            peak = peaks[0] * content["devices"]
            case["figures"]["MFU"] = content["flops"] / epoch / peak
        if case["busy"]:
            busy, exposed = np.asarray(case["busy"]), np.asarray(case["exposed"])
            case["figures"] |= {
                "imbalance": float(imbalance(busy).mean()),
                "CV": float(coefficient_of_variation(busy).mean()),
                "idle": float(1 - busy.mean(axis=1).sum() / seconds.sum()),
                "exposed": float(exposed.mean(axis=1).sum() / seconds.sum()),
            }


def _outcome(case: Json) -> str:
    if "figures" in case:
        return f"{case['figures']['tokens_per_second']:,.0f} tokens/s"
    return f"the same steps as {case['same_as']}"


def _table(content: Json) -> Table:
    def share(name: str) -> Callable[[Json], str]:
        return lambda case: f"{case['figures'][name]:.1%}" if name in case["figures"] else "-"

    def memory(case: Json, figure: Callable[[list[int]], float]) -> str:
        return harness.gigabytes(case["peak_bytes"] and round(figure(case["peak_bytes"])))

    def compilation(case: Json) -> str:
        """A run that read programs from a cache has no seconds."""
        seconds, programs = case["compile_seconds"], case["compiled"]
        return f"{programs}" if seconds is None else f"{seconds:.0f} s ({programs})"

    measured = {case["case"]: case for case in content["cases"]}
    return harness.table_of(
        f"{content['workload']} on {content.get('devices', 0)} devices, "
        f"{content['model']['num_layers']} layers, {content['m_mem']:,} tokens per rank",
        {
            "case": lambda case: case["case"],
            "tokens/s": lambda case: f"{case['figures']['tokens_per_second']:,.0f}",
            "MFU": share("MFU"),
            "spread": share("spread"),
            "epoch, s": lambda case: f"{case['figures']['epoch_seconds']:,.1f}",
            **{name: share(name) for name in _DEVICE_FIGURES},
            "padding": lambda case: f"{case['padding']:.1%}" if "padding" in case else "-",
            "memory": lambda case: memory(case, statistics.fmean),
            "memory range": lambda case: memory(case, np.ptp) if case["peak_bytes"] else "-",
            "programs": lambda case: f"{case['programs']}",
            "to compile": compilation,
            "predicted off by": share("prediction_error"),
        },
        [
            measured[case["same_as"]] | {"case": f"{case['case']} = {case['same_as']}"}
            if "same_as" in case
            else case
            for case in content["cases"]
        ],
    )
