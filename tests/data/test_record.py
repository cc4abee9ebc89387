"""Samples as bytes: bit for bit, and nothing that is damaged or hostile is run or crashes."""

import ast
import contextlib
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

import alload_jax
from alload_jax.data import record

DTYPES = [np.dtype(name) for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u4", "?")]
named_arrays = st.dictionaries(
    st.text("abcdefgh_", min_size=1, max_size=8),
    npst.arrays(st.sampled_from(DTYPES), npst.array_shapes(min_dims=1, min_side=0, max_side=5)),
    max_size=4,
)
GOOD = record.encode({"latents": np.ones((1, 4, 4, 1), np.float16), "labels": np.arange(2)})
NOT_ONE = "not a safetensors record"


@settings(max_examples=40)
@given(named_arrays)
def test_decode_undoes_encode_bit_for_bit_whatever_the_order_and_layout(arrays):
    arrays["bfloat"] = np.arange(4).astype(ml_dtypes.bfloat16)
    data = record.encode(arrays)
    grid = np.arange(30, dtype=np.int32).reshape(5, 6)
    layouts = [grid.T, np.asfortranarray(grid), grid[::-1, ::2], grid.astype(">f4"), np.array(3.0)]
    more = {f"layout{n}": array for n, array in enumerate(layouts)}
    found = record.decode(data) | record.decode(record.encode(more))
    assert found.keys() == arrays.keys() | more.keys()
    for name, array in (arrays | more).items():
        assert found[name].shape == array.shape
        assert found[name].dtype == array.dtype.newbyteorder("=")
        assert found[name].tobytes() == array.astype(found[name].dtype).tobytes()
    assert record.encode(dict(reversed(arrays.items()))) == data
    assert record.checksum(data) == zlib.crc32(data)


def with_header(header, data=b""):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@settings(max_examples=30)
@given(st.binary(max_size=200), st.integers(0, len(GOOD) - 1), st.integers(1, 255))
@example(b"", 0, 1)
@example(b"\0" * 8, 0, 1)
@example(b"\xff" * 64, 0, 1)
@example(with_header([]), 0, 1)
@example(with_header({"a": 1}), 0, 1)
def test_garbage_and_truncated_or_damaged_records_raise_value_errors_alone(data, position, change):
    for wrong in (data, GOOD[: len(data) % len(GOOD)]):
        with pytest.raises(ValueError, match=NOT_ONE):
            record.decode(wrong)
    damaged = bytearray(GOOD)
    damaged[position] ^= change
    with contextlib.suppress(ValueError):
        assert isinstance(record.decode(bytes(damaged)), dict)


def test_dtypes_that_are_not_supported_are_value_errors():
    for name in ("F8_E4M3", "Q7"):
        header = {"a": {"dtype": name, "shape": [1], "data_offsets": [0, 1]}}
        with pytest.raises(ValueError, match="safetensors"):
            record.decode(with_header(header, b"\0"))
    for array in (np.array([print], object), np.zeros(1, np.complex64)):
        with pytest.raises(ValueError, match=r"a is .*; supported are"):
            record.encode({"a": array})


def test_a_pickle_is_refused_without_being_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    with pytest.raises(ValueError, match=NOT_ONE):
        record.decode(pickle.dumps(Bomb()))
    assert not (tmp_path / "exploded").exists()


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_no_module_can_unpickle():
    for path in Path(alload_jax.__file__).parent.rglob("*.py"):
        source = path.read_text()
        modules = {name.split(".")[0] for name in imported_modules(ast.parse(source))}
        assert not modules & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}, path
        assert "allow_pickle" not in source, path
        assert "np.load(" not in source, path
