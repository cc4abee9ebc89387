"""`alload report`: pictures of finished and running trainings."""

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from alload_jax.commands import add_command
from alload_jax.commands.flags import require_place
from alload_jax.errors import InputError
from alload_jax.files import Json
from alload_jax.training import expert_places

_MOST_ROWS = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the reports, each a subcommand."""
    reports = parser.add_subparsers(required=True, metavar="REPORT")
    sparsity = "the sparsity of each layer's attention"
    validation = "the validation loss of each size and noise level"
    for name, what, draw, run in (
        ("sparsity", sparsity, _sparsity, "runs/digits_sparse"),
        ("validation", validation, _validation, "runs/digits"),
    ):
        words = f"Draw {what} over training."
        add = add_command(reports, name, words, partial(_run, name, draw)).add_argument
        add("run_folder", metavar="RUN", help=f"folder of a run, as {run}")
        add("--out", help=f"the PNG to write (default RUN/{name}.png)")


def _run(name: str, draw: Callable[[Path, Path], str], options: argparse.Namespace) -> int:
    """Checks the run's folder and the file to write, draws, and prints a line.

    Raises:
      InputError: there is no such folder, or the file cannot be written.
    """
    folder = Path(options.run_folder)
    if not folder.is_dir():
        raise InputError(f"alload report {name}: {folder}: no such folder; name a run's folder")
    if len(both := expert_places(folder)) > 1:
        raise InputError(f"alload report {name}: {folder}: has two experts; name {both[0]}")
    out = Path(options.out) if options.out else folder / f"{name}.png"
    if not options.out and out.is_symlink():  # the run may be somebody else's
        raise InputError(f"{out}: is a link; remove it, or name a file by --out")
    require_place(f"alload report {name}", "--out", out)
    print(f"{draw(folder, out)}; written: {out}")
    return 0


def _sparsity(folder: Path, out: Path) -> str:
    # Imported here because JAX takes a second to import.
    from alload_jax.report.pictures import write_sparsity_picture
    from alload_jax.training.callbacks.telemetry import LAYER_LOG
    from alload_jax.training.run_files import read_metrics

    rows = _thinned(row for row in read_metrics(folder / LAYER_LOG) if "sparsity" in row)
    if not rows:
        raise InputError(
            f"alload report sparsity: {folder / LAYER_LOG} holds no sparsity; train with "
            "model.sparse_attention, for at least 10 steps"
        )
    write_sparsity_picture(out, rows, f"Attention of {folder.name}")
    sparse = rows[-1]["sparse"]
    return f"step {rows[-1]['step']}: {sum(sparse)} of {len(sparse)} layers are sparse"


def _thinned(rows: Iterable[Json]) -> list[Json]:
    """Evenly as many of the rows as a picture has pixels for, with the first and the last."""
    kept, every, last = list[Json](), 1, list[Json]()
    for number, row in enumerate(rows):
        last = [row]
        if number % every == 0:
            kept.append(row)
        if len(kept) > _MOST_ROWS:
            kept, every = kept[::2], 2 * every
    return kept if last == kept[-1:] else kept + last


def _validation(folder: Path, out: Path) -> str:
    # Imported here because JAX takes a second to import.
    from alload_jax.report.pictures import write_validation_picture
    from alload_jax.training.run_files import is_validation, read_metrics

    rows = [row for row in read_metrics(folder / "metrics.jsonl") if is_validation(row)]
    try:
        best = write_validation_picture(out, rows, f"Validation of {folder.name}")
    except InputError as error:
        raise InputError(f"alload report validation: {folder}: {error}") from error
    return f"lowest loss at step {best} of {rows[-1]['step']}"
