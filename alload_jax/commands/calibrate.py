"""`alload calibrate`: measures the cost of a model's training steps, or takes it from a run."""

import argparse
import dataclasses
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from alload_jax.bench.harness import console, table_of
from alload_jax.commands.flags import ABOVE_0, COUNT, SHARE, require_place
from alload_jax.errors import InputError
from alload_jax.files import Json, parse_yaml, read_json, read_text
from alload_jax.planning import cost
from alload_jax.planning.fit import fit_run
from alload_jax.planning.remat import AUTO_REMAT
from alload_jax.sharding.host_memory import set_xla_flags

if TYPE_CHECKING:
    from alload_jax.bench.calibration import Bounds, Outcome
    from alload_jax.config import Config
    from alload_jax.training.trial_step import Step


def print_report(costs: cost.CostFile) -> None:
    """Prints the points, the fits and the allocator's peak; the file has `details`."""
    assert costs.details
    _print_points(costs.details["points"], f"training steps on {costs.device}")
    fits = dict(costs.details["fits"])
    if sparse := costs.details.get("sparse"):
        if sparse["points"]:
            _print_points(sparse["points"], "steps with sparse attention")
            fits["sparse"] = sparse
        else:
            print(
                "sparse attention: too few steps of model.sparse_attention.min_tokens or more were "
                "measured, so that plans assume its costs; give more --seconds or --longest"
            )
    forms = {
        "form": lambda form: form["form"].replace("_", " "),
        "R²": lambda form: "–" if form["r2"] is None else f"{form['r2']:.5f}",
        "mean error": lambda form: f"{form['mape']:.2%}",
        "held out": lambda form: (
            "–" if form["held_out_mape"] is None else f"{form['held_out_mape']:.2%}"
        ),
        "coefficients": lambda form: ", ".join(
            f"{name} {value:.4g}" for name, value in form["coefficients"].items()
        ),
    }
    rows = [{"form": name} | form for name, form in fits.items()]
    console().print(table_of("fits", forms, rows))
    if allocator := costs.details["allocator"]:
        print(
            f"peak of the allocator {allocator['peak_bytes'] / 1e9:.2f} GB, "
            f"predicted {allocator['relative_error']:+.1%}"
        )


def _print_points(points: list[Json], title: str) -> None:
    """A table of measured steps; the last column says the density, or what was held out."""
    columns: dict[str, Callable[[Json], str]] = {
        "rows": lambda row: f"{row['rows']:,}",
        "tokens per row": lambda row: f"{row['seq_len']:,}",
        "measured, s": lambda row: f"{row['seconds']:.4f}",
        "predicted, s": lambda row: f"{row['predicted_seconds']:.4f}",
        "error": lambda row: f"{row['residual']:+.1%}",
    }
    if "density" in points[0]:
        columns["density"] = lambda row: str(row["density"])
    else:
        columns["held out"] = lambda row: "yes" if row["held_out"] else ""
    console().print(table_of(title, columns, points))


