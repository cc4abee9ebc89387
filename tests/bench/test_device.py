"""What is seen of a device: nvidia-smi's samples, and kernels in a profile written by hand."""

import contextlib
import os
import signal
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.profiler import ProfileData
from patience import PATIENCE, alive, wait_until

from alload_jax.bench import device as device_load
from alload_jax.bench.device import load_of, sampling
from alload_jax.bench.trace import (
    device_shares,
    divided_steps,
    is_collective,
    recorded,
    step_windows,
    time_of_operations,
)

values = st.integers(0, 5000)
samples = st.tuples(values, values, values, values)
JUNK = ["", "1980, 19", "1980, 1980, 1, 7", "[N/A], 1980, 1, 700\n", "nan, 1, 2, 3\n", "\ufffd\n"]


@given(st.lists(samples, max_size=9), st.sampled_from(JUNK))
def test_medians_of_whole_samples(drawn, junk):
    lines = [f"{a}, {b}, {c}.00, {d}.00\n" for a, b, c, d in drawn]
    found = load_of([*lines, junk])
    if not drawn:
        assert found is None
        return
    assert found.pop("samples") == len(drawn)
    assert [*found.values()] == [*map(statistics.median, zip(*drawn, strict=True))]


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a shell script in nvidia-smi's place, on a machine that seems to have a GPU."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(device_load, "_PATIENCE", PATIENCE)

    def write(script):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return write


def test_samples_what_the_program_says_until_the_end(program, tmp_path):
    program(
        f"echo '1600, 1980, 690.5, 700'; printf '\\377\\n17'; : > {tmp_path}/told; exec sleep 60"
    )
    with sampling() as lines:
        wait_until((tmp_path / "told").exists)
    known = {"sm_mhz": 1600, "most_sm_mhz": 1980, "watts": 690.5, "most_watts": 700}
    assert load_of(lines) == known | {"samples": 1}


@pytest.mark.parametrize(
    ("visible", "device"), [(None, "0"), (" 3,1", "3"), ("GPU-8a,GPU-9", "GPU-8a")]
)
def test_asks_for_the_first_visible_device(program, tmp_path, monkeypatch, visible, device):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    program(f'echo "$*" > {tmp_path}/told; mv {tmp_path}/told {tmp_path}/asked; exec sleep 60')
    with sampling():
        wait_until((tmp_path / "asked").exists)
    assert f"-i {device} " in (tmp_path / "asked").read_text()


def test_a_program_that_does_not_end_is_killed(program, tmp_path, monkeypatch):
    monkeypatch.setattr(device_load, "_PATIENCE", 0.2)
    program(f'trap "" TERM; echo $$ > {tmp_path}/pid; : > {tmp_path}/told; while :; do :; done')
    with sampling() as lines:
        wait_until((tmp_path / "told").exists)
    assert load_of(lines) is None
    wait_until(lambda: not alive((tmp_path / "pid").read_text().strip()))


def test_it_ends_where_its_process_is_killed(program, tmp_path):
    program(f"echo $$ > {tmp_path}/pid; : > {tmp_path}/told; while echo 1; do sleep 0.05; done")
    script = "import jax, signal; from alload_jax.bench.device import sampling\n"
    script += "jax.default_backend = lambda: 'gpu'\nwith sampling(): signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", script])
    wait_until((tmp_path / "told").exists, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    sampler = int((tmp_path / "pid").read_text())
    try:
        wait_until(lambda: not alive(sampler))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(sampler, signal.SIGKILL)


@pytest.mark.parametrize("reason", ["no program", "no GPU", "no visible GPU"])
def test_nothing_is_started_without_a_gpu_or_the_program(program, monkeypatch, tmp_path, reason):
    program("echo '1, 2, 3, 4'; exec sleep 60")
    if reason == "no program":
        monkeypatch.setenv("PATH", str(tmp_path / "none"))
    elif reason == "no GPU":
        monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",1")
    start, started = subprocess.Popen, []

    def noted(*arguments, **options):
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    with pytest.raises(ValueError, match="within") as raised, sampling() as lines:
        raise ValueError("within")
    assert raised.value.__context__ is None
    assert load_of(lines) is None
    assert not started


MS = 1_000_000_000
"""Picoseconds, in which a profile counts."""


def plane(name, events_of_lines):
    """A plane in protobuf's text: {line: [(event, begin, end) in ms]}."""
    names = sorted({event for events in events_of_lines.values() for event, *_ in events})
    text = f'name: "{name}" '
    for number, event in enumerate(names):
        text += f'event_metadata {{ key: {number} value {{ id: {number} name: "{event}" }} }} '
    for line, events in events_of_lines.items():
        text += f'lines {{ name: "{line}" timestamp_ns: 0 '
        for event, begin, end in events:
            span = f"offset_ps: {begin * MS} duration_ps: {(end - begin) * MS}"
            text += f"events {{ metadata_id: {names.index(event)} {span} }} "
        text += "} "
    return f"planes {{ {text} }}"


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
    seconds = {False: [], True: []}
    for step in divided_steps(profile(second, HOST, first)):
        for collective, found in seconds.items():
            spans = (spans for spans, _ in step)
            found += [
                sum(s for each, s in mine if is_collective(each.operation) == collective)
                for mine in spans
            ]
    # The kernel from 15 to 25 began before its step; the record's clock is the host's.
    assert seconds[False] == pytest.approx([5e-3, 0, 10e-3, 5e-3])
    assert seconds[True] == pytest.approx([3e-3, 0, 2e-3, 0])
    of_trace = device_shares(profile(second, HOST, first))  # from 1 to 36
    assert of_trace["busy"] == pytest.approx([15 / 35, 10 / 35])
    assert of_trace["exposed"] == pytest.approx([5 / 35, 0], abs=1e-12)
    assert of_trace["idle"] == pytest.approx(1 - 25 / 70)
    assert device_shares(profile(HOST)) == {}
    calls = {"Stream #1(Compute)": [("gemm", 1, 5), ("sort", 6, 7), ("gemm", 8, 9)]}
    found = time_of_operations(divided_steps(profile(HOST, plane("/device:GPU:0", calls))))
    seconds = {operation.kernel: 2 * spent["seconds"] for operation, spent in found.items()}
    assert seconds == {"gemm": pytest.approx(5e-3), "sort": pytest.approx(1e-3)}


def test_every_step_runs_once_in_order():
    done = []
    seconds, found = recorded([lambda n=n: done.append(jnp.float32(n) + 1) for n in range(3)])
    assert done == [1.0, 2.0, 3.0]
    assert len(seconds) == len(step_windows(found)) == 3
