"""MLflow (extra `mlflow`)."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from alload_jax.training.trackers.service import (
    PICTURES,
    InBackground,
    TrackedRuns,
    require_package,
)
from alload_jax.training.trackers.tracker import Tracker, TrackerContext

_PARAMS = 100
"""The most parameters in one call of MLflow."""
_LONGEST = 500
"""The longest value of a parameter that every version of MLflow stores, in characters."""


@dataclass(frozen=True)
class MlflowConfig:
    """Tracks the run with MLflow.

    Attributes:
      name: `mlflow`.
      tracking_uri: server or database of MLflow; null for the environment's MLFLOW_TRACKING_URI, or
        MLflow's default.
      experiment: name of the experiment.
      run_name: name of the run; null for the run folder's name.
    """

    name: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = None
    experiment: str = "alload"
    run_name: str | None = None

    def check(self) -> None:
        """See `TrackerConfig.check`."""
        require_package("mlflow", "mlflow", "pip install -c constraints.txt -e '.[mlflow]'")

    def make(self, context: TrackerContext) -> Tracker:
        """See `TrackerConfig.make`."""
        return InBackground("mlflow", Mlflow(self, context))


class Mlflow:
    """A `Service` of MLflow.

    MLflow keeps every point. Steps that a resumed run computes again are therefore left out where
    they have been logged; their losses are the same.
    """

    def __init__(self, config: MlflowConfig, context: TrackerContext):
        self._config, self._context = config, context
        self._runs = TrackedRuns(context.folder, context.resumed_at)
        self._client: Any = None
        self._run = ""
        self._last: int | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Service.log`."""
        from mlflow.entities import Metric

        client, now = self._opened(), int(time.time() * 1000)
        if self._last is None:
            known = client.get_metric_history(self._run, next(iter(values)))
            self._last = max((metric.step for metric in known), default=0)
        if step > self._last:
            metrics = [Metric(name, float(value), now, step) for name, value in values.items()]
            client.log_batch(self._run, metrics=metrics)
            self._last = step

    def show(self, step: int, name: str, path: Path) -> None:
        """See `Service.show`: pictures as images by step, clips as artifacts."""
        client = self._opened()
        if path.suffix.lower() in PICTURES:
            with Image.open(path) as picture:
                client.log_image(self._run, picture, key=name.replace("/", "."), step=step)
        else:
            client.log_artifact(self._run, str(path), f"samples/{step:08d}")

    def close(self) -> None:
        """See `Service.close`."""
        if self._client is not None:
            self._client.set_terminated(self._run)
            self._client = None

    def _opened(self) -> Any:
        if self._client is None:
            from mlflow import MlflowClient

            client = MlflowClient(self._config.tracking_uri)
            place = f"mlflow:{self._config.tracking_uri or ''}:{self._config.experiment}"
            known = self._runs.known(place)
            if known is None:
                self._run = self._create(client)
                self._runs.keep(place, self._run)
            else:
                self._run = known
                client.update_run(known, status="RUNNING")
            self._client = client
        return self._client

    def _create(self, client: Any) -> str:
        from mlflow.entities import Param

        found = client.get_experiment_by_name(self._config.experiment)
        experiment = found.experiment_id if found else None
        experiment = experiment or client.create_experiment(self._config.experiment)
        name = self._config.run_name or self._context.folder.absolute().name
        run = str(client.create_run(experiment, run_name=name).info.run_id)
        values = self._context.config.items()
        params = [Param(key, str(value)[:_LONGEST]) for key, value in values]
        for first in range(0, len(params), _PARAMS):
            client.log_batch(run, params=params[first : first + _PARAMS])
        return run
