"""Refusals of telemetry."""

from alload_jax.data.loader import PlacedStep
from alload_jax.distributed.cluster import Cluster
from alload_jax.training.callbacks.telemetry import Telemetry
from alload_jax.training.progress import ProgressBar
from alload_jax.training.run_files import BadRecords, MetricsLog
from alload_jax.training.trackers import TensorBoard


class Run:
    refusal = ""

    def refuse(self, reason):
        self.refusal = reason


def telemetry_of(folder, max_bad_records):
    records = BadRecords(folder / "bad_records.txt", Cluster())
    log = MetricsLog(folder, resumed_at=0)
    tracker = TensorBoard(folder / "tensorboard", resumed_at=0)
    bar = ProgressBar("training", 4)
    return Telemetry(None, lambda step: 1.0, log, tracker, records, max_bad_records, bar)


def refusal(folder, max_bad_records, *problems):
    telemetry, run = telemetry_of(folder, max_bad_records), Run()
    telemetry.on_start(run)
    telemetry.on_step_start(run, PlacedStep(3, 0, (), problems, 0, 0.0))
    telemetry.close()
    return run.refusal


def test_records_that_were_damaged_once_do_not_stop_a_later_start(tmp_path):
    (tmp_path / "bad_records.txt").write_bytes(b"shard: record 1 is damaged\n\xff\xfe\n")
    assert refusal(tmp_path, 0) == ""


def test_a_refusal_counts_the_records_of_earlier_starts_and_says_where_they_are(tmp_path):
    listed = tmp_path / "bad_records.txt"
    listed.write_text("shard: record 1 is damaged\nshard: record 2\n")
    assert refusal(tmp_path, 3, "shard: record 3") == ""
    found = refusal(tmp_path, 3, "shard: record 4")
    assert found.startswith("shard: record 4; restore the record, or allow more than")
    assert found.endswith(f"(3 others are in {listed}; delete it where they are restored)")
    (tmp_path / "new").mkdir()
    assert " in " not in refusal(tmp_path / "new", 0, "shard: record 1")
