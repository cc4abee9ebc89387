"""Named mixes of sample shapes, modelled on published training stages, for plans and benchmarks.

No histogram of such data is published; shares and aspect ratios are assumptions.
`wan-480p` follows Wan 2.1's joint 480p stage (arXiv 2503.20314), `mixed-resolution` Seaweed-7B's
second stage (arXiv 2504.08685) and Open-Sora 2.0 (arXiv 2503.09642), `long-video-V35` to `-V60`
the evaluation of Zellige (arXiv 2608.01150): the number is the share of tokens that is video.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from alload_jax.errors import InputError
from alload_jax.planning.samples import ASPECT_RATIOS, Geometry, Samples

AREAS: dict[str, int] = {
    "192p": 192 * 336,
    "256p": 256 * 256,
    "480p": 480 * 832,
    "512p": 512 * 512,
    "720p": 720 * 1280,
    "1080p": 1080 * 1920,
}
"""Pixels of a frame, before height and width are rounded to multiples of 16."""

_MULTIPLE = 16
_MOST_SAMPLES = 10**9
_LONG_VIDEO_SHARES = range(35, 61, 5)
_LONG_VIDEO_FRAMES = (161,)


@dataclass(frozen=True)
class Component:
    """Samples of one area class, their frame counts even over `frames`; `share` of all samples."""

    share: float
    area: str
    frames: tuple[int, ...] = (1,)


def names() -> tuple[str, ...]:
    """The names of all workloads."""
    return (*_FIXED, *(f"long-video-V{share}" for share in _LONG_VIDEO_SHARES))


def make_workload(
    name: str,
    size: int,
    seed: int = 0,
    geometry: Geometry | None = None,
    aspect_ratios: Mapping[tuple[int, int], float] = ASPECT_RATIOS,
) -> Samples:
    """Draws `size` samples of a named workload.

    Args:
      name: one of `names()`.
      size: number of samples.
      seed: equal seeds give equal samples.
      geometry: from pixels to tokens; None for Wan 2.1's.
      aspect_ratios: (width, height) → weight.

    Raises:
      InputError: there is no such workload, or `size` is below 1.
    """
    if not 1 <= size <= _MOST_SAMPLES:
        raise InputError(
            f"workload {name}: size is {size}; it must be at least 1 and at most {_MOST_SAMPLES:,}"
        )
    geometry = geometry or Geometry()
    kinds = _kinds(components(name, geometry, aspect_ratios), aspect_ratios)
    shapes, weights = np.asarray([shape for shape, _ in kinds]), [weight for _, weight in kinds]
    rng = np.random.default_rng(np.random.SeedSequence([seed, *name.encode()]))
    drawn = rng.choice(len(kinds), size=size, p=np.asarray(weights) / sum(weights))
    return Samples(shapes[drawn], geometry.seq_len(*shapes.T)[drawn])


def components(
    name: str,
    geometry: Geometry,
    aspect_ratios: Mapping[tuple[int, int], float] = ASPECT_RATIOS,
) -> tuple[Component, ...]:
    """The components of a workload.

    Raises:
      InputError: there is no such workload.
    """
    if name in _FIXED:
        return _FIXED[name]
    if name in names():
        return _long_video(int(name[-2:]) / 100, geometry, aspect_ratios)
    raise InputError(f"workload {name} is unknown; choose one of {', '.join(names())}")


def _spaced(first: int, last: int, step: int = 4) -> tuple[int, ...]:
    return tuple(range(first, last + 1, step))


_FIXED: dict[str, tuple[Component, ...]] = {
    "wan-480p": (
        Component(0.5, "480p"),
        Component(0.3, "480p", (81,)),
        Component(0.2, "480p", _spaced(17, 77)),
    ),
    "mixed-resolution": (
        Component(0.10, "256p"),
        Component(0.10, "512p"),
        Component(0.10, "480p"),
        Component(0.05, "720p"),
        Component(0.20, "192p", (81,)),
        Component(0.30, "480p", _spaced(17, 81, 16)),
        Component(0.15, "720p", _spaced(17, 81, 16)),
    ),
}


def _long_video(
    token_share: float, geometry: Geometry, aspect_ratios: Mapping[tuple[int, int], float]
) -> tuple[Component, ...]:
    """Components of images and ten-second videos; videos have `token_share` of the tokens."""
    images = [Component(1 / 4, area) for area in ("256p", "480p", "720p", "1080p")]
    videos = [Component(1 / 3, area, _LONG_VIDEO_FRAMES) for area in ("480p", "720p", "1080p")]

    def mean_tokens(parts: list[Component]) -> float:
        kinds = _kinds(tuple(parts), aspect_ratios)
        seq_len = geometry.seq_len(*np.asarray([shape for shape, _ in kinds]).T)
        return float(np.average(seq_len, weights=[weight for _, weight in kinds]))

    video, image = token_share / mean_tokens(videos), (1 - token_share) / mean_tokens(images)
    share = video / (video + image)
    return (
        *(Component(part.share * (1 - share), part.area, part.frames) for part in images),
        *(Component(part.share * share, part.area, part.frames) for part in videos),
    )


def _kinds(
    parts: tuple[Component, ...], aspect_ratios: Mapping[tuple[int, int], float]
) -> list[tuple[tuple[int, int, int], float]]:
    """Every ((frames, height, width), weight) of the parts; weights add up to 1."""
    total = sum(aspect_ratios.values())
    return [
        (
            (frames, *_size(AREAS[part.area], ratio)),
            part.share / len(part.frames) * weight / total,
        )
        for part in parts
        for frames in part.frames
        for ratio, weight in aspect_ratios.items()
    ]


def _size(area: int, ratio: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of about that area and aspect ratio, multiples of 16."""
    width, height = ratio
    return (
        _MULTIPLE * max(1, round(math.sqrt(area * height / width) / _MULTIPLE)),
        _MULTIPLE * max(1, round(math.sqrt(area * width / height) / _MULTIPLE)),
    )
