"""High dynamic range shown as standard range: PQ and HLG of ITU-R BT.2100 become BT.709 pictures.

By the convention of ITU-R BT.2408, HDR reference white of 203 cd/m² is the white of SDR.
"""

import re
from functools import cache

import numpy as np
from PIL import Image

TRANSFERS = {16: "PQ", 18: "HLG"}
"""HDR's transfer characteristics, by their numbers in ITU-T H.273."""
TONE_MAPPED = "{}, tone-mapped to standard range"
"""What the report says of a picture of one of `TRANSFERS`."""
_BT709, _BT2020 = 1, 9
_PRIMARIES = {
    _BT709: ((0.64, 0.33), (0.3, 0.6), (0.15, 0.06)),
    _BT2020: ((0.708, 0.292), (0.17, 0.797), (0.131, 0.046)),
    12: ((0.68, 0.32), (0.265, 0.69), (0.15, 0.06)),  # P3, as screens of phones have
}
"""(x, y) of red, green and blue, by their numbers in H.273; their white is D65."""
_D65 = (0.3127, 0.3290)
_WHITE, _HLG_PEAK = 203.0, 1000.0  # cd/m²
_KNEE = 0.8  # of white; what is brighter is rolled off, so that white itself becomes 0.9


def stored_colour(image: Image.Image, start: bytes) -> tuple[int, int]:
    """(primaries, transfer) of a still picture by H.273, most of which Pillow leaves out.

    Args:
      image: the opened picture.
      start: the first bytes of its file.

    Returns:
      2 for what the file does not say.
    """
    if nclx := image.info.get("nclx_profile"):  # of HEIC
        return nclx["color_primaries"], nclx["transfer_characteristics"]
    chunk = {"PNG": rb"cICP(.)(.)", "AVIF": rb"colrnclx\0(.)\0(.)"}.get(image.format or "")
    found = chunk and re.search(chunk, start, re.DOTALL)
    return (found[1][0], found[2][0]) if found else (2, 2)


def tone_mapped(signal: np.ndarray, primaries: int, transfer: int) -> np.ndarray:
    """An HDR picture as an SDR screen of BT.1886 shows it.

    Colours are rolled off by their largest component, which keeps their hue; those outside BT.709
    are mixed with the grey of their luminance until they lie inside.

    Args:
      signal: [..., 3] full-range R'G'B', uint8 or uint16.
      primaries: number of the primaries in H.273; those of BT.2020 where it is not known.
      transfer: one of `TRANSFERS`.

    Returns:
      [..., 3] uint8.
    """
    to_xyz = _to_xyz(primaries if primaries in _PRIMARIES else _BT2020)
    linear = _linear(transfer, np.iinfo(signal.dtype).max)[signal]
    if TRANSFERS[transfer] == "HLG":  # the OOTF of a screen of 1000 cd/m²
        scene = linear @ to_xyz[1]
        linear *= (_HLG_PEAK / _WHITE) * scene[..., None] ** np.float32(0.2)
    linear = linear @ (np.linalg.inv(_to_xyz(_BT709)) @ to_xyz).T.astype(np.float32)
    grey = linear @ _to_xyz(_BT709)[1]
    lowest = np.minimum(linear.min(-1), 0)
    share = grey / np.maximum(grey - lowest, 1e-9)
    linear = grey[..., None] + (linear - grey[..., None]) * share[..., None]
    peak = linear.max(-1, keepdims=True)
    rolled = 1 - (1 - _KNEE) ** 2 / (np.maximum(peak, _KNEE) + 1 - 2 * _KNEE)
    linear *= np.where(peak > _KNEE, rolled / np.maximum(peak, _KNEE), 1)
    return (255 * np.maximum(linear, 0) ** np.float32(1 / 2.4) + 0.5).astype(np.uint8)


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
