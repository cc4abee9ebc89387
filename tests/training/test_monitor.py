"""What the monitor refuses."""

from alload_jax.data.placement import PlacedStep
from alload_jax.distributed.cluster import Cluster
from alload_jax.planning.cost import PowerCost
from alload_jax.training.monitor import Monitor
from alload_jax.training.telemetry import BadRecords, MetricsLog


class Bar:
    def say(self, text):
        pass


def test_fewer_damaged_records_allowed_than_were_met_before_are_refused_in_words(tmp_path):
    (tmp_path / "bad_records.txt").write_text("shard: record 1 is damaged\nshard: record 2\n")
    records = BadRecords(tmp_path / "bad_records.txt", Cluster())
    log = MetricsLog(tmp_path, resumed_at=0)
    monitor = Monitor(None, PowerCost(2.0), 0.0, lambda step: 1.0, log, records, 1)
    with monitor.watching(Bar()):
        assert not monitor.accepts(PlacedStep(3, 0, (), (), 0, 0.0))
    assert monitor.refusal.startswith("2 damaged records were met before this start; restore")
