"""Evaluators: metrics of generated samples, selected by name."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from jaxtyping import PyTree

from alload_jax.data.manifest import Manifest
from alload_jax.models.common.config import ModelConfig
from alload_jax.registry import Registry
from alload_jax.sampling.config import Draw


class Drawing(NamedTuple):
    """What an evaluator needs to generate samples.

    Attributes:
      draw: function that generates samples.
      values: values of the model.
      condition_tokens: number of condition tokens per sample.
      seed: seed of the initial noise.
      origin: origin of the training data.
    """

    draw: Draw
    values: PyTree
    condition_tokens: int
    seed: int
    origin: Mapping[str, Any]


class Evaluator(Protocol):
    """A frozen dataclass whose fields are its config; `name` is its name in the config."""

    def check(self, model: ModelConfig, manifest: Manifest) -> None:
        """Checks before training that the model can be evaluated.

        Raises:
          InputError: the evaluator does not support the model or the data.
        """
        ...

    def evaluate(self, drawing: Drawing) -> dict[str, float]:
        """Returns metrics by name for the run's summary; all processes call it."""
        ...


EVALUATORS: Registry[type[Evaluator]] = Registry(
    "evaluator",
    {
        "digit_accuracy": "alload_jax.sampling.evaluators.digits:DigitAccuracy",
        "digit_motion": "alload_jax.sampling.evaluators.digits:DigitMotion",
    },
)
"""Classes of evaluators, each an `Evaluator`."""
