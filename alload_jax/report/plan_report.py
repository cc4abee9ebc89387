"""Makes the page of `alload plan --report` from the cases of a study."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from alload_jax.planning.advice import advice
from alload_jax.planning.cost import CostModel, in_seconds, marginal_cost
from alload_jax.planning.epoch import EpochPlan
from alload_jax.planning.factory import m_comp_curve
from alload_jax.planning.metrics import imbalance
from alload_jax.planning.step_costs import micro_batch_costs, rank_costs
from alload_jax.planning.study import Case, Study
from alload_jax.report.plan_page import PlanPage, PolicyPart, StepBars, write_page

_DRAWN_AT = (0.25, 0.5, 0.75)
"""Positions of the drawn steps in the epoch, as shares of its steps."""

_METRICS = (
    "imbalance",
    "imbalance_max",
    "idle",
    "excess",
    "compute_cv",
    "step_cv",
    "padding",
    "utilisation",
    "step_samples_min",
    "step_samples_max",
    "longest_weight",
    "longest_weight_by_step",
    "steps",
    "buckets",
    "first_step_seconds",
    "dropped",
    "duplicated",
)


def write_report(
    path: str | Path, study: Study, cases: Sequence[Case], data: str, cost_model: str
) -> None:
    """Writes the page: cases with the first number of ranks in full, the others as curves.

    Args:
      path: the HTML file to write.
      study: the study of the cases.
      cases: the planned cases; the first is the baseline.
      data: description of the data set.
      cost_model: description of the cost model's source.

    Raises:
      InputError: the path cannot be written.
    """
    ranks = cases[0].ranks
    main = [case for case in cases if case.ranks == ranks]
    typical = study.samples.typical()
    page = PlanPage(
        title=f"How to feed {ranks} GPUs",
        facts={"data": data, "ranks": f"{ranks:,}"}
        | ({"M_mem": f"{main[0].plan_m_mem:,} tokens"} if main[0].plan_m_mem else {})
        | {"cost model": cost_model},
        seq_len=typical.seq_len,
        sequence_cost=study.predictor.sequence_cost(typical.seq_len),
        cost_unit="s" if in_seconds(study.predictor) else "",
        policies=tuple(_policy_part(case, study) for case in main),
        curve=_curve(main, study),
        over_ranks=_over_ranks(cases),
        notes=(*advice(study, main), *_notes(study, cost_model)),
    )
    write_page(path, page)


def _policy_part(case: Case, study: Study) -> PolicyPart:
    samples = study.samples_of(case.config.policy)
    epoch, seq_len = case.epoch, samples.seq_len
    seconds = case.config.seconds_per_split_token(study.costs)
    cost = rank_costs(epoch, micro_batch_costs(epoch, seq_len, study.predictor, seconds))
    metrics = {k: v for k, v in case.figures()["metrics"].items() if k in _METRICS}
    if case.in_seconds:
        metrics["seconds_per_epoch"] = case.metrics.cost
        metrics["tokens_per_second"] = case.metrics.tokens_per_second
    else:
        metrics["cost"] = case.metrics.cost
    drawn = sorted({int(share * (epoch.steps - 1)) for share in _DRAWN_AT})
    bars = tuple(_bars(epoch, step, seq_len, study.predictor, seconds) for step in drawn)
    return PolicyPart(case.name, metrics, bars, imbalance(cost))


def _bars(
    epoch: EpochPlan,
    step: int,
    seq_len: np.ndarray,
    model: CostModel,
    seconds_per_split_token: float,
) -> StepBars:
    """The samples and padding that each rank of a step computes, with their costs."""
    part = epoch.only(step)
    total = micro_batch_costs(part, seq_len, model, seconds_per_split_token)
    owner, lengths = part.micro_batch_of_part(), seq_len[part.sample]
    if part.packing is None:
        cost, is_split = model.sequence_cost(lengths), np.zeros(len(lengths), bool)
    else:
        cost, is_split = _packed_costs(part, lengths, model)
    rest = total - np.bincount(owner, weights=cost, minlength=len(total))
    columns = (part.rank[owner], cost, lengths, np.where(is_split, "split", "whole"))
    parts = list(zip(*(column.tolist() for column in columns), strict=True))
    parts += [
        (int(rank), float(value), 0, "padding")
        for rank, value in zip(part.rank, rest, strict=True)
        if value > 0
    ]
    return StepBars(step, part.ranks, parts)


def _packed_costs(
    part: EpochPlan, lengths: np.ndarray, model: CostModel
) -> tuple[np.ndarray, np.ndarray]:
    """Cost of every part, and whether it is split.

    The cost of a part is that of its tokens as padding plus its share of its sample's marginal
    cost.
    """
    assert part.packing is not None
    tokens, is_split = part.packing.tokens, part.packing.is_split
    marginal = marginal_cost(model, lengths)
    share = np.where(is_split, tokens / np.maximum(1, lengths), 1.0)
    return model.padding_cost(tokens) + marginal * share, is_split


def _curve(cases: Sequence[Case], study: Study) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Predicted time over M_comp of the first policy that has an M_comp by default."""
    for case in cases:
        if case.config.traits.m_comp_by_default:
            samples = study.samples_of(case.config.policy)
            curve = m_comp_curve(case.config, samples, case.plan.topology, study.costs)
            return curve.m_comp, curve.cost, curve.chosen
    return None


def _over_ranks(cases: Sequence[Case]) -> dict[str, list[tuple[int, float]]] | None:
    if len({case.ranks for case in cases}) == 1:
        return None
    curves: dict[str, list[tuple[int, float]]] = {}
    for case in cases:
        curves.setdefault(case.name, []).append((case.ranks, case.metrics.imbalance))
    return curves


def _notes(study: Study, cost_model: str) -> tuple[str, ...]:
    notes = ["A cost model predicts every figure on this page; none is measured."]
    if study.costs.origin == "analytic":
        notes.append(
            "The cost model counts FLOPs and bytes; `alload calibrate` measures one on your device."
        )
    if study.replay:
        notes.append(
            f"The simulation adds noise of {study.replay.noise:.0%} and "
            f"{study.replay.all_reduce:g} s of all-reduce to every step."
        )
    return (*notes, f"Cost model: {cost_model}.")
