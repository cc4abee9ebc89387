"""Weights of sources by patterns over the paths of samples."""

import fnmatch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.selection import (
    SourceWeight,
    source_shares,
    weights_identity,
    with_weights,
)
from alload_jax.errors import InputError
from alload_jax.planning.samples import Samples

PATHS = np.array(
    [
        *("portraits/a.mp4", "portraits/old/b.mp4", "landscapes/c.png"),
        *("portraits2/d.mp4", "", "e+.png"),
    ],
    object,
)
SAMPLES = Samples(np.zeros((6, 3), np.int64), np.array([4, 8, 16, 4, 4, 4]))


def refusal(*weights, paths=PATHS):
    with pytest.raises(InputError) as caught:
        with_weights(SAMPLES, weights, paths)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "matched"),
    [
        ("portraits", [0, 1]),
        ("./portraits/", [0, 1]),
        ("portraits/*", [0, 1]),
        ("portraits*", [0, 1, 3]),
        ("?andscapes", [2]),
        ("e+.png", [5]),
        ("*", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_pattern_matches_files_and_folders(path, matched):
    found = with_weights(SAMPLES, [SourceWeight(path, 3)], PATHS).weight
    assert np.flatnonzero(found == 3).tolist() == matched
    assert set(found[found != 3]) <= {1.0}


@settings(deadline=None, max_examples=100)
@given(
    st.text("ab*?/.", min_size=1, max_size=6).filter(
        lambda path: path.strip("/") and not path.startswith(("./", "/"))
    ),
    st.lists(st.text("ab/.", max_size=6), min_size=1, max_size=6),
)
def test_patterns_match_as_those_of_a_shell_do_on_a_path_or_a_folder_of_it(path, paths):
    name = path.rstrip("/")

    def matches(one):
        ends = [end for end in range(len(one)) if one[end] == "/"] + [len(one)]
        return any(fnmatch.fnmatchcase(one[:end], name) for end in ends)

    samples = Samples(np.zeros((len(paths), 3), np.int64), np.ones(len(paths), np.int64))
    expected = [matches(one) for one in paths]
    if not any(expected):
        with pytest.raises(InputError, match="matches no sample"):
            with_weights(samples, [SourceWeight(path, 2)], np.array(paths, object))
        return
    found = with_weights(samples, [SourceWeight(path, 2)], np.array(paths, object)).weight
    assert (found == 2).tolist() == expected


def test_the_first_pattern_that_matches_counts():
    weights = [SourceWeight("portraits/old", 0.5), SourceWeight("portraits", 2)]
    assert with_weights(SAMPLES, weights, PATHS).weight.tolist() == [2, 0.5, 1, 1, 1, 1]
    message = refusal(*reversed(weights))
    assert "'portraits/old' belong to earlier entries" in message


def test_weights_that_change_nothing_leave_the_samples_as_they_are():
    assert with_weights(SAMPLES, [], None) is SAMPLES
    assert with_weights(SAMPLES, [SourceWeight("portraits", 1)], PATHS) is SAMPLES
    assert weights_identity([SourceWeight("portraits", 1)]) == {}
    assert weights_identity([SourceWeight("portraits", 2)])


def test_what_is_wrong_is_said_in_a_line():
    message = refusal(SourceWeight("portrait", 2))
    assert "'portrait' matches no sample" in message
    assert "portraits, portraits/old, landscapes" in message
    assert "prepare the media again" in refusal(SourceWeight("a", 2), paths=None)
    for weight in (0, -1, 1e-4, 1001, float("nan"), float("inf")):
        with pytest.raises(InputError, match="weight of 'a' is"):
            SourceWeight("a", weight)
    with pytest.raises(InputError, match="path is empty"):
        SourceWeight("/", 1)


def test_shares_are_those_of_an_expected_epoch():
    weights = [SourceWeight("portraits", 2), SourceWeight("landscapes", 0.5)]
    shares = source_shares(SAMPLES, weights, PATHS)
    assert [(s.path, s.samples, s.epoch_samples, s.epoch_tokens) for s in shares] == [
        ("portraits", 2, 4, 24),
        ("landscapes", 1, 0.5, 8),
        ("others", 3, 3, 12),
    ]
    assert sum(s.share for s in shares) == pytest.approx(1)
