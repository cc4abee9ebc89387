"""Parts of charts: axes, bins, classes of lengths, and short numbers."""

import numpy as np
import pytest

from alload_jax.report.charts import binned, compact, linear_axis, log_axis
from alload_jax.report.plan_figures import percent, show, show_cost
from alload_jax.report.plan_lengths import LengthClasses


@pytest.mark.parametrize(("low", "high", "count"), [(5, 5, 1), (4, 272, 6), (100, 199, 1)])
def test_length_classes_cover_all_lengths(low, high, count):
    classes = LengthClasses.of(np.asarray([high, low]))
    assert classes.count == count
    places = classes.position(np.asarray([low - 1, low, high, high + 1]), count)
    assert places.tolist() == [0, 0, count - 1, count - 1]
    assert len(classes.legend()) == count


def test_binned_keeps_mean_and_maximum():
    values = np.random.default_rng(0).random(1003)
    mean, high = binned(values, 100)
    assert len(mean) == 100
    assert high.max() == values.max()
    counts = np.diff(np.linspace(0, 1003, 101).astype(int))
    assert np.average(mean, weights=counts) == pytest.approx(values.mean())


@pytest.mark.parametrize("high", [1e-9, 0.013, 0.5, 1.0, 3.0, 4.9, 37, 9.99e11])
def test_axes_reach_beyond_the_values(high):
    axis = linear_axis(high, "t")
    assert high <= axis.high * 1.0001 <= 2.01 * high
    assert 3 <= len(axis.ticks) <= 7
    assert len({tick.value for tick in axis.ticks}) == len(axis.ticks)
    assert len(log_axis(1, 1 + high, "t").ticks) >= 2


def test_numbers_are_short():
    assert [compact(v) for v in (0, 640, 4400, 29_000, 1.5e6)] == [
        "0",
        "640",
        "4,400",
        "29k",
        "1.5×10⁶",
    ]
    assert [compact(v) for v in (2e11, 1e9, 0.25)] == ["2×10¹¹", "10⁹", "0.25"]
    assert [percent(v) for v in (0, 1e-6, 0.0012, 0.392, 7.1)] == [
        *("0%", "<0.01%", "0.12%", "39.2%", "710%"),
    ]
    assert [show_cost(v, "s") for v in (2e-5, 0.02, 90, 900, 9e4)] == [
        *("20 µs", "20 ms", "90 s", "15 min", "25 h"),
    ]
    assert show_cost(5.72e9, "") == "5.72×10⁹"
    assert show("unheard_of", 1.23456) == "1.235"
    assert show("idle", None) == "–"