def calibrate_from_run(folder: Path, out: Path) -> int:
    """Reads a run's folder, prints the fit and writes the cost model's JSON.

    The model that planned the run, if it predicts seconds, bounds the fit, and its memory model is
    kept.

    Raises:
      InputError: the folder holds no run, or too few of its steps can be fitted.
    """
    from alload_jax.config import read_config
    from alload_jax.training.run_files import is_validation, read_metrics

    path = folder / "config.yaml"
    if not path.is_file():
        raise InputError(f"{folder}: holds no run; give the folder of one, such as runs/digits")
    config = parse_yaml(read_text(path), str(path), "restore the run's config")
    config = config if isinstance(config, dict) else {}
    planned_by = cost.CostFile()
    if place := (config.get("planning") or {}).get("cost_model"):
        try:
            planned_by = cost.read_cost_file(place)
        except InputError as error:
            raise InputError(f"{folder}: its config names a cost model: {error}") from error
    before = planned_by.quadratic
    if (config.get("model") or {}).get("sparse_attention"):
        before = cost.with_layers(planned_by, cost.SparseLayers()).quadratic
    try:
        rows = read_metrics(folder / "metrics.jsonl")
        found = fit_run([row for row in rows if not is_validation(row)], before)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error
    starts = read_json(folder / "environment.json") or [{}]
    devices = starts[-1].get("devices") or [None]
    details = {
        "command": shlex.join(["alload", *sys.argv[1:]]),
        "from_run": str(folder),
        "steps": found.steps,
        "mape": found.mape,
        "drift": found.drift,
        "versions": starts[-1].get("versions"),
    }
    quadratic, sparse = cost.without_layers(found.model)
    model = planned_by.model  # by which a cost model is compared with others
    if not model:
        trained = read_config(["--config", str(path)], prog=_COMMAND).model
        step = trained.step_fields()
        remat = {"remat": step["remat"]} if "remat" in step else {}
        model = trained.architecture() | remat
    summary = read_json(folder / "summary.json") or {}
    compiled, programs = summary.get("compile_seconds"), summary.get("programs")
    times: Json = {}
    if compiled and programs and (first_step := summary.get("first_step_seconds")):
        times["program_seconds"] = compiled / programs
        times["start_seconds"] = max(0.0, first_step - compiled)
    costs = dataclasses.replace(
        planned_by,
        **times,
        quadratic=quadratic,
        sparse=sparse or planned_by.sparse,
        power=planned_by.power,
        model=model,
        device=devices[0] or planned_by.device,
        origin="measured",
        details=details,
    )
    cost.write_cost_file(out, costs)
    print(f"{found.steps:,} steps, mean error {found.mape:.1%}")
    if found.drift is not None:
        longer = "longer" if found.drift >= 0 else "shorter"
        print(f"recent steps took {abs(found.drift):.1%} {longer} than the plan predicted")
    for name, value in vars(found.model).items():
        if isinstance(value, float):
            was = f" (was {getattr(before, name):.4g})" if before else ""
            print(f"  {name} = {value:.4g} s{was}")
    print(f"written: {out}")
    return 0


