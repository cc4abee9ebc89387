"""Configs of benchmarks/sparse_quality.py: of its variants, of short clips, and thresholds."""

import dataclasses
from typing import Any

import numpy as np

FIRST = "short clips"
"""Name of the programs that train on short clips first."""
FIRST_RATE = 2e-3
PLAIN = "no sparse attention"
"""Name of the timing of a model that measures nothing."""
THRESHOLDS = ((0.5, 0.9), (0.5, 0.85), (0.5, 0.75), (0.3, 0.85), (0.3, 0.75), (0.2, 0.6))
"""Pairs of min_sparsity and min_recall to choose from, in this order."""
DENSE_SHARE, ANNEAL_SHARE = 0.2, 0.1
"""Shares of the steps: of those before which no layer switches, of those of annealing."""


def selector_of(variant: str) -> str:
    """The selector whose programs a variant runs."""
    return "predictor" if variant == "dense" else variant


def selectors(variants: list[str]) -> list[str]:
    """The distinct selectors of some variants."""
    return list(dict.fromkeys(map(selector_of, variants)))


def variant_config(
    config: Any, variant: str, steps: int, thresholds: dict[str, float] | None = None
) -> Any:
    """The config of a variant for a number of steps."""
    selector = selector_of(variant)
    values: dict[str, Any] = {
        "selector": selector,
        "dense_steps": round(DENSE_SHARE * steps),
        "anneal_steps": round(ANNEAL_SHARE * steps),
    } | (thresholds or {})
    if variant == "dense":  # measures, but never switches
        values |= {"min_sparsity": 1.0, "min_recall": 1.0}
    if variant == "random":  # no layer would switch otherwise
        values |= {"min_recall": 0.0}
    sparse = dataclasses.replace(config.model.sparse_attention, **values)
    model = dataclasses.replace(config.model, sparse_attention=sparse)
    optimizer = config.optimizer
    if selector != "predictor":  # the others have no parameters of their own
        optimizer = dataclasses.replace(optimizer, groups=())
    return dataclasses.replace(config, model=model, optimizer=optimizer)


def plain_config(config: Any) -> Any:
    """The config of a model without sparse attention, which measures nothing."""
    model = dataclasses.replace(config.model, sparse_attention=None)
    optimizer = dataclasses.replace(config.optimizer, groups=())
    return dataclasses.replace(config, model=model, optimizer=optimizer)


def first_config(config: Any, tokens: int, steps: int) -> Any:
    """The config of training on short clips."""
    config = plain_config(config)
    return dataclasses.replace(
        config,
        planning=dataclasses.replace(config.planning, m_mem=tokens),
        optimizer=dataclasses.replace(config.optimizer, learning_rate=FIRST_RATE, warmup_steps=50),
        run=dataclasses.replace(config.run, steps=steps),
    )


def replaced(config: Any, part: str, **values: Any) -> Any:
    """The config with other values of one of its parts."""
    return dataclasses.replace(
        config, **{part: dataclasses.replace(getattr(config, part), **values)}
    )


def midway(layers: dict[str, Any]) -> np.ndarray:
    """The sparsity and the recall of a run's layers midway, [2, layers]."""
    middle = len(layers["step"]) // 2
    return np.array([layers["sparsity"][middle], layers["recall"][middle]])


def passed_thresholds(found: np.ndarray) -> dict[str, float]:
    """The highest of THRESHOLDS that half of the layers pass, or else the lowest.

    Args:
      found: sparsity and recall, [2, layers].
    """
    for pair in THRESHOLDS:
        if np.mean((found >= np.array(pair)[:, None]).all(axis=0)) >= 0.5:
            break
    return dict(zip(("min_sparsity", "min_recall"), pair, strict=True))
