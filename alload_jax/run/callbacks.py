"""The callbacks of a run, in the order in which they are called."""

from pathlib import Path
from typing import Any, NamedTuple

from alload_jax.config import Config, values_of
from alload_jax.distributed.cluster import Cluster
from alload_jax.run.work import Work
from alload_jax.training.best import BestCheckpoints
from alload_jax.training.callbacks.callback import Callback, CallbackContext
from alload_jax.training.callbacks.checkpointing import Checkpointing
from alload_jax.training.callbacks.drawing import Drawing
from alload_jax.training.callbacks.evaluation import Evaluation
from alload_jax.training.callbacks.layer_log import LayerLog
from alload_jax.training.callbacks.telemetry import Telemetry
from alload_jax.training.callbacks.validating import Validating
from alload_jax.training.callbacks.watchdog import Watchdog
from alload_jax.training.checkpoint import Checkpoints
from alload_jax.training.divergence import MOST_FOLLOWED, Divergence, DivergenceGuard
from alload_jax.training.optimizer import learning_rate_schedule
from alload_jax.training.progress import ProgressBar
from alload_jax.training.run_files import BadRecords, MetricsLog
from alload_jax.training.signals import StopRequest
from alload_jax.training.trackers.tracker import TrackerContext, Trackers
from alload_jax.training.validation.validator import Validator


class Callbacks(NamedTuple):
    """The callbacks of a run.

    Attributes:
      all: in the order in which they are called.
      log: the metrics of the steps.
      checkpointing: saves the state.
      evaluation: measures samples at the end.
      validating: measures the loss on held-out samples; None without any.
    """

    all: list[Callback]
    log: MetricsLog
    checkpointing: Checkpointing
    evaluation: Evaluation
    validating: Validating | None

    def figures(self) -> dict[str, Any]:
        """What the evaluators and the validation have measured, for the summary."""
        return self.evaluation.figures | (self.validating.figures() if self.validating else {})


def make_callbacks(
    config: Config,
    cluster: Cluster,
    work: Work,
    total: int,
    start: int,
    stop: StopRequest,
    watchdog: Watchdog,
    checkpoints: Checkpoints,
    validator: Validator | None,
    nothing: float | None,
) -> Callbacks:
    """Builds the callbacks of a run of `total` steps that begins at step `start`.

    `nothing` is the loss of a model that predicts nothing; None if it is not known.
    """
    folder, writer = Path(config.run.folder), work.writer
    log, bar = MetricsLog(folder, resumed_at=start), ProgressBar("training", total, start)
    tracker = Trackers(config.trackers, TrackerContext(folder, start, values_of(config)))
    evaluation = Evaluation(config.evaluators, writer, config.sampling.seed)
    checkpointing = Checkpointing(checkpoints, config.checkpoint, work.run_plan)
    validating = None
    if validator:
        best = BestCheckpoints(folder, config.checkpoint.keep_best, checkpoints, cluster)
        when, save = config.validation.every, checkpointing.save
        validating = Validating(validator, when, log, tracker, bar.say, best, save)
    divergence = Divergence(config.divergence.stop_above, nothing)
    guard = DivergenceGuard(divergence, checkpoints, work.run_plan, folder)
    guard.follow(cluster.broadcast(lambda: _followed(log) if start else []))
    telemetry = Telemetry(
        work.run_plan,
        learning_rate_schedule(config.optimizer, total),
        log,
        tracker,
        BadRecords(folder / "bad_records.txt", cluster),
        config.data.loader.max_bad_records,
        bar,
        guard,
    )
    found = [
        watchdog,
        telemetry,
        LayerLog(folder, config.model, start),
        checkpointing,
        *([validating] if validating else []),
        Drawing(writer, config.sampling.every, tracker, writer.progress(start)),
        *(each.make(CallbackContext(folder, stop)) for each in config.callbacks),
        evaluation,
    ]
    return Callbacks(found, log, checkpointing, evaluation, validating)


def _followed(log: MetricsLog) -> list[tuple[float, float]]:
    """Losses and gradient norms of the last steps of earlier starts."""
    return [(row["loss"], row["grad_norm"]) for row in log.rows[-MOST_FOLLOWED:]]
