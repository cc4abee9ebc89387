"""Reading again what could not be read."""

import copy

import numpy as np
import pytest

from alload_jax.data import loader
from alload_jax.data.loader import PatientReader
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import BadRecordError, StoreReader, StoreWriter


class Shaky:
    """A source that fails so often before a sample can be read."""

    manifest = None

    def __init__(self, failures):
        self.failures, self.reads, self.closed = dict(failures), [], 0

    def read(self, sample):
        self.reads.append(sample)
        if self.failures.get(sample, 0):
            self.failures[sample] -= 1
            raise BadRecordError(f"sample {sample} cannot be read (input/output error)")
        return {"latents": np.full(1, sample)}

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("failures", [0, 1, 3])
def test_a_failure_that_passes_is_not_seen(failures, monkeypatch):
    waits = []
    monkeypatch.setattr(loader.time, "sleep", waits.append)
    source = Shaky({7: failures})
    reader = PatientReader(source, (0.1, 0.5, 2.0))
    assert reader.read(7)["latents"] == 7
    assert source.closed == failures  # files are opened again
    assert waits == [0.1, 0.5, 2.0][:failures]


def test_a_sample_that_stays_damaged_is_waited_for_once():
    source = Shaky({3: 10**6})
    reader = PatientReader(source, (0.0, 0.0))
    for attempts in (3, 4, 5):
        with pytest.raises(BadRecordError, match="sample 3 cannot be read"):
            reader.read(3)
        assert len(source.reads) == attempts
    source.failures[3] = 0  # restored meanwhile
    assert reader.read(3)["latents"] == 3
    source.failures[3] = 1
    assert reader.read(3)["latents"] == 3


def test_a_reader_travels_to_another_process(tmp_path):
    with StoreWriter(tmp_path, vae_stride=(1, 1, 1)) as writer:
        writer.add(np.ones((1, 4, 4, 3), np.float32), np.zeros(1, np.int32), (1, 4, 4))
    reader = PatientReader(StoreReader(read_manifest(tmp_path)), ())
    received = copy.deepcopy(reader)  # Grain's workers get its state in the same way
    assert (received.read(0)["latents"] == 1).all()
    assert len(received.manifest) == 1
