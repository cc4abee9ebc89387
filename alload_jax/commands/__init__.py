"""The subcommands of `alload`, a file for each; see `alload_jax.cli`."""

import argparse
from collections.abc import Callable


def add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    words: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Declares a command below another one, still without flags.

    Args:
      commands: what `add_subparsers` returned.
      name: of the command.
      words: what it does.
      run: runs it with its flags and returns the exit status.
    """
    parser = commands.add_parser(name, help=words, description=words)
    parser.set_defaults(run=run, parser=parser)
    return parser
