"""Parts of charts: colours, axes, bins, classes of lengths, and short numbers."""

import numpy as np
import pytest

from alload_jax.report.charts import (
    COLOURS,
    binned,
    compact,
    new_axes,
    percent,
    scale_x_log,
    scale_y,
    show_cost,
    svg,
)
from alload_jax.report.plan_charts import LengthClasses
from alload_jax.report.plan_figures import show


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
    _, (axes,) = new_axes(300, 200)
    scale_y(axes, high, "t")
    scale_x_log(axes, 1, 1 + high, "t")
    assert high <= axes.get_ylim()[1] <= 1.1 * high
    for axis, (low, top) in ((axes.yaxis, axes.get_ylim()), (axes.xaxis, axes.get_xlim())):
        ticks = [tick for tick in axis.get_majorticklocs() if low <= tick <= top]
        assert len(ticks) >= 2


def test_colours_are_those_of_the_style_sheet():
    assert len(set(COLOURS.values())) == len(COLOURS) >= 15
    figure, (axes,) = new_axes(300, 200)
    axes.axhspan(0, 1, facecolor=COLOURS["s3"])
    text = svg(figure, "name", 'a "label"')
    assert "fill: var(--s3)" in text
    assert COLOURS["s3"] not in text
    assert 'aria-label="a &quot;label&quot;"' in text


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
    assert show("idle", None) == "–"
