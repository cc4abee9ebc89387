"""Cuts videos into clips of 4n + 1 frames."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from alload_jax.data.prepare.buckets import Fit
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
) -> Iterator[np.ndarray]:
    """Decodes a video and cuts it into clips; a shorter video gives one, of the length that fits.

    What is left after the last whole clip is dropped.

    Args:
      source: the file.
      choose: gives the fit for (height, width) in pixels.
      fps: frames per second of the clips.
      frames: length of a clip, 4n + 1.
      min_frames: videos in which no clip of this length fits are refused.
      stride: frames from the start of a clip to that of the next; None for no gap or overlap.
      max_clips: most clips of a video; None for all.

    Yields:
      [frames, height, width, 3] uint8.

    Raises:
      UnusableError: the video cannot be used, or not on from here.
    """
    stride = stride or frames
    with opened_video(source) as container:
        picture = decoder(container, choose)
        window: list[np.ndarray] = []
        start, clips = 0, 0
        for shown, array in _pictures(frames_at(container, fps), picture, stride, frames):
            if shown.place == start + len(window):
                window.append(array)
            if len(window) == frames:
                yield np.stack(window)
                clips += 1
                if clips == max_clips:
                    return
                start += stride
                window = window[stride:]
        if clips == 0:
            yield _shorter(window, frames, min_frames)


def _pictures(
    shown: Iterator[TimedFrame], picture: Callable[[Any], np.ndarray], stride: int, frames: int
) -> Iterator[tuple[TimedFrame, np.ndarray]]:
    """Converts the frames that a clip needs, each once."""
    last: Any = None
    array = np.empty(0, np.uint8)
    for one in shown:
        if one.place % stride >= frames:
            continue  # between clips
        if one.frame is not last:
            last, array = one.frame, picture(one.frame)
        yield one, array


def _shorter(window: list[np.ndarray], frames: int, min_frames: int) -> np.ndarray:
    length = next(length for length in clip_lengths(frames) if length <= len(window))
    if length < min_frames:
        raise UnusableError(f"too short: {len(window)} frames at the asked rate")
    return np.stack(window[:length])
