"""Seconds that GPUs compute and communicate, from a profile written by hand."""

import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from alload_jax.bench.trace import device_seconds, timeline, traced

MS = 1_000_000_000
"""Picoseconds, in which a profile counts."""


def plane(name, events_of_lines):
    """A plane in protobuf's text: {line: [(event, begin, end) in ms]}."""
    names = sorted({event for events in events_of_lines.values() for event, *_ in events})
    ids = {event: number for number, event in enumerate(names, 1)}
    lines = "".join(
        f'lines {{ name: "{line}" timestamp_ns: 0 '
        + "".join(
            f"events {{ metadata_id: {ids[event]} offset_ps: {begin * MS} "
            f"duration_ps: {(end - begin) * MS} }} "
            for event, begin, end in events
        )
        + "} "
        for line, events in events_of_lines.items()
    )
    metadata = "".join(
        f'event_metadata {{ key: {number} value {{ id: {number} name: "{event}" }} }} '
        for event, number in ids.items()
    )
    return f'planes {{ name: "{name}" {lines} {metadata} }}'


def profile(*planes):
    return ProfileData.from_serialized_xspace(
        ProfileData.text_proto_to_serialized_xspace(" ".join(planes))
    )


HOST = plane("/host:CPU", {"python": [("alload step", 0, 10), ("alload step", 20, 40)]})


def test_overlapping_kernels_count_once_and_collectives_separately():
    first = plane(
        "/device:GPU:0",
        {
            "Stream #1(Compute)": [("gemm", 1, 5), ("attention", 21, 30), ("gemm", 35, 36)],
            "Stream #2(Compute)": [("gemm", 4, 6), ("gemm", 22, 23)],
            "Stream #3": [("ncclDevKernel_AllGather", 5, 9), ("ncclDevKernel_AllGather", 28, 32)],
            "XLA Modules": [("jit_step", 0, 10)],
        },
    )
    second = plane("/device:GPU:1", {"Stream #1(Compute)": [("gemm", 15, 25)]})
    busy, exposed = device_seconds(profile(second, HOST, first))
    # The kernel from 15 to 25 began before its step; the record's clock is the host's.
    assert busy == [pytest.approx([5e-3, 0]), pytest.approx([10e-3, 5e-3])]
    assert exposed == [pytest.approx([3e-3, 0]), pytest.approx([2e-3, 0])]


def test_a_profile_without_gpus_has_no_device_times():
    assert device_seconds(profile(HOST)) is None


def test_every_step_runs_once_in_order():
    done = []
    found = traced([lambda n=n: done.append(float(jnp.float32(n) + 1)) for n in range(3)])
    assert done == [1.0, 2.0, 3.0]
    assert len(found.seconds) == 3


def test_calls_of_a_kernel_are_added():
    calls = {"Stream #1(Compute)": [("gemm", 1, 5), ("sort", 6, 7), ("gemm", 8, 9)]}
    found = timeline(profile(HOST, plane("/device:GPU:0", calls))).spent
    seconds = {operation.kernel: 2 * spent.seconds for operation, spent in found.items()}
    assert seconds == {"gemm": pytest.approx(5e-3), "sort": pytest.approx(1e-3)}
