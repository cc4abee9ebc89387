"""`alload parameters`: lists a model's parameters and the optimizer of each."""

import argparse

from rich.table import Table

from alload_jax.bench.harness import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    parser.add_argument("--config", required=True, help="a YAML file, as for train.py")


def run(options: argparse.Namespace) -> int:
    """Prints a row for each parameter and the totals."""
    # Imported here because JAX takes a second to import.
    from flax.traverse_util import flatten_dict

    from alload_jax.config import read_config
    from alload_jax.models.families import abstract_model
    from alload_jax.training.optimizer import group_of
    from alload_jax.training.parameters import split_parameters

    config = read_config(["--config", options.config], prog="alload parameters")
    params = abstract_model(config.model).params
    trained, _ = split_parameters(params, config.parameters)
    names = flatten_dict(trained, sep="/").keys()
    table = Table("name", "shape", "parameters", "trained by")
    counts = {"trained": 0, "frozen": 0}
    for name, leaf in flatten_dict(params, sep="/").items():
        group = group_of(name, config.optimizer.groups)
        optimizer = "optimizer" if group is None else f"optimizer.groups[{group}]"
        shape = "×".join(map(str, leaf.shape))
        table.add_row(name, shape, f"{leaf.size:,}", optimizer if name in names else "frozen")
        counts["trained" if name in names else "frozen"] += leaf.size
    console().print(table)
    print(f"trained: {counts['trained']:,}   frozen: {counts['frozen']:,}")
    return 0
