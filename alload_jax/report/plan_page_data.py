"""What a plan page shows; filled from plans by the caller, drawn by `plan_page.py`."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

Region = Literal["whole", "split", "padding"]


@dataclass(frozen=True)
class StepBars:
    """One optimizer step of one policy.

    Attributes:
      step: its index within the epoch.
      ranks: all of them, also those beyond what is drawn.
      parts: (rank, cost, seq_len, region) of every sample or padding on every rank, so that mean
        and makespan are those of the whole step. The region is that of `Region`.
    """

    step: int
    ranks: int
    parts: list[tuple[int, float, int, str]]


@dataclass(frozen=True)
class PolicyPart:
    """An epoch as one policy plans it.

    Attributes:
      name: as people call it, `equal_tokens (independent)`.
      metrics: name → value; names of `plan_figures.METRICS` get its labels and formats, others
        are shown as they are; None is shown as a dash.
      steps: those to draw, about three.
      imbalance: [steps] max/mean − 1 of cost over ranks; may be long.
    """

    name: str
    metrics: dict[str, float | int | None]
    steps: tuple[StepBars, ...]
    imbalance: np.ndarray


@dataclass(frozen=True)
class PlanPage:
    """A data set and how policies plan it.

    Attributes:
      title: the page's.
      facts: what the plans were made for: `data set`, `ranks`, `M_mem`, `cost model`, …
      seq_len: [N] int64, tokens of every sample of the manifest.
      sequence_cost: [N], cost of each sample alone.
      cost_unit: `s`, or "" where costs have no unit.
      policies: at least one; the first is the baseline, the last the best.
      curve: (M_comp values, predicted time per epoch, chosen M_comp), or None.
      over_ranks: policy → [(ranks, value)], or None.
      notes: plain sentences for the end.
      over_ranks_metric: what the values of `over_ranks` are, a name of `plan_figures.METRICS`.
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
