from collections import defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples, manifests, of_lengths, of_shapes, refusal

from alload_jax.planning.samples import Geometry, Samples, read_samples, samples_from_columns

WRONG_VALUES = [0, -3, 2.5, float("nan"), float("inf"), -0.0]


def write(path, columns):
    table = pa.table(columns)
    if path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    else:
        pa.parquet.write_table(table, path)
    return path


def same(left, right):
    return np.array_equal(left.shape, right.shape) and np.array_equal(left.seq_len, right.seq_len)


@given(manifests())
@examples(60)
def test_samples_have_the_shapes_and_lengths_of_their_columns(manifest):
    samples = manifest.samples()
    assert len(samples) == len(manifest.lengths())
    assert samples.seq_len.tolist() == manifest.lengths()
    assert [tuple(shape) for shape in samples.shape.tolist()] == manifest.shapes()


@given(manifests())
@examples(60)
def test_buckets_are_the_samples_grouped_by_shape_shortest_first(manifest):
    expected = defaultdict(list)
    for sample, key in enumerate(zip(manifest.lengths(), manifest.shapes(), strict=True)):
        expected[key].append(sample)
    buckets = manifest.samples().buckets()
    found = [
        ((int(length), tuple(shape)), buckets.members[start:stop].tolist())
        for length, shape, start, stop in zip(
            buckets.seq_len,
            buckets.shape.tolist(),
            buckets.offsets[:-1],
            buckets.offsets[1:],
            strict=True,
        )
    ]
    assert found == sorted(expected.items())
    assert len(buckets) == len(expected)


@given(manifests())
@examples(30)
def test_a_bucket_is_named_by_its_shape_or_else_its_length(manifest):
    buckets = manifest.samples().buckets()
    assert {buckets.name(k) for k in range(len(buckets))} == set(manifest.names())


def test_equal_lengths_of_different_shapes_are_different_buckets():
    buckets = of_shapes((1, 16, 32), (1, 32, 16), (1, 16, 32)).buckets()
    assert [buckets.name(k) for k in range(len(buckets))] == ["1x16x32", "1x32x16"]
    assert buckets.members.tolist() == [0, 2, 1]


@pytest.mark.parametrize("columns", [{"seq_len": [4, 7, 4]}, {"frames": [1, 5], "seq_len": [3, 9]}])
def test_lengths_are_taken_as_they_are_where_sizes_are_missing(columns):
    samples = samples_from_columns({k: np.array(v) for k, v in columns.items()}, Geometry(), "x")
    assert samples.seq_len.tolist() == columns["seq_len"]
    assert not samples.shape.any()


def test_sizes_win_over_a_seq_len_column():
    columns = {"frames": [1], "height": [32], "width": [32], "seq_len": [99]}
    samples = samples_from_columns({k: np.array(v) for k, v in columns.items()}, Geometry(), "x")
    assert samples.seq_len.tolist() == [4]


@given(manifest=manifests())
@examples(15)
def test_csv_and_parquet_say_the_same(tmp_path_factory, manifest):
    folder = tmp_path_factory.mktemp("manifest")
    columns = manifest.columns | {"note": ["extra"] * len(manifest.lengths())}
    for name in ("m.csv", "m.parquet"):
        path = write(folder / name, columns)
        assert same(read_samples(path, manifest.geometry), manifest.samples())


@pytest.mark.parametrize("dtype", [pa.int8(), pa.uint16(), pa.int32(), pa.uint64(), pa.float64()])
def test_any_number_type_with_whole_numbers_is_accepted(tmp_path, dtype):
    path = write(tmp_path / "m.parquet", {"seq_len": pa.array([1, 100, 7], dtype)})
    assert same(read_samples(path, Geometry()), of_lengths(1, 100, 7))


