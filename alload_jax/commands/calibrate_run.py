"""`alload calibrate --from-run`: fits a cost model to the step times of a run."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

from alload_jax.errors import InputError
from alload_jax.files import parse_yaml, read_json, read_text
from alload_jax.planning.cost import CostFile, QuadraticCost, read_cost_file, write_cost_file
from alload_jax.planning.refit import RunFit, fit_run
from alload_jax.planning.sparse_cost import SparseLayers, with_layers, without_layers


def calibrate_from_run(folder: Path, out: Path) -> int:
    """Reads a run's folder, prints the fit and writes the cost model's JSON.

    The model that planned the run, if it predicts seconds, bounds the fit, and its memory model is
    kept.

    Raises:
      InputError: the folder holds no run, or too few of its steps can be fitted.
    """
    from alload_jax.training.run_files import is_validation, read_metrics

    config = _config(folder)
    planned_by = _planned_by(folder, config)
    before = planned_by.quadratic
    if (config.get("model") or {}).get("sparse_attention"):
        before = with_layers(planned_by, SparseLayers()).quadratic
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
    quadratic, sparse = without_layers(found.model)
    times: dict[str, Any] = _start_times(read_json(folder / "summary.json") or {})
    costs = dataclasses.replace(
        planned_by,
        **times,
        quadratic=quadratic,
        sparse=sparse or planned_by.sparse,
        power=planned_by.power,
        model=planned_by.model or _model(folder),
        device=devices[0] or planned_by.device,
        origin="measured",
        details=details,
    )
    write_cost_file(out, costs)
    _print(found, before)
    print(f"written: {out}")
    return 0


def _start_times(summary: dict[str, Any]) -> dict[str, float]:
    """Fields of `CostFile` on the start of a run, as far as its summary knows them."""
    compiled, programs = summary.get("compile_seconds"), summary.get("programs")
    first_step = summary.get("first_step_seconds")
    if not compiled or not programs or not first_step:
        return {}
    return {
        "program_seconds": compiled / programs,
        "start_seconds": max(0.0, first_step - compiled),
    }


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    if not path.is_file():
        raise InputError(f"{folder}: holds no run; give the folder of one, such as runs/digits")
    content = parse_yaml(read_text(path), str(path), "restore the run's config")
    return content if isinstance(content, dict) else {}


def _planned_by(folder: Path, config: dict[str, Any]) -> CostFile:
    """The cost model of the run's plan; empty if there is none."""
    place = (config.get("planning") or {}).get("cost_model")
    if not place:
        return CostFile()
    try:
        return read_cost_file(place)
    except InputError as error:
        raise InputError(f"{folder}: its config names a cost model: {error}") from error


def _model(folder: Path) -> dict[str, Any]:
    """Fields of the run's model, by which a cost model is compared with others."""
    from alload_jax.config import read_config

    config = read_config(["--config", str(folder / "config.yaml")], prog="alload calibrate")
    step = config.model.step_fields()
    remat = {"remat": step["remat"]} if "remat" in step else {}
    return config.model.architecture() | remat


def _print(found: RunFit, before: QuadraticCost | None) -> None:
    """Coefficients, beside those of the model that planned the run."""
    print(f"{found.steps:,} steps, mean error {found.mape:.1%}")
    if found.drift is not None:
        longer = "longer" if found.drift >= 0 else "shorter"
        print(f"recent steps took {abs(found.drift):.1%} {longer} than the plan predicted")
    for name, value in vars(found.model).items():
        if isinstance(value, float):
            was = f" (was {getattr(before, name):.4g})" if before else ""
            print(f"  {name} = {value:.4g} s{was}")
