"""Things found by name: ours are imported when they are asked for, others register themselves."""

import importlib
from collections.abc import Mapping
from typing import Generic, TypeVar, cast

from alload_jax.errors import InputError

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects of one kind by name."""

    def __init__(self, kind: str, ours: Mapping[str, str]):
        """Knows ours by where they are.

        Args:
          kind: what the objects are, for messages.
          ours: name → "module:attribute".
        """
        self._kind = kind
        self._known: dict[str, str | T] = dict(ours)

    def names(self) -> tuple[str, ...]:
        """Every name, ours first."""
        return tuple(self._known)

    def register(self, name: str, item: T) -> None:
        """Adds one.

        Raises:
          InputError: another has the name.
        """
        if self._known.setdefault(name, item) is not item:
            raise InputError(f"{self._kind} {name!r} is registered already; choose another name")

    def find(self, name: str) -> T:
        """The one of a name.

        Raises:
          InputError: there is none; the message lists the names.
        """
        if name not in self._known:
            raise InputError(
                f"{self._kind} {name!r} is unknown; choose one of {', '.join(self._known)}"
            )
        item = self._known[name]
        if isinstance(item, str):
            module, attribute = item.split(":")
            return cast(T, getattr(importlib.import_module(module), attribute))
        return item
