"""The implementations of a kernel by name, and the choice among them."""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

AUTO = "auto"


class Implementation:
    """What a registry asks of an implementation. The kernel says what describes a call.

    Attributes:
      name: by which users choose it.
      interpretable: whether it runs with `interpret=True`, without the device that it is for.
    """

    name: str
    interpretable: bool = False

    def unsupported_reason(self, *args: Any, **kwargs: Any) -> Exception | None:
        """Why it cannot take a call, as the error to raise; None if it can.

        The error ends a sentence: NotImplementedError says what this device or sharding lacks,
        ValueError which argument to change.
        """
        return None

    def faster_than_reference(self, *args: Any, **kwargs: Any) -> bool:
        """Whether it was measured as faster than the reference for such a call."""
        return False


T = TypeVar("T", bound=Implementation)


class Registry(Generic[T]):
    """The implementations of one kernel.

    Attributes:
      reference: takes every call; "auto" chooses it where nothing was measured as faster.
    """

    def __init__(self, reference: T):
        self.reference = reference
        self._others: dict[str, T] = {}

    def __iter__(self) -> Iterator[T]:
        """In order of registration, the reference last."""
        yield from (*self._others.values(), self.reference)

    def names(self) -> tuple[str, ...]:
        """What users can choose from."""
        return (AUTO, *(each.name for each in self))

    def register(self, implementation: T) -> None:
        """Adds an implementation; "auto" prefers those that were registered later.

        Raises:
          ValueError: its name is taken.
        """
        if implementation.name in self.names():
            raise ValueError(f"the name {implementation.name!r} is taken; choose another")
        self._others[implementation.name] = implementation

    def unregister(self, name: str) -> None:
        """Removes what `register` added."""
        del self._others[name]

    def choose(self, function: str, name: str, *call: Any, interpret: bool = False) -> T:
        """The implementation to run.

        Args:
          function: that the user called, for messages.
          name: one of `names()`.
          call: what `unsupported_reason` and `faster_than_reference` take.
          interpret: only what can run in an interpreter will do.

        Raises:
          ValueError: the name is unknown, or an argument keeps it from running.
          NotImplementedError: what was asked for cannot run here.
        """
        if name not in self.names():
            raise ValueError(
                f"{function}: implementation={name!r} is unknown; "
                f"choose one of {', '.join(self.names())}"
            )
        if name == AUTO and not interpret:
            return self._fastest(call)
        candidates = [each for each in self if name in (AUTO, each.name)]
        if interpret:
            candidates = [each for each in candidates if each.interpretable]
        if not candidates:
            raise ValueError(f"{function}: {name!r} has nothing to interpret; leave interpret out")
        reason = candidates[0].unsupported_reason(*call)
        if reason is not None:
            raise type(reason)(f"{function}: {candidates[0].name!r} cannot run, {reason}")
        return candidates[0]

    def _fastest(self, call: tuple[Any, ...]) -> T:
        for each in reversed(self._others.values()):
            if each.unsupported_reason(*call) is None and each.faster_than_reference(*call):
                return each
        return self.reference
