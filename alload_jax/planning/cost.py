"""What micro-batches and steps cost: AdaptiveLoad's B·S^p, or linear and quadratic terms.

Both are for layers with dense attention; `SparseCost` adds what layers with sparse attention take.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from typing_extensions import override

from alload_jax.errors import InputError
from alload_jax.files import read_json, replacing
from alload_jax.planning.architecture import DEFAULT_FAMILY
from alload_jax.planning.epoch import EpochPlan

FORMAT = "alload-cost-model-1"

PROGRAM_SECONDS, START_SECONDS = 8.0, 30.0
"""Seconds to compile a program, and other seconds from the start of a run to the end of its first
step, where no calibration or run has measured them."""
_COMPILE_SECONDS = 600
"""Seconds that compiling may take, unless `planning.max_programs` says otherwise."""

_RENAMED = {"anchor_bytes": "bytes_per_split_token"}
"""Names of fields in older files → their present names."""


class CostModel(Protocol):
    """Predicts the cost of micro-batches: a fixed_cost, their sequences, and padding tokens."""

    @property
    def fixed_cost(self) -> float:
        """Cost of a micro-batch that does not depend on its content."""
        return 0.0

    @property
    def slot_cost(self) -> float:
        """Cost of a slot for a sequence in a packed row, which is computed even if it is empty."""
        return 0.0

    def sequence_cost(self, seq_len: np.ndarray) -> np.ndarray:
        """Cost of each sequence within a micro-batch: [N] integers → [N] float64."""
        ...

    def padding_cost(self, tokens: np.ndarray) -> np.ndarray:
        """Cost of tokens of a packed row that belong to no sequence: [N] integers → [N]."""
        ...


def in_seconds(model: CostModel) -> bool:
    """Whether a model's costs are seconds; those of B·S^p with a = 1 have no unit."""
    return not (isinstance(model, PowerCost) and model.a == 1.0)


def marginal_cost(model: CostModel, seq_len: np.ndarray) -> np.ndarray:
    """Cost of sequences beyond that of an empty slot and as many padding tokens, at least 0.

    Args:
      model: the cost model.
      seq_len: [N] integers.

    Returns:
      [N] float64.
    """
    empty = model.slot_cost + model.padding_cost(seq_len)
    return np.maximum(model.sequence_cost(seq_len) - empty, 0.0)


