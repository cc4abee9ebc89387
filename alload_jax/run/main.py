"""The training program: `python train.py` and `alload train`."""

import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from alload_jax.config import read_config, with_context
from alload_jax.distributed.initialize import initialize
from alload_jax.encoders.devices import share_memory
from alload_jax.errors import run_command
from alload_jax.run.training import train
from alload_jax.run.work import prepare
from alload_jax.sharding.xla_flags import set_xla_flags
from alload_jax.training.callbacks.watchdog import Watchdog
from alload_jax.training.quiet_threads import hush_threads, leave
from alload_jax.training.resume import continue_with
from alload_jax.training.run_lock import locked
from alload_jax.training.signals import StopRequest, Terminated, termination_as_interrupt

_TERMINATED = "SIGTERM: nothing was left to save; the same command goes on"


def main(argv: Sequence[str], prog: str = "train.py") -> int:
    """Runs the training that the command line asks for; returns the exit status."""
    set_xla_flags()
    config = read_config(argv, prog)
    if config.sampling.encoders.vae:  # it decodes samples beside the model
        share_memory()
    status = config.run.status_when_stopped or 128 + signal.SIGTERM

    def end() -> None:
        print(_TERMINATED, file=sys.stderr, flush=True)
        leave(status)

    try:
        with (
            initialize(config.cluster, config.run.folder) as cluster,
            termination_as_interrupt(end),
        ):
            stop, folder = StopRequest(), Path(config.run.folder)
            remedy = partial(continue_with, folder, config.cluster)
            with Watchdog(config.watchdog, folder, cluster, stop, remedy) as watchdog:
                work = prepare(with_context(config), cluster)
                with locked(folder, cluster):
                    return train(work, cluster, argv, stop, watchdog)
    except Terminated:
        print(_TERMINATED, file=sys.stderr)
        return status


def entry() -> None:
    """Runs `main` as a program: errors that a user can cause are one line and status 2."""
    hush_threads()
    leave(run_command(main, sys.argv[1:]))
