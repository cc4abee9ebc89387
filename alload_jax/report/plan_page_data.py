"""The data of a plan page, which `plan_page.py` draws."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StepBars:
    """One optimizer step of one policy.

    Attributes:
      step: index of the step within the epoch.
      ranks: number of ranks, including those that are not drawn.
      parts: (rank, cost, seq_len, kind) of every sample and padding on every rank; the kind is
        "whole", "split" or "padding".
    """

    step: int
    ranks: int
    parts: list[tuple[int, float, int, str]]


@dataclass(frozen=True)
class PolicyPart:
    """An epoch as one policy plans it.

    Attributes:
      name: displayed name, such as `equal_tokens (independent)`.
      metrics: name → value; `plan_figures.METRICS` gives labels and formats; metrics that it lacks
        are shown with their names, and None as a dash.
      steps: the steps to draw, about three.
      imbalance: [steps] max/mean − 1 of cost over ranks.
    """

    name: str
    metrics: dict[str, float | int | None]
    steps: tuple[StepBars, ...]
    imbalance: np.ndarray


@dataclass(frozen=True)
class PlanPage:
    """A data set and how policies plan it.

    Attributes:
      title: title of the page.
      facts: settings of the plans: `data`, `ranks`, `M_mem`, `cost model`, …
      seq_len: [N] int64, tokens of every sample of the manifest.
      sequence_cost: [N], cost of each sample alone.
      cost_unit: `s`, or "" if costs have no unit.
      policies: at least one; the first is the baseline, the last the best.
      curve: ([n] values of M_comp, [n] predicted seconds per epoch, chosen M_comp), or None.
      over_ranks: policy → [(ranks, value)], or None.
      notes: sentences at the end of the page.
      over_ranks_metric: metric of the values in `over_ranks`, a name in `plan_figures.METRICS`.
    """

    title: str
    facts: dict[str, str]
    seq_len: np.ndarray
    sequence_cost: np.ndarray
    cost_unit: str
    policies: tuple[PolicyPart, ...]
    curve: tuple[np.ndarray, np.ndarray, float] | None = None
    over_ranks: dict[str, list[tuple[int, float]]] | None = None
    notes: tuple[str, ...] = ()
    over_ranks_metric: str = "imbalance"
