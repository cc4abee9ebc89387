"""Evaluators: figures of what a model draws, found by name."""

from typing import Any, NamedTuple, Protocol

from alload_jax.data.manifest import Manifest
from alload_jax.models.common.config import ModelConfig
from alload_jax.registry import Registry
from alload_jax.sampling.samples import Draw


class Drawing(NamedTuple):
    """What an evaluator draws with.

    Attributes:
      draw: draws samples.
      values: the model's values.
      condition_tokens: of a sample.
      seed: of the starting noise.
    """

    draw: Draw
    values: Any
    condition_tokens: int
    seed: int


class Evaluator(Protocol):
    """A frozen dataclass whose fields are its config; `name` is its name in the config."""

    def check(self, model: ModelConfig, manifest: Manifest) -> None:
        """Checks before training that the model can be evaluated.

        Raises:
          InputError: it cannot.
        """
        ...

    def evaluate(self, drawing: Drawing) -> dict[str, float]:
        """Figures by name; they stand in the run's summary. All processes call it alike."""
        ...


EVALUATORS: Registry[type[Any]] = Registry(
    "evaluator", {"digit_accuracy": "alload_jax.sampling.evaluators.digit_accuracy:DigitAccuracy"}
)
"""Classes of evaluators, each an `Evaluator`."""
