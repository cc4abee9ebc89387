"""Samples of manifests: their tokens, their buckets, and files that hold none."""

from collections import defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import SHAPES, examples, manifests, of_lengths, of_shapes, refused, tokens

from alload_jax.planning.samples import (
    Geometry,
    Samples,
    divisible,
    read_samples,
    samples_from_columns,
)

TRIPLES = st.tuples(*[st.integers(1, 9)] * 3)


# ---------------------------------------------------------------- tokens of a size


@given(st.lists(SHAPES, min_size=1, max_size=20), TRIPLES, TRIPLES)
@examples(60)
def test_tokens_are_the_exact_count_of_patches_of_latents_that_cover_every_pixel(
    shapes, vae_stride, patch_size
):
    geometry = Geometry(vae_stride, patch_size)
    found = geometry.seq_len(*np.array(shapes).T)
    assert found.tolist() == [tokens(shape, geometry) for shape in shapes]
    assert found.dtype == np.int64
    grid = geometry.latent_grid(*np.array(shapes).T)
    covered = (grid - [1, 0, 0]) * vae_stride  # the first frame has a latent of its own
    needed = np.array(shapes) - [1, 0, 0]
    assert (covered >= needed).all()
    assert (covered - vae_stride < needed).all()


def test_the_default_geometry_is_that_of_wan_and_small_integers_do_not_overflow():
    for shape, expected in (((81, 480, 832), 32_760), ((81, 720, 1280), 75_600), ((2, 16, 16), 2)):
        assert Geometry().seq_len(*np.array(shape)[:, None]).tolist() == [expected]
    sizes = np.array([127], np.int8), np.array([65_535], np.uint16), np.array([30_000], np.int16)
    assert Geometry().seq_len(*sizes).tolist() == [tokens([127, 65_535, 30_000], Geometry())]


@pytest.mark.parametrize("name", ["vae_stride", "patch_size"])
@pytest.mark.parametrize("value", [(0, 8, 8), (4, -8, 8), (4, 8), (4, 8, 8, 8)])
def test_a_bad_triple_is_refused_by_name_and_value(name, value):
    refused((name, value, "at least 1"), Geometry, **{name: value})


@given(SHAPES, TRIPLES, TRIPLES, st.tuples(*[st.integers(1, 5)] * 3))
@examples(100)
def test_a_size_is_divisible_where_nothing_is_rounded_up(shape, vae_stride, patch_size, patches):
    steps = np.multiply(vae_stride, patch_size)
    later, rest = divmod(shape[0] - 1, vae_stride[0])
    whole_frames = rest == 0 and (later + 1) % patch_size[0] == 0
    expected = whole_frames and not (np.array(shape)[1:] % steps[1:]).any()
    assert divisible(tuple(shape), vae_stride, patch_size) == expected
    grid = np.multiply(patches, patch_size)
    size = tuple(((grid - [1, 0, 0]) * vae_stride + [1, 0, 0]).tolist())
    assert divisible(size, vae_stride, patch_size)


# ---------------------------------------------------------------- samples and buckets


@given(manifests())
@examples(60)
def test_buckets_are_the_samples_grouped_by_shape_shortest_first(manifest):
    samples = manifest.samples()
    assert samples.seq_len.tolist() == manifest.lengths()
    assert [tuple(shape) for shape in samples.shape.tolist()] == manifest.shapes()
    expected = defaultdict(list)
    for sample, key in enumerate(zip(manifest.lengths(), manifest.shapes(), strict=True)):
        expected[key].append(sample)
    buckets = samples.buckets()
    members = np.split(buckets.members, buckets.offsets[1:-1])
    keys = zip(buckets.seq_len.tolist(), map(tuple, buckets.shape.tolist()), strict=True)
    found = [(key, some.tolist()) for key, some in zip(keys, members, strict=True)]
    assert found == sorted(expected.items())
    assert len(buckets) == len(expected)
    assert {buckets.name(k) for k in range(len(buckets))} == set(manifest.names())


