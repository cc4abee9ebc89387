"""Cuts videos into clips of 4n + 1 frames."""

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from alload_jax.data.prepare.buckets import Fit
from alload_jax.data.prepare.scenes import numbered_scenes
from alload_jax.data.prepare.sources import Source
from alload_jax.data.prepare.unusable import UnusableError
from alload_jax.data.prepare.videos import TimedFrame, decoder, frames_at, opened_video


def clip_lengths(frames: int) -> tuple[int, ...]:
    """Lengths that clips may have, longest first: `frames`, then …, 49, 33, 17, 9, 5, 1."""
    steps = {1, 5, 9, *range(17, frames, 16), frames}
    return tuple(sorted((length for length in steps if length <= frames), reverse=True))


def video_clips(
    source: Source,
    choose: Callable[[int, int], Fit],
    *,
    fps: Fraction,
    frames: int,
    min_frames: int = 1,
    stride: int | None = None,
    max_clips: int | None = None,
    scene_threshold: float | None = None,
) -> Iterator[np.ndarray]:
    """Decodes a video and cuts it into clips; a shorter scene gives one, of the length that fits.

    Without a threshold the video is one scene. What is left after the last whole clip of a scene is
    dropped.

    Args:
      source: the file.
      choose: gives the fit for (height, width) in pixels.
      fps: frames per second of the clips.
      frames: length of a clip, 4n + 1.
      min_frames: scenes in which no clip of this length fits are left out.
      stride: frames from the start of a clip to that of the next; None for no gap or overlap.
      max_clips: most clips of a video; None for all.
      scene_threshold: cuts the video into scenes, see `scenes.numbered_scenes`; None does not.

    Yields:
      [frames, height, width, 3] uint8.

    Raises:
      UnusableError: the video cannot be used, or not on from here; or all scenes are too short.
    """
    scenes = iter if scene_threshold is None else numbered_scenes(scene_threshold)
    with opened_video(source) as container:
        picture = decoder(container, choose)
        longest = clips = 0
        shown = frames_at(container, fps, scenes)
        for _, scene in itertools.groupby(shown, key=lambda one: one.scene):
            for window in _windows(scene, picture, stride or frames, frames):
                longest = max(longest, len(window))
                length = next(n for n in clip_lengths(frames) if n <= len(window))
                if length >= min_frames:
                    yield np.stack(window[:length])
                    clips += 1
                if clips == max_clips:
                    return
        if clips == 0:
            raise UnusableError(f"too short: {longest} frames at the asked rate")


def _windows(
    scene: Iterator[TimedFrame], picture: Callable[[Any], np.ndarray], stride: int, frames: int
) -> Iterator[list[np.ndarray]]:
    """The pictures of each whole clip of a scene; if there is none, all of its pictures."""
    window: list[np.ndarray] = []
    start, whole = 0, False
    for place, array in _pictures(scene, picture, stride, frames):
        if place == start + len(window):
            window.append(array)
        if len(window) == frames:
            yield window
            start, whole = start + stride, True
            window = window[stride:]
    if not whole:
        yield window


def _pictures(
    scene: Iterator[TimedFrame], picture: Callable[[Any], np.ndarray], stride: int, frames: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Converts the frames that a clip needs, each once, and counts from the scene's start."""
    last: Any = None
    array = np.empty(0, np.uint8)
    for place, one in enumerate(scene):
        if place % stride >= frames:
            continue  # between clips
        if one.frame is not last:
            last, array = one.frame, picture(one.frame)
        yield place, array