_COMMAND = "alload calibrate"


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
        type=ABOVE_0,
        default=300.0,
        help="time for the grid, after small steps are compiled (default 300)",
    )
    add("--shortest", type=COUNT, default=256, help="tokens of the shortest sequence (default 256)")
    add("--longest", type=COUNT, help="tokens of the longest; default: what fits, at most 80,000")
    add("--margin", type=SHARE, default=0.05, help="share of memory to leave free (default 0.05)")
    add(
        "--memory-gb",
        type=ABOVE_0,
        help="device memory in GB; default: JAX's limit, or half of the host's memory on CPUs",
    )
    add(
        "--layers",
        type=COUNT,
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
    from alload_jax.bench.calibration import LEAST_POINTS, Bounds, Calibration
    from alload_jax.bench.calibration_fit import calibrated
    from alload_jax.config import use_compilation_cache
    from alload_jax.training.run_files import peak_memory

    set_xla_flags()  # as training does
    config = _config(options)
    use_compilation_cache(config.run)
    memory = None if options.memory_gb is None else options.memory_gb * 1e9
    bounds = Bounds(options.seconds, options.shortest, options.longest, options.margin, memory)
    step = _step(config, bounds)
    print("compiling small steps, to fit memory over tokens; --seconds counts from then on")
    calibration = Calibration(step, bounds)
    finding = calibration.memory()
    print(
        f"{finding.model.base / 1e9:.2f} GB + {finding.model.per_token / 1e3:.1f} kB per token + "
        f"{finding.model.per_sequence / 1e6:.2f} MB per sequence: "
        f"{finding.m_mem:,} tokens in {finding.limit / 1e9:.1f} GB, {options.margin:.0%} left free"
    )
    outcomes = _until_interrupted(calibration.measure(finding.m_mem), LEAST_POINTS)
    peak = peak_memory()
    ratio = None
    try:
        ratio = calibration.packed_ratio(outcomes)
    except KeyboardInterrupt:
        print("interrupted: packed rows are not timed")
    if ratio is not None:
        print(f"packed rows take {ratio:.3f} times the seconds of batches of the same samples")
    sparse = _until_interrupted(calibration.measure_sparse(finding.m_mem), 0)
    command = shlex.join(["alload", *sys.argv[1:]])
    costs = calibrated(calibration, finding, outcomes, sparse, command, peak)
    costs = dataclasses.replace(costs, packed_ratio=ratio)
    cost.write_cost_file(options.out, costs)
    print_report(costs)
    written = [options.out]
    if options.picture:
        from alload_jax.bench.pictures import draw_calibration

        draw_calibration(Path(options.picture), costs)
        written.append(options.picture)
    print(f"written: {', '.join(written)}")
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("out", "picture"):
        if (value := getattr(options, name)) is not None:
            require_place(_COMMAND, f"--{name}", Path(value))
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
    return dataclasses.replace(config, model=config.model.with_layers(options.layers))


def _step(config: "Config", bounds: "Bounds") -> "Step":
    """Makes the step to measure; raises InputError first if its state cannot fit."""
    from alload_jax.bench.calibration import device_memory
    from alload_jax.data.sources.opening import open_source
    from alload_jax.data.store.reader import is_address
    from alload_jax.models.families import parameter_count
    from alload_jax.planning.analytic import state_bytes
    from alload_jax.planning.cost import MemoryModel
    from alload_jax.training.memory import trained_of
    from alload_jax.training.trial_step import Step, training_spec, with_density

    limit = device_memory(bounds.memory)
    trained = trained_of(config.model, config.parameters, config.optimizer)
    state = state_bytes(parameter_count(config.model), trained)
    MemoryModel(float(state), 1.0).max_tokens(limit, bounds.margin)
    model = with_density(config.model, 1.0)
    spec = training_spec(model, config.optimizer, config.objective, config.parameters)
    # Of a row with classes: the data's maximum, or 1 without the data.
    data, tokens = config.data, 1
    there = data.source is not None or is_address(data.folder) or Path(data.folder).exists()
    if not config.model.text and there:
        tokens = open_source(data.folder, data.source).manifest.longest_text()
    return Step(spec, tokens, single=config.planning.single_gradient)


def _until_interrupted(outcomes: "Iterable[Outcome]", least: int) -> "list[Outcome]":
    """All outcomes; after Ctrl-C those so far, if at least so many were measured."""
    found: list[Outcome] = []
    try:
        for each in outcomes:
            found.append(each)
            words = f"{each.case.rows} × {each.case.seq_len:,} tokens"
            words += "" if each.density == 1 else f", density {each.density}"
            print(f"{words}: {f'{each.seconds:.4f} s' if each.seconds else each.note}")
    except KeyboardInterrupt:
        if sum(each.seconds is not None for each in found) < least:
            raise
        print("interrupted: fitting the steps measured so far")
    return found


def _run_with_memory_check(options: argparse.Namespace) -> int:
    """Calibrates in a separate process, so that the device is free for the steps of the check."""
    from alload_jax.bench.calibration import check_memory

    words = [word for word in options.argv if word != "--memory-check"]
    command = [sys.executable, "-m", "alload_jax.cli", *words]
    status, interrupted = None, False
    with subprocess.Popen(command) as child:
        while status is None:
            try:
                status = child.wait()
            except KeyboardInterrupt:  # the child got it too and writes its results so far
                interrupted = True
    if status or interrupted:
        return status
    costs = cost.read_cost_file(options.out)
    assert costs.details
    if costs.details["allocator"] is None:
        print("no memory check: the device reports no memory limit")
        return 0
    costs.details["memory_check"] = found = check_memory(costs)
    cost.write_cost_file(options.out, costs)
    for name, case in found.items():
        error = case["relative_error"]
        outcome = "ran" if case["ran"] else case["error"]
        peak = "" if error is None else f", peak predicted {error:+.1%}"
        print(f"{name} M_mem: {case['rows']} × {case['seq_len']:,} tokens: {outcome}{peak}")
    return 0