@pytest.mark.parametrize("value", WRONG_VALUES)
@pytest.mark.parametrize("name", ["frames", "height", "width", "seq_len"])
def test_values_other_than_positive_whole_numbers_are_refused(tmp_path, name, value):
    names = ["seq_len"] if name == "seq_len" else ["frames", "height", "width"]
    columns = {each: [8, 8, value if each == name else 8, 8] for each in names}
    path = write(tmp_path / "m.parquet", columns)
    message = refusal(read_samples, path, Geometry())
    for part in (str(path), "row 2", name, f"{float(value)}".removesuffix(".0"), "whole number"):
        assert part in message


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_missing_value_is_refused_by_row(tmp_path, suffix):
    path = write(
        tmp_path / f"m.{suffix}", {"seq_len": pa.array([4, None, 4], pa.int64()), "a": [1, 2, 3]}
    )
    message = refusal(read_samples, path, Geometry())
    for part in (str(path), "row 1", "seq_len", "whole number"):
        assert part in message


def test_a_length_beyond_int64_is_refused(tmp_path):
    path = write(tmp_path / "m.parquet", {"seq_len": [4.0, 1e19]})
    assert "1e+19" in refusal(read_samples, path, Geometry())


@pytest.mark.parametrize("values", [["a", "b"], [True, False]])
def test_a_column_without_numbers_is_refused_by_name(tmp_path, values):
    path = write(tmp_path / "m.parquet", {"seq_len": values})
    message = refusal(read_samples, path, Geometry())
    assert str(path) in message
    assert "column seq_len" in message
    assert "whole numbers" in message


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_manifest_without_rows_is_refused_as_such(tmp_path, suffix):
    path = write(tmp_path / f"m.{suffix}", {"seq_len": pa.array([], pa.int64())})
    message = refusal(read_samples, path, Geometry())
    assert str(path) in message
    assert "no rows" in message
    assert "at least one sample" in message


def test_a_missing_manifest_is_refused_by_path(tmp_path):
    path = tmp_path / "m.parquet"
    message = refusal(read_samples, path, Geometry())
    assert str(path) in message
    assert "no such manifest" in message
    assert ".parquet or .csv" in message


def test_a_folder_as_manifest_is_refused(tmp_path):
    assert str(tmp_path) in refusal(read_samples, tmp_path, Geometry())


@pytest.mark.parametrize("content", [b"", b"seq_len\n4\n", b"PAR1 no more PAR1", b"\x00" * 100])
def test_invalid_parquet_is_refused(tmp_path, content):
    path = tmp_path / "m.parquet"
    path.write_bytes(content)
    message = refusal(read_samples, path, Geometry())
    assert str(path) in message
    assert "not a readable manifest" in message


def test_a_truncated_parquet_file_is_refused(tmp_path):
    path = write(tmp_path / "m.parquet", {"seq_len": list(range(1, 1000))})
    path.write_bytes(path.read_bytes()[:-100])
    assert "not a readable manifest" in refusal(read_samples, path, Geometry())


@pytest.mark.parametrize("content", [b"", b"seq_len,a\n4\n", b"seq_len,seq_len\n4,4\n"])
def test_invalid_csv_is_refused(tmp_path, content):
    path = tmp_path / "m.csv"
    path.write_bytes(content)
    assert str(path) in refusal(read_samples, path, Geometry())


@pytest.mark.parametrize("names", [["frames", "height"], ["width"], ["length", "path"]])
def test_missing_columns_are_refused(tmp_path, names):
    path = write(tmp_path / "m.parquet", {name: [8] for name in names})
    message = refusal(read_samples, path, Geometry())
    assert str(path) in message
    assert "needs frames, height and width, or seq_len" in message


def test_the_refusal_names_the_columns_that_the_file_has(tmp_path):
    path = write(tmp_path / "m.parquet", {"length": [8], "height": [8]})
    message = refusal(read_samples, path, Geometry())
    assert "length" in message
    assert "height" in message


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1), st.integers(1, 300))
def test_most_samples_within_tokens_are_the_shortest(drawn, tokens):
    seq_len, counts = np.asarray(drawn).T
    samples = Samples(np.zeros((len(seq_len), 3), np.int64), seq_len)
    for given_counts, lengths in ((None, seq_len), (counts, np.repeat(seq_len, counts))):
        of_epoch = samples if given_counts is None else samples.of_epoch(given_counts)
        held, left = 0, tokens
        for length in sorted(lengths):
            left -= length
            held += left >= 0
        assert of_epoch.most_within(tokens) == max(1, held)
