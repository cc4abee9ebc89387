"""`--scenes`: finds hard cuts with PySceneDetect, in the frames that PyAV decodes."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import av
import numpy as np

from alload_jax.data.prepare.unusable import short
from alload_jax.data.prepare.videos import Decoded, damage_named
from alload_jax.errors import InputError

_LONGEST_SIDE = 256
"""Pixels to which frames are reduced, about as PySceneDetect reduces them."""
_RATE = 25.0
"""Frames are numbered, not timed: the detector only compares numbers."""


def require_detector() -> None:
    """Checks that PySceneDetect can be imported.

    Raises:
      InputError: it cannot.
    """
    try:
        import scenedetect  # noqa: F401
    except ImportError as error:  # or OpenCV's libraries
        raise InputError(
            f"--scenes needs the package scenedetect ({short(error)}); install alload-jax[scenes]"
        ) from error


def numbered_scenes(threshold: float) -> Callable[[Iterator[Decoded]], Iterator[Decoded]]:
    """A function that numbers the scenes of decoded frames.

    It passes all frames on, two later than they come. PySceneDetect's AdaptiveDetector compares
    the change at each frame with the changes at two frames before and two after it, so that
    moving cameras are no cuts.

    Args:
      threshold: ratio of these changes from which there is a cut.
    """
    return lambda frames: _numbered(frames, _Cuts(threshold))


def _numbered(frames: Iterator[Decoded], cuts: "_Cuts") -> Iterator[Decoded]:
    waiting: deque[Decoded] = deque()
    scene = decided = 0
    for decoded in frames:
        waiting.append(decoded)
        cuts.add(decoded.frame)
        if len(waiting) > cuts.delay:
            scene += decided in cuts.found
            yield waiting.popleft()._replace(scene=scene)
            decided += 1
    cuts.finish()
    for decoded in waiting:
        scene += decided in cuts.found
        yield decoded._replace(scene=scene)
        decided += 1


class _Cuts:
    """Feeds frames to a detector.

    The first and the last frame are repeated, without which cuts beside them were not found.

    Attributes:
      found: numbers of the frames that begin a scene, from 0.
      delay: frames after which it is known whether a frame begins a scene.
    """

    def __init__(self, threshold: float):
        from scenedetect.detectors import AdaptiveDetector

        self.found: set[int] = set()
        self._detector = AdaptiveDetector(adaptive_threshold=threshold, min_scene_len=0)
        self.delay = self._detector.event_buffer_length
        self._fed = 0
        self._last: np.ndarray | None = None

    def add(self, frame: Any) -> None:
        """Takes the next frame."""
        first = self._last is None
        self._last = _small(frame, self._last)
        for _ in range(1 + self.delay * first):
            self._feed(self._last)

    def finish(self) -> None:
        """Finds the cuts up to the last frame."""
        for _ in range(self.delay):
            if self._last is not None:
                self._feed(self._last)

    def _feed(self, picture: np.ndarray) -> None:
        from scenedetect import FrameTimecode

        time = FrameTimecode(self._fed, _RATE)
        self._fed += 1
        for cut in self._detector.process_frame(time, picture):
            self.found.add(cut.frame_num - self.delay)


def _small(frame: Any, like: np.ndarray | None) -> np.ndarray:
    """A frame as [height, width, 3] uint8 in OpenCV's order of colours, in the size of another."""
    scale = min(1.0, _LONGEST_SIDE / max(frame.height, frame.width))
    size = [max(1, round(side * scale)) for side in (frame.height, frame.width)]
    height, width = size if like is None else like.shape[:2]
    with damage_named("pixel format that cannot be converted"):
        return frame.reformat(
            width=width,
            height=height,
            format="bgr24",
            interpolation=av.video.reformatter.Interpolation.AREA,
        ).to_ndarray()
