"""Samples of manifests and of named workloads: their tokens, their buckets, and what is refused."""

import math
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import SHAPES, examples, manifests, of_lengths, refused, tokens

from alload_jax.planning.samples import (
    Geometry,
    Samples,
    divisible,
    read_samples,
    samples_from_columns,
)
from alload_jax.planning.workloads import make_workload

TRIPLES = st.tuples(*[st.integers(1, 9)] * 3)


@given(st.lists(SHAPES, min_size=1, max_size=20), TRIPLES, TRIPLES)
@examples(40)
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
    assert ((covered >= needed) & (covered - vae_stride < needed)).all()


def test_the_default_geometry_is_that_of_wan_and_small_integers_do_not_overflow():
    for shape, expected in (((81, 480, 832), 32_760), ((81, 720, 1280), 75_600), ((2, 16, 16), 2)):
        assert Geometry().seq_len(*np.array(shape)[:, None]).tolist() == [expected]
    sizes = np.array([127], np.int8), np.array([65_535], np.uint16), np.array([30_000], np.int16)
    assert Geometry().seq_len(*sizes).tolist() == [tokens([127, 65_535, 30_000], Geometry())]


@given(SHAPES, TRIPLES, TRIPLES, st.tuples(*[st.integers(1, 5)] * 3))
@examples(60)
def test_a_size_is_divisible_where_nothing_is_rounded_up(shape, vae_stride, patch_size, patches):
    steps = np.multiply(vae_stride, patch_size)
    later, rest = divmod(shape[0] - 1, vae_stride[0])
    whole_frames = rest == 0 and (later + 1) % patch_size[0] == 0
    expected = whole_frames and not (np.array(shape)[1:] % steps[1:]).any()
    assert divisible(tuple(shape), vae_stride, patch_size) == expected
    grid = np.multiply(patches, patch_size)
    size = tuple(((grid - [1, 0, 0]) * vae_stride + [1, 0, 0]).tolist())
    assert divisible(size, vae_stride, patch_size)


@given(manifests())
@examples(40)
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
    assert {buckets.name(k) for k in range(len(buckets))} == set(manifest.names())


def test_sizes_win_over_lengths_which_are_taken_where_sizes_are_missing():
    for columns, expected, sized in (
        ({"frames": [1, 5], "seq_len": [3, 9]}, [3, 9], False),
        ({"frames": [1], "height": [32], "width": [32], "seq_len": [99]}, [4], True),
    ):
        samples = samples_from_columns(
            {k: np.array(v) for k, v in columns.items()}, Geometry(), "x"
        )
        assert samples.seq_len.tolist() == expected
        assert samples.shape.any() == sized


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1), st.integers(1, 300))
@examples(50)
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


