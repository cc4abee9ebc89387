"""Variance and bias of the gradients of steps, from the gradients of single samples."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import sparse
from scipy.stats import t as student


@dataclass(frozen=True)
class Population:
    """Gradients of all samples, each with its own noise.

    Attributes:
      gradients: [N, K] float32, or another linear map of the gradients that keeps inner products.
      weight: [N] float64, weight of a sample in the mean of its step.
    """

    gradients: np.ndarray
    weight: np.ndarray

    @cached_property
    def mean(self) -> np.ndarray:
        """[K] float64, the weighted mean over all samples: the full-data gradient."""
        share = self.weight / self.weight.sum()
        return np.einsum("n,nk->k", share, self.gradients, dtype=np.float64)

    @cached_property
    def variance(self) -> float:
        """σ²: n samples drawn i.i.d. have a step gradient of variance σ²/n around the mean.

        It is the trace of the covariance. With unequal weights it is that of the ratio of two
        means, to first order in 1/n.
        """
        relative = self.weight / self.weight.mean()
        return float(np.mean(relative**2 * self._distances))

    @cached_property
    def _distances(self) -> np.ndarray:
        """[N] float64, squared distances of the gradients from the mean."""
        return _squared_norms(self.gradients - self.mean.astype(np.float32))

    def share_between(self, group: np.ndarray) -> float:
        """Share of the variance that is between the groups' means, from 0 to 1; `group` is [N]."""
        _, number = np.unique(group, return_inverse=True)
        means = step_gradients(self, np.arange(len(group)), number)
        mass = np.bincount(number, self.weight) / self.weight.sum()
        total = self.weight @ self._distances / self.weight.sum()
        return float(mass @ _squared_norms(means - self.mean) / total)


def step_gradients(population: Population, sample: np.ndarray, step: np.ndarray) -> np.ndarray:
    """The gradient of each step: the weighted mean over its samples.

    Args:
      population: gradients and weights of the samples.
      sample: [P] int64, row numbers in the population.
      step: [P] int64, the step of each, from 0 without gaps.

    Returns:
      [steps, K] float64.
    """
    weight = population.weight[sample]
    share = (weight / np.bincount(step, weight)[step]).astype(np.float32)
    shape = (int(step.max()) + 1, len(population.gradients))
    return (sparse.csr_matrix((share, (step, sample)), shape) @ population.gradients).astype(
        np.float64
    )


def epoch_figures(
    population: Population, sample: np.ndarray, step: np.ndarray
) -> dict[str, float | np.ndarray]:
    """Figures of the steps of one epoch.

    Args:
      population: gradients and weights of the samples.
      sample: [P] int64, row numbers in the population.
      step: [P] int64, the step of each, from 0 without gaps.

    Returns:
      steps: number of steps.
      samples: mean number of samples of a step.
      fewest, most: least and most samples of a step, over the mean.
      variance: mean squared distance of a step's gradient from the full gradient, over that of
        steps with the same numbers of samples drawn i.i.d.
      variance_at_mean: the same, over that of i.i.d. steps that all have the mean number.
      variance_times_samples: mean over steps of n·squared distance, over σ².
      noise: mean squared distance over the squared norm of the full gradient.
      cosine, cosine_p10: mean and 10th percentile of the cosine between a step's gradient and the
        full gradient.
      mean_step: [K], the mean of the steps' gradients.
    """
    mean, sigma2 = population.mean, population.variance
    counts = np.bincount(step)
    gradients = step_gradients(population, sample, step)
    distance = _squared_norms(gradients - mean)
    cosine = gradients @ mean / np.sqrt(_squared_norms(gradients) * (mean @ mean))
    return {
        "steps": len(counts),
        "samples": counts.mean(),
        "fewest": counts.min() / counts.mean(),
        "most": counts.max() / counts.mean(),
        "variance": distance.mean() / (sigma2 / counts).mean(),
        "variance_at_mean": distance.mean() * counts.mean() / sigma2,
        "variance_times_samples": (distance * counts).mean() / sigma2,
        "noise": distance.mean() / (mean @ mean),
        "cosine": cosine.mean(),
        "cosine_p10": np.percentile(cosine, 10),
        "mean_step": gradients.mean(axis=0),
    }


def bias(population: Population, mean_steps: np.ndarray) -> float:
    """Distance of the mean over steps from the full gradient, over the full gradient's norm.

    Args:
      population: gradients and weights of the samples.
      mean_steps: [epochs, K], the mean of the steps' gradients in each epoch.
    """
    mean = population.mean
    return float(np.linalg.norm(mean_steps.mean(axis=0) - mean) / np.linalg.norm(mean))


def relative_weights(weight: np.ndarray, sample: np.ndarray, step: np.ndarray) -> np.ndarray:
    """[P], the weight of each sample in the mean of the epoch's steps, over the sample's own.

    A sample of a step of n samples weighs 1/n, so samples of small steps weigh more. The mean is 1
    where `weight` is 1 for all.
    """
    own = weight[sample]
    steps = int(step.max()) + 1
    return own.sum() / (steps * np.bincount(step, own)[step])


def interval(values: list[float]) -> list[float]:
    """[mean, half-width of its 95 % confidence interval by Student's t over the values]."""
    array = np.asarray(values, np.float64)
    if len(array) < 2:
        return [float(array.mean()), float("nan")]
    error = array.std(ddof=1) / np.sqrt(len(array))
    return [float(array.mean()), float(student.ppf(0.975, len(array) - 1) * error)]


def _squared_norms(rows: np.ndarray) -> np.ndarray:
    return np.einsum("nk,nk->n", rows, rows, dtype=np.float64)
