"""The training program: `python train.py` and `alload train`."""

import gc
import sys
from collections.abc import Sequence
from functools import partial

from alload_jax.config import read_config
from alload_jax.errors import run_command
from alload_jax.processes import outlive_output, quiet_imports
from alload_jax.sharding.host_memory import set_xla_flags
from alload_jax.training.signals import leave, silence_threads


def main(argv: Sequence[str], prog: str = "train.py") -> int:
    """Runs the training that the command line asks for; returns the exit status."""
    set_xla_flags()
    config = read_config(argv, prog)
    with quiet_imports():  # after the config, since they take two seconds: `--help` needs none
        from alload_jax.run.training import run
    return run(config, argv)


def entry(argv: Sequence[str] | None = None, prog: str = "train.py") -> None:
    """Runs `main` as a program: errors that a user can cause are one line and status 2.

    The program ends without waiting for threads after a failure.
    """
    outlive_output()
    silence_threads()
    gc.freeze()  # what is imported stays: looking through it takes a tenth of a start
    leave(run_command(partial(main, prog=prog), list(sys.argv[1:] if argv is None else argv)))
