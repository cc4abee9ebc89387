"""Records what a family says of its layers, such as the sparsity of their attention."""

import json
from pathlib import Path

import numpy as np

from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import family_of
from alload_jax.training.callbacks.callback import Callback, Run
from alload_jax.training.run_files import open_own, read_metrics, write_atomically

LAYER_LOG = "layers.jsonl"
"""Name of the file in a run's folder: a line for each recorded step."""
_EVERY = 10


class LayerLog(Callback):
    """Writes a line every ten steps; nothing for families that have nothing to record."""

    def __init__(self, folder: Path, model: ModelConfig, resumed_at: int):
        """Goes on behind the lines of an earlier start.

        Args:
          folder: of the run.
          model: its config.
          resumed_at: number of steps that are done; lines of later steps are dropped.

        Raises:
          InputError: a line of the file is not a JSON object.
        """
        self._path, self._model = folder / LAYER_LOG, model
        kept = [row for row in read_metrics(self._path) if row["step"] <= resumed_at]
        if self._path.exists():
            text = "".join(json.dumps(row) + "\n" for row in kept)
            write_atomically(self._path, text)

    def due(self, run: Run) -> bool:
        """See `Callback.due`."""
        return run.done % _EVERY == 0

    def act(self, run: Run) -> None:
        """See `Callback.act`."""
        variables = run.state.variables
        found = family_of(self._model).layer_records(self._model, variables)
        if not found:
            return
        values = {name: np.asarray(value).tolist() for name, value in found.items()}
        with open_own(self._path) as file:
            file.write(json.dumps({"step": run.done} | values) + "\n")

    def on_finish(self, run: Run) -> None:
        """See `Callback.on_finish`."""
        self.act(run)
