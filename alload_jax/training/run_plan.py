"""The plan of a run, whose next epoch may follow from the step times of the last ones."""

from collections.abc import Callable, Generator
from dataclasses import asdict
from typing import Any

from alload_jax.data.collate import HostStep
from alload_jax.data.source import LoaderConfig, PlanSource, StepLoader
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError
from alload_jax.planning.cost import CostModel, QuadraticCost
from alload_jax.planning.metrics import StepMetrics, step_metrics
from alload_jax.planning.plan import Plan, Step
from alload_jax.planning.refit import CostFilter
from alload_jax.planning.settings import PlanningConfig

_LEAST_STEPS = 20
"""Steps of known time that a first recalibration needs."""


class RunPlan:
    """The plan of a run, the step times so far, and the cost models fitted to them.

    With `planning.recalibrate: epoch` the steps of an epoch are not read before the last epoch's
    steps are, because process 0 then fits the cost model that plans it.

    Attributes:
      plan: up to the epoch that is being read; where it was recalibrated, earlier epochs stay.
    """

    def __init__(self, plan: Plan, planning: PlanningConfig, cluster: Cluster):
        """Follows `plan`, which `planning` describes.

        Raises:
          InputError: the plan is to be recalibrated, but its cost model predicts no seconds.
        """
        self.plan = plan
        self._every_epoch = planning.recalibrate == "epoch"
        self._predictor = planning.predictor()
        self._seconds_per_split_token = planning.seconds_per_split_token()
        self._cluster = cluster
        self._decided = 0  # the last epoch whose cost model is settled
        self._times: CostFilter | None = None
        if isinstance(self._predictor, QuadraticCost):
            self._times = CostFilter(self._predictor)
        elif self._every_epoch:
            raise InputError(
                "planning.recalibrate is epoch, but planning.cost_model predicts no seconds; give "
                "the JSON of `alload calibrate`, or leave recalibrate out"
            )

    def steps(
        self, first: int, stop: int, collate: Callable[[Step], HostStep], config: LoaderConfig
    ) -> Generator[HostStep, None, None]:
        """Reads the steps from `first` up to `stop`, ahead of training. Close the generator.

        A collective operation at the end of an epoch, if it recalibrates.
        """
        while first < stop:
            epoch, within = self.plan.locate(first)
            if self._every_epoch and not within and epoch > self._decided:
                self._recalibrate(epoch)
            upto = min(stop, self.plan.end_of_epoch(first)) if self._every_epoch else stop
            with StepLoader(PlanSource(self.plan, first, upto), collate, config) as loader:
                yield from loader
            first = upto

    def metrics(self, number: int) -> StepMetrics:
        """Figures of a step that are known before it runs."""
        step = self.plan.step(number)
        model = self._cost_model(step.epoch)
        return step_metrics(step, self.plan, model, self._seconds_per_split_token)

    def drift(self, number: int, cost_terms: tuple[float, ...], seconds: float) -> float | None:
        """Adds the time of a step.

        Returns:
          How much longer recent steps took than the cost model that planned this one predicts, as
          a share of their time; None if it predicts no seconds.
        """
        model = self._cost_model(self.plan.locate(number)[0])
        if self._times is None or not isinstance(model, QuadraticCost):
            return None
        self._times.add(cost_terms, seconds)
        return self._times.drift(model)

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps, as JSON values; None without recalibration."""
        if not self._every_epoch or self._times is None:
            return None
        models = [[each.epoch, asdict(each.cost)] for each in self.plan.recalibrations]  # type: ignore[call-overload]
        return {"models": models, "decided": self._decided, "times": self._times.state()}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continues from what a checkpoint keeps."""
        if state is None or self._times is None:
            return
        for epoch, fields in state["models"]:
            self.plan = self.plan.recalibrated(epoch, QuadraticCost(**fields))
        self._decided = state["decided"]
        self._times.restore(state["times"])

    def _cost_model(self, epoch: int) -> CostModel:
        return self.plan.cost_model(epoch) or self._predictor

    def _recalibrate(self, epoch: int) -> None:
        """Plans from `epoch` on by the model fitted to the steps so far, if they are enough."""
        self._decided = epoch
        found = self._cluster.broadcast(self._fitted)
        if found is not None and self.plan.cost_model(epoch) != (model := QuadraticCost(**found)):
            self.plan = self.plan.recalibrated(epoch, model)

    def _fitted(self) -> dict[str, float] | None:
        if self._times is None or self._times.steps < _LEAST_STEPS:
            return None
        return asdict(self._times.fitted())
