"""What nvidia-smi says of a busy device, with a program in its place."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alload_jax.bench.device_load import load_of, sampling

values = st.integers(0, 5000)
samples = st.tuples(values, values, values, values)


@given(st.lists(samples, max_size=9), st.sampled_from(["", "1980, 19", "[N/A], 1980, 1, 700\n"]))
def test_medians_of_whole_samples(drawn, broken):
    text = "".join(f"{a}, {b}, {c}.00, {d}.00\n" for a, b, c, d in drawn) + broken
    found = load_of(text)
    if not drawn:
        assert found is None
        return
    assert found[:4] == tuple(map(statistics.median, zip(*drawn, strict=True)))
    assert found.samples == len(drawn)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a shell script in nvidia-smi's place."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def write(script):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return write


def test_samples_what_the_program_says_until_the_end(program, tmp_path):
    program(f"echo '1600, 1980, 690.5, 700'; echo $$ > {tmp_path}/pid; exec sleep 60")
    with sampling() as sampled:
        while not (tmp_path / "pid").exists():
            pass
    assert sampled.load == (1600, 1980, 690.5, 700, 1)


@pytest.mark.parametrize(
    ("visible", "device"), [("", "0"), ("3,1", "3"), ("GPU-8a,GPU-9", "GPU-8a")]
)
def test_asks_for_the_first_visible_device(program, tmp_path, monkeypatch, visible, device):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    program(f'echo "$*" > {tmp_path}/told; mv {tmp_path}/told {tmp_path}/asked; exec sleep 60')
    with sampling():
        while not (tmp_path / "asked").exists():
            pass
    assert f"-i {device} " in (tmp_path / "asked").read_text()


def test_none_without_the_program(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with sampling() as sampled:
        pass
    assert sampled.load is None


def test_an_error_within_ends_the_program(program, tmp_path):
    program("exec sleep 60")
    with pytest.raises(ValueError, match="within"), sampling():
        raise ValueError("within")
