import ast
import json
import pickle
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import alload_jax.data
from alload_jax.data import record

DTYPES = [np.dtype(name) for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u4", "?")]
named_arrays = st.dictionaries(
    st.text("abcdefgh_", min_size=1, max_size=8),
    npst.arrays(st.sampled_from(DTYPES), npst.array_shapes(min_dims=1, min_side=0, max_side=5)),
    max_size=4,
)


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        assert found[name].shape == expected[name].shape
        assert found[name].tobytes() == expected[name].tobytes()


def with_header(header, data):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def decodes_or_raises_value_error(data):
    try:
        assert isinstance(record.decode(data), dict)
    except ValueError as error:
        assert "safetensors" in str(error)  # noqa: PT017  both outcomes are right


@settings(max_examples=50, deadline=None)
@given(named_arrays)
def test_decode_undoes_encode_bit_for_bit_whatever_the_order(arrays):
    data = record.encode(arrays)
    assert_same_bits(record.decode(data), arrays)
    assert record.encode(dict(reversed(arrays.items()))) == data
    assert record.checksum(data) == zlib.crc32(data)


GRID = np.arange(30, dtype=np.int32).reshape(5, 6)


@pytest.mark.parametrize(
    "array",
    [GRID.T, np.asfortranarray(GRID), GRID[::-1, ::2], GRID.astype(">f4"), np.array(3.0)],
    ids=["transposed", "Fortran", "strided", "byte order", "no axes"],
)
def test_memory_layout_does_not_matter(array):
    found = record.decode(record.encode({"a": array}))["a"]
    np.testing.assert_array_equal(found, array)
    assert found.shape == array.shape


def test_bfloat16_survives_or_is_refused_when_written():
    array = np.arange(4).astype(ml_dtypes.bfloat16)
    try:
        data = record.encode({"a": array})
    except (TypeError, ValueError):
        return
    assert_same_bits(record.decode(data), {"a": array})


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\0" * 8)
@example(b"\xff" * 64)
@example(with_header([], b""))
@example(with_header({"a": 1}, b""))
def test_garbage_is_a_value_error(data):
    with pytest.raises(ValueError, match="not a safetensors record"):
        record.decode(data)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "Q7"])
def test_a_dtype_that_numpy_lacks_decodes_or_is_a_value_error(dtype):
    size = 2 if dtype == "BF16" else 1
    header = {"a": {"dtype": dtype, "shape": [1], "data_offsets": [0, size]}}
    decodes_or_raises_value_error(with_header(header, b"\0" * size))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_record_never_raises_anything_but_value_error(data):
    good = record.encode({"latents": np.ones((1, 4, 4, 1), np.float16), "labels": np.arange(2)})
    position = data.draw(st.integers(0, len(good) - 1))
    damaged = bytearray(good)
    damaged[position] ^= data.draw(st.integers(1, 255))
    decodes_or_raises_value_error(bytes(damaged))


def test_every_truncation_is_a_value_error():
    good = record.encode({"latents": np.ones((1, 4, 4, 1), np.float16)})
    for length in range(len(good)):
        with pytest.raises(ValueError, match="not a safetensors record"):
            record.decode(good[:length])


def test_a_pickle_is_refused_without_being_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    with pytest.raises(ValueError, match="not a safetensors record"):
        record.decode(pickle.dumps(Bomb()))
    with pytest.raises(Exception, match="object"):
        record.encode({"a": np.array([print], object)})
    assert not (tmp_path / "exploded").exists()


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_no_module_of_the_data_layer_can_unpickle():
    for path in Path(alload_jax.data.__file__).parent.glob("*.py"):
        source = path.read_text()
        modules = {name.split(".")[0] for name in imported_modules(ast.parse(source))}
        assert not modules & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}, path
        assert "allow_pickle" not in source, path
        assert "np.load(" not in source, path
