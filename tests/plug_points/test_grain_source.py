"""A source of samples from outside, named in the config by its module and class."""

import json

import numpy as np
import pytest
from grain_ramps import RampRecords

from alload_jax.data.store import StoreWriter
from alload_jax.errors import InputError


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def write_records(folder, count):
    with StoreWriter(folder, vae_stride=(1, 1, 1)) as writer:
        for index in range(count):
            record = RampRecords(count)[index]
            clip = np.moveaxis(record["clip"], 0, -1)
            writer.add(clip, np.array([record["direction"]]), clip.shape[:3])


@pytest.mark.slow
def test_a_grain_source_from_outside_trains_as_the_same_samples_in_a_store(train, tmp_path):
    write_records(tmp_path / "stored", 12)
    source = {"name": "grain_ramps:GrainRamps", "count": 12}
    outside = train(data={"folder": "unused", "source": source}, folder="outside")
    stored = train(data={"folder": str(tmp_path / "stored")}, folder="stored")
    assert losses(outside) == losses(stored)
    assert len(losses(outside)) == 6
    # The config that the run wrote reads the same samples again.
    again = train("--run.steps", "8", data={"folder": "unused", "source": source}, folder="outside")
    assert len(losses(again)) == 8
    with pytest.raises(InputError, match="was trained on 12 samples"):
        train(
            "--run.steps",
            "9",
            data={"folder": "unused", "source": source | {"count": 9}},
            folder="outside",
        )


@pytest.mark.slow
def test_a_grain_source_from_outside_is_read_by_processes(train):
    source = {"name": "grain_ramps:GrainRamps"}
    read = {"folder": "unused", "source": source}
    threads = train(data=read, run={"steps": 3}, folder="threads")
    processes = train(data=read | {"loader": {"processes": 2}}, run={"steps": 3}, folder="more")
    assert losses(threads) == losses(processes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("grain_ramps:Missing", "cannot be imported"),
        ("no_such_module:Class", "cannot be imported"),
        ("ramps", "choose one of store, parquet, musubi, safetensors, or give module:Class"),
    ],
)
def test_a_source_that_cannot_be_found_is_refused(train, name, words):
    with pytest.raises(InputError, match=words):
        train(data={"folder": "unused", "source": {"name": name}})


def test_a_source_and_a_data_set_are_refused_together(train, tmp_path):
    both = {"source": {"name": "store"}, "dataset": {"name": "ramps"}}
    with pytest.raises(InputError, match=r"data.source and data\.dataset"):
        train(data={"folder": str(tmp_path / "made")} | both)
