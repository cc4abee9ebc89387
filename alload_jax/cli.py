"""The `alload` command: everything that users do besides training."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from alload_jax.errors import InputError, run_command
from alload_jax.processes import quiet_imports

_COMMANDS = {
    "train": "Train a model, as `python train.py`; --help lists all keys.",
    "plan": "Plan an epoch and report its balance, padding and memory use.",
    "calibrate": "Measure training steps on this device, and fit a cost model: seconds and memory.",
    "prepare": "Write a data folder to train on.",
    "data": "Show, check or merge data folders.",
    "parameters": "List the parameters of a config's model and which of them are trained.",
    "sample": "Draw samples from a run of train.py or from released weights.",
    "export": "Write a run's weights as a transformer folder for diffusers.",
    "lora": "Write a run's adapters (LoRA), convert files of adapters, merge them into weights.",
    "report": "Draw what a training run has recorded.",
    "bench": "Measure kernels and training steps on this device against other implementations.",
}
"""What each does, by the name of its module in `commands/`, which is imported where it is run.

`train` is the program of train.py.
"""

_TRAINING = "alload_jax.run"


class _Store(argparse.Action):
    """Stores values; those of a flag given again follow the first: `--lora A --lora B`."""

    before: Sequence[Any] = ()

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        given = values if isinstance(values, list) else [values]
        if "" in given and self.dest != "negative_prompt":  # of a variable that is not set
            parser.error(f"{option_string or self.metavar or self.dest} is empty; give a value")
        if self.nargs == "+":
            values = self.before = [*self.before, *values]
        setattr(namespace, self.dest, values)


class _Version(argparse.Action):
    def __call__(self, parser, *given):  # type: ignore[no-untyped-def]
        from importlib.metadata import version  # takes as long as the rest of the command

        print(f"alload {version('alload-jax')}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Raises an InputError of one line for an invalid command line.

    Flags cannot be shortened: what a short form means would change with each new flag.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.register("action", None, _Store)

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
            hint = hint if typed[:1] == "-" else "put several words in quotation marks"
            raise InputError(f"{parsed.parser.prog}: {unknown[0]} is unknown; {hint}")
        return parsed


def main(argv: Sequence[str]) -> int:
    """Runs `alload` with the arguments `argv` and returns the exit status."""
    name = next((each for each in argv if each in _COMMANDS), "")
    if list(argv[:1]) == ["train"]:  # its flags are the keys of the config
        return _imported(_TRAINING).main(list(argv[1:]), "alload train")
    parser = _Parser(
        prog="alload",
        description="Plan, prepare and measure the training of video DiTs, and sample from them.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for each, text in _COMMANDS.items():
        sub = commands.add_parser(each, help=text, description=text)
        if each == name:
            command = _imported(f"alload_jax.commands.{name}")
            command.add_arguments(sub)
            # Where there are commands below it, each has its own `run`.
            run = getattr(command, "run", None)
            sub.set_defaults(run=run, parser=sub, argv=list(argv))
    parsed = parser.parse_args(list(argv))
    return parsed.run(parsed)


def _imported(module: str) -> Any:
    with quiet_imports():
        return import_module(module)


def entry() -> None:
    """The console script."""
    if sys.argv[1:2] == ["train"]:
        _imported(_TRAINING).entry(sys.argv[2:], "alload train")
    sys.exit(run_command(main, sys.argv[1:]))


if __name__ == "__main__":
    entry()
