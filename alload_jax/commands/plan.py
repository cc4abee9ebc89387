"""`alload plan`: plans an epoch of a data set and reports the plan's metrics."""

import argparse
import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import rich.box
from rich.table import Column, Table
from rich.text import Text

from alload_jax.bench.harness import console
from alload_jax.commands.flags import (
    ABOVE_0,
    COUNT,
    FROM_0,
    SHARE,
    WHOLE,
    add_settings,
    number,
    triple,
    up_to,
)
from alload_jax.commands.plan_inputs import PlanRequest, setting_types
from alload_jax.data.selection import SourceShare
from alload_jax.errors import InputError, one_line, print_stderr
from alload_jax.files import Json
from alload_jax.planning.analytic import FROZEN_BYTES, SHORTEST, USABLE_SHARE, step_memory
from alload_jax.planning.architecture import model_names
from alload_jax.planning.devices import device_named
from alload_jax.planning.plan import plan_table, replaceable, write_plan
from alload_jax.planning.policies import candidates, policy_names
from alload_jax.planning.policies.policy import MOST_RANKS
from alload_jax.planning.remat import OFFLOADED, RematPolicy, host_bytes
from alload_jax.planning.samples import Geometry
from alload_jax.planning.study import Case, Study, advice
from alload_jax.planning.workloads import names

_MOST_EPOCHS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    data = parser.add_argument_group("data set")
    data.add_argument(
        "--manifest",
        help="data folder, .yaml set, size.npy, Parquet or CSV: frames, height, width, or seq_len",
    )
    data.add_argument("--workload", choices=names(), metavar="NAME", help=", ".join(names()))
    data.add_argument("--size", type=COUNT, default=100_000, help="samples of the workload")
    data.add_argument(
        "--weights",
        nargs="+",
        metavar="PATH=WEIGHT",
        help="times that samples of a folder stand in an epoch; default: data.weights of --config",
    )
    data.add_argument(
        "--vae-stride",
        type=triple,
        help="pixels per latent, such as 4,8,8 for Wan and 4,16,16 for HunyuanVideo 1.5",
    )
    data.add_argument("--patch-size", type=triple, help="latents per token, such as 1,2,2")
    data.add_argument("--seed", type=WHOLE, help="seed of the order of samples")
    data.add_argument("--epoch", type=WHOLE, default=0, help="which epoch to plan")
    data.add_argument(
        "--epochs",
        type=up_to(_MOST_EPOCHS),
        help="epochs of the run: --out writes so many, by default 1, and auto counts the time to "
        "the first step over them, by default those of --config",
    )
    _add_costs(parser.add_argument_group("model, device and cost model"))
    _add_policies(
        parser.add_argument_group(
            "policy and bounds", "Keys of `planning` in a config; null is a flag that is not given."
        )
    )
    _add_output(parser.add_argument_group("output"))


def _add_costs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--config", help="training config; flags override its data, planning section and model")
    add(
        "--model",
        choices=model_names(),
        help="model of the analytic cost model; default wan2.1-1.3b",
    )
    add("--device", help="h200 (the default), h100, a100 or cpu")
    add("--shards", type=COUNT, default=1, help="devices that shard one copy of the weights")
    add(
        "--trained-parameters",
        type=int,
        help="number of trained parameters, others are frozen; default all",
    )
    add("--frozen-dtype", choices=tuple(FROZEN_BYTES), help="of frozen parameters; default float32")
    add(
        "--sparse-layers",
        type=float,
        metavar="SHARE",
        help="share of the layers whose self-attention is sparse; default: as the config begins",
    )
    add("--density", type=float, help="share of the keys that these attend to; default 0.1")
    add("--memory-gb", type=ABOVE_0, help="memory of a device in GB, from which M_mem is computed")
    add("--margin", type=SHARE, default=0.05, help="share of memory to leave free; default 0.05")


def _add_policies(group: argparse._ArgumentGroup) -> None:
    policies = policy_names()
    ranks = "numbers of data-parallel ranks (GPUs), one or several"
    special: dict[str, dict[str, object]] = {"policy": {"type": _policy}}
    special["ranks"] = {"type": up_to(MOST_RANKS), "nargs": "+", "default": None, "help": ranks}
    declared: set[str] = {"ranks_per_group", "recalibrate", "options"}
    for kind in setting_types():
        add_settings(group, kind, declared, special)
        declared |= {field.name for field in dataclasses.fields(kind)}
    group.add_argument(
        "--compare",
        nargs="+",
        metavar="POLICY",
        help=f"compare policies: {', '.join(policies)}; `equal_tokens:independent` sets the mode",
    )


