"""`benchmarks/gradient_statistics.py` on quadratic losses, where every answer is known.

The loss of sample i is ½·|θ − x_i|², so its gradient at θ is θ − x_i. The samples are of two
classes of equal size, whose means are `APART` from the mean of all.
"""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SAMPLES, SIZE, APART, PER_STEP, EPOCHS = 6000, 32, 3.0, 8, 12
THETA = np.full(SIZE, 0.5)
CLASS = np.arange(SAMPLES) % 2


@pytest.fixture(scope="module")
def statistics():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("gradient_statistics")
        del sys.modules["gradient_statistics"]


@pytest.fixture(scope="module")
def population(statistics):
    x = np.random.default_rng(0).normal(size=(SAMPLES, SIZE))
    x[:, 0] += np.where(CLASS, APART, -APART)
    return statistics.Population((THETA - x).astype(np.float32), np.ones(SAMPLES))


def epochs(statistics, population, draw):
    """[mean, half-width] of each figure over epochs whose samples in steps `draw` gives."""
    found = [statistics.epoch_figures(population, *draw(n)) for n in range(EPOCHS)]
    return {
        name: statistics.interval([epoch[name] for epoch in found])
        for name in found[0]
        if name != "mean_step"
    }


def iid(seed):
    rng = np.random.default_rng([1, seed])
    step = np.arange(SAMPLES) // PER_STEP
    return rng.integers(SAMPLES, size=SAMPLES), step


def one_class(seed):
    rng = np.random.default_rng([2, seed])
    order = np.concatenate([rng.permutation(np.flatnonzero(c == CLASS)) for c in (0, 1)])
    return order, np.arange(SAMPLES) // PER_STEP


def test_variance_of_the_population_is_the_trace_of_its_covariance(population):
    expected = np.trace(np.cov(population.gradients.T.astype(np.float64), bias=True))
    assert population.variance == pytest.approx(expected, rel=1e-5)
    assert population.share_between(CLASS) == pytest.approx(APART**2 / (SIZE + APART**2), rel=0.05)


def test_iid_steps_have_a_ratio_of_one(statistics, population):
    found = epochs(statistics, population, iid)
    for name in ("variance", "variance_at_mean", "variance_times_samples"):
        mean, half = found[name]
        assert half < 0.02
        assert abs(mean - 1) < 2 * half + 1e-9
    assert found["samples"] == [PER_STEP, 0]


def test_steps_of_one_class_have_the_known_inflation(statistics, population):
    mean, half = epochs(statistics, population, one_class)["variance"]
    expected = (SIZE + PER_STEP * APART**2) / (SIZE + APART**2)
    assert mean == pytest.approx(expected, abs=half + 0.05)


def test_uneven_steps_add_variance_only_against_steps_of_the_mean_count(statistics, population):
    def uneven(seed):
        sample, _ = iid(seed)
        return sample, np.repeat(np.arange(2 * SAMPLES // 15), np.tile([3, 12], SAMPLES // 15))

    found = epochs(statistics, population, uneven)
    assert found["variance"][0] == pytest.approx(1, abs=0.03)
    assert found["variance_at_mean"][0] == pytest.approx(7.5 * (1 / 3 + 1 / 12) / 2, abs=0.05)
    assert found["fewest"][0] == pytest.approx(0.4)
    assert found["most"][0] == pytest.approx(1.6)


def test_small_steps_of_one_class_bias_the_mean_over_steps(statistics, population):
    small, large = np.flatnonzero(CLASS == 0), np.flatnonzero(CLASS == 1)
    sample = np.r_[small, large]
    step = np.r_[np.arange(3000) // 2, 1500 + np.arange(3000) // 6]
    weight = statistics.relative_weights(population.weight, sample, step)
    assert weight.mean() == pytest.approx(1)
    assert weight[0] / weight[-1] == pytest.approx(3)
    found = statistics.epoch_figures(population, sample, step)
    mean_of_class = [population.gradients[c == CLASS].mean(axis=0) for c in (0, 1)]
    expected = 0.75 * mean_of_class[0] + 0.25 * mean_of_class[1]
    np.testing.assert_allclose(found["mean_step"], expected, atol=1e-5)
    full = population.mean
    assert statistics.bias(population, found["mean_step"][None]) == pytest.approx(
        np.linalg.norm(expected - full) / np.linalg.norm(full), rel=1e-4
    )


def test_weights_enter_the_mean_of_a_step_and_its_reference(statistics, population):
    weighted = statistics.Population(population.gradients, np.where(CLASS, 4.0, 1.0))
    g = population.gradients.astype(np.float64)
    (gradient,) = statistics.step_gradients(weighted, np.asarray([0, 1]), np.zeros(2, int))
    np.testing.assert_allclose(gradient, (g[0] + 4 * g[1]) / 5, rtol=1e-5)
    mean, half = epochs(statistics, weighted, lambda n: (iid(n)[0], np.arange(SAMPLES) // 100))[
        "variance"
    ]
    assert mean == pytest.approx(1, abs=half + 0.03)
