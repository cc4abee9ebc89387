"""`alload train`: the training program, as `python train.py`; its flags are the config's keys."""

import sys

from alload_jax.processes import quiet_imports


def main(argv: list[str]) -> int:
    """Trains with the arguments behind `alload train`; returns the exit status."""
    # Imported here because JAX takes a second to import.
    with quiet_imports():
        from alload_jax.run.main import main as train

    return train(argv, prog="alload train")


def entry() -> None:
    """Runs `alload train` as a program, which ends without waiting for threads after a failure."""
    with quiet_imports():
        from alload_jax.errors import run_command
        from alload_jax.training.signals import leave, silence_threads

    silence_threads()
    leave(run_command(main, sys.argv[2:]))
