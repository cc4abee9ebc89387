"""Registries of implementations by name; built-in ones are imported on first use."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from alload_jax.errors import InputError

T = TypeVar("T")


class Registry(Generic[T]):
    """Implementations of one kind by name.

    To add a built-in implementation, add a line to the table of its registry. To add one from
    outside the package, call `register` before the config is read.
    """

    def __init__(self, kind: str, built_in: Mapping[str, str], method: str | None = None):
        """Creates the registry.

        Args:
          kind: kind of the implementations, for messages, such as `model family`.
          built_in: `module:attribute` by name, imported on first use.
          method: method of its classes, if a name `module:Class` gives a dataclass that has it.
        """
        self._kind = kind
        self._method = method
        self._built_in = dict(built_in)
        self._loaded: dict[str, T] = {}

    def register(self, name: str, implementation: T) -> T:
        """Adds an implementation and returns it.

        Raises:
          ValueError: the name exists already.
        """
        if name in self._built_in or name in self._loaded:
            raise ValueError(f"{self._kind} {name!r} exists already; choose another name")
        self._loaded[name] = implementation
        return implementation

    def names(self) -> tuple[str, ...]:
        """Returns all names, built-in ones first."""
        return tuple(dict.fromkeys((*self._built_in, *self._loaded)))

    def get(self, name: Any) -> T:
        """Returns the implementation of that name.

        Raises:
          InputError: the name is unknown.
        """
        if name not in self.names() and self._method and ":" in str(name):
            return self._imported(str(name))
        if name not in self.names():
            known = ", ".join(self.names())
            other = "give module:Class" if self._method else "start the script that registers it"
            raise InputError(f"{self._kind} {name!r} is unknown; choose one of {known}, or {other}")
        if name not in self._loaded:
            module, attribute = self._built_in[name].split(":")
            self._loaded[name] = cast(T, getattr(import_module(module), attribute))
        return self._loaded[name]

    def _imported(self, name: str) -> T:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise InputError(
                f"{self._kind} {name!r} cannot be imported ({error}); check the name, and that "
                "PYTHONPATH has its folder"
            ) from error
        is_class = isinstance(found, type) and is_dataclass(found)
        if not is_class or not callable(getattr(found, str(self._method), None)):
            raise InputError(
                f"{self._kind} {name!r} is not a dataclass with a method {self._method}; name one"
            )
        return cast(T, found)
