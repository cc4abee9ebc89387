"""Random manifests and planning configs, and helpers of the tests of planning."""

import json
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from alload_jax.errors import InputError
from alload_jax.planning.cost import QuadraticCost
from alload_jax.planning.samples import Geometry, Samples, samples_from_columns
from alload_jax.planning.settings import PlanningConfig

POLICIES = ("fixed", "equal_tokens", "sorted", "dual_constraint")
MODES = ("synchronous", "independent")
WAN = QuadraticCost(0.05, 1.7e-5, 1.0e-9, 5e-4)
"""Approximate seconds of Wan 2.1's 1.3B model on an H200."""


def examples(count, **options):
    return settings(max_examples=count, deadline=None, **options)


def refusal(action, *args, **kwargs):
    with pytest.raises(InputError) as caught:
        action(*args, **kwargs)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def of_lengths(*lengths):
    return samples_from_columns({"seq_len": np.array(lengths)}, Geometry(), "manifest")


def of_shapes(*shapes, geometry=None):
    columns = dict(zip(("frames", "height", "width"), np.array(shapes).T, strict=True))
    return samples_from_columns(columns, geometry or Geometry(), "manifest")


def tokens(shape, geometry):
    """Tokens of one sample, in exact scalar arithmetic."""
    (frames, *space), (stride_t, *stride) = shape, geometry.vae_stride
    latents = [math.ceil(Fraction(frames - 1, stride_t)) + 1]
    latents += [math.ceil(Fraction(size, step)) for size, step in zip(space, stride, strict=True)]
    return math.prod(
        math.ceil(Fraction(size, patch))
        for size, patch in zip(latents, geometry.patch_size, strict=True)
    )


@dataclass(frozen=True)
class Manifest:
    columns: dict
    geometry: Geometry

    def samples(self) -> Samples:
        columns = {name: np.array(values) for name, values in self.columns.items()}
        return samples_from_columns(columns, self.geometry, "manifest")

    def shapes(self):
        """(frames, height, width) per sample in pixels; zeros if unknown."""
        if "frames" not in self.columns:
            return [(0, 0, 0)] * len(self.columns["seq_len"])
        return list(
            zip(*(self.columns[name] for name in ("frames", "height", "width")), strict=True)
        )

    def lengths(self):
        if "frames" not in self.columns:
            return self.columns["seq_len"]
        return [tokens(shape, self.geometry) for shape in self.shapes()]

    def names(self):
        """The bucket's name of every sample."""
        if "frames" not in self.columns:
            return [str(length) for length in self.lengths()]
        return ["x".join(map(str, shape)) for shape in self.shapes()]


GEOMETRIES = st.sampled_from(
    [Geometry(), Geometry((1, 1, 1), (1, 4, 4)), Geometry((4, 8, 8), (2, 2, 2))]
)
LENGTHS = st.integers(1, 2000) | st.sampled_from([256, 1024, 32_760, 75_600])
SHAPES = st.tuples(st.integers(1, 81), st.integers(1, 128), st.integers(1, 128))


@st.composite
def manifests(draw):
    """1 to 300 samples of up to 6 buckets, in any order."""
    sized = draw(st.booleans())
    kinds = draw(st.lists(SHAPES if sized else LENGTHS, min_size=1, max_size=6, unique=True))
    counts = draw(st.tuples(*[st.integers(1, 50)] * len(kinds)))
    order = np.random.default_rng(draw(st.integers(0, 999)))
    picks = order.permutation(np.repeat(np.arange(len(kinds)), counts)).tolist()
    if not sized:
        return Manifest({"seq_len": [kinds[pick] for pick in picks]}, Geometry())
    frames, height, width = zip(*(kinds[pick] for pick in picks), strict=True)
    columns = {"frames": list(frames), "height": list(height), "width": list(width)}
    return Manifest(columns, draw(GEOMETRIES))


@st.composite
def configs(draw, manifest, policies=POLICIES, modes=MODES):
    """A config under which every sample of the manifest can be placed."""
    policy = draw(st.sampled_from(policies))
    longest = max(manifest.lengths())
    p = draw(st.sampled_from([None, 1.0, 1.5, 2.0, 2.36, 3.0]))
    rows = None
    m_mem = longest * draw(st.integers(1, 8)) + draw(st.integers(0, longest))
    if policy == "fixed":
        names = sorted(set(manifest.names()))
        by_name = st.fixed_dictionaries({name: st.integers(1, 6) for name in names})
        rows = draw(st.integers(1, 6) | by_name)
        m_mem = draw(st.none() | st.integers(6 * longest, 9 * longest))
    m_comp = None
    if policy == "dual_constraint" and draw(st.booleans()):
        m_comp = longest ** (p or 2.0) * draw(st.floats(0.001, 50))
    mode, micro_batches = draw(st.sampled_from(modes)), draw(st.integers(1, 4))
    bounds = {"m_mem": m_mem, "m_comp": m_comp, "p": p, "rows": rows}
    bounds |= {"ranks": draw(st.integers(1, 9)), "micro_batches_per_step": micro_batches}
    return PlanningConfig(policy, mode, **bounds)


@st.composite
def cases(draw, **kinds):
    """A manifest, a config that fits it, and a seed."""
    manifest = draw(manifests())
    return manifest, draw(configs(manifest, **kinds)), draw(st.integers(0, 2**32 - 1))


def write_json(path, content):
    path.write_text(json.dumps(content))
    return path


def refused(parts, action, *args, **kwargs):
    """The refusal, which says all parts."""
    message = refusal(action, *args, **kwargs)
    for part in parts:
        assert str(part) in message, (part, message)
    return message
