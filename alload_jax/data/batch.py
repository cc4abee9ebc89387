"""The arrays of a micro-batch in the bucketed layout."""

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """A micro-batch of one shape.

    Attributes:
      latents: [B, frames, height, width, channels] float32.
      condition: [B, L] int32 classes, the number of classes standing for none; or [B, L, width]
        text embeddings.
      sample: [B] int32, the manifest's row numbers; −1 for filler.
      weight: [B] float32; 0 for filler.
    """

    latents: Any
    condition: Any
    sample: Any
    weight: Any
