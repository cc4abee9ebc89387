"""`alload prepare`: writes a data folder."""

import argparse
from dataclasses import replace
from pathlib import Path

from alload_jax.data.datasets.dataset import DATASETS
from alload_jax.data.manifest import MANIFEST_NAME

HELP = "Write a data folder to train on."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add("kind", choices=DATASETS.names(), help="digits: real ones, still and moving")
    add("--out", required=True, help="the data folder; must not exist yet")
    add("--seed", type=int, default=0, help="of places and motion")


def run(options: argparse.Namespace) -> int:
    """Writes the folder."""
    replace(DATASETS.get(options.kind)(), seed=options.seed).write(options.out)
    print(Path(options.out) / MANIFEST_NAME)
    return 0
