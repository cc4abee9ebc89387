"""What the encoders of captions with weights have in common: tokens of a text encoder."""

from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from alload_jax.data.prepare.encoders import Encoded, EncoderOptions
from alload_jax.data.prepare.rounding import as_float16
from alload_jax.data.prepare.unusable import UnusableError
from alload_jax.encoders.devices import require_packages
from alload_jax.encoders.text_model import TEXT, TextModel
from alload_jax.errors import InputError

_LONGEST = 2**16
_KEPT = 128  # captions; 4 MB each at 512 tokens of width 4096


@dataclass(frozen=True)
class TextEmbeddings:
    """Stores embeddings of a text encoder as float16, a row for each token; see `TextEncoder`.

    A file without a caption has the embedding of the empty text.

    Attributes:
      name: value of `--text`.
      text_class: the encoder, made of a folder and the most tokens of a caption.
      needs_torch: whether the encoder runs in PyTorch.
      folder: local folder of encoder and tokenizer.
      length: most tokens of a caption.
      made_from: name, width, length and digest of the encoder.
    """

    has_weights: ClassVar[bool] = True
    needs_torch: ClassVar[bool] = True
    default_length: ClassVar[int]
    name: ClassVar[str]
    text_class: ClassVar[Any]

    folder: Path
    length: int
    made_from: dict[str, Any]

    @classmethod
    def make(cls, options: EncoderOptions) -> Self:
        """See `TextEncoder.make`."""
        flag = f"--text {cls.name}"
        if options.folder is None:
            raise InputError(f"{flag} needs the folder of its weights; give --text-folder DIR")
        if not 1 <= options.text_length <= _LONGEST:
            raise InputError(
                f"--text-length is {options.text_length}; it must be from 1 to {_LONGEST}"
            )
        encoder = _encoder(cls.text_class, options.folder, options.text_length)
        if cls.needs_torch:
            require_packages(flag)
        return cls(options.folder, options.text_length, encoder.origin())

    def origin(self) -> dict[str, Any]:
        """See `TextEncoder.origin`."""
        return dict(self.made_from)

    def encode(self, caption: str | None) -> Encoded:
        """See `TextEncoder.encode`; [L, width] float16. Equal captions are encoded once."""
        tokens = _encoded(self.text_class, self.folder, self.length, caption or "")
        if not all(np.isfinite(values).all() for values in tokens.values()):
            raise UnusableError("the text encoder gives values that are not finite")
        return dict(tokens) if len(tokens) > 1 else tokens[TEXT]


@cache
def _encoder(kind: Any, folder: Path, length: int) -> TextModel:
    """The encoder of this process, with its weights once they are loaded."""
    found: TextModel = kind(folder, length)
    return found


@lru_cache(_KEPT)
def _encoded(kind: Any, folder: Path, length: int, caption: str) -> dict[str, np.ndarray]:
    tokens = _encoder(kind, folder, length).tokens(caption)
    return {name: as_float16(values) for name, values in tokens.items()}
