"""Evaluates samples of the trained model."""

from collections.abc import Sequence

from alload_jax.sampling.evaluators.evaluator import Drawing, Evaluator
from alload_jax.sampling.samples import SampleWriter
from alload_jax.training.callbacks.callback import Callback, Run


class Evaluation(Callback):
    """Runs the evaluators at the end.

    Attributes:
      figures: metrics of the evaluators by name; empty before the end.
    """

    def __init__(self, evaluators: Sequence[Evaluator], writer: SampleWriter, seed: int):
        """Evaluators generate samples with `writer.draw` from the initial noise of `seed`."""
        self.figures: dict[str, float] = {}
        self._evaluators, self._writer, self._seed = evaluators, writer, seed

    def on_finish(self, run: Run) -> None:
        """See `Callback.on_finish`."""
        values = run.state.averaged_weights.merged()
        writer = self._writer
        tokens, origin = writer.condition_tokens, writer.origin
        drawing = Drawing(writer.draw, values, tokens, self._seed, origin)
        for evaluator in self._evaluators:
            self.figures |= evaluator.evaluate(drawing)
