"""Checks of flags and formatting of results that the benchmarks of `alload bench` share."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import rich.box
from rich.table import Table

from alload_jax.errors import InputError


def typed() -> str:
    """The command line as the user typed it."""
    program = Path(sys.argv[0])
    as_script = program.suffix == ".py" and not program.is_absolute()
    begins = ["python", str(program)] if as_script else [program.name]
    return shlex.join([*begins, *sys.argv[1:]])


def require_place(command: str, flag: str, path: Path) -> None:
    """Raises InputError unless the path can be written as a file."""
    if not path.name or not path.parent.is_dir():
        raise InputError(f"{command}: {flag} {path}: not a file in an existing folder; name one")
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise InputError(f"{command}: {flag} {path}: {reason}; name another file") from error
    if not existed:
        path.unlink()


def require_counts(command: str, **flags: int | None) -> None:
    """Raises InputError if a flag (keyword: its name in Python) is given and below 1."""
    for name, value in flags.items():
        if value is not None and value < 1:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{command}: {flag} {value}: it must be at least 1")


def gigabytes(count: int | None) -> str:
    """Bytes as text in GB."""
    return "not known" if count is None else f"{count / 1e9:.1f} GB"


def markdown_table(title: str, columns: Sequence[str]) -> Table:
    """A table without rows; the first column is left-aligned, the others right-aligned."""
    table = Table(title=title, box=rich.box.MARKDOWN)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left")
    return table