def _policy(name: str) -> str:
    """The name of a policy that can be found; argparse names the flag in the error."""
    try:
        candidates(name)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--simulate", action="store_true", help="simulate the plan: throughput, idle time")
    add(
        "--noise",
        type=number(float, "a number from 0 to 10", lambda value: 0 <= value <= 10),
        default=0.0,
        help="relative standard deviation of a rank's time, such as 0.02",
    )
    add("--all-reduce", type=FROM_0, default=0.0, help="seconds of all-reduce added to every step")
    add("--report", help="HTML page to write")
    add("--out", help="Parquet file of the plan to write, a row for every placed sample")
    add(
        "--memory",
        action="store_true",
        help="show the memory that a step needs and the longest clip that fits, without data",
    )
    add("--json", action="store_true", help="print the figures as JSON")


def run(options: argparse.Namespace) -> int:
    """Plans, prints the metrics and writes the requested files."""
    if options.memory:
        return _show_memory(options)
    _check(options)
    request = PlanRequest(options)
    study = request.study()
    if request.warning:
        print_stderr(one_line(f"warning: {request.warning}"))
    policies = list(dict.fromkeys(options.compare or [study.config.policy]))
    cases = list(study.cases(policies, request.ranks))
    if options.json:
        each = [
            {"ranks": case.ranks, "plan": _settings(request, study, case)} | case.figures()
            for case in cases
        ]
        print(json.dumps(each[0] if len(each) == 1 else {"cases": each}, indent=2))
    else:
        _print_tables(request, study, cases)
    if options.out:
        numbers = range(options.epoch, options.epoch + (options.epochs or 1))
        epochs = {number: cases[0].plan.epoch(number) for number in numbers}
        write_plan(options.out, plan_table(epochs, _settings(request, study, cases[0])))
        _print_unless_json(options, f"plan: {options.out}")
    if options.report:
        from alload_jax.report.plan_page import write_report

        write_report(options.report, study, cases, request.source, request.costs_source)
        _print_unless_json(options, f"report: {options.report}")
    return 0


def _show_memory(options: argparse.Namespace) -> int:
    """Prints what a step needs on a device, without data."""
    for name in ("manifest", "workload", "weights", "out", "report"):
        if getattr(options, name):
            raise InputError(f"alload plan: --memory needs no data; leave --{name} out")
    name, cases = memory_cases(options)
    if options.json:
        print(json.dumps({"model": name, "cases": cases}, indent=2))
        return 0
    print(f"predicted by arithmetic, not measured: {name}")
    console().print(memory_table(cases))
    return 0


def _check(options: argparse.Namespace) -> None:
    # An output must not be an input, and two outputs not one file.
    taken = {
        Path(os.path.realpath(value)): f"--{name.replace('_', '-')}"
        for name in ("manifest", "cost_model", "config")
        if (value := getattr(options, name, None))
    }
    for name in ("out", "report"):
        if (value := getattr(options, name)) is None:
            continue
        if (path := replaceable(value)) in taken:
            raise InputError(
                f"alload plan: --{name} {value} is also {taken[path]}; name another file"
            )
        taken[path] = f"--{name}"
    if options.out and not options.out.endswith(".parquet"):
        raise InputError(
            f"alload plan: --out is {options.out}; it is a Parquet file: name a .parquet"
        )
    if options.out and (len(options.compare or []) > 1 or len(options.ranks or []) > 1):
        raise InputError("alload plan: --out writes one plan; give one policy and one --ranks")


def _print_tables(request: PlanRequest, study: Study, cases: list[Case]) -> None:
    print(one_line(f"data: {request.source}"))
    if request.shares:
        console().print(shares_table(request.shares))
    print(one_line(f"cost model: {request.costs_source}"))
    for reason in dict.fromkeys(case.reason for case in cases if case.reason):
        print(reason)
    console().print(case_table(cases[0]) if len(cases) == 1 else comparison_table(cases))
    for sentence in advice(study, [case for case in cases if case.ranks == cases[0].ranks]):
        print(sentence)


def _settings(request: PlanRequest, study: Study, case: Case) -> dict[str, object]:
    """The plan's identity, inputs and cost model, as JSON values."""
    fields = dataclasses.asdict(study.predictor)  # type: ignore[call-overload]
    cost_model = {"kind": type(study.predictor).__name__, **fields}
    return case.plan.identity() | {
        "data": request.source,
        "manifest": request.options.manifest,
        "epoch": request.options.epoch,
        "m_mem": case.plan_m_mem,
        "sample_count": len(study.samples),
        **({"sources": [each._asdict() for each in request.shares]} if request.shares else {}),
        "cost_model": cost_model,
        "cost_model_source": request.costs_source,
        "seconds_per_split_token": case.config.seconds_per_split_token(study.costs),
    }


