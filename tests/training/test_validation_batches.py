"""Which held-out samples are measured, in which batches, and the means of their errors."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alload_jax.planning.samples import Samples
from alload_jax.training.validation import ClassErrors, finite, validation_figures
from alload_jax.training.validation.validator import SizeClass, choose_samples

SIZES = [(1, 8, 8), (1, 8, 16), (5, 8, 8), (5, 16, 16), (17, 8, 8)]
PICKS = st.lists(st.integers(0, len(SIZES) - 1), min_size=1, max_size=60)
MOST = st.none() | st.integers(1, 70)


def manifest_of(picks, checksums=None):
    shape = np.array([SIZES[pick] for pick in picks], np.int64)
    sums = np.arange(len(picks)) if checksums is None else checksums
    return SimpleNamespace(
        checksum=np.asarray(sums, np.uint32),
        samples=lambda patch: Samples(shape, shape.prod(axis=1) // 16),
    )


@given(PICKS, MOST, MOST)
def test_the_choice_is_of_the_most_frequent_sizes_by_their_shares(picks, samples, shapes):
    chosen = choose_samples(manifest_of(picks), (1, 4, 4), samples, shapes)
    counts = {size: picks.count(n) for n, size in enumerate(SIZES) if n in picks}
    taken = {each.shape: len(each.samples) for each in chosen}
    numbers = np.concatenate([each.samples for each in chosen])
    assert len(set(numbers.tolist())) == len(numbers)
    assert all(SIZES[picks[n]] == each.shape for each in chosen for n in each.samples.tolist())
    assert len(taken) == min(len(counts), shapes or 99, samples or 99)
    left_out = [count for size, count in counts.items() if size not in taken]
    assert not left_out or max(left_out) <= min(counts[size] for size in taken)
    room = sum(counts[size] for size in taken)
    assert len(numbers) == min(room, samples or room)
    assert [each.seq_len for each in chosen] == sorted(each.seq_len for each in chosen)
    total = len(numbers)
    for size, count in taken.items():  # its share, but at least one and rounded
        assert 1 <= count <= counts[size]
        assert abs(count - total * counts[size] / room) < len(taken) + 1


@given(PICKS, MOST, st.randoms())
def test_the_choice_depends_on_content_and_not_on_order(picks, samples, shuffle):
    rows = list(enumerate(picks))
    shuffle.shuffle(rows)
    sums, other = [n for n, _ in rows], [pick for _, pick in rows]
    found = choose_samples(manifest_of(picks), (1, 4, 4), samples, None)
    again = choose_samples(manifest_of(other, sums), (1, 4, 4), samples, None)
    assert [each.samples.tolist() for each in found] == [
        [sums[n] for n in each.samples.tolist()] for each in again
    ]


@given(st.integers(1, 40), st.integers(1, 9), st.none() | st.integers(1, 100))
def test_every_sample_has_one_row_and_batches_of_a_size_have_one_shape(count, ranks, tokens):
    size = SizeClass((5, 8, 8), 20, np.arange(100, 100 + count))
    steps = list(size.steps(ranks, tokens))
    parts = [part for step in steps for part in step.micro_batches]
    assert [sample for part in parts for sample in part.samples] == size.samples.tolist()
    assert {(part.rows, part.shape, part.seq_len) for part in parts} == {
        (size.rows(ranks, tokens), (5, 8, 8), 20)
    }
    assert all(len(part.samples) <= part.rows for part in parts)
    assert all([part.rank for part in step.micro_batches] == [*range(ranks)] for step in steps)
    assert all(any(part.samples for part in step.micro_batches) for step in steps)
    rows = parts[0].rows
    assert rows == 1 or (rows * 20 <= tokens and ranks * (rows - 1) < count)


@given(st.data())
def test_means_are_those_of_all_samples_and_levels(data):
    levels = data.draw(st.lists(st.integers(1, 99), min_size=1, max_size=4, unique=True))
    rng, classes, rows = np.random.default_rng(0), [], []
    for name in ("1x8x8", "5x8x8"):
        count = data.draw(st.integers(1, 6))
        measured = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
        errors = rng.normal(size=(len(levels), count)).astype(np.float32)
        errors[:, ~measured] = np.nan
        classes.append(ClassErrors(name, errors, measured))
        for place, level in enumerate(levels):
            rows += [(name, level, float(e)) for e in errors[place] if not np.isnan(e)]
    found = validation_figures(classes, [level / 100 for level in levels])
    expected = {"validation/samples": len(rows) // len(levels)}
    if rows:
        expected["validation/loss"] = np.mean([e for *_, e in rows])
    for name in {name for name, *_ in rows}:
        expected[f"validation/loss/{name}"] = np.mean([e for n, _, e in rows if n == name])
    for level in {level for _, level, _ in rows}:
        name = f"validation/loss/sigma_{level / 100:g}"
        expected[name] = np.mean([e for _, at, e in rows if at == level])
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_losses_that_are_not_finite_are_told_apart_from_losses_that_are_unknown():
    broken = ClassErrors("1x8x8", np.array([[np.nan, 1.0]], np.float32), np.array([True, True]))
    found = validation_figures([broken], [0.5])
    assert "validation/loss" in found
    assert finite(found) == {"validation/samples": 2}
    unread = broken._replace(measured=np.array([False, False]))
    assert validation_figures([unread], [0.5]) == {"validation/samples": 0}
