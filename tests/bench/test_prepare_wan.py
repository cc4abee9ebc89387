"""`benchmarks/prepare_wan.py`: which samples of the GPU count, and what its videos are."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def prepare_wan():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("prepare_wan")
        del sys.modules["prepare_wan"]


def test_samples_between_the_times_count(prepare_wan, tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "2026/11/23 15:00:00.000, 0, 10\n"
        "2026/11/23 15:00:01.500, 50, 200\n"
        "2026/11/23 15:00:01.700, [N/A], 200\n"
        "2026/11/23 15:00:02.000, 100, 150\n"
        "2026/11/23 15:00:03.000, 0, 10\n"
        "2026/11/23 15:00"
    )
    samples = prepare_wan.read_samples(log)
    assert len(samples) == 4
    begin = samples[0].at
    assert prepare_wan.gpu_use(samples, begin + 1, begin + 2) == {
        "gpu_busy": 0.75,
        "gpu_busy_least": 0.5,
        "gpu_samples": 2,
        "gpu_mebibytes": 200,
    }
    assert prepare_wan.gpu_use([], 0, 1)["gpu_busy"] is None


def test_videos_differ_and_have_one_clip_of_the_asked_size(prepare_wan, tmp_path):
    shape = (5, 32, 48)
    prepare_wan.write_videos(tmp_path / "videos", 7, shape)
    clips = list(prepare_wan.decoded(tmp_path, shape))
    assert [clip.shape for clip in clips] == [(*shape, 3)] * prepare_wan.DISTINCT
    assert all((clip[0] != clip[-1]).any() for clip in clips)
    assert len(np.unique(clips, axis=0)) == len(clips)
    contents = [path.read_bytes() for path in sorted((tmp_path / "videos").glob("*.mp4"))]
    assert contents[0] == contents[prepare_wan.DISTINCT]
    assert len(list((tmp_path / "videos").glob("*.txt"))) == 7
