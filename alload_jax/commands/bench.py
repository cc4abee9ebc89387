"""`alload bench`: measures kernels and whole training steps on this device."""

import argparse
from collections.abc import Callable
from functools import partial

from alload_jax.commands import add_command, bench_epoch, bench_kernels, bench_step
from alload_jax.sharding.host_memory import set_xla_flags

_KERNEL = "Measure kernels on this device against XLA's fusion."
_SPARSE = "Measure block-sparse attention on this device against cuDNN's dense attention."
_TUNE = "Measure how the norm kernels run fastest on this GPU, for model.norm auto and triton."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares a subcommand with its own flags for each benchmark."""
    choices = parser.add_subparsers(required=True, metavar="WHAT")
    for name, words, add, run in (
        ("kernel", _KERNEL, bench_kernels.add_kernel_arguments, bench_kernels.run_kernel),
        ("step", bench_step.HELP, bench_step.add_arguments, bench_step.run),
        ("epoch", bench_epoch.HELP, bench_epoch.add_arguments, bench_epoch.run),
        ("sparse-attention", _SPARSE, bench_kernels.add_sparse_arguments, bench_kernels.run_sparse),
        ("tune", _TUNE, bench_kernels.add_tune_arguments, bench_kernels.run_tune),
    ):
        add(add_command(choices, name, words, partial(_run, run)))


def _run(measure: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Runs a benchmark with the flags of XLA that training has."""
    set_xla_flags()
    return measure(options)