def empty_row_cost(model: CostModel, tokens: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Cost of packed rows of these tokens and slots without any sample: [W] → [W] float64."""
    slots = np.asarray(slots, np.float64)
    return model.fixed_cost + model.slot_cost * slots + model.padding_cost(tokens)


def bucketed_cost(model: CostModel, rows: np.ndarray, seq_len: np.ndarray) -> np.ndarray:
    """Cost of micro-batches of `rows` ([W]) sequences of `seq_len` ([W]) tokens each: [W]."""
    return model.fixed_cost + np.asarray(rows, np.float64) * model.sequence_cost(seq_len)


@dataclass(frozen=True)
class PowerCost(CostModel):
    """a·B·S^p; with a = 1 it is AdaptiveLoad's measure (arXiv 2605.17923) and has no unit.

    Padding tokens count as sequences of length 1.
    """

    p: float = 2.0
    a: float = 1.0

    @override
    def sequence_cost(self, seq_len: np.ndarray) -> np.ndarray:
        return self.a * np.asarray(seq_len, np.float64) ** self.p

    @override
    def padding_cost(self, tokens: np.ndarray) -> np.ndarray:
        return self.a * np.asarray(tokens, np.float64)


@dataclass(frozen=True)
class QuadraticCost(CostModel):
    """c0 + c_sequence·B + c1·ΣS + c2·ΣS² seconds: fixed, conditions, per-token work, attention.

    Attributes:
      c0: seconds per micro-batch.
      c1: seconds per token.
      c2: seconds per pair of tokens of a sequence.
      c_sequence: seconds per sequence, for keys and values of its condition.
    """

    c0: float
    c1: float
    c2: float
    c_sequence: float = 0.0

    @property
    @override
    def fixed_cost(self) -> float:
        return self.c0

    @property
    @override
    def slot_cost(self) -> float:
        return self.c_sequence

    @override
    def sequence_cost(self, seq_len: np.ndarray) -> np.ndarray:
        seq_len = np.asarray(seq_len, np.float64)
        return self.c_sequence + self.c1 * seq_len + self.c2 * seq_len**2

    @override
    def padding_cost(self, tokens: np.ndarray) -> np.ndarray:
        return self.c1 * np.asarray(tokens, np.float64)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """(c0, c_sequence, c1, c2, …): the terms of attention from the fourth on."""
        return (self.c0, self.c_sequence, self.c1, self.c2)

    def with_coefficients(self, values: Sequence[float]) -> Self:
        """The model with others, in the order of `coefficients`."""
        c0, c_sequence, c1, c2 = values
        return replace(self, c0=c0, c_sequence=c_sequence, c1=c1, c2=c2)


@dataclass(frozen=True)
class SparseTerms:
    """Seconds that the attention of sparse layers takes, if all layers are sparse.

    Attributes:
      c3: seconds per pair of tokens that is attended to.
      c4: seconds per token, for the order in tiles and the pooled blocks.
      c5: seconds per pair of tokens, attended to or not, for the choice of the blocks.
    """

    c3: float
    c4: float = 0.0
    c5: float = 0.0


@dataclass(frozen=True)
class MemoryModel:
    """bytes = base + per_token·ΣS + per_sequence·B of a micro-batch, on one device.

    Attributes:
      base: bytes that do not depend on the batch: weights, optimizer state.
      per_token: bytes per token.
      per_sequence: bytes per sequence, for its condition.
    """

    base: float
    per_token: float
    per_sequence: float = 0.0

    def bytes_of(self, tokens: float, sequences: float = 0.0) -> float:
        """Peak bytes in use during a step on a micro-batch of these tokens and sequences."""
        return self.base + self.per_token * tokens + self.per_sequence * sequences

    def max_tokens(self, budget: float, margin: float = 0.05, shortest: int | None = None) -> int:
        """M_mem: maximum tokens of a micro-batch in `budget` bytes.

        Args:
          budget: bytes of the device.
          margin: share of the budget that stays free.
          shortest: tokens of the shortest sequence: M_mem tokens in such sequences must fit. None
            ignores `per_sequence`.

        Raises:
          InputError: not even one token fits.
        """
        if not (math.isfinite(budget) and budget > 0):
            raise InputError(f"device memory is {budget / 1e9:g} GB; it must be above 0")
        per_token = self.per_token + (self.per_sequence / shortest if shortest else 0.0)
        tokens = int((budget * (1 - margin) - self.base) // per_token)
        if tokens < 1:
            raise InputError(
                f"the model takes {self.base / 1e9:.1f} GB before any token, and the device has "
                f"{budget / 1e9:.1f} GB with a margin of {margin:.0%}; shard it over more devices "
                "(--shards of `alload plan`)"
            )
        return tokens


def sent_share(ranks: int, exchanged: int) -> float:
    """Bytes that a rank sends over those of its split tokens' queries, keys, values and outputs.

    In an all-to-all of n ranks a rank keeps 1/n of its bytes and sends the rest. If n is less than
    the c ranks of its group, each also gets keys and values, half of the arrays, from c/n − 1
    others.

    Args:
      ranks: c.
      exchanged: n, ranks that exchange heads.
    """
    return 1 - 1 / exchanged + (ranks / exchanged - 1) / 2


@dataclass(frozen=True)
class CostFile:
    """The content of a cost-model JSON; missing fields are None.

    Attributes:
      power: the power law; `dual_constraint` plans with its `p`.
      quadratic: preferred over `power` to predict costs.
      sparse: terms of layers with sparse attention, which `quadratic` lacks.
      memory: the memory model.
      m_mem: maximum tokens of a micro-batch on one rank.
      m_comp: maximum B·S^p of a micro-batch.
      bytes_per_split_token: bytes that a token of a split sequence sends between devices per step.
      program_seconds: seconds to compile the program of a shape of micro-batches.
      start_seconds: other seconds from the start of a run to the end of its first step.
      packed_ratio: seconds of packed rows over those of batches of the same samples, where packed
        rows are worth it only if this was measured: before Hopper.
      model: fields of the model's architecture.
      device: name of the device, such as `NVIDIA H200`.
      origin: `measured` by `alload calibrate`, or `analytic`.
      details: points, residuals, goodness of fit and versions; only for readers.
    """

    power: PowerCost | None = None
    quadratic: QuadraticCost | None = None
    sparse: SparseTerms | None = None
    memory: MemoryModel | None = None
    m_mem: int | None = None
    m_comp: float | None = None
    bytes_per_split_token: float | None = None
    program_seconds: float | None = None
    start_seconds: float | None = None
    packed_ratio: float | None = None
    model: dict[str, Any] | None = None
    device: str | None = None
    origin: str | None = None
    details: dict[str, Any] | None = None

    def most_programs(self) -> int:
        """Programs that compile in `_COMPILE_SECONDS`; at most 64."""
        return int(min(64, max(1, _COMPILE_SECONDS // max(self.seconds_of_program, 1e-3))))

    @property
    def seconds_of_program(self) -> float:
        """Seconds to compile a program: measured, or a stated default."""
        return PROGRAM_SECONDS if self.program_seconds is None else self.program_seconds

    def first_step_seconds(self, programs: int) -> float:
        """Predicted seconds from the start of a run to the end of its first step."""
        start = START_SECONDS if self.start_seconds is None else self.start_seconds
        return start + programs * self.seconds_of_program

    def sequence_tokens(self) -> float:
        """Tokens that take as much memory as the condition of a sequence; 0 where unknown."""
        return self.memory.per_sequence / self.memory.per_token if self.memory else 0.0

    def unlike(self, model: Mapping[str, object], device: str | None = None) -> str:
        """The differences between the cost model's model and device and these; "" if none.

        Args:
          model: fields of the architecture in use; those that the file knows are compared.
          device: as JAX names it; None where it is not known.
        """
        implied = {"family": DEFAULT_FAMILY, "matmul": "dtype"}  # of files that lack them
        theirs, ours = ({**implied, **fields} for fields in (self.model or model, model))
        differing = [k for k in theirs if k in ours and theirs[k] != ours[k]]
        found = [f"{k} {theirs[k]} (here {ours[k]})" for k in differing]
        if device and self.device and self.device != device:
            found.append(f"device {self.device} (here {device})")
        return ", ".join(found)


_PARTS: dict[str, type[Any]] = {
    "power": PowerCost,
    "quadratic": QuadraticCost,
    "sparse": SparseTerms,
    "memory": MemoryModel,
}
"""Fields of `CostFile` that are objects of numbers."""


def write_cost_file(path: str | Path, costs: CostFile) -> None:
    """Writes the JSON that `read_cost_file` reads."""
    content = {"format": FORMAT} | {k: v for k, v in asdict(costs).items() if v is not None}
    with replacing(Path(path)) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2) + "\n")


def read_cost_file(path: str | Path) -> CostFile:
    """Reads a cost-model JSON.

    Raises:
      InputError: the file is missing, not JSON, or not a cost model.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such cost model; give the path of its JSON")
    content = read_json(path, "write the cost model again")
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise InputError(f"{path}: not a cost model; its format field must be {FORMAT!r}")
    content = {_RENAMED.get(name, name): value for name, value in content.items()}
    for name, kind in (("model", dict), ("details", dict), ("device", str), ("origin", str)):
        if not isinstance(content.get(name, kind()), kind):
            raise InputError(f"{path}: {name} is {content[name]!r}; write the cost model again")
    _check_numbers(content, path)
    try:
        fields = {k: _PARTS[k](**v) if k in _PARTS else v for k, v in content.items()}
        if "m_mem" in fields:
            fields["m_mem"] = int(fields["m_mem"])
        return CostFile(**fields)
    except TypeError as error:
        raise InputError(
            f"{path}: {error}; the fields are {', '.join(f.name for f in fields_of(CostFile))}"
        ) from error


def _check_numbers(content: Mapping[str, Any], path: Path) -> None:
    """Refuses values that are not finite numbers in their range."""
    above_zero = {"p", "m_mem", "m_comp", "per_token", "packed_ratio"}
    seconds = ("program_seconds", "start_seconds")
    single = ("m_mem", "m_comp", "bytes_per_split_token", "packed_ratio", *seconds)
    flat = {name: content[name] for name in single if name in content}
    for name in _PARTS:
        part = content.get(name, {})
        if not isinstance(part, dict):
            raise InputError(f"{path}: {name} is {part!r}; it must be an object of numbers")
        flat |= part
    for name, value in flat.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if (
            not number
            or not math.isfinite(value)
            or value < 0
            or (name in above_zero and not value)
        ):
            least = "above 0" if name in above_zero else "0 or more"
            raise InputError(f"{path}: {name} is {value!r}; it must be a number, {least}")
        if name == "m_mem" and value != int(value):
            raise InputError(f"{path}: m_mem is {value}; it must be a whole number of tokens")


def micro_batch_costs(plan: EpochPlan, model: CostModel) -> np.ndarray:
    """Predicted cost of every micro-batch, with the communication of split samples: [W] float64."""
    costs = computed_costs(plan, model)
    if plan.packing is None:
        return costs
    return costs + plan.packing.seconds_per_split_token * plan.packing.split_tokens


def computed_costs(plan: EpochPlan, model: CostModel) -> np.ndarray:
    """Predicted cost of what every micro-batch computes: [W] float64.

    All tokens and slots of a packed row are computed, so its cost is that of an empty row plus the
    marginal cost of every sample. The marginal cost of a split sample is shared equally by the
    ranks of its group, which exchange heads for tokens.
    """
    if plan.packing is None:
        return bucketed_cost(model, plan.rows, plan.padded_len)
    seq_len = plan.seq_len[plan.sample]
    marginal = marginal_cost(model, seq_len)
    owner = plan.micro_batch_of_part()
    is_split, context = plan.packing.is_split, plan.packing.context
    share = marginal * plan.packing.tokens / np.maximum(1, seq_len)
    whole = np.bincount(owner, weights=np.where(is_split, 0, marginal), minlength=len(plan.rows))
    split = np.bincount(owner, weights=np.where(is_split, share, 0), minlength=len(plan.rows))
    by_group = split.reshape(-1, context).mean(axis=1).repeat(context)
    return empty_row_cost(model, plan.padded_len, plan.slots()) + whole + by_group


SQUARES = QuadraticCost(0.0, 0.0, 1.0)
"""The model by which a sequence costs S²."""


def micro_batch_terms(plan: EpochPlan, model: QuadraticCost) -> np.ndarray:
    """What each micro-batch has of every term of a cost model.

    Args:
      plan: an epoch.
      model: the cost model; its coefficients are not read.

    Returns:
      [W, C] float64: micro-batches (1), sequences or slots for them, tokens with padding, and for
      each term of attention the sum over the sequences, such as that of S² (that of a split sample
      is shared equally by the ranks of its group). The product with the model's `coefficients` is
      `computed_costs`.
    """
    units = np.eye(len(model.coefficients))[3:].tolist()
    attention = [computed_costs(plan, model.with_coefficients(unit)) for unit in units]
    sequences = plan.rows if plan.packing is None else plan.slots()
    columns = [np.ones(len(plan.rows)), sequences, plan.rows * plan.padded_len, *attention]
    return np.stack([np.asarray(column, np.float64) for column in columns], axis=1)


def rank_costs(plan: EpochPlan, cost: np.ndarray) -> np.ndarray:
    """Sums of micro-batch costs by step and rank: [W] → [steps, ranks]."""
    place = plan.step * plan.ranks + plan.rank
    total = np.bincount(place, weights=cost, minlength=plan.steps * plan.ranks)
    return total.reshape(plan.steps, plan.ranks)


def largest_indivisible_cost(plan: EpochPlan, model: CostModel) -> np.ndarray:
    """[steps] cost of each step's most expensive sample, alone in a micro-batch.

    Split samples do not count because several ranks share them.
    """
    largest = np.zeros(plan.steps)
    if plan.packing is None:
        alone = model.fixed_cost + model.sequence_cost(plan.padded_len)
        np.maximum.at(largest, plan.step, alone)
        return largest
    row = empty_row_cost(model, plan.padded_len, plan.slots())
    marginal = marginal_cost(model, plan.seq_len[plan.sample])
    marginal = np.where(plan.packing.is_split, 0, marginal)
    owner = plan.micro_batch_of_part()
    np.maximum.at(largest, plan.step[owner], row[owner] + marginal)
    return largest


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


_BANDS = 8


@dataclass(frozen=True)
class BandedCost(QuadraticCost):
    """A quadratic cost whose c2 depends on the length: it is for the shortest sequences.

    Attributes:
      edges: tokens from which on each further band of lengths begins, ascending.
      squares: c2 of these bands.
    """

    edges: tuple[int, ...] = ()
    squares: tuple[float, ...] = ()

    @classmethod
    def of(cls, model: QuadraticCost, seq_len: np.ndarray) -> Self:
        """The same costs, in at most 8 bands that have about equal shares of all pairs of tokens.

        Args:
          model: the costs.
          seq_len: [N] integers, of the data set.
        """
        lengths = np.sort(np.asarray(seq_len, np.int64))
        upto = np.cumsum(lengths.astype(np.float64) ** 2)
        at = np.searchsorted(upto, upto[-1] * np.arange(1, _BANDS) / _BANDS)
        edges = np.setdiff1d(lengths[at], lengths[:1]).tolist()
        return cls(**vars(model), edges=tuple(edges), squares=(model.c2,) * len(edges))

    @override
    def sequence_cost(self, seq_len: np.ndarray) -> np.ndarray:
        band = np.searchsorted(self.edges, seq_len, side="right")
        c2, seq_len = np.asarray([self.c2, *self.squares])[band], np.asarray(seq_len, np.float64)
        return self.c_sequence + self.c1 * seq_len + c2 * seq_len**2

    @property
    @override
    def coefficients(self) -> tuple[float, ...]:
        return (*super().coefficients, *self.squares)

    @override
    def with_coefficients(self, values: Sequence[float]) -> Self:
        return replace(super().with_coefficients(values[:4]), squares=tuple(values[4:]))


def cost_of_fields(fields: Mapping[str, Any]) -> QuadraticCost:
    """The cost model of which these are the fields, as `dataclasses.asdict` gives them."""
    if "edges" in fields:
        pairs = {name: tuple(fields[name]) for name in ("edges", "squares")}
        return BandedCost(**{**fields, **pairs})
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
