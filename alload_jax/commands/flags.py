"""Types of flags that several commands have."""

import argparse
from typing import Literal

_MOST_DIGITS = 18


def triple(text: str) -> tuple[int, int, int]:
    """Three whole numbers, such as 4,8,8.

    Raises:
      argparse.ArgumentTypeError: the text is something else.
    """
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not three whole numbers such as 4,8,8")
    return (int(parts[0]), int(parts[1]), int(parts[2]))


def step(text: str) -> int | Literal["best"]:
    """A step's number, or best.

    Raises:
      argparse.ArgumentTypeError: the text is something else.
    """
    if text == "best":
        return "best"
    if not (text.isascii() and text.isdecimal()) or len(text) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a step such as 500, nor best")
    return int(text)
