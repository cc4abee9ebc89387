"""`alload calibrate`: measures the cost of a model's training steps on this device."""

import argparse
import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from alload_jax.commands.bench_output import require_counts, require_place
from alload_jax.commands.calibrate_run import calibrate_from_run
from alload_jax.commands.calibrate_tables import print_report
from alload_jax.errors import InputError
from alload_jax.planning.cost import read_cost_file, write_cost_file
from alload_jax.planning.remat import AUTO_REMAT
from alload_jax.sharding.xla_flags import set_xla_flags

if TYPE_CHECKING:  # JAX takes a second to import and reserves a GPU's memory
    from alload_jax.bench.calibration import Bounds, Calibration, MemoryFinding, Outcome
    from alload_jax.bench.step import Step
    from alload_jax.config import Config

_COMMAND = "alload calibrate"

HELP = "Measure training steps on this device and fit a cost model: seconds and memory by length."

_WIDTH = 120
_REPEATED = (
    *("config", "out", "picture", "seconds", "shortest", "longest", "margin", "memory_gb"),
    "layers",
)
"""Flags that are passed on to the process of the measurements."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", help="training config whose model and optimizer are measured")
    source.add_argument(
        "--from-run", metavar="RUN", help="folder of a run, whose step times are fitted instead"
    )
    add(
        "--set",
        nargs=2,
        action="append",
        default=[],
        metavar=("KEY", "VALUE"),
        help="override a key of the config, such as --set model.remat full",
    )
    add("--out", required=True, help="cost model's JSON to write, for planning.cost_model")
    add("--picture", help="PNG of measured and fitted steps")
    add(
        "--seconds",
        type=float,
        default=300.0,
        help="time for the grid, after small steps are compiled (default 300)",
    )
    add("--shortest", type=int, default=256, help="tokens of the shortest sequence (default 256)")
    add("--longest", type=int, help="tokens of the longest; default: what fits, at most 80,000")
    add("--margin", type=float, default=0.05, help="share of memory to leave free (default 0.05)")
    add(
        "--memory-gb",
        type=float,
        help="device memory in GB; default: JAX's limit, or half of the host's memory on CPUs",
    )
    add(
        "--layers",
        type=int,
        help="number of layers, if fewer than the model has, for a quick trial",
    )
    add(
        "--memory-check",
        action="store_true",
        help="on a GPU: run steps to check that M_mem tokens fit and clearly more do not",
    )


def run(options: argparse.Namespace) -> int:
    """Measures, fits, prints tables and writes the cost model."""
    _check(options)
    if options.from_run:
        return calibrate_from_run(Path(options.from_run), Path(options.out))
    if options.memory_check:
        return _run_with_memory_check(options)
    from alload_jax.bench.calibration import Calibration
    from alload_jax.bench.calibration_fit import calibrated
    from alload_jax.config import use_compilation_cache
    from alload_jax.training.run_files import peak_memory

    set_xla_flags()  # as training does
    config = _config(options)
    use_compilation_cache(config.run)
    console = Console(markup=False, soft_wrap=True, width=_WIDTH)
    step = _step(config, options)
    console.print("compiling small steps, to fit memory over tokens; --seconds counts from then on")
    calibration = Calibration(step, _bounds(options))
    finding = calibration.memory()
    console.print(
        f"{finding.model.base / 1e9:.2f} GB + {finding.model.per_token / 1e3:.1f} kB per token + "
        f"{finding.model.per_sequence / 1e6:.2f} MB per sequence: "
        f"{finding.m_mem:,} tokens in {finding.limit / 1e9:.1f} GB, {options.margin:.0%} left free"
    )
    outcomes = _measured(calibration, finding, console)
    peak = peak_memory()
    sparse = _measured_sparse(calibration, finding, console)
    command = shlex.join(["alload", *sys.argv[1:]])
    costs = calibrated(
        calibration.step, finding, outcomes, command, peak, sparse, calibration.program_seconds
    )
    write_cost_file(options.out, costs)
    print_report(costs, console)
    written = [options.out]
    if options.picture:
        from alload_jax.bench.calibration_picture import write_calibration_picture

        write_calibration_picture(Path(options.picture), costs)
        written.append(options.picture)
    print(f"written: {', '.join(written)}")
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("out", "picture"):
        value = getattr(options, name)
        if value is not None:
            require_place(_COMMAND, f"--{name}", Path(value))
    for name in ("seconds", "memory_gb"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            flag = name.replace("_", "-")
            raise InputError(f"alload calibrate: --{flag} is {value}; it must be above 0")
    counts = ("shortest", "longest", "layers")
    require_counts(_COMMAND, **{name: getattr(options, name) for name in counts})
    if not 0 <= options.margin < 1:
        raise InputError(
            f"alload calibrate: --margin is {options.margin}; it must be from 0 to below 1"
        )
    if options.longest is not None and options.longest < 4 * options.shortest:
        raise InputError(
            f"alload calibrate: --longest {options.longest} is less than four times --shortest "
            f"{options.shortest}; a fit needs lengths further apart"
        )


def _config(options: argparse.Namespace) -> "Config":
    from alload_jax.config import read_config

    if not Path(options.config).is_file():
        raise InputError(
            f"{options.config}: no such config; give the path of a YAML such as configs/digits.yaml"
        )
    overrides = [part for key, value in options.set for part in (f"--{key}", value)]
    config = read_config(["--config", options.config, *overrides], prog="alload calibrate")
    if config.model.remat == AUTO_REMAT:
        raise InputError(
            "alload calibrate: model.remat is auto, which fills the memory that m_mem leaves; give "
            "the policy to measure, such as --set model.remat attention"
        )
    if config.model.sparse_attention:  # the densities that are measured are not the config's
        sparse = dataclasses.replace(config.model.sparse_attention, forced=None)
        model = dataclasses.replace(config.model, sparse_attention=sparse)
        config = dataclasses.replace(config, model=model)
    if options.layers is None:
        return config
    if not hasattr(config.model, "num_layers"):
        raise InputError(
            f"alload calibrate: --layers is {options.layers}, but model.family "
            f"{config.model.family} has no num_layers; leave it out"
        )
    fewer: dict[str, Any] = {"num_layers": options.layers}
    model = dataclasses.replace(config.model, **fewer)
    return dataclasses.replace(config, model=model)


def _bounds(options: argparse.Namespace) -> "Bounds":
    from alload_jax.bench.calibration import Bounds

    memory = None if options.memory_gb is None else options.memory_gb * 1e9
    return Bounds(options.seconds, options.shortest, options.longest, options.margin, memory)


def _step(config: "Config", options: argparse.Namespace) -> "Step":
    """Makes the step to measure; raises InputError first if its state cannot fit."""
    from alload_jax.bench.calibration import device_memory
    from alload_jax.bench.step import Step, training_spec, with_density
    from alload_jax.models.families import abstract_model, parameter_count
    from alload_jax.planning.analytic import state_bytes
    from alload_jax.planning.cost import MemoryModel
    from alload_jax.training.state_size import trained_of

    limit = device_memory(_bounds(options).memory)
    trained = trained_of(abstract_model(config.model).params, config.parameters, config.optimizer)
    state = state_bytes(parameter_count(config.model), trained)
    MemoryModel(float(state), 1.0).max_tokens(limit, options.margin)
    model = with_density(config.model, 1.0)
    spec = training_spec(model, config.optimizer, config.objective, config.parameters)
    return Step(spec, _condition_tokens(config), single=config.planning.single_gradient)


def _condition_tokens(config: "Config") -> int:
    """Condition tokens of a row with classes: the data's maximum, or 1 without the data."""
    from alload_jax.data.sources.opening import open_source

    absent = config.data.source is None and not Path(config.data.folder).exists()
    if config.model.text or absent:
        return 1
    return open_source(config.data.folder, config.data.source).manifest.longest_text()


