"""The one place that reads JSON and YAML, within bounds, and that replaces and extends files.

What is read may be from anybody: sizes, nesting and numbers are bounded, only regular files are
opened, and every failure is an InputError of one line. What is written goes to no place that a
symbolic link names.
"""

import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

import yaml

from alload_jax.errors import InputError

Json = dict[str, Any]
"""Values of JSON by name; what is read from a file is checked where it is used."""
_LARGEST = 2**28
"""Bytes of a file that is read as a whole."""
_DEEPEST = 64
"""Levels of lists and mappings within each other."""
_MOST_VALUES = 1_000_000
"""Values of a file, each alias of YAML counted with all that it stands for."""


# ---------------------------------------------------------------- reading


def read_text(path: Path, remedy: str = "name another file", encoding: str = "utf-8") -> str:
    """Reads a text file.

    Raises:
      InputError: it is too large, no regular file, or not text in that encoding.
      OSError: it is missing or cannot be read.
    """
    with open(path, "rb", opener=lambda name, flags: _open_regular(name, flags, remedy)) as file:
        if len(content := file.read(_LARGEST + 1)) > _LARGEST:
            raise InputError(f"{path}: is larger than {_LARGEST:,} bytes; {remedy}")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not valid text ({error.reason}); {remedy}") from error


def require_local(path: Path) -> None:
    """Raises InputError for the address of object storage, of whose :// Path has made :/."""
    if str(path).partition("/")[0].endswith(":"):
        raise InputError(f"{path}: is no folder of this machine; name one, and copy it there")


def require_regular(
    path: str | Path, remedy: str = "name another file", *, or_folder: bool = True
) -> None:
    """Refuses a FIFO, a device or a link to nothing, which a library may wait for for ever.

    Args:
      path: of a file, or of none.
      remedy: what to do, for the message.
      or_folder: a folder is left to the caller.

    Raises:
      InputError: there is such a thing.
    """
    if os.path.islink(path) and not os.path.exists(path):
        raise InputError(f"{path}: is a link to nothing; {remedy}")
    allowed = os.path.isfile(path) or (or_folder and os.path.isdir(path))
    if os.path.exists(path) and not allowed:
        raise InputError(f"{path}: is not a regular file; {remedy}")


def visible_files(root: Path, *, links: bool = False) -> Iterator[str]:
    """The files of a folder and the folders in it, as relative paths.

    Names that begin with a dot are left out, and links to folders are not followed.

    Args:
      root: the folder.
      links: whether links to folders are among them.
    """
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if links:
            files += [name for name in folders if (Path(parent) / name).is_symlink()]
        for name in files:
            if not name.startswith("."):
                yield (Path(parent) / name).relative_to(root).as_posix()


def read_json(path: Path, remedy: str = "fix it or remove it") -> Any:
    """Reads a JSON file of finite numbers; None if it does not exist. Arguments as `parse_json`.

    Raises:
      InputError: the content is not valid JSON within the bounds.
      OSError: the file cannot be read.
    """
    try:
        text = read_text(path, remedy)
    except FileNotFoundError:
        return None
    return parse_json(text, str(path), remedy)


def parse_json(text: str | bytes, place: str, remedy: str, *, finite: bool = True) -> Any:
    """Parses JSON within bounds: nesting, number of values, numbers of int64 and float64.

    Args:
      text: the JSON.
      place: where it stands, for messages.
      remedy: what to do if it is not valid, for messages.
      finite: refuse NaN and infinite numbers, which Python writes but JSON does not have.

    Raises:
      InputError: it is not valid.
    """
    try:
        return _bounded(json.loads(text), finite)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: is not valid JSON ({_reason(error)}); {remedy}") from error


class _Loader(yaml.SafeLoader):
    """Dates stay text, as in jsonargparse; a key that stands twice is refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen: set[tuple[str, str]] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if (name := (key.tag, key.value)) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value} stands twice", problem_mark=key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in known if not tag.endswith(":timestamp")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str, place: str, remedy: str) -> Any:
    """Parses YAML of plain values within the bounds of `parse_json`; infinite numbers are allowed.

    Raises:
      InputError: it is not valid; the message names the line if it is known.
    """
    try:
        return _bounded(yaml.load(text, _Loader), finite=False)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place += f": line {mark.line + 1}" if mark else ""
        raise InputError(f"{place}: is not valid YAML ({_reason(error)}); {remedy}") from error
    except (LookupError, TypeError, AttributeError) as error:  # a tag on what it is not for
        raise InputError(f"{place}: is not valid YAML (a tag has no value); {remedy}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"it is nested deeper than {_DEEPEST} levels"
    return " ".join((getattr(error, "problem", None) or str(error)).split())


def _bounded(content: Any, finite: bool) -> Any:
    """Returns a value from a file if it is within the bounds.

    It goes down level by level: YAML's aliases can stand for more than there is memory for.

    Raises:
      ValueError: it is not; the message is the reason.
    """
    level, left = [content], _MOST_VALUES
    for _ in range(_DEEPEST):
        if (left := left - len(level)) < 0:
            raise ValueError(f"it holds more than {_MOST_VALUES:,} values")
        for value in level:
            _check_plain(value, finite)
        if not (level := list(islice(_parts(level), left + 1))):
            return content
    raise ValueError(f"it is nested deeper than {_DEEPEST} levels")


def _parts(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, dict):
            yield from value
            yield from value.values()
        elif isinstance(value, list):
            yield from value


def _check_plain(value: object, finite: bool) -> None:
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number is beyond 64 bits")
    if finite and type(value) is float and not math.isfinite(value):
        raise ValueError(f"a number is {value}")
    if type(value) is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError("a text holds half a character, which UTF-8 cannot write") from error
    if value is not None and type(value) not in (bool, int, float, str, list, dict):
        raise ValueError(f"a value is of kind {type(value).__name__}")


# ---------------------------------------------------------------- writing


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yields a new empty file that then takes the place of `path`, also of a link, atomically.

    Its name beside `path` cannot be guessed, so that nobody can put a link there before. Its suffix
    is that of `path`. It is removed if the content cannot be written. `mode` is of `os.open`.
    """
    unfinished = path.with_name(f".{secrets.token_hex(8)}{_UNFINISHED}{path.suffix}")
    try:
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode))
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        # That of a full disk has no name; an error of words alone would lose them.
        if error.strerror and error.filename in (None, str(unfinished)):
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # it is not there, or the file system is read-only by now
            unfinished.unlink()


_UNFINISHED = ".unfinished"


def remove_unfinished(folder: Path) -> None:
    """Removes what `replacing` left in a folder where its process was killed."""
    for path in folder.glob(f".{'[0-9a-f]' * 16}{_UNFINISHED}*"):
        path.unlink(missing_ok=True)


def open_regular(path: Path, mode: str, buffering: int = -1) -> IO[str]:
    """Opens a file to write to, which is no symbolic link and, if it exists, a regular file.

    Raises:
      InputError: it is something else.
    """

    def opener(name: str, flags: int) -> int:
        return _open_regular(name, flags | os.O_NOFOLLOW, "remove it: it is not from a run")

    return open(path, mode, buffering, encoding="utf-8", opener=opener)


def _open_regular(path: str, flags: int, remedy: str) -> int:
    """Opens a file; a FIFO would wait for ever for its other end."""
    try:
        number = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise InputError(f"{path}: is a link or a pipe; {remedy}") from error
        raise
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise InputError(f"{path}: is not a regular file; {remedy}")
    return number
