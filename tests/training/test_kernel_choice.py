"""Processes of a run choose the same kernels, and what their layers keep."""

import json
from types import SimpleNamespace

import pytest

from alload_jax.run.training import share_comparisons
from pallas_kernels.first_use import COMPARISONS

pytestmark = pytest.mark.usefixtures("own_comparisons")

CASE = "bias_gelu 1536 bfloat16"


def asks(*times):
    return lambda: COMPARISONS.ratio(CASE, lambda: times)


def test_process_0_measures_what_a_program_asks_for():
    told = []

    def broadcast(compute):
        told.append(json.dumps(compute()))
        return json.loads(told[0])

    share_comparisons(SimpleNamespace(num_processes=2, broadcast=broadcast), asks(3.0, 2.0))
    assert told == [json.dumps({CASE: 1.5})]
    assert COMPARISONS.ratio(CASE, lambda: (9.0, 1.0)) == 1.5


def test_the_others_take_its_results_and_measure_nothing():
    cluster = SimpleNamespace(num_processes=2, broadcast=lambda compute: {CASE: 1.25})
    share_comparisons(cluster, asks(0.0, 0.0))
    assert COMPARISONS.ratio(CASE, lambda: (9.0, 1.0)) == 1.25
    assert COMPARISONS.ratio("another", lambda: (9.0, 1.0)) == 1.0


def test_one_process_measures_by_itself():
    share_comparisons(SimpleNamespace(num_processes=1), asks(0.0, 0.0))
    assert COMPARISONS.ratio(CASE, lambda: (9.0, 3.0)) == 3.0
