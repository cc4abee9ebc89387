"""`alload plan`: what a policy makes of a data set, before anything is trained."""

import argparse
import json
import math
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from alload_jax.commands.plan_inputs import PlanInputs, plan_inputs
from alload_jax.commands.plan_tables import case_table, comparison_table
from alload_jax.errors import InputError
from alload_jax.planning.analytic import FROZEN_BYTES
from alload_jax.planning.architectures.registry import model_names
from alload_jax.planning.files import plan_table, replaceable, write_plan
from alload_jax.planning.policies.registry import AUTO, policy_names
from alload_jax.planning.simulation import SimulationSettings
from alload_jax.planning.study import Case, Study
from alload_jax.planning.topology import RanksMode
from alload_jax.planning.workloads import names

HELP = "Plan an epoch and measure the plan: balance, padding, use of memory."

_WIDTH = 150
"""Columns of a comparison; a narrower terminal folds lines rather than figures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    data = parser.add_argument_group("what is planned")
    data.add_argument("--manifest", help="Parquet or CSV: frames, height, width, or seq_len")
    data.add_argument("--workload", choices=names(), metavar="NAME", help=", ".join(names()))
    data.add_argument("--size", type=int, default=100_000, help="samples of the workload")
    data.add_argument("--workload-seed", type=int, default=0, help="of the workload's samples")
    data.add_argument("--vae-stride", type=_triple, help="pixels per latent, as 4,8,8")
    data.add_argument("--patch-size", type=_triple, help="latents per token, as 1,2,2")
    data.add_argument("--seed", type=int, help="of the order of samples")
    data.add_argument("--epoch", type=int, default=0, help="which epoch to plan")
    _add_costs(parser.add_argument_group("what it is planned for"))
    _add_policies(parser.add_argument_group("how"))
    _add_output(parser.add_argument_group("what comes out"))


def _add_costs(group: Any) -> None:
    add = group.add_argument
    add("--config", help="a training config, whose planning section and model the flags override")
    add("--model", choices=model_names(), help="for an analytic cost model; default wan2.1-1.3b")
    add("--device", help="h200 (the default), h100, a100 or cpu")
    add("--shards", type=int, default=1, help="devices that share one copy of the weights")
    add("--trained-parameters", type=int, help="how many are trained, the rest frozen; default all")
    add("--frozen-dtype", choices=tuple(FROZEN_BYTES), help="of frozen ones; default float32")
    add("--cost-model", help="JSON written by `alload calibrate`, in place of the analytic model")
    add("--foreign-cost-model", action="store_true", default=None, help="accept another's")
    add("--memory-gb", type=float, help="of a device: gives M_mem by the cost model's memory")
    add("--margin", type=float, default=0.05, help="share of it to leave free; default 0.05")


def _add_policies(group: Any) -> None:
    add = group.add_argument
    policies, modes = policy_names(), get_args(RanksMode)
    add(
        "--policy",
        choices=(AUTO, *policies),
        help="how micro-batches are made; default: auto, balanced if the device can pack rows",
    )
    add(
        "--compare",
        nargs="+",
        metavar="POLICY",
        help=f"side by side, of {', '.join(policies)}; `equal_tokens:independent` names a mode",
    )
    add("--ranks", type=int, nargs="+", help="data-parallel ranks (GPUs), one number or several")
    add("--ranks-mode", choices=modes, help="whether ranks share a bucket")
    add("--m-mem", type=int, help="most tokens of a micro-batch; default: what the device holds")
    add("--m-comp", type=_m_comp, help="most cost of a micro-batch: a number, longest or auto")
    add("--p", type=float, help="exponent of cost over sequence length; default: fitted, or 2")
    add("--rows", type=int, help="batch size of every bucket, for --policy fixed")
    add("--micro-batches-per-step", type=int, help="that a rank accumulates before an update")
    add("--align", type=int, help="packed samples begin at multiples of this")
    add("--max-segments", type=int, help="most samples of a packed row")
    add("--look-ahead", type=int, help="steps that packed policies choose from at once")
    add("--max-delay", type=int, help="such windows that may defer a sample")
    add("--context", type=int, help="ranks over which `balanced` splits samples that are too long")
    add("--link-bandwidth", type=float, help="bytes/s between them; default 76e9")


def _add_output(group: Any) -> None:
    add = group.add_argument
    add("--simulate", action="store_true", help="replay the plan: throughput, idle time")
    add("--noise", type=float, default=0.0, help="spread of a rank's time for the same work: 0.02")
    add("--all-reduce", type=float, default=0.0, help="seconds added to every step")
    add("--report", help="write one self-contained HTML page here")
    add("--out", help="write the plan to this Parquet file, a row for every placed sample")
    add("--json", action="store_true", help="print the figures as JSON")


def run(options: argparse.Namespace) -> int:
    """Plans, prints the figures, writes what was asked for."""
    _check(options)
    inputs = plan_inputs(options)
    ranks = options.ranks or _configured_ranks(options)
    replay = None
    if options.simulate:
        replay = SimulationSettings(options.noise, options.all_reduce, inputs.seed)
    study = Study(inputs.samples, inputs.planning, inputs.costs, inputs.seed, options.epoch, replay)
    policies = list(dict.fromkeys(options.compare or [inputs.planning.policy]))
    cases = list(study.cases(policies, ranks))
    if options.json:
        print(json.dumps(_content(options, inputs, cases), indent=2))
    else:
        _print_tables(inputs, cases)
    if options.out:
        table = plan_table(
            cases[0].epoch, inputs.samples.seq_len, _settings(options, inputs, cases[0])
        )
        write_plan(options.out, table)
        _say(options, f"plan: {options.out}")
    if options.report:
        from alload_jax.report.plan_report import write_report

        write_report(options.report, study, cases, inputs.source, inputs.costs_source)
        _say(options, f"report: {options.report}")
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("seed", "epoch", "workload_seed", "noise", "all_reduce"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < math.inf:
            flag = name.replace("_", "-")
            raise InputError(f"alload plan: --{flag} is {value}; it must be a number, 0 or more")
    if options.ranks and min(options.ranks) < 1:
        raise InputError(f"alload plan: --ranks is {min(options.ranks)}; it must be at least 1")
    if not 0 <= options.margin < 1:
        raise InputError(f"alload plan: --margin is {options.margin}; give a share below 1")
    _check_files(options)
    if options.out and (len(options.compare or []) > 1 or len(options.ranks or []) > 1):
        raise InputError("alload plan: --out writes one plan; give one policy and one --ranks")


def _check_files(options: argparse.Namespace) -> None:
    """What is written replaces nothing that is read, and no two things are written to one file."""
    taken = {
        Path(value).resolve(): f"--{name.replace('_', '-')}"
        for name in ("manifest", "cost_model", "config")
        if (value := getattr(options, name))
    }
    for name in ("out", "report"):
        value = getattr(options, name)
        if value is None:
            continue
        path = replaceable(value)
        if path in taken:
            raise InputError(f"alload plan: --{name} {value} is {taken[path]} too; name another")
        taken[path] = f"--{name}"


def _configured_ranks(options: argparse.Namespace) -> list[int]:
    if options.config:
        from alload_jax.config import read_config

        ranks = read_config(["--config", options.config], prog="alload plan").planning.ranks
        if ranks is not None:
            return [ranks]
    raise InputError("alload plan: --ranks is not given; give the number of ranks (GPUs)")


def _content(options: argparse.Namespace, inputs: PlanInputs, cases: list[Case]) -> dict[str, Any]:
    """One case's settings and figures as they are; several under `cases`."""
    each = [
        {"ranks": case.ranks, "plan": _settings(options, inputs, case)} | case.figures()
        for case in cases
    ]
    return each[0] if len(cases) == 1 else {"cases": each}


