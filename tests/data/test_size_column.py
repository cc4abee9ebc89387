"""Columns of sizes: every sample in each pass, in another order, without reading the whole file."""

import os
import pickle
from itertools import islice

import numpy as np
import pytest
from data_helpers import says
from hypothesis import given
from hypothesis import strategies as st

from alload_jax.data.sources import grain_samples
from alload_jax.data.sources.grain_samples import SizeColumn, shuffled


@given(st.integers(1, 3000), st.integers(0, 9))
def test_an_order_holds_each_number_once(count, seed):
    found = shuffled(np.arange(count), count, [seed])
    assert sorted(found.tolist()) == list(range(count))
    some = np.arange(count)[:: max(1, count // 7)]
    np.testing.assert_array_equal(shuffled(some, count, [seed]), found[some])


def test_orders_are_random():
    """Neighbours come from everywhere, in each order from elsewhere, also of a billion."""
    for count in (5000, 10**9):
        one, other = (shuffled(np.arange(5000), count, [0, n]).astype(float) for n in (0, 1))
        for pair in ((one[1:], one[:-1]), (one, other), (one, np.arange(5000))):
            assert abs(np.corrcoef(*pair)[0, 1]) < 0.06
        assert abs(one.mean() / count - 0.5) < 0.02


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(grain_samples, "_PER_ENTRY", 8)
    np.save(tmp_path / "sizes.npy", [[1, 4, 4], [5, 4, 8]])
    np.save(tmp_path / "size.npy", np.arange(50, dtype=np.uint8) % 2)
    return tmp_path


def test_all_samples_are_listed_in_each_pass(folder):
    column = pickle.loads(pickle.dumps(SizeColumn(folder, seed=3)))
    entries = list(islice(column.entries(), 14))
    keys = [key for entry in entries for key in entry["key"].tolist()]
    first, second = keys[:50], keys[50:]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    for entry in entries:
        size = np.stack([entry[name] for name in ("frames", "height", "width")], axis=1)
        np.testing.assert_array_equal(size, column.sizes[entry["key"] % 2])
    assert len(set(column.drawn(20).tolist())) == 20


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("size.npy", np.full(50, 2), ["sample", "has size 2", "sizes.npy has 2 rows"]),
        ("size.npy", np.full(50, -1), ["has size -1"]),
        ("size.npy", np.zeros((2, 2), int), ["size.npy", "must be [N]"]),
        ("size.npy", np.zeros(3), ["float64", "whole numbers"]),
        ("size.npy", np.array([None]), ["cannot be read", "numpy.save"]),
        ("sizes.npy", np.zeros((2, 2), int), ["sizes.npy", "whole numbers [K, 3]"]),
        ("sizes.npy", np.zeros((0, 3), int), ["sizes.npy", "shape (0, 3)"]),
        ("sizes.npy", [[1, 4, 4], [0, 4, 4]], ["size 1 is 0×4×4", "from 1 to 65,536"]),
        ("sizes.npy", [[1, 4, -4]], ["size 0 is 1×4×-4"]),
        ("sizes.npy", np.array([[1, 2**63, 4]], np.uint64), ["size 0 is 1×9223372036854775808"]),
    ],
)
def test_files_that_cannot_be_used_are_refused(name, values, words, folder):
    np.save(folder / name, values)
    with says(*words):
        SizeColumn(folder).entry(0)
    (folder / name).unlink()
    with says(name, "cannot be read"):
        SizeColumn(folder)


@pytest.mark.parametrize("shape", ["(1" + 30 * "0" + ",)", "(True,)", "(" * 300])
def test_a_header_that_is_none_is_refused(shape, folder):
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".encode()
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64)
    (folder / "size.npy").write_bytes(content)
    with says("size.npy: cannot be read"):
        SizeColumn(folder)


def test_a_pipe_is_refused(folder):
    (folder / "size.npy").unlink()
    os.mkfifo(folder / "size.npy")
    with says("size.npy: is not a regular file"):
        SizeColumn(folder)
