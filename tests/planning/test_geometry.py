import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import SHAPES, examples, refusal, tokens

from alload_jax.planning.samples import Geometry, divisible

TRIPLES = st.tuples(*[st.integers(1, 9)] * 3)


@given(st.lists(SHAPES, min_size=1, max_size=20), TRIPLES, TRIPLES)
@examples(60)
def test_seq_len_is_the_exact_count_of_patches(shapes, vae_stride, patch_size):
    geometry = Geometry(vae_stride, patch_size)
    found = geometry.seq_len(*np.array(shapes).T)
    assert found.tolist() == [tokens(shape, geometry) for shape in shapes]
    assert found.dtype == np.int64


@given(st.lists(SHAPES, min_size=1, max_size=20), TRIPLES)
@examples(40)
def test_latents_cover_every_pixel_and_no_more(shapes, stride):
    grid = Geometry(stride, (1, 1, 1)).latent_grid(*np.array(shapes).T)
    assert grid.shape == (len(shapes), 3)
    covered = (grid - [1, 0, 0]) * stride  # the first frame has a latent of its own
    needed = np.array(shapes) - [1, 0, 0]
    assert (covered >= needed).all()
    assert (covered - stride < needed).all()


@pytest.mark.parametrize(
    ("shape", "seq_len"),
    [
        ((81, 480, 832), 32_760),  # Wan 2.1, 480p
        ((81, 720, 1280), 75_600),  # Wan 2.1, 720p
        ((1, 256, 256), 256),
        ((1, 1, 1), 1),
        ((2, 16, 16), 2),
    ],
)
def test_default_geometry_is_that_of_wan(shape, seq_len):
    assert Geometry().seq_len(*np.array(shape)[:, None]).tolist() == [seq_len]


def test_small_integer_columns_do_not_overflow():
    sizes = np.array([127], np.int8), np.array([65_535], np.uint16), np.array([30_000], np.int16)
    expected = tokens([127, 65_535, 30_000], Geometry())
    assert Geometry().seq_len(*sizes).tolist() == [expected]


@pytest.mark.parametrize("name", ["vae_stride", "patch_size"])
@pytest.mark.parametrize("value", [(0, 8, 8), (4, -8, 8), (4, 8), (4, 8, 8, 8)])
def test_a_bad_triple_is_refused_by_name_and_value(name, value):
    message = refusal(Geometry, **{name: value})
    assert name in message
    assert str(value) in message
    assert "at least 1" in message


@given(SHAPES, TRIPLES, TRIPLES)
@examples(100)
def test_a_size_is_divisible_where_nothing_is_rounded_up(shape, vae_stride, patch_size):
    steps = np.multiply(vae_stride, patch_size)
    later, rest = divmod(shape[0] - 1, vae_stride[0])
    whole_frames = rest == 0 and (later + 1) % patch_size[0] == 0
    expected = whole_frames and not (np.array(shape)[1:] % steps[1:]).any()
    assert divisible(tuple(shape), vae_stride, patch_size) == expected


@given(TRIPLES, TRIPLES, st.tuples(*[st.integers(1, 5)] * 3))
@examples(60)
def test_sizes_of_whole_patches_are_divisible(vae_stride, patch_size, patches):
    grid = np.multiply(patches, patch_size)
    size = tuple(((grid - [1, 0, 0]) * vae_stride + [1, 0, 0]).tolist())
    assert divisible(size, vae_stride, patch_size)


@pytest.mark.parametrize(
    ("size", "vae_stride", "patch_size", "expected"),
    [
        ((17, 16, 16), (4, 1, 1), (1, 4, 4), True),
        ((1, 8, 16), (4, 1, 1), (1, 4, 4), True),
        ((3, 8, 8), (4, 1, 1), (1, 4, 4), False),
        ((4, 8, 8), (4, 1, 1), (1, 4, 4), False),
        ((5, 8, 8), (4, 1, 1), (2, 4, 4), True),
        ((9, 8, 8), (4, 1, 1), (2, 4, 4), False),
        ((5, 8, 10), (4, 1, 1), (1, 4, 4), False),
        ((3, 8, 8), (1, 1, 1), (1, 4, 4), True),
        ((81, 480, 832), (4, 8, 8), (1, 2, 2), True),
        ((81, 480, 840), (4, 8, 8), (1, 2, 2), False),
    ],
)
def test_divisible_sizes(size, vae_stride, patch_size, expected):
    assert divisible(size, vae_stride, patch_size) is expected
