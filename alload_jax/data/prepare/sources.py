"""One input file: its bytes, its caption, its bucket, and its pixels if it is an image."""

import hashlib
import io
import math
import re
import struct
import tarfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from alload_jax.errors import InputError, first_line
from alload_jax.planning.samples import ASPECT_RATIOS, Triple


class UnusableError(ValueError):
    """A file cannot be used; the message is the reason, which the report lists."""


def short(error: BaseException) -> str:
    """The first line of an error, for a reason; without the path, which the report gives."""
    return getattr(error, "strerror", None) or first_line(error)[:200]  # OSError's, FFmpeg's


IMAGES = frozenset(
    {".jpg", ".jpeg", ".png", ".apng", ".webp", ".bmp", ".tif", ".tiff"}
    | {".avif", ".heic", ".heif", ".hif"}
)
"""Suffixes of images, some of which may be animated."""
VIDEOS = frozenset(
    {".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts"}
    | {".wmv", ".flv", ".gif", ".ogv", ".3gp", ".vob"}
)
"""Suffixes of videos; GIF is one, with one frame or many."""
MEDIA = IMAGES | VIDEOS


@dataclass(frozen=True)
class Source:
    """A file, or a member of a tar shard.

    Attributes:
      path: the file that is opened.
      offset: first byte of the content; 0 for a file.
      size: number of bytes of the content.
    """

    path: Path
    offset: int
    size: int


@dataclass(frozen=True)
class Item:
    """An image or a video with its captions, or the reason why it cannot be used.

    Attributes:
      name: path within the input, as messages and the report give it; valid Unicode.
      source: its bytes; None if it cannot be used.
      captions: the captions as found; empty if there are none.
      reason: why it cannot be used; empty if it can.
      content: digest of its bytes; "" where it is not known yet.
      records: of its clips in the data folder, of which only the captions are encoded again: shard,
        place in it, checksum, and size in pixels of each.
      own: settings of `MediaSettings` that differ from the command's, as (name, value).
      weight: how often an epoch has each of its samples.
      dropout: share of the times that they are trained without their caption.
      found: the captions of the file, where its folder in a set adds to them.
      copy: how many files before it have its name and settings; see `with_copies`.
    """

    name: str
    source: Source | None
    captions: tuple[str, ...] = ()
    reason: str = ""
    content: str = ""
    records: tuple[tuple[Path, int, int, Triple], ...] = ()
    own: tuple[tuple[str, Any], ...] = ()
    weight: float = 1.0
    dropout: float = 0.0
    found: tuple[str, ...] = ()
    copy: int = 0


def with_copies(items: Sequence[Item]) -> list[Item]:
    """The items, of which those are numbered that name a file again, as tables and sets may.

    They are files of their own: each has its caption, its weight and its samples.
    """
    seen: Counter[object] = Counter()
    found = []
    for item in items:
        key = (item.name, item.own)
        found.append(replace(item, copy=seen[key]))
        seen[key] += 1
    return found


def content_of(source: Source, own: object = (), copy: int = 0) -> str:
    """A digest of the bytes of a source, equal for equal files whatever their names.

    Args:
      source: the file.
      own: settings of its own, which the digest covers.
      copy: number of the item among those of the file, which it covers too.

    Raises:
      UnusableError: it cannot be read.
    """
    try:
        with opened(source) as file:
            digest = hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16))
    except OSError as error:
        raise UnusableError(f"cannot be read ({short(error)})") from error
    digest.update(repr(own).encode() if own else b"")
    digest.update(f"copy {copy}".encode() if copy else b"")
    return digest.hexdigest()


def suffix_of(name: str) -> str:
    """The suffix of a file name in lower case, such as `.mp4`."""
    return PurePosixPath(name).suffix.lower()