def _measured(
    calibration: "Calibration", finding: "MemoryFinding", console: Console
) -> list["Outcome"]:
    """All outcomes; after Ctrl-C those so far, if they are enough for a fit."""
    from alload_jax.bench.calibration_fit import LEAST_POINTS

    outcomes: list[Outcome] = []
    try:
        for outcome in calibration.measure(finding.m_mem):
            outcomes.append(outcome)
            case = outcome.case
            took = f"{outcome.seconds:.4f} s" if outcome.seconds else outcome.note
            console.print(f"{case.rows} × {case.seq_len:,} tokens: {took}")
    except KeyboardInterrupt:
        if sum(o.seconds is not None for o in outcomes) < LEAST_POINTS:
            raise
        console.print("interrupted: fitting the steps measured so far")
    return outcomes


def _measured_sparse(
    calibration: "Calibration", finding: "MemoryFinding", console: Console
) -> list[tuple[float, "Outcome"]]:
    """Outcomes of sparse attention with the density of each; after Ctrl-C those so far."""
    found: list[tuple[float, Outcome]] = []
    try:
        for density, outcome in calibration.measure_sparse(finding.m_mem):
            found.append((density, outcome))
            case = outcome.case
            took = f"{outcome.seconds:.4f} s" if outcome.seconds else outcome.note
            console.print(f"{case.rows} × {case.seq_len:,} tokens, density {density}: {took}")
    except KeyboardInterrupt:
        console.print("interrupted: fitting the steps measured so far")
    return found


def _run_with_memory_check(options: argparse.Namespace) -> int:
    """Calibrates in a separate process, so that the device is free for the steps of the check."""
    from alload_jax.bench.memory_check import check_memory

    command = [sys.executable, "-m", "alload_jax.cli", "calibrate", *_flags(options)]
    interrupted = False
    with subprocess.Popen(command) as child:
        while True:
            try:
                status = child.wait()
                break
            except KeyboardInterrupt:  # the child got it too and writes its results so far
                interrupted = True
    if status or interrupted:
        return status
    costs = read_cost_file(options.out)
    assert costs.details
    if costs.details["allocator"] is None:
        print("no memory check: the device reports no memory limit")
        return 0
    costs.details["memory_check"] = found = check_memory(costs)
    write_cost_file(options.out, costs)
    for name, case in found.items():
        error = case["relative_error"]
        outcome = "ran" if case["ran"] else case["error"]
        peak = "" if error is None else f", peak predicted {error:+.1%}"
        print(f"{name} M_mem: {case['rows']} × {case['seq_len']:,} tokens: {outcome}{peak}")
    return 0


def _flags(options: argparse.Namespace) -> list[str]:
    """The flags of the command line, without --memory-check."""
    flags = [part for pair in options.set for part in ("--set", *pair)]
    for name in _REPEATED:
        if (value := getattr(options, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags
