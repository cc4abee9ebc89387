"""The YAML files of a config: reading them, and checking the kinds of their values."""

import dataclasses
import types
import typing
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from alload_jax.errors import InputError
from alload_jax.files import parse_yaml, read_text

_EXAMPLE = "configs/digits.yaml"


def config_files(argv: Sequence[str]) -> list[str]:
    """Returns the files that a command line names by `--config`, in order."""
    after = [file for flag, file in pairwise(argv) if flag == "--config"]
    return after + [part.split("=", 1)[1] for part in argv if part.startswith("--config=")]


def read_yaml(file: str) -> dict[str, Any]:
    """Reads the sections of a YAML file.

    Raises:
      InputError: there is no such file, it is not valid YAML, or it holds no sections, or its
        aliases stand for far too many values.
    """
    try:
        text = read_text(Path(file), f"give a config such as {_EXAMPLE}")
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such file; give a config such as {_EXAMPLE}") from error
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; give a config such as {_EXAMPLE}") from error
    content = parse_yaml(text, file, f"write it as {_EXAMPLE} is")
    if not isinstance(content, dict) or not content:
        raise InputError(f"{file}: is empty or holds no sections; start from {_EXAMPLE}")
    return content


def check_kinds(file: str, content: dict[str, Any], kind: type[Any], prefix: str = "") -> None:
    """Checks that sections hold keys, lists hold items, and nothing is null that must not be.

    Args:
      file: name of the file, for messages.
      content: values by key.
      kind: dataclass that the keys belong to; unknown keys are not checked here.
      prefix: dotted key of `content`.

    Raises:
      InputError: a value is of another kind.
    """
    for name, hint in typing.get_type_hints(kind).items():
        if name in content:
            _check_value(file, content[name], hint, prefix + name)


def _check_value(file: str, value: Any, hint: Any, key: str) -> None:
    optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
    choices = typing.get_args(hint) if optional else (hint,)
    if value is None:
        if type(None) not in choices and hint is not type(None):
            raise InputError(f"{file}: {key} is null; give a value, or leave the key out")
        return
    section: Any = next((each for each in choices if dataclasses.is_dataclass(each)), None)
    if section is not None and len(choices) - (type(None) in choices) == 1:
        if not isinstance(value, dict):
            first = dataclasses.fields(section)[0].name
            raise InputError(f"{file}: {key} is {value!r}; give its keys, such as {first}: ...")
        check_kinds(file, value, section, f"{key}.")
    elif typing.get_origin(hint) in (list, tuple):
        _check_items(file, value, typing.get_args(hint)[0], key)


def _check_items(file: str, value: Any, item: Any, key: str) -> None:
    if not isinstance(value, list):
        raise InputError(f"{file}: {key} is {value!r}; give a list")
    if not dataclasses.is_dataclass(item) and typing.get_origin(item) is not dict:
        return
    for each in value:
        if not isinstance(each, dict):
            raise InputError(f"{file}: {key} holds {each!r}; give mappings, as in - {{key: value}}")
        if not dataclasses.is_dataclass(item):
            continue
        for part in dataclasses.fields(item):
            required = part.default is part.default_factory is dataclasses.MISSING
            if required and part.name not in each:
                raise InputError(f"{file}: {key}: {each!r} lacks {part.name}; add it")
