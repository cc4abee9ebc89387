"""`alload prepare`: writes a data folder."""

import argparse
from pathlib import Path

from alload_jax.data.datasets.digits import DigitsConfig, write_digits
from alload_jax.data.manifest import MANIFEST_NAME

HELP = "Write a data folder to train on."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    parser.add_argument("kind", choices=["digits"], help="digits: real ones, still and moving")
    parser.add_argument("--out", required=True, help="the data folder; must not exist yet")
    parser.add_argument("--seed", type=int, default=0, help="of places and motion")


def run(options: argparse.Namespace) -> int:
    """Writes the folder."""
    write_digits(options.out, DigitsConfig(seed=options.seed))
    print(Path(options.out) / MANIFEST_NAME)
    return 0