def readable_name(name: str) -> str:
    """A file name as valid Unicode; bytes that are not UTF-8 become replacement characters."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def checked_source(root: Path, relative: str) -> Source:
    """The source of a file of the folder `root`, which must be an existing, resolved path.

    Raises:
      UnusableError: the path is absolute and of another folder, has `..`, leads out of the folder
        by a link, or names no regular file that has content.
    """
    parts = PurePosixPath(relative.replace("\\", "/"))
    windows = relative[1:2] == ":"
    if windows or (parts.is_absolute() and not Path(relative).resolve().is_relative_to(root)):
        raise UnusableError("absolute path out of the table's folder; name --media-root")
    if ".." in parts.parts:
        raise UnusableError("path with '..', which could leave the folder")
    try:
        real = (root / relative).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # missing, circle of links, NUL in it
        raise UnusableError(f"no such file ({type(error).__name__})") from error
    if not real.is_relative_to(root):
        raise UnusableError("link out of the folder")
    if not real.is_file():
        raise UnusableError("not a regular file")
    size = real.stat().st_size
    if not size:
        raise UnusableError("empty file (0 bytes)")
    return Source(real, 0, size)


@contextmanager
def opened(source: Source) -> Iterator[io.BufferedReader]:
    """Opens the bytes of a source for reading.

    Raises:
      UnusableError: the file is gone, may not be read, or is a tar shard that was cut off.
    """
    try:
        file = source.path.open("rb")
    except OSError as error:
        raise UnusableError(f"cannot be opened ({error.strerror or short(error)})") from error
    with file:
        if not source.offset:
            yield file
            return
        member = tarfile.TarInfo()
        member.offset_data, member.size = source.offset, source.size
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                yield cast(io.BufferedReader, archive.extractfile(member))
        except tarfile.TarError as error:
            raise UnusableError(f"damaged .tar file ({short(error)})") from error


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


def fit(
    height: float, width: float, areas: Sequence[Sequence[Bucket]], max_enlarge: float
) -> Bucket:
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
            return bucket
    raise UnusableError(
        f"too small: {width:.0f} wide × {height:.0f} high would be enlarged {scale:.2f} times"
    )


def covering(bucket: Bucket, height: float, width: float) -> tuple[int, int]:
    """(height, width) of a picture of that aspect ratio that just covers the bucket."""
    scale = max(bucket.height / height, bucket.width / width)
    return max(bucket.height, round(height * scale)), max(bucket.width, round(width * scale))


BACKGROUND = 255
"""Grey level that transparent pixels get: white."""
ON_WHITE = "transparent parts became white"
"""What the report says of them."""
MOST_PIXELS = 2**27
"""Most pixels of a picture; more is taken for a decompression bomb."""
_DAMAGE = (
    *(OSError, SyntaxError, ValueError, EOFError, KeyError, IndexError, TypeError),
    *(OverflowError, MemoryError, RuntimeError, struct.error, zlib.error),
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
"""What Pillow's decoders raise for damaged files."""
_HEIF = re.compile(rb"....ftyp(hei|hev|mif1|msf1)", re.DOTALL)
_MOVING = ("PNG", "WEBP", "AVIF", "GIF")
"""Formats whose frames are an animation; TIFF has pages, and HEIC bursts of shots."""

Note = Callable[[str], None]
"""Called with what is changed in a picture, for the report."""


