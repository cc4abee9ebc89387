"""Files that name samples to leave out."""

import numpy as np
import pytest
from data_helpers import assert_says

from alload_jax.data.selection import count_excluded, exclusion_identity, read_excluded
from alload_jax.errors import InputError
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.bucketed import EqualTokens
from alload_jax.planning.policies.policy import RankTopology
from alload_jax.planning.samples import Samples


def test_numbers_comments_and_empty_lines(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_text("# found by eye\n3\n\n  7  # dark\n3\n0")
    assert read_excluded(path, 8) == {0, 3, 7}
    assert read_excluded(None, 8) == frozenset()


@pytest.mark.parametrize("line", ["8", "-1", "3.0", "three", "3,4", "٣", "9" * 5000])
def test_lines_that_are_no_sample_are_named(tmp_path, line):
    path = tmp_path / "bad.txt"
    path.write_text(f"1\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError) as error:
        read_excluded(path, 8)
    assert_says(error, "data.exclude", "line 2", path, line[:40], "from 0 to 7")


def test_files_that_cannot_be_read_are_named(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(InputError) as error:
            read_excluded(path, 8)
        assert_says(error, "data.exclude", path, "cannot be read")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError) as error:
        read_excluded(tmp_path / "binary", 8)
    assert_says(error, "data.exclude", "it is no text")


def test_some_sample_must_be_left(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_text("0\n1\n2\n")
    with pytest.raises(InputError) as error:
        read_excluded(path, 3)
    assert_says(error, "data.exclude", path, "names all 3 samples")


def test_each_time_of_an_excluded_sample_counts():
    samples = Samples(np.zeros((9, 3), np.int64), np.full(9, 4), weight=np.full(9, 3.0))
    plan = Plan(samples, EqualTokens(40), RankTopology(2), 0)
    counts = [count_excluded(plan.step(n), frozenset({1, 5})) for n in range(plan.steps_per_epoch)]
    assert sum(counts) == 6
    plain = Plan(Samples(samples.shape, samples.seq_len), EqualTokens(40), RankTopology(2), 0)
    assert count_excluded(plain.step(0), frozenset({1, 5})) == 2


def test_other_samples_have_another_identity():
    found = [exclusion_identity(frozenset(one)) for one in ((), (1,), (1, 2), (2,))]
    assert len({str(one) for one in found}) == 4
    assert exclusion_identity(frozenset((2, 1))) == exclusion_identity(frozenset((1, 2)))
