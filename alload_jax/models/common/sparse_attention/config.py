"""Config of sparse self-attention."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from alload_jax.errors import InputError

SelectorName = Literal["predictor", "pooled", "random", "all"]

_MOST_BRANCHES = 3
"""Most lengths of lists of a layer with forced densities."""
_NO_SAMPLE = 2**31
"""More tokens than a sample can have."""


@dataclass(frozen=True)
class SparseAttentionConfig:
    """Dynamic sparse self-attention in two stages (DSV, arXiv 2502.07590); dense by default.

    Every layer begins with dense attention. It switches to sparse attention when its measured
    sparsity and the recall of its selector reach their thresholds, and back when one of them falls
    `hysteresis` below.

    Attributes:
      selector: what chooses the blocks of keys: `predictor` (low-rank projections that are trained
        beside the model), `pooled` (mean queries and keys), `random` and `all` (controls).
      block: tokens of a block, 64 or 128.
      rank: rank of a head's projections in the predictor; even.
      min_tokens: samples of fewer tokens have dense attention always.
      coverage: share of the attention that critical blocks hold.
      profile_every: steps between measurements, which also train the predictor.
      sparse_profile_every: likewise, of layers that are sparse.
      profile_blocks: blocks of queries that a measurement samples.
      decay: decay of the moving average of measurements.
      dense_steps: steps before which no layer switches.
      min_sparsity: sparsity from which a layer switches; mean over its heads.
      min_recall: recall from which a layer switches; mean over its heads.
      hysteresis: how far a value may fall below its threshold before the layer switches back.
      max_density: density of a layer that has just switched, and the most that lists hold.
      min_density: least density of a head.
      anneal_steps: steps in which the density falls from `max_density` to `min_density`.
      capacities: densities below `max_density` for which shorter lists are compiled; others are
        ignored. A layer uses the shortest lists that hold its densest head: they are made faster.
      balance_heads: whether the ranks of a context group get heads of about the same total density
        for split samples, in place of consecutive heads.
      forced: densities of the layers, 1 for dense, in place of the measured ones; null to switch by
        measurement.
    """

    selector: SelectorName = "pooled"
    block: int = 64
    rank: int = 16
    min_tokens: int = 16_384
    coverage: float = 0.9
    profile_every: int = 10
    sparse_profile_every: int = 50
    profile_blocks: int = 8
    decay: float = 0.9
    dense_steps: int = 1000
    min_sparsity: float = 0.8
    min_recall: float = 0.9
    hysteresis: float = 0.05
    max_density: float = 0.3
    min_density: float = 0.02
    anneal_steps: int = 500
    capacities: tuple[float, ...] = (0.1,)
    balance_heads: bool = True
    forced: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.selector not in get_args(SelectorName):
            names = ", ".join(get_args(SelectorName))
            raise InputError(_message("selector", self.selector, f"choose one of {names}"))
        if self.block not in (64, 128):
            raise InputError(_message("block", self.block, "it must be 64 or 128"))
        for name in ("rank", "profile_every", "sparse_profile_every", "profile_blocks"):
            if getattr(self, name) < 1:
                raise InputError(_message(name, getattr(self, name), "it must be at least 1"))
        if self.rank % 2:
            raise InputError(_message("rank", self.rank, "it must be even"))
        for name in ("min_tokens", "dense_steps", "anneal_steps"):
            if getattr(self, name) < 0:
                raise InputError(_message(name, getattr(self, name), "it must be 0 or more"))
        for name in ("coverage", "max_density", "min_density"):
            if not 0 < getattr(self, name) <= 1:
                wanted = "it must be above 0 and at most 1"
                raise InputError(_message(name, getattr(self, name), wanted))
        for name in ("decay", "min_sparsity", "min_recall", "hysteresis"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(_message(name, getattr(self, name), "it must be from 0 to 1"))
        if self.min_density > self.max_density:
            wanted = f"it must be at most max_density, {self.max_density}"
            raise InputError(_message("min_density", self.min_density, wanted))
        if not all(0 < each <= 1 for each in self.capacities):
            wanted = "each must be above 0 and at most 1"
            raise InputError(_message("capacities", self.capacities, wanted))
        if self.forced is None and self.min_sparsity < 1 - self.max_density - 1e-9:
            wanted = (
                f"it must be at least 1 - max_density, {1 - self.max_density:g}: a layer that is "
                "less sparse needs longer lists"
            )
            raise InputError(_message("min_sparsity", self.min_sparsity, wanted))
        if self.forced is not None and not all(0 < each <= 1 for each in self.forced):
            wanted = "each must be above 0 and at most 1"
            raise InputError(_message("forced", self.forced, wanted))

    def check_layers(self, layers: int) -> None:
        """Raises InputError if the forced densities are not one for each layer."""
        if self.forced is not None and len(self.forced) != layers:
            wanted = f"give {layers}, one for each of model.num_layers"
            raise InputError(_message("forced", f"{len(self.forced)} densities", wanted))

    def identity(self) -> dict[str, Any]:
        """The fields that determine a checkpoint's arrays, as JSON values."""
        return {"selector": self.selector} | (
            {"rank": self.rank} if self.selector == "predictor" else {}
        )

    @property
    def measures(self) -> bool:
        """Whether the layers ever measure: forced ones only to train their predictors."""
        return self.forced is None or self.selector == "predictor"

    def as_dense(self) -> "SparseAttentionConfig":
        """A config for the same checkpoints, by which the attention of all samples is dense."""
        return replace(self, min_tokens=_NO_SAMPLE)

    def list_densities(self) -> tuple[float, ...]:
        """The densities for which lists are compiled, falling; a layer uses the lowest it can."""
        if self.selector == "all":
            return (1.0,)
        if self.forced is not None:
            sparse = {each for each in self.forced if each < 1} or {self.max_density}
            return tuple(sorted(sparse, reverse=True)[:_MOST_BRANCHES])
        lower = {each for each in self.capacities if each < self.max_density}
        return tuple(sorted({self.max_density, *lower}, reverse=True))


def _message(field: str, value: object, wanted: str) -> str:
    return f"model.sparse_attention.{field} is {value}; {wanted}"
