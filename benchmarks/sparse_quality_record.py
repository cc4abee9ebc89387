"""What benchmarks/sparse_quality.py records: its JSON, and the pictures of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from sparse_quality_report import draw, draw_samples, summary, table
from sparse_quality_runs import Result
from sparse_quality_switch import Choice

from alload_jax.config import Config


class Record:
    """What a study found so far.

    Attributes:
      content: of the JSON.
    """

    def __init__(self, content: dict[str, Any], out: Path, pictures: Path, drawn: Path):
        """Takes what is known before the first run, and where JSON, pictures and clips belong."""
        self.content, self._drawn = content, drawn
        self._out, self._pictures = out, pictures

    def write(self) -> None:
        """Writes the JSON."""
        self.content["summary"] = summary(self.content)
        self._out.parent.mkdir(parents=True, exist_ok=True)
        partial = self._out.with_suffix(".partial")
        lines = (f" {json.dumps(key)}: {text(value)}" for key, value in self.content.items())
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        partial.replace(self._out)

    def draw(self) -> None:
        """Draws the pictures and prints the table."""
        draw(self.content, self._pictures)
        draw_samples(self._drawn, self.content["draws"], self._pictures)
        print(table(self.content))

    def add_drawn(self, variant: str, clips: dict[str, np.ndarray]) -> None:
        """Adds clips that a variant drew, which the next pictures show."""
        before = self._drawn.exists() and self.content["draws"]
        arrays = dict(np.load(self._drawn)) if before else {}
        np.savez(self._drawn, **(arrays | clips))
        self.content["draws"].append(variant)


def describe_first(seed: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the JSON says of training on short clips, from the lines of its metrics."""
    losses = [row["loss"] for row in rows]
    return {
        "seed": seed,
        "loss": [rounded(np.mean(part)) for part in np.array_split(losses, min(40, len(losses)))],
        "seconds": round(sum(row["step_seconds"] for row in rows), 3),
    }


def describe_run(result: Result, config: Config) -> dict[str, Any]:
    """What the JSON says of a run."""
    rows = result.rows
    return {
        "loss": rounded([row["loss"] for row in rows]),
        "predictor_loss": rounded(
            [row.get("attention_predictor_loss", 0.0) for row in rows[::10]], 4
        ),
        "step_seconds": _step_seconds(rows, config),
        "held_out": [
            {
                "step": step,
                "seconds": round(at, 3),
                "levels": rounded(losses.mean(axis=1)),
                "mean": float(losses.mean()),
            }
            for step, at, losses in result.held_out
        ],
        "last_by_clip": [rounded(each) for each in result.held_out[-1][2]],
    } | _describe_layers(result, config)


def _step_seconds(rows: list[dict[str, Any]], config: Config) -> dict[str, float]:
    """Median seconds of dense steps and of the last fifth, and those of all steps together."""
    seconds = np.array([row["step_seconds"] for row in rows])
    sparse: Any = config.model.sparse_attention
    return {
        "dense": round(float(np.median(seconds[1 : max(2, sparse.dense_steps)])), 5),
        "last": round(float(np.median(seconds[-max(1, len(seconds) // 5) :])), 5),
        "total": round(float(seconds.sum()), 3),
    }


def _describe_layers(result: Result, config: Config) -> dict[str, Any]:
    """Means over the heads of each layer by step, its switches, and each head at the end."""
    lines = (Path(config.run.folder) / "layers.jsonl").read_text().splitlines()
    layers = [json.loads(line) for line in lines]
    mean = {
        name: [rounded(np.mean(row[name], axis=-1), 4) for row in layers]
        for name in ("sparsity", "recall", "density")
    }
    return {
        "layers": {"step": [row["step"] for row in layers]} | mean,
        "sparse_from": switched_at(result.choices),
        "last_layers": {name: [rounded(each, 4) for each in layers[-1][name]] for name in mean},
    }


def switched_at(choices: list[Choice]) -> list[list[int]]:
    """The steps after which each layer became sparse, or dense again."""
    sparse = np.stack([np.asarray(each.sparse) for each in choices])
    before = np.vstack([np.zeros_like(sparse[:1]), sparse[:-1]])
    return [(np.flatnonzero(column) + 1).tolist() for column in (sparse != before).T]


def rounded(values: Any, digits: int = 6) -> Any:
    """The values as nested lists of rounded numbers."""
    return np.round(np.asarray(values, np.float64), digits).tolist()


def text(value: Any) -> str:
    """JSON with a line for each entry of a list of objects."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]"
    return json.dumps(value)
