"""Reads and writes configs: YAML files and flags; errors are reported in one line."""

import copy
import dataclasses
import difflib
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import files as files_of
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader

from alload_jax.errors import VALUE_KINDS, InputError, without_secrets
from alload_jax.files import parse_yaml, read_text
from alload_jax.registry import Registry

_EXAMPLE = "configs/digits.yaml"


def flags_of(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The flags of a command line with their values, as `--flag value` or `--flag=value`."""
    for before, after in zip_longest(argv, argv[1:]):
        flag, equals, value = before.partition("=")
        if equals or after is not None:
            yield flag, value if equals else after


def config_files(argv: Sequence[str]) -> list[str]:
    """Returns the files that a command line names by `--config`, in order."""
    return [file for flag, file in flags_of(argv) if flag == "--config"]


def with_examples(argv: Sequence[str]) -> list[str]:
    """A command line whose `--config NAME` is the example of that name, where no file is."""
    package = Path(str(files_of("alload_jax")))
    installed = package / "configs"
    examples = installed if installed.is_dir() else package.parent / "configs"  # in a checkout
    paths = {path.stem: str(path) for path in examples.glob("*.yaml")}
    result = list(argv)
    for index, name in enumerate(result):
        flag, equals, given = name.partition("=")
        if index and result[index - 1] == "--config" and not Path(name).is_file():
            result[index] = paths.get(name, name)
        elif flag == "--config" and equals and not Path(given).is_file():
            result[index] = f"--config={paths.get(given, given)}"
    return result


def given_value(argv: Sequence[str], key: str) -> Any:
    """The last value of a key on a command line and in its files; None if there is none."""
    return next(reversed(list(given_values(argv, key))), None)


def given_values(argv: Sequence[str], key: str) -> Iterator[Any]:
    """The values of a key, or of a section, on a command line and in its files, in order."""
    for flag, text in flags_of(with_examples(argv)):
        if flag == f"--{key}":
            yield text
        elif flag == "--config" or f"--{key}".startswith(f"{flag}."):
            found: Any = read_yaml(text) if flag == "--config" else as_section(text)
            for part in f"--{key}".removeprefix(f"{flag}.").removeprefix("--").split("."):
                found = found.get(part) if isinstance(found, dict) else None
            if found is not None:
                yield found


def as_section(text: Any) -> Any:
    """The content of a whole section as one flag; what it is given where that is no YAML."""
    with suppress(InputError, TypeError):
        return parse_yaml(text, "", "")
    return text


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
    return {key: _plain(value) for key, value in content.items()}


def _plain(value: Any) -> Any:
    """Optional parts as configs have them; `--print_config` writes the class around their keys."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"class_path", "init_args"}:
        return _plain(value["init_args"])
    return {key: _plain(each) for key, each in value.items()}


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
    if value is None:
        optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
        if type(None) not in (typing.get_args(hint) if optional else (hint,)):
            raise InputError(f"{file}: {key} is null; give a value, or leave the key out")
        return
    if (section := _section_of(hint)) is not None:
        if not isinstance(value, dict):
            first = dataclasses.fields(section)[0]
            plain = isinstance(first.default, int)
            such = f"{{{first.name}: {first.default if plain else '...'}}}"
            raise InputError(f"{file}: {key} is {value!r}; give its keys, such as {such}")
        check_kinds(file, value, section, f"{key}.")
        return
    if typing.get_origin(hint) not in (list, tuple):
        return
    if not isinstance(value, list):
        raise InputError(f"{file}: {key} is {value!r}; give a list")
    item: Any = typing.get_args(hint)[0]
    fields = dataclasses.fields(item) if dataclasses.is_dataclass(item) else ()
    if not fields and typing.get_origin(item) is not dict:
        return
    for each in value:
        if not isinstance(each, dict):
            raise InputError(f"{file}: {key} holds {each!r}; give mappings, as in - {{key: value}}")
        for part in fields:
            required = part.default is part.default_factory is dataclasses.MISSING
            if required and part.name not in each:
                raise InputError(f"{file}: {key}: {each!r} lacks {part.name}; add it")


def _section_of(hint: Any, key: str = "") -> Any:
    """The dataclass of a section, or of one below it at a dotted key; None for other types."""
    optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
    choices = [each for each in typing.get_args(hint) if each is not type(None)]
    found = choices[0] if optional and len(choices) == 1 else hint
    if not dataclasses.is_dataclass(found) or not key:
        return found if dataclasses.is_dataclass(found) else None
    name, _, below = key.partition(".")
    return _section_of(typing.get_type_hints(found).get(name), below)


class Part(NamedTuple):
    """A part of the config whose fields depend on a name in it.

    Attributes:
      key: dotted key of the part.
      name: key of the name within the part.
      default: default name; None if the part is optional.
      kind: function that returns the dataclass of a name.
    """

    key: str
    name: str
    default: str | None
    kind: Callable[[str], type[Any]]


def parse_config(
    argv: Sequence[str],
    prog: str,
    config: type[Any],
    parts: Sequence[Part],
    lists: Mapping[str, Registry[type[Any]]],
    renamed: Mapping[str, str],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """Parses the values of a config's fields from a command line and its YAML files.

    Args:
      argv: arguments, `--config FILE` or the name of an example, and `--section.key value`.
      prog: name of the program, for `--help`.
      config: dataclass of the whole config.
      parts: parts whose dataclass is selected by name.
      lists: keys whose values are lists of configs with names, and the registries of the names.
      renamed: keys of earlier versions and their replacements.
      defaults: values by dotted key that replace the dataclasses' defaults.

    Raises:
      InputError: a key is unknown or a value is invalid.
    """
    argv = with_examples(argv)
    files = {file: read_yaml(file) for file in config_files(argv)}
    kinds: dict[str, Any] = dict.fromkeys(lists, list[dict[str, str | Any]])
    contents = files | {text: content for _, text, content in _sections(argv, config)}
    kinds |= {part.key: _kind_of(part, argv, contents) for part in parts}
    typed = _typed(config, kinds)
    for file, content in files.items():
        check_kinds(file, content, typed)
    for flag, text in flags_of(argv):
        section = _section_of(typed, flag[2:]) if flag.startswith("--") else None
        if section and not os.path.isfile(text) and (value := as_section(text)) is not None:
            _check_value("command line", value, section, flag[2:])
    parser = _Parser(prog=prog, description=config.__doc__, allow_abbrev=False, parser_mode="texts")
    parser.known_keys, parser.renamed, parser.command_line = list(_keys(typed)), renamed, argv
    parser.add_argument(
        "--config",
        action="config",
        help="a YAML file, or the name of an example; later flags override it",
    )
    parser.add_class_arguments(typed)
    parser.set_defaults(dict(defaults))
    try:
        given = parser.parse_args(_sections_as_configs(argv, typed))
        _check_values("", given.as_dict())
        for flag, text in flags_of(argv):
            if _is_empty(text) and given.get(flag[2:], text) is None:  # of what is no text
                raise InputError(f"{flag[2:]} is {text!r}; give a value, or null")
        parsed = parser.instantiate(given)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(_reason_in_union(str(error))) from error
    values = {part.name: parsed[part.name] for part in dataclasses.fields(config)}
    for section in {key.partition(".")[0] for key in kinds if "." in key}:
        found = values[section]
        plain = type(found).__bases__[0]  # from which `_typed` derived its type
        fields = dataclasses.fields(plain)
        values[section] = plain(**{each.name: getattr(found, each.name) for each in fields})
    for key, registry in lists.items():
        values[key] = tuple(build_named(key, item, registry) for item in values[key])
    return values


def _sections(argv: Sequence[str], kind: type[Any]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The `--section '{key: value}'` of a command line: place, text, content as of a file."""
    for index, (flag, text) in enumerate(flags_of(argv)):
        section = as_section(text) if flag[2:] in typing.get_type_hints(kind) else None
        if isinstance(section, dict):
            yield index, f"{flag} {text}", {flag[2:]: section}


def _sections_as_configs(argv: Sequence[str], kind: type[Any]) -> list[str]:
    """A command line whose sections are configs: they keep what they do not name.

    Jsonargparse would begin an optional part of the section anew.
    """
    result = list(argv)
    for index, _, section in _sections(argv, kind):
        content = yaml.safe_dump(section, default_flow_style=True)
        one = "=" in argv[index]  # --section={...}
        result[index : index + 2 - one] = ["--config=" + content] if one else ["--config", content]
    return result


_UNBOUNDED = ("planning.m_comp", "planning.sample_spread")
"""Keys that may be infinite."""


def _check_values(key: str, value: Any) -> None:
    """Refuses values that no setting can be, from files and flags alike.

    Raises:
      InputError: a number is NaN or infinite, or a whole number beyond 64 bits, or an address holds
        a password, or a folder has no name.
    """
    parts = value if isinstance(value, dict) else dict(enumerate(value))
    for name, part in parts.items():
        place = f"{key}.{name}" if key else str(name)
        if isinstance(part, dict | list | tuple):
            _check_values(place, part)
        elif isinstance(part, float) and not math.isfinite(part) and place not in _UNBOUNDED:
            raise InputError(f"{place} is {part}; give a finite number")
        elif part == "" and name == "folder":  # of a variable of the shell that is not set
            raise InputError(f"{place} is empty; name a folder")
        elif isinstance(part, str) and "\0" in part:
            raise InputError(f"{place} is {part!r}; remove the NUL character")
        elif isinstance(part, str) and without_secrets(part) != part:
            raise InputError(
                f"{place} holds a password or token, which the run folder and trackers would show; "
                "give it by a variable of the environment, such as MLFLOW_TRACKING_URI"
            )
        elif isinstance(part, int) and not -(2**63) <= part < 2**63:
            raise InputError(f"{place} is {part}; give a number of at most 64 bits")


def _kind_of(
    part: Part, argv: Sequence[str], files: Mapping[str, dict[str, Any]]
) -> type[Any] | None:
    """Returns the dataclass that flags or the last config name; None for a missing part."""
    name, given, place = part.default, False, ""
    for file, content in files.items():
        found: Any = content
        for key in part.key.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, dict):
            name, given = found.get(part.name, name), True
            # A flag's keys may be of the name that another gives.
            place = file if part.name in found or not file.startswith("--") else place
    flag = f"--{part.key}.{part.name}"
    for given_flag, text in flags_of(argv):
        if part.default is None and given_flag == f"--{part.key}":
            found = as_section(text) or {}  # none for null
            if not isinstance(found, dict):
                raise InputError(
                    f"--{part.key} is {text!r}; give its keys, such as "
                    f"--{part.key}.{part.name} NAME"
                )
            name, given = found.get(part.name, name), given or bool(found)
        if given_flag == flag:
            if place and text != name and not _same_keys(part, text, name):
                raise InputError(
                    f"{flag} is {text}, but {place} has {part.key}.{part.name} {name} and its "
                    "keys; write a config of its own for it"
                )
            name, given = text, True
    if name is None and not given and not any(f.startswith(f"--{part.key}.") for f in argv):
        return None
    if name is None:
        raise InputError(f"{part.key} is given without {part.key}.{part.name}; add it")
    return part.kind(name)


def _same_keys(part: Part, *names: str | None) -> bool:
    """Whether a part has the same keys by all these names."""
    try:
        return len({part.kind(str(name)) for name in names}) == 1
    except InputError:  # one is unknown
        return False


def _typed(kind: type[Any], kinds: Mapping[str, Any], prefix: str = "") -> type[Any]:
    """Derives a dataclass from `kind` with the types that were selected by name.

    Args:
      kind: dataclass of the config, or of a section.
      kinds: types by dotted key; in a section None for a missing part.
      prefix: dotted key of the section, with a dot behind it.
    """
    fields: list[Any] = []
    for each in dataclasses.fields(kind):
        key, hint = prefix + each.name, None
        if key in kinds:
            hint = kinds[key]
            if prefix:
                hint = type(None) if hint is None else hint | None
        elif any(other.startswith(f"{key}.") for other in kinds):
            hint = _typed(typing.get_type_hints(kind)[each.name], kinds, f"{key}.")
        if hint is None:
            continue
        if each.default is each.default_factory is dataclasses.MISSING:
            fields.append((each.name, hint))
        elif typing.get_origin(hint) is list:
            default: Any = each.default
            values = [dataclasses.asdict(item) for item in default]
            items = partial(copy.deepcopy, values)
            fields.append((each.name, hint, dataclasses.field(default_factory=items)))
        elif dataclasses.is_dataclass(hint):
            factory: Any = hint
            fields.append((each.name, hint, dataclasses.field(default_factory=factory)))
        else:
            fields.append((each.name, hint, None))
    made = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True)
    made.__doc__, made.__module__ = kind.__doc__, kind.__module__
    return made


def build_named(key: str, item: Any, registry: Registry[type[Any]]) -> Any:
    """Builds one item of a list of configs with names from its values."""
    if not isinstance(item, dict) or "name" not in item:
        known = ", ".join(registry.names()) or "none"
        raise InputError(f"{key}: {item!r} has no name; choose one of {known}")
    kind, place = registry.get(item["name"]), f"{key}: {item['name']}"
    if wrong := [name for name in item if "" in str(name).split(".")]:
        raise InputError(f"{place}: {wrong[0]!r} is no key; remove it")
    check_kinds(place, item, kind)
    parser = _Parser(prog=key, parser_mode="texts")
    parser.known_keys, parser.place = list(_keys(kind)), place
    parser.add_class_arguments(kind)
    try:
        values = Namespace(**{str(name): value for name, value in item.items()})
        given = parser.parse_object(values)
        _check_values(place, given.as_dict())
        parsed = parser.instantiate(given)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(_reason_in_union(str(error))) from error
    return kind(**{part.name: parsed[part.name] for part in dataclasses.fields(kind)})


def _keys(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """Yields every dotted key that a config can have."""
    for name, annotation in typing.get_type_hints(kind).items():
        if typing.get_origin(annotation) is typing.ClassVar:
            continue
        yield prefix + name
        for part in (annotation, *typing.get_args(annotation)):
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                yield from _keys(part, f"{prefix}{name}.")


def _load(text: str) -> Any:
    """As YAML, but what has no content and does not say null is text, such as a folder `#1`."""
    return text if _is_empty(text) else get_loader("yaml")(text)


def _is_empty(text: str) -> bool:
    """Whether YAML takes a text for null that does not say so: a comment, an anchor, `---`."""
    if text.strip().lower() in ("", "~", "null"):
        return False
    try:
        return get_loader("yaml")(text) is None
    except yaml.YAMLError:
        return False


set_loader("texts", _load, (yaml.YAMLError,))


class _Parser(ArgumentParser):
    """Converts jsonargparse's messages to InputErrors of one line that suggest the nearest key.

    Attributes:
      known_keys: all valid keys.
      renamed: keys of earlier versions and their replacements.
      command_line: the arguments of the program.
      place: place of the parsed values for messages, if they are not from a command line.
    """

    known_keys: Sequence[str] = ()
    renamed: Mapping[str, str] = {}
    command_line: Sequence[str] = ()
    place: str = ""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        cause: BaseException | None = ex
        while cause is not None and not isinstance(cause, InputError):
            cause = cause.__cause__ or cause.__context__
        # An optional section has a parser of its own, which does not know where it is.
        section, text = re.match(r'Parser key "([\w.]+)"', message), str(cause)
        if section and (unknown := re.search(r"key ([\w.]+) is unknown", text)):
            cause, message = None, f"Key '{section[1]}.{unknown[1]}' is not expected"
        elif section and text.startswith('key "'):
            cause, message = None, text.replace('"', f'"{section[1]}.', 1)
        raise cause or InputError(self._one_line(message)) from ex

    def _one_line(self, message: str) -> str:
        for pattern, key in (
            (r"Option '([\w.]+)' is not accepted", "{0}"),
            (r"Key '([\w.]+)' is not expected", "{0}"),
            (r"Group '([\w.]+)' does not accept option '([\w.]+)'", "{0}.{1}"),
            (r"nrecognized arguments: --([\w.]+)", "{0}"),
        ):
            if found := re.search(pattern, message):
                return self._unknown(key.format(*found.groups()))
        text = re.sub(r"\s+", " ", message).strip()
        files = " or ".join(config_files(self.command_line))
        if text.startswith("Unexpected config"):
            return f"{files}: is empty or holds no sections; start from configs/digits.yaml"
        text = re.sub(r"Expected a typing\.Literal(\[[^\]]*\])", r"expected one of \1", text)
        text = re.sub(r"Expected a <class '(\w+)'>", r"expected \1", text)
        text = re.sub(r"Expected a dot import path string: \S+", "expected dict", text)
        union = r"Does not validate .* Errors: (- .*) Given value type: .*? Given value: ?"
        text = re.sub(union, _alternatives, text)
        text = re.sub(r"\. Got value: ?$", "; the value is empty", text)
        text = re.sub(
            r"(?<=expected )\w+", lambda kind: VALUE_KINDS.get(kind[0], kind[0]), text, count=1
        )
        text = text.replace("Parser key", "key").replace('key "config.', 'key "')
        if self.place:
            return f"{self.place}: {text}"
        # jsonargparse reads items and `experts` by parsers of this class that know no command line.
        needed = re.search(r"arguments? (?:is|are) required: (\w+)$", text)
        if needed and not self.command_line:
            return f"a section or an item of a list lacks {needed[1]}; add it"
        if "required" in text and files:
            keys = text.rpartition(": ")[2]
            return f"{files}: lacks {keys}; add them there, or as flags"
        if "required" in text:
            return f"{text}; give --config FILE, such as configs/digits.yaml"
        flags = (part[2:].split("=")[0] for part in self.command_line if part.startswith("--"))
        typed = any(f'key "{flag}' in text or f"argument --{flag}" in text for flag in flags)
        return text if typed or not files else f"{files}: {text}; `--help` explains every key"

    def _unknown(self, key: str) -> str:
        typed = any(f"--{key}.".startswith(part.split("=")[0] + ".") for part in self.command_line)
        files = " or ".join(config_files(self.command_line))
        place = self.place or ("command line" if typed or not files else files)
        for old, new in self.renamed.items():
            if key == old or key.startswith(f"{old}."):
                remedy = "leave it out" if new.startswith("nothing") else "rename it"
                return f"{place}: key {old} is now {new}; {remedy}"
        if not (near := difflib.get_close_matches(key, self.known_keys, n=1, cutoff=0.5)):
            return f"{place}: key {key} is unknown; `--help` lists all keys"
        return f"{place}: key {key} is unknown; did you mean {near[0]}?"


def _alternatives(union: re.Match[str]) -> str:
    """What a value of several kinds may be, of jsonargparse's list of all that it is not."""
    kinds = re.findall(r"- expected (.*?)(?=\.? Got value| - |$)", union[1])
    return f"expected {' or '.join(VALUE_KINDS.get(each, each) for each in kinds)}. Got value: "


def _reason_in_union(message: str) -> str:
    """Returns the message of our check for an optional part; jsonargparse lists all reasons."""
    reasons = re.findall(r"^  - (.*)$", message, re.MULTILINE)
    return next((r for r in reasons if not r.startswith("Expected a")), message.splitlines()[0])
