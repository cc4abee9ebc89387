import contextlib
import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import strategies as st
from source_files import write_fastvideo, write_musubi, write_tensor_files

from alload_jax.data.condition import Conditions
from alload_jax.data.manifest import DIGEST_KEY, MANIFEST_NAME, Manifest
from alload_jax.data.record import SampleForm
from alload_jax.data.sources.opening import SafetensorsFolder
from alload_jax.data.sources.parquet import Parquet
from alload_jax.data.store import BadRecordError, StoreWriter
from alload_jax.errors import InputError
from alload_jax.planning.factory import make_plan
from alload_jax.planning.plan import Plan
from alload_jax.planning.settings import PlanningConfig

PATCH = (1, 2, 2)
NULL_LABEL = 10


def classes(length, images=False):
    """Conditions of classes, and the given frames and embeddings of `SpyReader`."""
    given = (2, (3, 5)) if images else (0, None)
    return Conditions(length, np.dtype(np.int32), None, NULL_LABEL, *given)


class Sample(NamedTuple):
    latents: np.ndarray
    labels: np.ndarray
    size: tuple[int, int, int]


def random_sample(rng, size, grid=None, channels=1, text_length=1):
    latents = rng.normal(size=(*(grid or size), channels)).astype(np.float16)
    return Sample(latents, rng.integers(0, 10, text_length, np.int32), size)


def random_samples(count, channels=1, seed=0):
    rng = np.random.default_rng(seed)
    sizes = [(1, 4, 4), (5, 4, 8), (9, 8, 4)]
    return [
        random_sample(rng, sizes[n % len(sizes)], channels=channels, text_length=n % 2 + 1)
        for n in range(count)
    ]


def write_store(folder, samples, vae_stride=(1, 1, 1), **options):
    with StoreWriter(folder, vae_stride=vae_stride, **options) as writer:
        for sample in samples:
            writer.add(*sample)
    return folder


def write_and_fail(folder, samples, mode="new", **options):
    """A writer that an error ends after the samples; returns the error."""

    def write():
        with StoreWriter(folder, vae_stride=(1, 1, 1), mode=mode, **options) as writer:
            for sample in samples[writer.written :]:
                writer.add(*sample)
            raise RuntimeError("the next clip")

    with pytest.raises(RuntimeError, match="the next clip") as error:
        write()
    return error.value


def assert_holds(arrays, sample):
    assert set(arrays) == {"latents", "labels"}
    for name in arrays:
        expected = getattr(sample, name)
        assert arrays[name].dtype == expected.dtype
        np.testing.assert_array_equal(arrays[name], expected)


@contextlib.contextmanager
def says(*parts, kind=InputError):
    """A block that ends with an error of that kind, whose one line has these parts."""
    with pytest.raises(kind) as error:
        yield error
    message = str(error.value)
    assert "\n" not in message
    assert [part for part in parts if str(part) not in message] == []


def change_manifest(folder, change=None, metadata="keep"):
    path = Path(folder) / MANIFEST_NAME
    table = pyarrow.parquet.read_table(path)
    kept = {name: value for name, value in table.schema.metadata.items() if name != DIGEST_KEY}
    if change:
        table = change(table)
    table = table.replace_schema_metadata(kept if metadata == "keep" else metadata)
    pyarrow.parquet.write_table(table, path)


def set_column(name, values):
    """A change of a manifest: all values of a column, or one for all rows."""

    def change(table):
        each = values if isinstance(values, list) else [values] * len(table)
        return table.set_column(table.column_names.index(name), name, pa.array(each))

    return change


def contents(folder):
    """The bytes of all files in a folder, by path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def flip_byte(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


def manifest_of(sizes, text_lengths, form=None, part_lengths=None):
    shape, texts = np.array(sizes, np.int64), np.array(text_lengths, np.int64)
    zeros = np.zeros(len(sizes), np.int64)
    return Manifest(
        path=Path("nowhere") / MANIFEST_NAME, shard=np.array(["shard"] * len(sizes), object),
        index=np.arange(len(sizes)), shape=shape, channels=zeros + 1, text_length=texts,
        checksum=zeros, vae_stride=(1, 1, 1), form=form or SampleForm(), shard_bytes={},
        origin={}, part_lengths=part_lengths,
    )  # fmt: skip


class SpyReader:
    """Samples made up from their number; notes which are read."""

    def __init__(self, manifest, damaged=()):
        self.manifest = manifest
        self.damaged = frozenset(damaged)
        self.reads = []

    def read(self, sample):
        self.reads.append(sample)
        if sample in self.damaged:
            raise BadRecordError(f"shard: record {sample} is damaged")
        names = ("latents", "text" if self.manifest.form.text_dim else "labels", "given", "image")
        arrays = {name: getattr(self, name)(sample) for name in names}
        return arrays | ({"glyphs": self.glyphs(sample)} if self.manifest.form.parts else {})

    def latents(self, sample):
        shape = (*self.manifest.shape[sample], 1)
        return (np.arange(np.prod(shape)).reshape(shape) + sample + 1).astype(np.float16)

    def given(self, sample):
        return np.concatenate([-self.latents(sample), 3 * self.latents(sample)], axis=-1)

    def image(self, sample):
        return np.full((3, 5), sample + 1, np.float16)

    def labels(self, sample):
        return np.arange(self.manifest.text_length[sample], dtype=np.int32) + sample % 7

    def text(self, sample):
        return self.labels(sample)[:, None] + np.ones((1, 4), np.float16)

    def glyphs(self, sample):
        return np.full((self.manifest.part_lengths[sample, 0], 2), sample - 0.5, np.float16)


@dataclasses.dataclass(frozen=True)
class Case:
    manifest: Manifest
    plan: Plan

    def epoch_steps(self, epoch=0):
        first = epoch * self.plan.steps_per_epoch
        return [self.plan.step(first + n) for n in range(self.plan.steps_per_epoch)]


FILES = SafetensorsFolder(normalize="none", mask="prompt_attention_mask")
CACHES = {"musubi": (write_musubi, None), "safetensors": (write_tensor_files, FILES)}
CACHES["parquet"] = (write_fastvideo, Parquet(normalize="none"))
"""What writes caches of other trainers, and the config that reads them."""


def plan_over(manifest, ranks=2, micro_batches=1, policy="dual_constraint", m_mem=160, seed=0):
    settings = {"rows": 2 if policy == "fixed" else None, "micro_batches_per_step": micro_batches}
    config = PlanningConfig(policy=policy, m_mem=m_mem, **settings)
    return make_plan(config, manifest.samples(PATCH), ranks, seed)


@st.composite
def cases(draw, ranks=(1, 2, 3, 4)):
    sizes = st.sampled_from([(1, 4, 4), (1, 4, 8), (5, 4, 4), (5, 8, 8)])
    rows = draw(st.lists(st.tuples(sizes, st.integers(0, 3)), min_size=1, max_size=40))
    manifest = manifest_of(*zip(*rows, strict=True))
    policy = st.sampled_from(["fixed", "equal_tokens", "dual_constraint"])
    kinds = (st.sampled_from(ranks), st.integers(1, 3), policy, st.integers(160, 400))
    return Case(manifest, plan_over(manifest, *map(draw, kinds), draw(st.integers(0, 1000))))