def write(path, content):
    """A file of bytes, or of a table's columns."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".csv":
        pa.csv.write_csv(pa.table(content), path)
    elif content is not None:
        pa.parquet.write_table(pa.table(content), path)
    return path


def same(left, right):
    return np.array_equal(left.shape, right.shape) and np.array_equal(left.seq_len, right.seq_len)


@given(manifest=manifests())
@examples(8)
def test_csv_and_parquet_say_the_same(tmp_path_factory, manifest):
    folder = tmp_path_factory.mktemp("manifest")
    columns = manifest.columns | {"note": ["extra"] * len(manifest.lengths())}
    for name in ("m.CSV", "m.parquet"):
        path = write(folder / name.lower(), columns).rename(folder / name)
        assert same(read_samples(path, manifest.geometry), manifest.samples())


def test_a_column_of_weights_says_how_often_an_epoch_has_a_sample(tmp_path):
    for weights, expected in (
        ([2, 1], [2, 1]),
        ([0.5, None], [0.5, 1]),
        ([1, 1], None),
        ([None] * 2, None),
    ):
        for name in ("m.csv", "m.parquet"):
            path = write(tmp_path / name, {"seq_len": [8, 8], "weight": weights})
            found = read_samples(path, Geometry()).weight
            assert found is expected is None or found.tolist() == expected


@pytest.mark.parametrize("dtype", [pa.int8(), pa.uint64(), pa.float64()])
def test_any_number_type_with_whole_numbers_is_accepted(tmp_path, dtype):
    path = write(tmp_path / "m.parquet", {"seq_len": pa.array([1, 100, 7], dtype)})
    assert same(read_samples(path, Geometry()), of_lengths(1, 100, 7))
    largest = write(tmp_path / "m.csv", b"seq_len\n1000000000\n")
    assert read_samples(largest, Geometry()).seq_len.tolist() == [10**9]


NONE = pa.array([], pa.int64())
SIZED = {"frames": [8], "height": [8], "width": [2.5]}
FAR = {"frames": [1, 9], "height": [16, 10**6], "width": [16, 10**6]}
UNREADABLE = "not a readable manifest"


def test_files_that_are_no_manifest_are_refused(tmp_path):
    for name, content, said in (
        ("m.parquet", None, ["no such manifest", ".parquet or .csv"]),
        *(("m.parquet", x, [UNREADABLE]) for x in (b"", b"seq_len\n4\n", b"PAR1 no more PAR1")),
        *(("m.csv", x, [UNREADABLE]) for x in (b"", b"seq_len,a\n4\n")),
        ("m.csv", b"seq_len,seq_len\n4,4\n", ["column seq_len exists twice"]),
        ("m.csv", {"seq_len": [4, None], "a": [1, 2]}, ["row 1 has seq_len = nan"]),
        ("m.csv", {"seq_len": NONE}, ["no rows", "at least one sample"]),
        ("m.parquet", {"seq_len": NONE}, ["no rows", "at least one sample"]),
        ("m.txt", b"seq_len\n4\n", [UNREADABLE, "its name ends in neither .parquet nor .csv"]),
        ("m.parquet", {"seq_len": ["a", "b"]}, ["column seq_len holds 'a'; it must hold whole"]),
        ("m.parquet", {"seq_len": [True, False]}, ["column seq_len", "whole numbers"]),
        *(
            ("m.csv", {"seq_len": [8, 8], "weight": [1.0, x]}, ["row 1 has weight", "to 1000"])
            for x in (0.0, 1001.0, math.inf)
        ),
        ("m.csv", {"seq_len": [8], "weight": ["a"]}, ["column weight holds 'a'; write numbers"]),
        ("m.parquet", {"frames": [8], "height": [8]}, ["needs frames, height and width, or"]),
        ("m.parquet", {"length": [8], "path": [8]}, ["or seq_len", "length, path"]),
        ("m.parquet", SIZED, ["row 0 has width = 2.5"]),
        ("m.parquet", FAR, ["row 1 is 9×1000000×1000000", "8.79e+09 tokens", "at most 1,000"]),
        *(
            ("m.parquet", {"seq_len": [8.0, x]}, [f"row 1 has seq_len = {x}", "whole number"])
            for x in (0.0, -3.0, math.nan, math.inf, 1e9 + 1)
        ),
    ):
        path = write(tmp_path / name, content)
        refused((path, *said), read_samples, path, Geometry())


def test_truncated_files_folders_and_bad_geometries_are_refused(tmp_path):
    path = write(tmp_path / "m.parquet", {"seq_len": list(range(1, 1000))})
    path.write_bytes(path.read_bytes()[:-100])
    refused((path, UNREADABLE), read_samples, path, Geometry())
    refused((tmp_path,), read_samples, tmp_path, Geometry())
    for name in ("vae_stride", "patch_size"):
        for value in ((0, 8, 8), (4, 8), (4, 8, 8, 8)):
            refused((name, value, "at least 1"), Geometry, **{name: value})


TOTALS = [
    ("wan-480p", 253.61),
    ("mixed-resolution", 30430.49),
    ("long-video-V35", -66654.42),
    ("long-video-V40", -12775.36),
    ("long-video-V45", 28966.28),
    ("long-video-V50", 43165.0),
    ("long-video-V55", 20127.14),
    ("long-video-V60", -48527.03),
]


@pytest.mark.parametrize(("name", "total"), TOTALS)
def test_a_workload_follows_its_seed_as_ever(name, total):
    """Measurements are compared on equal samples. All sizes are summed up, each with a factor."""
    samples, other = (make_workload(name, 2_000, seed) for seed in (3, 4))
    assert np.cos(np.arange(2_000)) @ samples.shape @ (7, 3, 1) == pytest.approx(total, abs=0.01)
    assert (samples.shape != other.shape).any()
    assert (samples.seq_len == Geometry().seq_len(*samples.shape.T)).all()


def test_geometry_and_aspect_ratios_are_parameters_and_what_is_no_workload_is_refused():
    coarse = Geometry((4, 16, 16), (1, 2, 2))
    samples, other = make_workload("wan-480p", 100), make_workload("wan-480p", 100, 0, coarse)
    assert (samples.shape == other.shape).all()
    assert (other.seq_len < samples.seq_len).all()
    square = make_workload("wan-480p", 100, aspect_ratios={(1, 1): 1.0})
    assert (square.shape[:, 1] == square.shape[:, 2]).all()
    thin = make_workload("wan-480p", 1, aspect_ratios={(1, 10_000): 1.0})
    assert thin.shape[0, 2] == 16
    refused(["wan-480p"], make_workload, "wan-481p", 10)
    for size in (0, 10**9 + 1):
        refused(["at least 1 and at most 1,000,000,000"], make_workload, "wan-480p", size)
