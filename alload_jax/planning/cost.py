"""What a micro-batch costs: the paper's power law and a sum of linear and quadratic terms."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from alload_jax.errors import InputError

FORMAT = "alload-cost-model-1"


class CostModel(Protocol):
    """Predicts the cost of micro-batches."""

    def cost(self, rows: np.ndarray, seq_len: np.ndarray) -> np.ndarray:
        """Cost of micro-batches of `rows` sequences of `seq_len` tokens each.

        Args:
          rows: [W] integers.
          seq_len: [W] integers.

        Returns:
          [W] float64.
        """
        ...


@dataclass(frozen=True)
class PowerCost:
    """a·B·S^p, as in AdaptiveLoad (arXiv 2605.17923). With a = 1 it has no unit."""

    p: float = 2.0
    a: float = 1.0

    def cost(self, rows: np.ndarray, seq_len: np.ndarray) -> np.ndarray:
        """See `CostModel.cost`."""
        return self.a * np.asarray(rows, np.float64) * np.asarray(seq_len, np.float64) ** self.p


@dataclass(frozen=True)
class QuadraticCost:
    """c0 + c1·ΣS + c2·ΣS² seconds: launch, per-token work, attention."""

    c0: float
    c1: float
    c2: float

    def cost(self, rows: np.ndarray, seq_len: np.ndarray) -> np.ndarray:
        """See `CostModel.cost`."""
        rows = np.asarray(rows, np.float64)
        seq_len = np.asarray(seq_len, np.float64)
        return self.c0 + self.c1 * rows * seq_len + self.c2 * rows * seq_len**2


@dataclass(frozen=True)
class CostFile:
    """What a cost-model JSON says; whatever it leaves out is None.

    Attributes:
      power: the power law; its `p` is what `dual_constraint` plans with.
      quadratic: preferred over `power` for predicted costs.
      m_mem: tokens a rank may hold in one micro-batch.
      m_comp: most B·S^p of one micro-batch.
    """

    power: PowerCost | None = None
    quadratic: QuadraticCost | None = None
    m_mem: int | None = None
    m_comp: float | None = None


def write_cost_file(path: str | Path, costs: CostFile) -> None:
    """Writes the JSON that `read_cost_file` reads."""
    content = {"format": FORMAT} | {k: v for k, v in asdict(costs).items() if v is not None}
    Path(path).write_text(json.dumps(content, indent=2) + "\n")


def read_cost_file(path: str | Path) -> CostFile:
    """Reads a cost-model JSON.

    Raises:
      InputError: the file is missing, not JSON, or not a cost model.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: no such cost model; give the path of its JSON") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); write the cost model anew") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise InputError(f"{path}: not a cost model; its format field must be {FORMAT!r}")
    _check_numbers(content, path)
    try:
        parts = {"power": PowerCost, "quadratic": QuadraticCost}
        fields = {k: parts[k](**v) if k in parts else v for k, v in content.items()}
        if "m_mem" in fields:
            fields["m_mem"] = int(fields["m_mem"])
        return CostFile(**fields)
    except TypeError as error:
        raise InputError(
            f"{path}: {error}; the fields are power, quadratic, m_mem, m_comp"
        ) from error


def _check_numbers(content: dict[str, Any], path: Path) -> None:
    """Refuses values that are not finite numbers in their range."""
    above_zero = {"p", "m_mem", "m_comp"}
    flat = {name: content[name] for name in ("m_mem", "m_comp") if name in content}
    for part in content.values():
        flat |= part if isinstance(part, dict) else {}
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