def _print_unless_json(options: argparse.Namespace, line: str) -> None:
    if not options.json:
        print(one_line(line))


# ---------------------------------------------------------------- metrics of plans

_SECONDS = ("first_step_seconds",)
_COUNTS = ("cost", "seconds", "tokens_per_second", "samples_per_second")
_WEIGHTS = ("longest_weight", "longest_weight_by_step")
_PLAIN = ("order_correlation", "step_samples_min", "step_samples_max", *_WEIGHTS)
LABELS = {
    "buckets": "programs",
    "first_step_seconds": "time to the first step",
    "step_samples_min": "least samples of a step / mean",
    "step_samples_max": "most samples of a step / mean",
    "longest_weight": "weight of longest / shortest samples",
    "longest_weight_by_step": "the same, each step a mean of its own",
    "repeated_neighbours": "repeated neighbours",
    "repeated_neighbours_random": "repeated neighbours, at random",
}
_COLUMNS = {name: name for name in ("steps", "imbalance", "idle", "padding")} | {
    "buckets": "programs",
    "first_step_seconds": "first step",
    "samples of a step": "samples of a step / mean",
    "weight": "long / short weight (by step)",
    "tokens_per_second": "tokens/s",
}
_REPLAY = {"idle": "idle, replayed", "tokens_per_second": "tokens/s, replayed"}


def case_table(case: Case) -> Table:
    """A table of all metrics of one case."""
    identity = case.plan.identity() | {"m_mem": case.plan_m_mem}
    bounds = []
    for name in ("m_mem", "m_comp", "p", "rows"):
        if isinstance(value := identity.get(name), dict):
            bounds.append(f"{name} {', '.join(f'{key}: {rows}' for key, rows in value.items())}")
        elif value:
            bounds.append(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:,.5g}")
    ranks = f"{case.ranks} rank{'s' * (case.ranks > 1)}"
    title = f"{case.name} · {ranks} · {' · '.join(bounds)}"
    table = Table("metric", Column("value", justify="right"), title=title, title_justify="left")
    for name, value in case.figures()["metrics"].items():
        label = LABELS.get(name, name.replace("_", " "))
        if name == "cost":
            label = "time of the epoch, s" if case.in_seconds else "cost of the epoch, no unit"
        elif name == "tokens_per_second":
            label = "tokens/s" if case.in_seconds else "tokens per unit of cost"
        table.add_row(label, readable(name, value))
    for name, value in dataclasses.asdict(case.simulation).items() if case.simulation else ():
        table.add_row(f"replayed: {name.replace('_', ' ')}", readable(name, value))
    return table


def comparison_table(cases: Sequence[Case]) -> Table:
    """A table of the main metrics with a row for each case."""
    ranks, policy = Column("ranks", justify="right"), Column("policy", no_wrap=True)
    table = Table(ranks, policy, box=rich.box.SIMPLE_HEAD)
    replay = _REPLAY if cases[0].simulation else {}
    columns = dict(_COLUMNS)
    if not cases[0].in_seconds:
        columns["tokens_per_second"] = "tokens/cost"
    for label in (*columns.values(), *replay.values()):
        table.add_column(label, justify="right")
    before = cases[0].ranks
    for case in cases:
        if case.ranks != before:
            table.add_section()
        before = case.ranks
        metrics = case.figures()["metrics"]
        cells = {name: readable(name, metrics[name]) for name in columns if name in metrics}
        least, most = (metrics[f"step_samples_{end}"] for end in ("min", "max"))
        cells["samples of a step"] = f"{least:.2f}–{most:.2f}"
        by_plan, by_step = (metrics[name] for name in _WEIGHTS)
        cells["weight"] = f"{by_plan:.2f} ({by_step:.2f})"
        replayed = dataclasses.asdict(case.simulation) if case.simulation else {}
        row = [cells[name] for name in columns]
        row += [readable(name, replayed[name]) for name in replay]
        table.add_row(str(case.ranks), case.name, *row)
    return table


def shares_table(shares: Sequence[SourceShare]) -> Table:
    """A table of what the entries of `data.weights` are of an epoch."""
    table = Table(Column("source", no_wrap=True), box=rich.box.SIMPLE_HEAD)
    for name in ("weight", "samples", "samples an epoch", "share of tokens"):
        table.add_column(name, justify="right")
    for each in shares:
        table.add_row(
            Text(each.path),
            f"{each.weight:g}",
            f"{each.samples:,}",
            f"{each.epoch_samples:,.10g}",
            f"{each.share:.1%}",
        )
    return table