@contextmanager
def image_errors() -> Iterator[None]:
    """Turns what Pillow raises and warns of into an UnusableError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            yield
        except UnusableError:
            raise
        except UnidentifiedImageError as error:
            raise UnusableError("not an image, or of an unknown format") from error
        except _DAMAGE as error:
            raise UnusableError(f"damaged image ({short(error)})") from error


def open_image(file: BinaryIO) -> tuple[Image.Image, tuple[int, int]]:
    """Opens an image, whose pixels are not decoded yet.

    Also gives (primaries, transfer) by H.273, most of which Pillow leaves out; 2 for what the file
    does not say.
    """
    start = file.read(2**16)
    if _HEIF.match(start):
        try:
            from pillow_heif import register_heif_opener
        except ImportError as error:
            raise UnusableError(
                "HEIC needs the package pillow-heif; install alload-jax[prepare]"
            ) from error
        register_heif_opener()
    file.seek(0)
    image = Image.open(file)
    check_pixels(image.height, image.width)
    if nclx := image.info.get("nclx_profile"):  # of HEIC
        return image, (nclx["color_primaries"], nclx["transfer_characteristics"])
    chunk = {"PNG": rb"cICP(.)(.)", "AVIF": rb"colrnclx\0(.)\0(.)"}.get(image.format or "")
    colour = chunk and re.search(chunk, start, re.DOTALL)
    return image, (colour[1][0], colour[2][0]) if colour else (2, 2)


def is_animated(source: Source) -> bool:
    """Whether an image has several frames that are shown one after the other."""
    try:
        with opened(source) as file, image_errors():
            image, _ = open_image(file)
            return image.format in _MOVING and getattr(image, "n_frames", 1) > 1
    except UnusableError:
        return False  # decode_image says why


def upright(
    image: Image.Image, colour: tuple[int, int], note: Note
) -> tuple[Image.Image, bytes | None]:
    """An opened image of any mode in 8 bits of standard range, turned as EXIF says, on white.

    Args:
      image: the image, at the frame that is wanted.
      colour: as `open_image` gives it.
      note: called with what is changed.

    Returns:
      the image, L, CMYK or RGB, and the ICC profile of its colours, which `as_srgb` applies; None
      for sRGB.

    Raises:
      UnusableError: its values are floats, whose range is not known.
    """
    image = ImageOps.exif_transpose(image)
    profile = image.info.get("icc_profile")
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip, not scale
        values = np.asarray(image).astype(np.int64).clip(0, 65535)
        clear = values == image.info.get("transparency", -1)
        alpha = Image.fromarray(np.where(clear, 0, 255).astype(np.uint8))
        grey = Image.fromarray(((values + 128) // 257).astype(np.uint8))
        image = Image.merge("LA", (grey, alpha))
    if image.mode == "F":
        raise UnusableError("image of floats, whose range is not known")
    is_grey = image.mode in ("L", "LA", "La")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        if rgba.getchannel("A").getextrema()[0] != 255:
            note(ON_WHITE)
        white = Image.new("RGBA", rgba.size, (BACKGROUND, BACKGROUND, BACKGROUND, 255))
        image = Image.alpha_composite(white, rgba)
    keeps = "L" if is_grey else "CMYK" if image.mode == "CMYK" else "RGB"
    primaries, transfer = colour
    if transfer in TRANSFERS:
        note(TONE_MAPPED.format(TRANSFERS[transfer]))
        mapped = tone_mapped(np.asarray(image.convert("RGB")), primaries, transfer)
        return Image.fromarray(mapped), None
    image = image.convert(keeps)
    if profile is None and primaries in WIDE and image.mode == "RGB":
        return Image.fromarray(from_wide(np.asarray(image), primaries)), None
    return image, profile


def as_srgb(image: Image.Image, profile: bytes | None, note: Note) -> Image.Image:
    """What `upright` gives, as RGB in sRGB; its time grows with the pixels."""
    try:
        if profile:
            known = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if known.profile.xcolor_space.strip() == {"L": "GRAY"}.get(image.mode, image.mode):
                srgb = ImageCms.createProfile("sRGB")
                converted = ImageCms.profileToProfile(image, known, srgb, outputMode="RGB")
                return cast(Image.Image, converted)
    except (OSError, TypeError, ValueError, ImageCms.PyCMSError):
        note("damaged colour profile, not used")
    return image.convert("RGB")


def decode_image(
    source: Source, choose: Callable[[int, int], Bucket], note: Note = lambda change: None
) -> np.ndarray:
    """Decodes an image as `upright` does, resized and cut.

    Args:
      source: the file.
      choose: gives the bucket for (height, width) in pixels.
      note: called with what is changed.

    Returns:
      [1, height, width, 3] uint8.

    Raises:
      UnusableError: it is damaged, no image, too large or too small.
    """
    with opened(source) as file, image_errors():
        image, profile = upright(*open_image(file), note)
    bucket = choose(image.height, image.width)
    height, width = covering(bucket, image.height, image.width)
    resized = image.resize((width, height), Image.Resampling.LANCZOS)
    return cut(np.asarray(as_srgb(resized, profile, note)), bucket)[None]


def check_pixels(height: int, width: int) -> None:
    """Refuses a decompression bomb before its pixels are decoded.

    Raises:
      UnusableError: the picture has more than `MOST_PIXELS`.
    """
    if height * width > MOST_PIXELS:
        raise UnusableError(
            f"{width}×{height} pixels are more than {MOST_PIXELS:,}: a decompression bomb?"
        )


def cut(picture: np.ndarray, bucket: Bucket) -> np.ndarray:
    """Cuts [height, width, 3] to the bucket around its centre."""
    top, left = (picture.shape[0] - bucket.height) // 2, (picture.shape[1] - bucket.width) // 2
    return picture[top : top + bucket.height, left : left + bucket.width]


# ---------------------------------------------------------------- wide gamut, high dynamic range
# They become BT.709 pictures. By the convention of ITU-R BT.2408, HDR reference white of 203 cd/m²
# is the white of SDR.

TRANSFERS = {16: "PQ", 18: "HLG"}
"""HDR's transfer characteristics, by their numbers in ITU-T H.273."""
TONE_MAPPED = "{}, tone-mapped to standard range"
"""What the report says of a picture of one of `TRANSFERS`."""
_BT709, _BT2020, _P3 = 1, 9, 12
_PRIMARIES = {
    _BT709: ((0.64, 0.33), (0.3, 0.6), (0.15, 0.06)),
    _BT2020: ((0.708, 0.292), (0.17, 0.797), (0.131, 0.046)),
    _P3: ((0.68, 0.32), (0.265, 0.69), (0.15, 0.06)),  # as screens of phones have
}
"""(x, y) of red, green and blue, by their numbers in H.273; their white is D65."""
WIDE = (_BT2020, _P3)
"""Primaries of SDR that `from_wide` converts."""
_D65 = (0.3127, 0.3290)
_WHITE, _HLG_PEAK = 203.0, 1000.0  # cd/m²
_GAMMA = 2.4  # of BT.1886
_KNEE = 0.8  # of white; what is brighter is rolled off, so that white itself becomes 0.9