def test_equal_lengths_of_different_shapes_are_different_buckets():
    buckets = of_shapes((1, 16, 32), (1, 32, 16), (1, 16, 32)).buckets()
    assert [buckets.name(k) for k in range(len(buckets))] == ["1x16x32", "1x32x16"]
    assert buckets.members.tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    ("columns", "expected", "sized"),
    [
        ({"seq_len": [4, 7, 4]}, [4, 7, 4], False),
        ({"frames": [1, 5], "seq_len": [3, 9]}, [3, 9], False),
        ({"frames": [1], "height": [32], "width": [32], "seq_len": [99]}, [4], True),
    ],
)
def test_sizes_win_over_lengths_which_are_taken_where_sizes_are_missing(columns, expected, sized):
    samples = samples_from_columns({k: np.array(v) for k, v in columns.items()}, Geometry(), "x")
    assert samples.seq_len.tolist() == expected
    assert samples.shape.any() == sized


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


# ---------------------------------------------------------------- files


def write(path, columns):
    table = pa.table(columns)
    if path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    else:
        pa.parquet.write_table(table, path)
    return path


def same(left, right):
    return np.array_equal(left.shape, right.shape) and np.array_equal(left.seq_len, right.seq_len)


@given(manifest=manifests())
@examples(15)
def test_csv_and_parquet_say_the_same(tmp_path_factory, manifest):
    folder = tmp_path_factory.mktemp("manifest")
    columns = manifest.columns | {"note": ["extra"] * len(manifest.lengths())}
    for name in ("m.csv", "m.parquet"):
        path = write(folder / name, columns)
        assert same(read_samples(path, manifest.geometry), manifest.samples())


@pytest.mark.parametrize("dtype", [pa.int8(), pa.uint64(), pa.float64()])
def test_any_number_type_with_whole_numbers_is_accepted(tmp_path, dtype):
    path = write(tmp_path / "m.parquet", {"seq_len": pa.array([1, 100, 7], dtype)})
    assert same(read_samples(path, Geometry()), of_lengths(1, 100, 7))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frames", 0),
        ("height", -3),
        ("width", 2.5),
        *(("seq_len", value) for value in (float("nan"), float("inf"), -0.0, 1e19)),
    ],
)
def test_values_other_than_positive_whole_numbers_are_refused(tmp_path, name, value):
    names = ["seq_len"] if name == "seq_len" else ["frames", "height", "width"]
    columns = {each: [8, 8, value if each == name else 8, 8] for each in names}
    path = write(tmp_path / "m.parquet", columns)
    said = (path, "row 2", name, f"{float(value)}".removesuffix(".0"), "whole number")
    refused(said, read_samples, path, Geometry())


INTEGERS = {
    "no rows": pa.array([], pa.int64()),
    "missing": pa.array([4, None, 4], pa.int64()),
}


@pytest.mark.parametrize(
    ("suffix", "columns", "said"),
    [
        ("csv", {"seq_len": INTEGERS["missing"], "a": [1, 2, 3]}, ["row 1", "whole number"]),
        ("parquet", {"seq_len": INTEGERS["missing"]}, ["row 1", "seq_len", "whole number"]),
        ("csv", {"seq_len": INTEGERS["no rows"]}, ["no rows", "at least one sample"]),
        ("parquet", {"seq_len": INTEGERS["no rows"]}, ["no rows", "at least one sample"]),
        ("parquet", {"seq_len": ["a", "b"]}, ["column seq_len", "whole numbers"]),
        ("parquet", {"seq_len": [True, False]}, ["column seq_len", "whole numbers"]),
        ("parquet", {"frames": [8], "height": [8]}, ["needs frames, height and width, or seq_len"]),
        ("parquet", {"length": [8], "path": [8]}, ["or seq_len", "length", "path"]),
    ],
)
def test_tables_without_samples_are_refused(tmp_path, suffix, columns, said):
    path = write(tmp_path / f"m.{suffix}", columns)
    refused((path, *said), read_samples, path, Geometry())


UNREADABLE = "not a readable manifest"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("m.parquet", None, ["no such manifest", ".parquet or .csv"]),
        *(("m.parquet", x, [UNREADABLE]) for x in (b"", b"seq_len\n4\n", b"PAR1 no more PAR1")),
        *(("m.csv", x, []) for x in (b"", b"seq_len,a\n4\n", b"seq_len,seq_len\n4,4\n")),
    ],
)
def test_files_that_are_no_manifest_are_refused(tmp_path, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    refused((path, *said), read_samples, path, Geometry())


def test_a_truncated_file_and_a_folder_are_refused(tmp_path):
    path = write(tmp_path / "m.parquet", {"seq_len": list(range(1, 1000))})
    path.write_bytes(path.read_bytes()[:-100])
    refused((path, UNREADABLE), read_samples, path, Geometry())
    refused((tmp_path,), read_samples, tmp_path, Geometry())