def readable(name: str, value: float | None) -> str:
    """A metric's value as text."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if name in _SECONDS:
        return f"{value:,.0f} s"
    if name in _COUNTS:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    shown = f"{value:.3f}" if name in _PLAIN else f"{value:.2%}"
    return shown.lstrip("-") if float(shown.rstrip("%")) == 0 else shown


# ---------------------------------------------------------------- memory of a step

_DEVICES = ("h100", "h200")
_REMAT: tuple[RematPolicy, ...] = (
    *("offload", "offload_attention", "offload_feed_forward_and_attention", "full"),
    *("attention", "feed_forward_and_attention"),
    *("matmuls_and_attention", "norms_matmuls_and_attention"),
)
_SIZES = ((480, 832), (720, 1280))
_LONGEST = 1001
"""Most frames of a clip that are tried."""


def memory_cases(options: argparse.Namespace) -> tuple[str, list[Json]]:
    """Predicts memory for the model of the flags.

    Returns:
      Its name; and for each device and `remat`: whether that is `configured`; bytes of the `state`,
      which do not depend on the batch, and bytes `per_token`; `m_mem`, the most tokens of a
      micro-batch, 0 if not even one fits; bytes that as many take of the `host`, at most; frames
      of the longest of `clips` by "HEIGHTxWIDTH", 0 for none.

    Raises:
      InputError: the model has no cost model, or a flag is wrong.
    """
    request, condition = PlanRequest(options), 0
    request.fields.pop("cost_model", None)  # it says nothing of other policies' memory
    architecture, model_name = request.architecture
    stride = Geometry().vae_stride
    if (model := request.model) is not None:
        from alload_jax.models.families import family_of

        stride = family_of(model).sampling_defaults(model).vae_stride
        if model.joint_attention:
            condition = sum(part.length for part in model.condition_parts())
    geometry = Geometry(options.vae_stride or stride, request.patch_size)
    names = [options.device] if options.device else list(_DEVICES)
    if options.memory_gb is not None:
        names = names[:1]  # the device matters by its memory alone
    replicas = max(1, min(options.ranks or [1]) // options.shards)
    cases = []
    for name, remat in itertools.product(names, _REMAT):
        device = device_named(name)
        memory = step_memory(architecture, device, remat, options.shards, request.trained, replicas)
        budget, shown = USABLE_SHARE * device.memory, device.name
        if options.memory_gb is not None:
            budget, shown = options.memory_gb * 1e9, f"{options.memory_gb:g} GB"
        free = budget * (1 - options.margin)
        frames = np.arange(1, _LONGEST + 1, geometry.vae_stride[0])
        clips = {}
        for height, width in _SIZES:
            sides = (np.full_like(frames, side) for side in (height, width))
            seq_len = geometry.seq_len(frames, *sides) + condition
            fits = [memory.bytes_of(float(tokens), 1) <= free for tokens in seq_len]
            clips[f"{height}x{width}"] = int(max(frames[fits], default=0))
        try:
            most = memory.max_tokens(budget, options.margin, SHORTEST)
        except InputError:
            most = 0
        case: Json = {"device": shown, "remat": remat}
        case["configured"] = model is not None and remat == request.remat
        case |= {"state": memory.base, "per_token": memory.per_token, "m_mem": most, "host": 0.0}
        if remat in OFFLOADED:
            case["host"] = host_bytes(architecture, device, most, remat)
        cases.append(case | {"clips": clips})
    return model_name, cases


def memory_table(cases: list[Json]) -> Table:
    """The cases as a table."""
    names = ["state GB", "KB per token", "M_mem tokens", "host's GB"]
    names += [f"longest clip {height}×{width}" for height, width in _SIZES]
    remat = Column("model.remat", overflow="fold")
    columns = (Column(name, justify="right") for name in names)
    table = Table("device", remat, *columns, box=rich.box.SIMPLE)
    for case in cases:
        clips = (
            f"{'≥ ' if frames == _LONGEST else ''}{frames:,} frames" if frames else "–"
            for frames in case["clips"].values()
        )
        table.add_row(
            case["device"],
            f"{case['remat']} (of the config)" if case["configured"] else case["remat"],
            f"{case['state'] / 1e9:.1f}",
            f"{case['per_token'] / 1e3:.0f}",
            f"{case['m_mem']:,}" if case["m_mem"] else "does not fit",
            f"{case['host'] / 1e9:.0f}" if case["host"] else "–",
            *clips,
        )
    return table