def _print_tables(inputs: PlanInputs, cases: list[Case]) -> None:
    console = Console(soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    console.print(f"data: {inputs.source}", highlight=False)
    console.print(f"cost model: {inputs.costs_source}", highlight=False)
    console.print(case_table(cases[0]) if len(cases) == 1 else comparison_table(cases))


def _settings(options: argparse.Namespace, inputs: PlanInputs, case: Case) -> dict[str, Any]:
    """How a plan was made and measured, as JSON values."""
    predictor = inputs.planning.predictor(inputs.costs)
    return case.plan.identity() | {
        "data": inputs.source,
        "manifest": options.manifest,
        "epoch": options.epoch,
        "m_mem": case.plan_m_mem,
        "sample_count": len(inputs.samples),
        "cost_model": {"kind": type(predictor).__name__, **vars(predictor)},
        "cost_model_source": inputs.costs_source,
        "seconds_per_split_token": case.config.seconds_per_split_token(inputs.costs),
    }


def _say(options: argparse.Namespace, line: str) -> None:
    if not options.json:
        print(line)


def _m_comp(text: str) -> float | str:
    if text in ("auto", "longest"):
        return text
    try:
        return float(text)
    except ValueError:
        message = f"{text!r} is neither a number nor auto nor longest"
        raise argparse.ArgumentTypeError(message) from None


def _triple(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not three whole numbers such as 4,8,8")
    return (int(parts[0]), int(parts[1]), int(parts[2]))
