"""The `alload` command: everything that users do besides training."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from alload_jax.errors import InputError, run_command
from alload_jax.quiet_imports import quiet_imports

with quiet_imports():
    from alload_jax.commands import (
        bench,
        calibrate,
        data,
        export,
        lora,
        parameters,
        plan,
        prepare,
        report,
        sample,
        train,
    )

_COMMANDS: Sequence[Any] = (
    *(plan, calibrate, prepare, data),
    *(parameters, sample, export, lora, report, bench),
)


class _Parser(argparse.ArgumentParser):
    """Raises an InputError of one line for an invalid command line.

    Flags cannot be shortened: what a short form means would change with each new flag.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}; `{self.prog} --help` lists what there is")

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Parses like argparse, but suggests the nearest flag for an unknown one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [flag for flag in parsed.parser._option_string_actions if flag[:2] == "--"]
            typed = unknown[0].split("=")[0]
            longer = [flag for flag in flags if typed[:2] == "--" and flag.startswith(typed)]
            near = longer or difflib.get_close_matches(typed, flags, n=1)
            hint = f"did you mean {near[0]}?" if near else f"`{parsed.parser.prog} --help` helps"
            raise InputError(f"{parsed.parser.prog}: {unknown[0]} is unknown; {hint}")
        return parsed


def main(argv: Sequence[str]) -> int:
    """Runs `alload` with the arguments `argv` and returns the exit status."""
    if list(argv[:1]) == ["train"]:  # its flags are the keys of the config
        return train.main(list(argv[1:]))
    parser = _Parser(
        prog="alload",
        description="Plan, prepare and measure the training of video DiTs, and sample from them.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("train", help=train.HELP)
    for command in _COMMANDS:
        name = command.__name__.rsplit(".", 1)[-1]
        sub = commands.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, parser=sub)
    parsed = parser.parse_args(list(argv))
    return parsed.run(parsed)


def entry() -> None:
    """The console script."""
    if sys.argv[1:2] == ["train"]:
        train.entry()
    sys.exit(run_command(main, sys.argv[1:]))


if __name__ == "__main__":
    entry()
