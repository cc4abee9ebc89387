"""What micro-batches cost while some layers of the model have sparse attention."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np
from typing_extensions import override

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile, QuadraticCost, SparseTerms

# Of dense attention's time per pair, forward and backward, at 75,600 tokens and 90 % sparsity on an
# H200 (benchmarks/results/sparse_attention_h200.json; 1.32 at 32,768 tokens, 1.43 at 131,072).
_PAIR = 1.33
# There the choice of blocks takes 1.62 %, 1.02 % and 0.79 % of dense attention's time at 32,768,
# 75,600 and 131,072 tokens: 0.55 %, and 350 pairs for each token. The order in tiles is arithmetic:
# it moves 22 values of a layer's width for each token at 30 % of the bandwidth, 1,250 pairs.
_SELECTION, _TOKEN = 0.0055, 350 + 1_250


@dataclass(frozen=True)
class SparseLayers:
    """Which attention the layers of a model have.

    Attributes:
      share: share of the layers that are sparse.
      density: share of the keys that these attend to, mean over layers and heads.
      min_tokens: samples of fewer tokens have dense attention in all layers.
      block: tokens of a block, the least that a query attends to.
    """

    share: float = 0.0
    density: float = 1.0
    min_tokens: int = 16_384
    block: int = 64

    def __post_init__(self) -> None:
        for name, least in (("share", 0.0), ("density", 1e-9)):
            if not least <= getattr(self, name) <= 1:
                wanted = "from 0 to 1" if name == "share" else "above 0 and at most 1"
                raise InputError(
                    f"the {name} of sparse layers is {getattr(self, name)}; give a number {wanted}"
                )

    def keys(self, seq_len: np.ndarray) -> np.ndarray:
        """k(S), keys that a query of a sparse layer attends to: [N] integers → [N] float64."""
        seq_len = np.asarray(seq_len, np.float64)
        return np.minimum(seq_len, np.maximum(self.block, self.density * seq_len))


@dataclass(frozen=True)
class SparseCost(QuadraticCost):
    """A quadratic cost whose attention is c2·S² in dense layers, and in sparse ones less.

    A sequence of at least `layers.min_tokens` tokens costs, with s the share of sparse layers,
    c_sequence + c1·S + (1 − s)·c2·S² + s·(c3·S·k(S) + c4·S + c5·S²); a shorter one costs what
    `QuadraticCost` says. That depends on the whole sample, also where it is split over ranks.

    Attributes:
      c3, c4, c5: see `SparseTerms`.
      layers: the layers that the model is for.
    """

    c3: float = 0.0
    c4: float = 0.0
    c5: float = 0.0
    layers: SparseLayers = field(default_factory=SparseLayers)

    @override
    def sequence_cost(self, seq_len: np.ndarray) -> np.ndarray:
        seq_len = np.asarray(seq_len, np.float64)
        share = np.where(seq_len >= self.layers.min_tokens, self.layers.share, 0.0)
        squares, pairs = seq_len**2, seq_len * self.layers.keys(seq_len)
        dense = self.c_sequence + self.c1 * seq_len + self.c2 * ((1 - share) * squares)
        return dense + share * (self.c3 * pairs + self.c4 * seq_len + self.c5 * squares)

    @property
    @override
    def coefficients(self) -> tuple[float, ...]:
        return (*super().coefficients, self.c3, self.c4, self.c5)

    @override
    def with_coefficients(self, values: Sequence[float]) -> Self:
        *dense, c3, c4, c5 = values
        return replace(super().with_coefficients(dense), c3=c3, c4=c4, c5=c5)

    def at(self, layers: SparseLayers) -> Self:
        """The model for other layers."""
        return replace(self, layers=layers)


def cost_of_fields(fields: Mapping[str, Any]) -> QuadraticCost:
    """The cost model of which these are the fields, as `dataclasses.asdict` gives them."""
    if "layers" not in fields:
        return QuadraticCost(**fields)
    return SparseCost(**{**fields, "layers": SparseLayers(**fields["layers"])})


def assumed_terms(quadratic: QuadraticCost) -> SparseTerms:
    """Terms of sparse layers where none were measured, from the cost of dense attention.

    Their ratios are those of an H200.
    """
    c2 = quadratic.c2
    return SparseTerms(c3=_PAIR * c2, c4=_TOKEN * c2, c5=_SELECTION * c2)


def with_layers(costs: CostFile, layers: SparseLayers) -> CostFile:
    """A file whose quadratic model predicts a model with these layers; the same without one."""
    if costs.quadratic is None:
        return costs
    if isinstance(costs.quadratic, SparseCost):
        return replace(costs, quadratic=costs.quadratic.at(layers))
    terms = costs.sparse or assumed_terms(costs.quadratic)
    model = SparseCost(**vars(costs.quadratic), **asdict(terms), layers=layers)
    return replace(costs, quadratic=model)


def without_layers(model: QuadraticCost) -> tuple[QuadraticCost, SparseTerms | None]:
    """The parts of a cost file that make a model; no terms of sparse layers if all are 0."""
    dense, sparse = model.coefficients[:4], model.coefficients[4:]
    quadratic = QuadraticCost(0.0, 0.0, 0.0).with_coefficients(dense)
    return quadratic, SparseTerms(*sparse) if any(sparse) else None
