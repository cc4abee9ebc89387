"""The samples that steps are measured on, and what they cost at least. No JAX."""

from typing import Any

import numpy as np

from alload_jax.planning.geometry import Geometry
from alload_jax.planning.samples import Samples
from alload_jax.planning.workloads import ASPECT_RATIOS, make_workload


def samples_of(settings: dict[str, Any]) -> Samples:
    """The samples of a measurement.

    Args:
      settings: `workload`, or None and the `shape` (frames, height, width) in pixels of all;
        `samples`, how many; `one_aspect`, 16:9 alone.
    """
    if settings["workload"]:
        ratios = {(16, 9): 1.0} if settings["one_aspect"] else ASPECT_RATIOS
        return make_workload(settings["workload"], settings["samples"], aspect_ratios=ratios)
    shape = np.tile(np.asarray(settings["shape"], np.int64), (settings["samples"], 1))
    return Samples(shape, Geometry().seq_len(*shape.T))


def model_flops(model: dict[str, Any], seq_len: np.ndarray, text_length: int) -> float:
    """Matrix products and attention of a training step on samples of these lengths.

    Three times the forward's; recomputation does not count.

    Args:
      model: fields of `DiTConfig`.
      seq_len: [N], tokens of each sample.
      text_length: condition tokens of each.
    """
    dim, tokens = model["dim"], np.asarray(seq_len, np.float64)
    forward = (
        tokens * (12 * dim**2 + 4 * dim * model["ffn_dim"] + 4 * text_length * dim)
        + 4 * tokens**2 * dim
        + 4 * text_length * dim**2
    )
    return float(3 * model["num_layers"] * forward.sum())
