"""Says what a thread waits for, by the functions that it is in."""

from collections.abc import Callable, Iterator
from pathlib import PurePath
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

FOR_OTHERS = "for the other processes"
_WORDS: dict[CodeType, str] = {}
"""By the code of a function."""

T = TypeVar("T", bound=Callable[..., Any])


def waits(words: str) -> Callable[[T], T]:
    """Marks a function, or all methods of a class, by what a thread waits for that stands there.

    To use directly above the `def`: what other decorators make of a function is another one.

    Args:
      words: such as `for a checkpoint to be written`.
    """

    def mark(what: T) -> T:
        for function in _functions(what):
            _WORDS[function.__code__] = words
        return what

    return mark


def _functions(what: object) -> Iterator[FunctionType]:
    for each in vars(what).values() if isinstance(what, type) else [what]:
        function = getattr(each, "fget", None) or getattr(each, "__func__", each)
        if isinstance(function, FunctionType):
            yield function


def waiting_for(frame: FrameType | None) -> str:
    """What a thread waits for, by the innermost function that is marked, or else where it is.

    Args:
      frame: the innermost frame of the thread.
    """
    place = ""
    while frame is not None:
        if words := _WORDS.get(frame.f_code):
            return words
        path = PurePath(frame.f_code.co_filename).as_posix()
        if not place or ("/alload_jax/" in path and "/alload_jax/" not in place):
            place = f"{path}:{frame.f_code.co_name}"
        frame = frame.f_back
    return f"in {place}"
