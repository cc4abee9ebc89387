"""A data source of Grain, and its config, as somebody outside would write them.

A config names the class by `grain_ramps:GrainRamps`.
"""

from dataclasses import dataclass

import grain
import numpy as np

from alload_jax.data.sources.grain_samples import GrainSamples, GrainStream


class RampRecords(grain.sources.RandomAccessDataSource):
    """The ramps of `counting.Ramps`, with channels first, made when they are asked for."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        size = ramp_size(index)
        ramp = np.linspace(-1, 1, 4)[None, :, None] * np.ones(size)
        clip = np.rot90(ramp, index % 4, axes=(1, 2))
        return {"clip": clip[None].astype(np.float32), "direction": index % 4}


def ramp_size(index):
    return (1, 4, 4) if index % 3 else (3, 4, 4)


def ramp_arrays(record):
    labels = np.array([record["direction"]])
    return {"latents": np.moveaxis(record["clip"], 0, -1), "labels": labels}


@dataclass(frozen=True)
class GrainRamps:
    """Grey ramps of two sizes, whose class is their direction."""

    name: str = "grain_ramps:GrainRamps"
    count: int = 24

    def open(self, folder):
        notes = {"identity": str(self.count), "origin": {"made": "ramps"}}
        return GrainSamples(RampRecords(self.count), ramp_size, (1, 1, 1), ramp_arrays, **notes)


def ramp_entries(block):
    """Of 24 ramps."""
    numbers = np.arange(24 * block, 24 * block + 24)
    sizes = np.array([ramp_size(number) for number in numbers])
    return dict(zip(("key", "frames", "height", "width"), (numbers, *sizes.T), strict=True))


def ramp_of_key(key):
    return ramp_arrays(RampRecords(key + 1)[key])


def huge_fives(key):
    """Ramps of which every hundredth makes a loss that is not finite."""
    arrays = ramp_of_key(key)
    return arrays | {"latents": arrays["latents"] * (1e30 if key % 100 == 5 else 1)}


@dataclass(frozen=True)
class RampStream:
    """Ramps again and again, each time in another order."""

    name: str = "grain_ramps:RampStream"
    blocks: int = 512  # of few ones, Grain shuffles slowly
    huge: bool = False

    def open(self, folder):
        blocks = grain.MapDataset.range(self.blocks).seed(0).shuffle().repeat()
        reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        entries = blocks.map(ramp_entries).to_iter_dataset(reading)
        sizes = [ramp_size(0), ramp_size(1)]
        arrays = huge_fives if self.huge else ramp_of_key
        return GrainStream(entries, arrays, sizes, (1, 1, 1), identity="v1")
