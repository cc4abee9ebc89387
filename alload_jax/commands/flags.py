"""Types of flags that several commands have."""

import argparse


def triple(text: str) -> tuple[int, int, int]:
    """Three whole numbers, such as 4,8,8.

    Raises:
      argparse.ArgumentTypeError: the text is something else.
    """
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not three whole numbers such as 4,8,8")
    return (int(parts[0]), int(parts[1]), int(parts[2]))
