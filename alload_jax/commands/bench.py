"""`alload bench`: measures kernels and whole training steps on this device."""

import argparse
from collections.abc import Callable
from functools import partial

from alload_jax.commands import (
    add_command,
    bench_balance,
    bench_epoch,
    bench_kernel,
    bench_sparse_attention,
    bench_step,
    bench_tune,
)
from alload_jax.sharding.host_memory import set_xla_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares a subcommand with its own flags for each benchmark."""
    choices = parser.add_subparsers(required=True, metavar="WHAT")
    for name, measured in (
        ("kernel", bench_kernel),
        ("step", bench_step),
        ("balance", bench_balance),
        ("epoch", bench_epoch),
        ("sparse-attention", bench_sparse_attention),
        ("tune", bench_tune),
    ):
        sub = add_command(choices, name, measured.HELP, partial(_run, measured.run))
        measured.add_arguments(sub)


def _run(measure: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Runs a benchmark with the flags of XLA that training has."""
    set_xla_flags()
    return measure(options)
