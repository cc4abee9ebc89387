"""`--text umt5`: embeddings of Wan's text encoder."""

from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from alload_jax.data.prepare.encoders import EncoderOptions
from alload_jax.data.prepare.unusable import UnusableError
from alload_jax.encoders.devices import require_packages
from alload_jax.encoders.umt5 import Umt5Text
from alload_jax.errors import InputError

_LONGEST = 2**16
_KEPT = 128  # embeddings; 4 MB each at 512 tokens of width 4096


@dataclass(frozen=True)
class Umt5Embeddings:
    """Stores embeddings of umT5 as float16, a row for each token; see `TextEncoder`.

    A file without a caption has the embedding of the empty text.

    Attributes:
      folder: local folder of encoder and tokenizer.
      length: most tokens of a caption.
      made_from: name, width, length and digest of the encoder.
    """

    has_weights: ClassVar[bool] = True
    default_length: ClassVar[int] = 512

    folder: Path
    length: int
    made_from: dict[str, Any]

    @classmethod
    def make(cls, options: EncoderOptions) -> Self:
        """See `TextEncoder.make`."""
        if options.folder is None:
            raise InputError("--text umt5 needs the folder of its weights; give --text-folder DIR")
        if not 1 <= options.text_length <= _LONGEST:
            raise InputError(
                f"--text-length is {options.text_length}; it must be from 1 to {_LONGEST}"
            )
        encoder = _encoder(options.folder, options.text_length)
        require_packages("--text umt5")
        return cls(options.folder, options.text_length, encoder.origin())

    def origin(self) -> dict[str, Any]:
        """See `TextEncoder.origin`."""
        return dict(self.made_from)

    def encode(self, caption: str | None) -> np.ndarray:
        """See `TextEncoder.encode`; [L, width] float16. Equal captions are encoded once."""
        embeddings = _encoded(self.folder, self.length, caption or "")
        if not np.isfinite(embeddings).all():
            raise UnusableError("the text encoder gives values that are not finite")
        return embeddings


@cache
def _encoder(folder: Path, length: int) -> Umt5Text:
    """The encoder of this process, with its weights once they are loaded."""
    return Umt5Text(folder, length)


@lru_cache(_KEPT)
def _encoded(folder: Path, length: int, caption: str) -> np.ndarray:
    (found,) = _encoder(folder, length).encode([caption])
    with np.errstate(over="ignore"):
        return found.astype(np.float16)
