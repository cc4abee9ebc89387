"""Things found by name: ours are imported when they are asked for, others are registered."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from alload_jax.errors import InputError

T = TypeVar("T")


class Registry(Generic[T]):
    """Implementations of one kind by their names.

    To add one of ours, add a line to the table of its registry. To add one from outside, call
    `register` before the config is read.
    """

    def __init__(self, kind: str, ours: Mapping[str, str]):
        """Creates the registry.

        Args:
          kind: what is registered, for messages, such as `model family`.
          ours: `module:attribute` by name, imported on first use.
        """
        self._kind = kind
        self._ours = dict(ours)
        self._loaded: dict[str, T] = {}

    def register(self, name: str, implementation: T) -> T:
        """Adds an implementation and returns it.

        Raises:
          ValueError: the name is taken.
        """
        if name in self._ours or name in self._loaded:
            raise ValueError(f"{self._kind} {name!r} exists already; choose another name")
        self._loaded[name] = implementation
        return implementation

    def unregister(self, name: str) -> None:
        """Removes what `register` added."""
        del self._loaded[name]

    def names(self) -> tuple[str, ...]:
        """All names, ours first."""
        return tuple(dict.fromkeys((*self._ours, *self._loaded)))

    def get(self, name: Any) -> T:
        """The implementation of that name.

        Raises:
          InputError: there is none.
        """
        if name not in self.names():
            known = ", ".join(self.names())
            raise InputError(f"{self._kind} {name!r} is unknown; choose one of {known}")
        if name not in self._loaded:
            module, attribute = self._ours[name].split(":")
            self._loaded[name] = cast(T, getattr(import_module(module), attribute))
        return self._loaded[name]
