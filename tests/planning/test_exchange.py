"""Exchange of samples of equal tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples

from alload_jax.planning.policies.exchange import exchanged


@given(st.integers(0, 60), st.integers(1, 9), st.booleans(), st.integers(0, 99))
@examples(60)
def test_places_keep_their_tokens_and_steps_take_first_what_must_be_placed(n, kinds, sort, seed):
    rng = np.random.default_rng(seed)
    seq_len = rng.integers(1, kinds + 1, n) * 100
    seq_len = np.sort(seq_len)[::-1] if sort else seq_len
    must, in_row = rng.random((2, n)) < 0.4
    held = in_row & (rng.random(n) < 0.6)
    sample = exchanged(seq_len, must, held, in_row, rng)
    assert sorted(sample.tolist()) == list(range(n))
    assert (seq_len[sample] == seq_len).all()
    for tokens in np.unique(seq_len):
        same = seq_len == tokens
        inside, wanted = int(held[same].sum()), int(must[same].sum())
        assert must[sample][same & held].sum() == min(inside, wanted)
        rows = int(in_row[same].sum())
        assert must[sample][same & in_row].sum() == min(rows, wanted)


def test_many_lengths_are_exchanged_too():
    rng = np.random.default_rng(0)
    seq_len = np.repeat(rng.permutation(40_000), 2)
    held = np.arange(len(seq_len)) % 3 == 0
    sample = exchanged(seq_len, np.zeros_like(held), held, held, rng)
    assert (seq_len[sample] == seq_len).all()
    moved = sample != np.arange(len(seq_len))
    assert 0.4 < moved.mean() < 0.6
