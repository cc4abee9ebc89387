"""`--text class`: captions are the names or numbers of classes."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from alload_jax.data.prepare.encoders import EncoderOptions
from alload_jax.data.prepare.unusable import UnusableError
from alload_jax.errors import InputError

_MOST_CLASSES = 10_000


@dataclass(frozen=True)
class ClassText:
    """Gives each distinct caption a class number; see `TextEncoder`.

    Attributes:
      classes: names of the classes, by number. Captions that are all whole numbers are the class
        numbers themselves; other captions are numbered in sorted order.
    """

    has_weights: ClassVar[bool] = False
    default_length: ClassVar[int] = 256

    classes: tuple[str, ...]

    @classmethod
    def make(cls, options: EncoderOptions) -> Self:
        """See `TextEncoder.make`."""
        names = sorted({caption for caption in options.captions if caption})
        if not names:
            raise InputError("--text class: no file has a caption; choose --text bytes")
        numbers = all(name.isascii() and name.isdecimal() and len(name) < 8 for name in names)
        count = max(map(int, names)) + 1 if numbers else len(names)
        if count > _MOST_CLASSES:
            raise InputError(
                f"--text class: the captions are {count:,} classes, more than {_MOST_CLASSES:,}; "
                "choose --text bytes, or name the column of classes with --caption-column"
            )
        return cls(tuple(str(number) for number in range(count)) if numbers else tuple(names))

    def origin(self) -> dict[str, Any]:
        """See `TextEncoder.origin`."""
        return {"name": "class", "classes": list(self.classes)}

    def encode(self, caption: str | None) -> np.ndarray:
        """See `TextEncoder.encode`; [1] int32."""
        if not caption:
            raise UnusableError("no caption, which --text class needs")
        name = str(int(caption)) if caption.isascii() and caption.isdecimal() else caption
        number = self._numbers.get(caption, self._numbers.get(name))
        if number is None:
            raise UnusableError(f"caption {caption[:40]!r} is no class")
        return np.array([number], np.int32)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}
