"""`alload prepare digits`: writes a data set that the project makes by itself."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from alload_jax.data.datasets.dataset import DATASETS
from alload_jax.data.manifest import MANIFEST_NAME

_HELP = {"digits": "Images and videos of handwritten digits."}


def add_kinds(kinds: Any) -> None:
    """Declares a subcommand for each registered data set.

    Args:
      kinds: what `add_subparsers` returned.
    """
    for name in DATASETS.names():
        help_text = _HELP.get(name, f"The data set {name}.")
        parser = kinds.add_parser(name, help=help_text, description=help_text)
        parser.add_argument("--out", required=True, help="data folder to write; must not exist")
        parser.add_argument("--seed", type=int, default=0, help="seed of positions and motion")
        parser.set_defaults(prepare=run, parser=parser, kind=name)


def run(options: argparse.Namespace) -> int:
    """Writes the folder."""
    replace(DATASETS.get(options.kind)(), seed=options.seed).write(options.out)
    print(Path(options.out) / MANIFEST_NAME)
    return 0
