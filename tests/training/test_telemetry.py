"""Refusals of telemetry."""

from alload_jax.data.placement import PlacedStep
from alload_jax.distributed.cluster import Cluster
from alload_jax.training.callbacks.telemetry import Telemetry
from alload_jax.training.progress import ProgressBar
from alload_jax.training.run_files import BadRecords, MetricsLog
from alload_jax.training.trackers.tensorboard import TensorBoard


class Run:
    refusal = ""

    def refuse(self, reason):
        self.refusal = reason


def test_fewer_damaged_records_allowed_than_were_met_before_are_refused_in_words(tmp_path):
    (tmp_path / "bad_records.txt").write_text("shard: record 1 is damaged\nshard: record 2\n")
    records = BadRecords(tmp_path / "bad_records.txt", Cluster())
    log = MetricsLog(tmp_path, resumed_at=0)
    bar, run = ProgressBar("training", 4), Run()
    tracker = TensorBoard(tmp_path / "tensorboard", resumed_at=0)
    telemetry = Telemetry(None, lambda step: 1.0, log, tracker, records, 1, bar)
    telemetry.on_start(run)
    telemetry.on_step_start(run, PlacedStep(3, 0, (), (), 0, 0.0))
    telemetry.close()
    assert run.refusal.startswith("2 damaged records were found before this start; restore")
