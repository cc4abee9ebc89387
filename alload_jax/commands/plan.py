"""`alload plan`: plans an epoch of a data set and reports the plan's metrics."""

import argparse
import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from alload_jax.commands.flags import triple
from alload_jax.commands.plan_inputs import PlanInputs, plan_inputs
from alload_jax.commands.plan_memory import memory_cases, memory_table
from alload_jax.commands.plan_tables import case_table, comparison_table, shares_table
from alload_jax.errors import InputError, one_line
from alload_jax.planning.advice import advice
from alload_jax.planning.analytic import FROZEN_BYTES
from alload_jax.planning.architectures.registry import model_names
from alload_jax.planning.files import plan_table, replaceable, write_plan
from alload_jax.planning.policies.registry import AUTO, policy_names
from alload_jax.planning.simulation import SimulationSettings
from alload_jax.planning.study import Case, Study
from alload_jax.planning.topology import RanksMode
from alload_jax.planning.workloads import names

HELP = "Plan an epoch and report its balance, padding and memory use."

_WIDTH = 150
"""Width of a comparison in characters; narrower terminals wrap its lines, but not its cells."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    data = parser.add_argument_group("data set")
    data.add_argument(
        "--manifest", help="a data folder; or Parquet or CSV: frames, height, width, or seq_len"
    )
    data.add_argument("--workload", choices=names(), metavar="NAME", help=", ".join(names()))
    data.add_argument("--size", type=int, default=100_000, help="number of samples of the workload")
    data.add_argument("--workload-seed", type=int, default=0, help="seed of the workload's samples")
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
    data.add_argument("--seed", type=int, help="seed of the order of samples")
    data.add_argument("--epoch", type=int, default=0, help="which epoch to plan")
    data.add_argument(
        "--epochs",
        type=int,
        help="epochs of the run: --out writes so many, and auto counts the time to the first step "
        "over them; default: those of --config, or 1",
    )
    _add_costs(parser.add_argument_group("model, device and cost model"))
    _add_policies(parser.add_argument_group("policy and bounds"))
    _add_output(parser.add_argument_group("output"))


def _add_costs(group: Any) -> None:
    add = group.add_argument
    add("--config", help="training config; flags override its planning section and model")
    add(
        "--model",
        choices=model_names(),
        help="model of the analytic cost model; default wan2.1-1.3b",
    )
    add("--device", help="h200 (the default), h100, a100 or cpu")
    add("--shards", type=int, default=1, help="devices that shard one copy of the weights")
    add(
        "--trained-parameters",
        type=int,
        help="number of trained parameters, others are frozen; default all",
    )
    add("--frozen-dtype", choices=tuple(FROZEN_BYTES), help="of frozen parameters; default float32")
    add("--cost-model", help="JSON of `alload calibrate`, instead of the analytic cost model")
    add(
        "--foreign-cost-model",
        action="store_true",
        default=None,
        help="accept a cost model of another model or device",
    )
    add(
        "--sparse-layers",
        type=float,
        metavar="SHARE",
        help="share of the layers whose self-attention is sparse; default: as the config begins",
    )
    add("--density", type=float, help="share of the keys that these attend to; default 0.1")
    add("--memory-gb", type=float, help="memory of a device in GB, from which M_mem is computed")
    add("--margin", type=float, default=0.05, help="share of memory to leave free; default 0.05")


def _add_policies(group: Any) -> None:
    add = group.add_argument
    policies, modes = policy_names(), get_args(RanksMode)
    add(
        "--policy",
        choices=(AUTO, *policies),
        help="planning policy; default auto: the fastest that the device can run",
    )
    add(
        "--compare",
        nargs="+",
        metavar="POLICY",
        help=f"compare policies: {', '.join(policies)}; `equal_tokens:independent` sets the mode",
    )
    add(
        "--ranks", type=int, nargs="+", help="numbers of data-parallel ranks (GPUs), one or several"
    )
    add("--ranks-mode", choices=modes, help="whether all ranks of a step share a bucket")
    add("--m-mem", type=int, help="maximum tokens of a micro-batch; default: what fits the device")
    add("--m-comp", type=_m_comp, help="maximum cost of a micro-batch: a number, longest or auto")
    add("--p", type=float, help="exponent of cost over sequence length; default: fitted, or 2")
    add("--rows", type=int, help="batch size of every bucket, for --policy fixed")
    add("--micro-batches-per-step", type=int, help="micro-batches that a rank accumulates per step")
    add("--align", type=int, help="packed samples begin at multiples of this many tokens")
    add("--row-tokens", type=int, help="tokens of a row of `balanced`; default: the fastest")
    add("--max-programs", type=int, help="maximum programs of a bucketed policy; default 64")
    add("--max-segments", type=int, help="maximum samples of a packed row; default: the fastest")
    add(
        "--sample-spread",
        type=_spread,
        help="most samples of a step over the mean, and the mean over the least; none for no bound",
    )
    add(
        "--look-ahead",
        type=int,
        help="steps in a window, within which packed policies place samples",
    )
    add(
        "--context",
        type=_context,
        metavar="C",
        help="ranks over which `balanced` splits long samples, or auto",
    )
    add(
        "--link-bandwidth",
        type=float,
        help="bytes/s between these ranks; default 76e9",
    )


def _add_output(group: Any) -> None:
    add = group.add_argument
    add("--simulate", action="store_true", help="simulate the plan: throughput, idle time")
    add(
        "--noise",
        type=float,
        default=0.0,
        help="relative standard deviation of a rank's time, such as 0.02",
    )
    add("--all-reduce", type=float, default=0.0, help="seconds of all-reduce added to every step")
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
    inputs = plan_inputs(options)
    ranks = options.ranks or _configured_ranks(options)
    replay = None
    if options.simulate:
        replay = SimulationSettings(options.noise, options.all_reduce, inputs.seed)
    if inputs.warning:
        print(one_line(f"warning: {inputs.warning}"), file=sys.stderr)
    study = Study(
        *(inputs.samples, inputs.planning, inputs.costs, inputs.seed, options.epoch, replay),
        bucketed=inputs.bucketed,
        packs=inputs.packs,
        length=inputs.length,
    )
    policies = list(dict.fromkeys(options.compare or [inputs.planning.policy]))
    cases = list(study.cases(policies, ranks))
    if options.json:
        print(json.dumps(_content(options, inputs, cases), indent=2))
    else:
        _print_tables(inputs, study, cases)
    if options.out:
        seq_len = study.samples_of(cases[0].config.policy).seq_len
        numbers = range(options.epoch, options.epoch + (options.epochs or 1))
        epochs = {number: cases[0].plan.epoch(number) for number in numbers}
        table = plan_table(epochs, seq_len, _settings(options, inputs, cases[0]))
        write_plan(options.out, table)
        _print_unless_json(options, f"plan: {options.out}")
    if options.report:
        from alload_jax.report.plan_report import write_report

        write_report(options.report, study, cases, inputs.source, inputs.costs_source)
        _print_unless_json(options, f"report: {options.report}")
    return 0


def _show_memory(options: argparse.Namespace) -> int:
    """Prints what a step needs on a device, without data."""
    _check_margin(options)
    if given := [
        name
        for name in ("manifest", "workload", "weights", "out", "report")
        if getattr(options, name)
    ]:
        raise InputError(f"alload plan: --memory needs no data; leave --{given[0]} out")
    name, cases = memory_cases(options)
    if options.json:
        content = {"model": name, "cases": [case.content() for case in cases]}
        print(json.dumps(content, indent=2))
        return 0
    console = Console(markup=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    console.print(f"predicted by arithmetic, not measured: {name}", highlight=False)
    console.print(memory_table(cases))
    return 0


def _check_margin(options: argparse.Namespace) -> None:
    if not 0 <= options.margin < 1:
        raise InputError(f"alload plan: --margin is {options.margin}; give a share below 1")


def _check(options: argparse.Namespace) -> None:
    for name in ("seed", "epoch", "workload_seed", "noise", "all_reduce"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < math.inf:
            flag = name.replace("_", "-")
            raise InputError(f"alload plan: --{flag} is {value}; it must be a number, 0 or more")
    if options.epochs is not None and options.epochs < 1:
        raise InputError(f"alload plan: --epochs is {options.epochs}; it must be at least 1")
    if options.ranks and min(options.ranks) < 1:
        raise InputError(f"alload plan: --ranks is {min(options.ranks)}; it must be at least 1")
    _check_margin(options)
    _check_files(options)
    if options.out and (len(options.compare or []) > 1 or len(options.ranks or []) > 1):
        raise InputError("alload plan: --out writes one plan; give one policy and one --ranks")


def _check_files(options: argparse.Namespace) -> None:
    """Raises InputError if an output is also an input, or if two outputs are one file."""
    taken = {
        Path(os.path.realpath(value)): f"--{name.replace('_', '-')}"
        for name in ("manifest", "cost_model", "config")
        if (value := getattr(options, name))
    }
    for name in ("out", "report"):
        value = getattr(options, name)
        if value is None:
            continue
        path = replaceable(value)
        if path in taken:
            raise InputError(
                f"alload plan: --{name} {value} is also {taken[path]}; name another file"
            )
        taken[path] = f"--{name}"


def _configured_ranks(options: argparse.Namespace) -> list[int]:
    if options.config:
        from alload_jax.config import read_config

        ranks = read_config(["--config", options.config], prog="alload plan").planning.ranks
        if ranks is not None:
            return [ranks]
    raise InputError("alload plan: --ranks is not given; give the number of ranks (GPUs)")


def _content(options: argparse.Namespace, inputs: PlanInputs, cases: list[Case]) -> dict[str, Any]:
    """Settings and metrics of a single case, or those of several cases under `cases`."""
    each = [
        {"ranks": case.ranks, "plan": _settings(options, inputs, case)} | case.figures()
        for case in cases
    ]
    return each[0] if len(cases) == 1 else {"cases": each}


def _print_tables(inputs: PlanInputs, study: Study, cases: list[Case]) -> None:
    console = Console(markup=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    console.print(one_line(f"data: {inputs.source}"), highlight=False)
    if inputs.shares:
        console.print(shares_table(inputs.shares))
    console.print(one_line(f"cost model: {inputs.costs_source}"), highlight=False)
    for reason in dict.fromkeys(case.reason for case in cases if case.reason):
        console.print(reason, highlight=False)
    console.print(case_table(cases[0]) if len(cases) == 1 else comparison_table(cases))
    for sentence in advice(study, [case for case in cases if case.ranks == cases[0].ranks]):
        console.print(sentence, highlight=False)


def _settings(options: argparse.Namespace, inputs: PlanInputs, case: Case) -> dict[str, Any]:
    """The plan's identity, inputs and cost model, as JSON values."""
    predictor = inputs.planning.predictor(inputs.costs)
    return case.plan.identity() | {
        "data": inputs.source,
        "manifest": options.manifest,
        "epoch": options.epoch,
        "m_mem": case.plan_m_mem,
        "sample_count": len(inputs.samples),
        **({"sources": [each._asdict() for each in inputs.shares]} if inputs.shares else {}),
        "cost_model": {"kind": type(predictor).__name__, **asdict(predictor)},  # type: ignore[call-overload]
        "cost_model_source": inputs.costs_source,
        "seconds_per_split_token": case.config.seconds_per_split_token(inputs.costs),
    }


def _print_unless_json(options: argparse.Namespace, line: str) -> None:
    if not options.json:
        print(one_line(line))


def _spread(text: str) -> float:
    try:
        return math.inf if text == "none" else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none") from error


def _context(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto") from error


def _m_comp(text: str) -> float | str:
    if text in ("auto", "longest"):
        return text
    try:
        return float(text)
    except ValueError:
        message = f"{text!r} is not a number, auto or longest"
        raise argparse.ArgumentTypeError(message) from None
