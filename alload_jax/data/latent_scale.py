"""The scale of a data set's latents, which models of noise and data need near 1."""

import numpy as np

from alload_jax.data.sources.source import SampleReader
from alload_jax.data.store import BadRecordError

_SAMPLES = 32
_LEAST, _MOST = 0.05, 4.0
"""Mean squares beyond which latents were hardly made for such models. Pixels from −1 to 1 and
normalised latents have 0.3 to 2."""


def mean_square(reader: SampleReader) -> float | None:
    """The mean square of a usual sample's latents; None if none of some can be read."""
    count = len(reader.manifest)
    numbers = np.unique(np.linspace(0, count - 1, min(count, _SAMPLES)).astype(int))
    found = []
    for sample in numbers.tolist():
        try:
            latents = reader.read(sample)["latents"]
        except BadRecordError:
            continue  # training reports it where its turn comes
        found.append(float(np.mean(np.square(latents, dtype=np.float64))))
    return float(np.median(found)) if found else None


def scale_warning(found: float | None) -> str:
    """What is to be said of a mean square; empty if it is usual."""
    if found is None or _LEAST <= found <= _MOST:
        return ""
    return (
        f"the latents have a mean square of {found:.3g}, and models are trained on about 1; "
        "normalise them by the mean and deviation of their VAE, and prepare the data again"
    )