def tone_mapped(signal: np.ndarray, primaries: int, transfer: int) -> np.ndarray:
    """An HDR picture as an SDR screen of BT.1886 shows it.

    Colours are rolled off by their largest component, which keeps their hue.

    Args:
      signal: [..., 3] full-range R'G'B', uint8 or uint16.
      primaries: number of the primaries in H.273; those of BT.2020 where it is not known.
      transfer: one of `TRANSFERS`.

    Returns:
      [..., 3] uint8.
    """
    primaries = primaries if primaries in _PRIMARIES else _BT2020
    linear = _linear(transfer, np.iinfo(signal.dtype).max)[signal]
    if TRANSFERS[transfer] == "HLG":  # the OOTF of a screen of 1000 cd/m²
        scene = linear @ _to_xyz(primaries)[1]
        linear *= (_HLG_PEAK / _WHITE) * scene[..., None] ** np.float32(0.2)
    linear = _in_bt709(linear, primaries)
    peak = linear.max(-1, keepdims=True)
    rolled = 1 - (1 - _KNEE) ** 2 / (np.maximum(peak, _KNEE) + 1 - 2 * _KNEE)
    linear *= np.where(peak > _KNEE, rolled / np.maximum(peak, _KNEE), 1)
    return _codes(linear)


def from_wide(signal: np.ndarray, primaries: int) -> np.ndarray:
    """An SDR picture of wide gamut in BT.709; what that does not reach is cut off.

    Args:
      signal: [..., 3] full-range R'G'B', uint8.
      primaries: one of `WIDE`.

    Returns:
      [..., 3] uint8.
    """
    light = (np.arange(256, dtype=np.float32) / 255) ** np.float32(_GAMMA)
    return _codes(_in_bt709(light[signal], primaries))


def _in_bt709(linear: np.ndarray, primaries: int) -> np.ndarray:
    """Light [..., 3] of other primaries in those of BT.709.

    Colours outside are mixed with the grey of their luminance until they lie inside.
    """
    to_bt709 = np.linalg.inv(_to_xyz(_BT709)) @ _to_xyz(primaries)
    linear = linear @ to_bt709.T.astype(np.float32)
    grey = linear @ _to_xyz(_BT709)[1]
    lowest = np.minimum(linear.min(-1), 0)
    share = grey / np.maximum(grey - lowest, 1e-9)
    return grey[..., None] + (linear - grey[..., None]) * share[..., None]


def _codes(linear: np.ndarray) -> np.ndarray:
    """[..., 3] uint8 by which a screen of BT.1886 shows light [..., 3] of 0 to 1."""
    return (255 * linear.clip(0, 1) ** np.float32(1 / _GAMMA) + 0.5).astype(np.uint8)


@cache
def _to_xyz(primaries: int) -> np.ndarray:
    """[3, 3] float32, linear RGB to XYZ; its second row gives luminance."""
    x, y = np.array([*_PRIMARIES[primaries], _D65]).T
    columns = np.stack([x, y, 1 - x - y]) / y
    return (columns[:, :3] * np.linalg.solve(columns[:, :3], columns[:, 3])).astype(np.float32)


@cache
def _linear(transfer: int, most: int) -> np.ndarray:
    """[most + 1] float32: what signals mean; of PQ in units of white, of HLG the scene's light."""
    signal = np.arange(most + 1) / most
    if TRANSFERS[transfer] == "HLG":  # inverse OETF
        a, b = 0.17883277, 0.28466892
        c = 0.5 - a * np.log(4 * a)
        upper = (np.exp((np.maximum(signal, 0.5) - c) / a) + b) / 12
        return np.where(signal <= 0.5, signal**2 / 3, upper).astype(np.float32)
    m1, m2 = 2610 / 16384, 2523 / 4096 * 128
    c1, c2, c3 = 3424 / 4096, 2413 / 4096 * 32, 2392 / 4096 * 32
    power = signal ** (1 / m2)
    light = (np.maximum(power - c1, 0) / (c2 - c3 * power)) ** (1 / m1)
    return (light * 10_000 / _WHITE).astype(np.float32)
