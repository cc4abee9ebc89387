import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.models.common.patches import patchify, unpatchify

sizes = st.integers(1, 3)


@settings(max_examples=30, deadline=None)
@given(st.tuples(sizes, sizes, sizes), st.tuples(sizes, sizes, sizes), sizes, sizes)
def test_unpatchify_undoes_patchify(grid, patch, batch, channels):
    shape = (batch, *(g * p for g, p in zip(grid, patch, strict=True)), channels)
    latents = jnp.arange(np.prod(shape)).reshape(shape)
    tokens = patchify(latents, patch)
    assert tokens.shape == (batch, np.prod(grid), np.prod(patch) * channels)
    np.testing.assert_array_equal(unpatchify(tokens, shape, patch), latents)


def test_a_token_holds_its_patch():
    latents = np.arange(2 * 4 * 6).reshape(1, 2, 4, 6, 1)
    tokens = np.asarray(patchify(jnp.asarray(latents), (1, 2, 2)))
    assert tokens[0, 0].tolist() == latents[0, 0, :2, :2, 0].ravel().tolist()
    assert tokens[0, 1].tolist() == latents[0, 0, :2, 2:4, 0].ravel().tolist()
    assert tokens[0, 6].tolist() == latents[0, 1, :2, :2, 0].ravel().tolist()
