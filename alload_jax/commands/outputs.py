"""What commands check of their flags before they begin."""

from pathlib import Path

from alload_jax.errors import InputError, require_positive_value


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


def require_outputs(command: str, out: str) -> tuple[Path, Path]:
    """The JSON and the PNG of `--out`; raises InputError unless both can be written."""
    paths = Path(f"{out}.json"), Path(f"{out}.png")
    for path in paths if Path(out).name else (Path(out),):
        require_place(command, "--out", path)
    return paths


def require_flags(command: str, **flags: int | None) -> None:
    """Raises InputError if a flag (keyword: its name in Python) is given and below 1."""
    for name, value in flags.items():
        require_positive_value(f"{command}: --{name.replace('_', '-')}", value)
