"""Class labels as condition tokens."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from alload_jax.models.common.embedding import ClassEmbedding


def tokens(labels):
    embedding = ClassEmbedding(10, 64, dtype=jnp.float32, rngs=nnx.Rngs(0))
    return np.asarray(jax.jit(embedding)(jnp.asarray(labels, jnp.int32)))


def test_the_order_of_classes_is_seen_by_attention_that_knows_no_order():
    there, back = tokens([[3, 7], [7, 3]])
    for order in itertools.permutations(range(2)):
        assert np.abs(there - back[list(order)]).max() > 0.5


def test_tokens_depend_on_their_own_place_and_class_alone():
    found, longer = tokens([[3, 7]])[0], tokens([[5, 7, 2], [3, 4, 7]])
    np.testing.assert_array_equal(found[1], longer[0, 1])
    np.testing.assert_array_equal(found[0], longer[1, 0])
