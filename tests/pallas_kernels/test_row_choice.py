"""Rows taken from one of several arrays, against NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from kernel_cases import BF16, F16, F32

from pallas_kernels import choose_rows

WAYS = [
    {"implementation": "xla"},
    {"interpret": True},
    pytest.param({"implementation": "triton"}, marks=pytest.mark.gpu),
]


def drawn(count, tokens, shape, dtype):
    """Parts whose rows that are not chosen are NaN, a choice, and what must come out."""
    rng = np.random.default_rng(0)
    choice = rng.integers(-1, count, tokens).astype(np.int32)
    parts = rng.normal(size=(count, tokens, *shape)).astype(np.float32)
    parts[choice != np.arange(count)[:, None]] = np.nan
    parts = jnp.asarray(parts, dtype)
    expected = np.zeros((tokens, *shape), np.float32)
    for number in range(count):
        expected[choice == number] = np.asarray(parts[number], np.float32)[choice == number]
    return tuple(parts), jnp.asarray(choice), expected


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    ("count", "tokens", "shape", "dtype"),
    [
        *((1, 1, (), F32), (2, 16, (8,), F16), (3, 70, (3, 40), BF16), (4, 33, (5, 128), F32)),
        pytest.param(1, 65_520, (12, 128), BF16, marks=pytest.mark.gpu),
        pytest.param(3, 4_097, (24, 128), BF16, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_rows_are_those_of_the_chosen_part(count, tokens, shape, dtype, way):
    if tokens > 1000 and way.get("interpret"):
        pytest.skip("the interpreter is slow")
    parts, choice, expected = drawn(count, tokens, shape, dtype)
    before = np.asarray(parts[-1], np.float32)
    # The last part is needed once more, and must be what it was.
    found, twice = jax.jit(lambda *parts: (choose_rows(parts, choice, **way), 2 * parts[-1]))(
        *parts
    )
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected)
    np.testing.assert_array_equal(np.asarray(twice, np.float32), 2 * before)
    np.testing.assert_array_equal(np.asarray(parts[-1], np.float32), before)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_result_has_no_derivative_and_may_have_no_rows(way):
    parts, choice, _ = drawn(2, 9, (8,), F32)
    parts = [jnp.nan_to_num(part) for part in parts]
    gradients = jax.grad(lambda parts: choose_rows(parts, choice, **way).sum())(parts)
    assert not any(part.any() for part in gradients)
    empty = jnp.zeros((0, 8), BF16)
    assert choose_rows((empty,), jnp.zeros(0, jnp.int32), **way).shape == (0, 8)


def test_a_checking_shard_map_gets_xla():
    parts, choice, expected = drawn(2, 16, (8,), F32)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    split = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data")}

    def within(**way):
        run = jax.shard_map(lambda a, b, choice: choose_rows((a, b), choice, **way), **split)
        return run(*parts, choice)

    np.testing.assert_array_equal(within(), expected)
    with pytest.raises(NotImplementedError, match="give that check_vma=False"):
        within(interpret=True)


@pytest.mark.usefixtures("for_cuda")
@pytest.mark.parametrize(("rows", "kernel"), [(2**16, True), (2**16 - 1, False)])
def test_auto_takes_the_kernel_from_a_mebibyte_on(rows, kernel):
    part, choice = jax.ShapeDtypeStruct((rows, 8), BF16), jax.ShapeDtypeStruct((rows,), jnp.int32)
    traced = jax.make_jaxpr(lambda part, choice: choose_rows((part,), choice))(part, choice)
    assert ("pallas_call" in str(traced)) == kernel


CHOICE = jnp.zeros(4, jnp.int32)


def test_what_does_not_fit_is_refused():
    for shapes, dtypes, choice, words in (
        ([], [], CHOICE, "parts have the shapes none"),
        ([(4, 8), (4, 9)], [F32, F32], CHOICE, "shapes (4, 8), (4, 9)"),
        ([(4, 8), (4, 8)], [F32, BF16], CHOICE, "dtypes float32, bfloat16"),
        ([(4, 8)], [jnp.bool_], CHOICE, "give one of floats or integers"),
        ([()], [F32], CHOICE, "shapes ()"),
        ([(4, 8)], [F32], jnp.zeros(5, jnp.int32), "give int32 of shape (4,)"),
        ([(4, 8)], [F32], jnp.zeros(4), "choice is float32"),
    ):
        parts = [jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        with pytest.raises(ValueError, match=re.escape(words)):
            choose_rows(parts, choice)
