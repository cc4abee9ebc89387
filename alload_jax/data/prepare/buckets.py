"""Resolution and aspect-ratio buckets: the sizes that images and clips are brought to."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from alload_jax.data.prepare.unusable import UnusableError
from alload_jax.errors import InputError
from alload_jax.planning.workloads import ASPECT_RATIOS

AREA_CLASSES: dict[str, tuple[int, int]] = {
    "192p": (192, 336),
    "256p": (256, 256),
    "480p": (480, 832),
    "512p": (512, 512),
    "720p": (720, 1280),
    "1080p": (1088, 1920),
}
"""(height, width) of the bucket that gives an area class its name."""

_ALIKE = 1.08
_LARGEST_SIDE = 8192


class Bucket(NamedTuple):
    """Height and width in pixels."""

    height: int
    width: int


class Fit(NamedTuple):
    """How a picture is brought to a bucket: resized, then cut around its centre.

    Attributes:
      bucket: size after cutting, in pixels.
      resized: (height, width) after resizing; no side is shorter than the bucket's.
    """

    bucket: Bucket
    resized: tuple[int, int]


def parse_area(text: str) -> tuple[int, int]:
    """(height, width) of an area class such as `480p` or `256x256` (height × width).

    Raises:
      InputError: there is no such class.
    """
    if text in AREA_CLASSES:
        return AREA_CLASSES[text]
    if found := re.fullmatch(r"(\d{1,5})[x×](\d{1,5})", text):
        sides = (int(found[1]), int(found[2]))
        if min(sides) > 0 and max(sides) <= _LARGEST_SIDE:
            return sides
    raise InputError(
        f"--area {text}: no such area; choose one of {', '.join(AREA_CLASSES)}, or height x width "
        f"such as 256x256, with sides up to {_LARGEST_SIDE}"
    )


def buckets_of(area: str, multiple: int) -> tuple[Bucket, ...]:
    """The buckets of an area class: its own shape, turned, and others of about that area.

    Args:
      area: as `parse_area` reads it.
      multiple: number that divides all sides.

    Raises:
      InputError: there is no such class, or its sides are not multiples.
    """
    height, width = parse_area(area)
    if height % multiple or width % multiple:
        raise InputError(
            f"--area {area}: {height}×{width} has sides that are not multiples of {multiple}; "
            f"choose {-(-height // multiple) * multiple}x{-(-width // multiple) * multiple}"
        )
    found = {Bucket(height, width): None, Bucket(width, height): None}
    for across, down in ASPECT_RATIOS:
        ratio = across / down
        if any(max(ratio / own, own / ratio) < _ALIKE for own in (width / height, height / width)):
            continue
        sides = (math.sqrt(height * width / ratio), math.sqrt(height * width * ratio))
        found[Bucket(*(max(1, round(side / multiple)) * multiple for side in sides))] = None
    return tuple(found)


def fit(height: float, width: float, areas: Sequence[Sequence[Bucket]], max_enlarge: float) -> Fit:
    """The bucket of the nearest aspect ratio in the largest area that needs no more enlarging.

    Args:
      height, width: size of the picture as shown, in pixels.
      areas: buckets of each area class.
      max_enlarge: most by which a side may grow.

    Raises:
      UnusableError: the picture is too small for every area.
    """
    nearest = [
        min(buckets, key=lambda b: (abs(math.log(b.width / b.height * height / width)), b))
        for buckets in areas
    ]
    nearest.sort(key=lambda bucket: (bucket.height * bucket.width, bucket))
    for bucket in reversed(nearest):
        scale = max(bucket.height / height, bucket.width / width)
        if scale <= max_enlarge:
            return Fit(bucket, covering(bucket, height, width))
    smallest = nearest[0]
    scale = max(smallest.height / height, smallest.width / width)
    raise UnusableError(
        f"too small: {width:.0f} wide × {height:.0f} high would be enlarged {scale:.2f} times"
    )


def covering(bucket: Bucket, height: float, width: float) -> tuple[int, int]:
    """(height, width) of a picture of that aspect ratio that just covers the bucket."""
    scale = max(bucket.height / height, bucket.width / width)
    return (
        max(bucket.height, round(height * scale)),
        max(bucket.width, round(width * scale)),
    )
