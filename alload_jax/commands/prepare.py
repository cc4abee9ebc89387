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
    add("kind", choices=DATASETS.names(), help="digits: images and videos of handwritten digits")
    add("--out", required=True, help="data folder to write; must not exist")
    add("--seed", type=int, default=0, help="seed of positions and motion")


def run(options: argparse.Namespace) -> int:
    """Writes the folder."""
    replace(DATASETS.get(options.kind)(), seed=options.seed).write(options.out)
    print(Path(options.out) / MANIFEST_NAME)
    return 0
