"""What text encoders have in common."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

TEXT = "text"
"""The kind of tokens that every text encoder gives; records hold them under this name."""


class TextModel(Protocol):
    """A text encoder in a local folder, made of the folder and the most tokens of a text.

    Attributes:
      folder: folder of config.json and weights.
    """

    folder: Path

    @property
    def width(self) -> int:
        """Components of an embedding of the kind `TEXT`."""
        ...

    def origin(self) -> dict[str, Any]:
        """Name, width, length and digest of the weights, as JSON values.

        Raises:
          InputError: weights are missing.
        """
        ...

    def tokens(self, text: str) -> dict[str, np.ndarray]:
        """Encodes a text.

        Returns:
          its tokens by kind, each [L, width] float32 without padding: `TEXT`, and further kinds by
          the names of the models' `condition_parts`.

        Raises:
          InputError: the weights cannot be loaded.
        """
        ...

    def unload(self) -> None:
        """Frees the weights; the next text loads them again."""
        ...
