"""Models with random parameters for comparisons with other implementations."""

import jax
import numpy as np

from alload_jax.models.families import abstract_model


def random_params(config, seed=0):
    """Every parameter random: fresh ones leave out gates and the head."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        norm = "norm" in jax.tree_util.keystr(path) and "scale" in jax.tree_util.keystr(path)
        return np.asarray(rng.normal(0, 0.2, leaf.shape) + norm, np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_model(config).params)
