"""`alload report`: pictures of finished and running trainings."""

import argparse
from pathlib import Path

from alload_jax.commands.bench_output import require_place
from alload_jax.errors import InputError

HELP = "Draw what a training run has recorded."

_SPARSITY = "Draw the sparsity of each layer's attention over training."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the reports, each a subcommand."""
    reports = parser.add_subparsers(required=True, metavar="REPORT")
    sparsity = reports.add_parser("sparsity", help=_SPARSITY, description=_SPARSITY)
    sparsity.add_argument(
        "run_folder", metavar="RUN", help="folder of a run, as runs/digits_sparse"
    )
    sparsity.add_argument("--out", help="the PNG to write (default RUN/sparsity.png)")
    sparsity.set_defaults(report=_report_sparsity, parser=sparsity)


def run(options: argparse.Namespace) -> int:
    """Draws the chosen report."""
    return options.report(options)


def _report_sparsity(options: argparse.Namespace) -> int:
    # Imported here because JAX takes a second to import.
    from alload_jax.report.sparsity_picture import write_sparsity_picture
    from alload_jax.training.callbacks.layer_log import LAYER_LOG
    from alload_jax.training.run_files import read_metrics

    folder = Path(options.run_folder)
    if not folder.is_dir():
        raise InputError(f"alload report sparsity: {folder}: no such folder; name a run's folder")
    out = Path(options.out) if options.out else folder / "sparsity.png"
    require_place("alload report sparsity", "--out", out)
    rows = [row for row in read_metrics(folder / LAYER_LOG) if "sparsity" in row]
    if not rows:
        raise InputError(
            f"alload report sparsity: {folder / LAYER_LOG} holds no sparsity; train with "
            "model.sparse_attention, for at least 10 steps"
        )
    write_sparsity_picture(out, rows, f"Attention of {folder.name}")
    last = rows[-1]
    sparse = sum(last["sparse"])
    print(
        f"step {last['step']}: {sparse} of {len(last['sparse'])} layers are sparse; written: {out}"
    )
    return 0
