"""A contact sheet: frames of some samples of a folder, with their captions, as one picture."""

import textwrap
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from alload_jax.data.pixel_latents import holds_pixels, unfold_frames
from alload_jax.data.record import LATENTS
from alload_jax.data.sources.source import SampleSource
from alload_jax.data.store import BadRecordError
from alload_jax.sampling.fonts import label_font
from alload_jax.sampling.frames import to_bytes

_PAPER, _INK, _FAINT = (24, 26, 32), (220, 224, 232), (150, 156, 168)
_WIDTH, _CELL, _GAP, _LINE = 1200, 150, 6, 20
_FRAMES, _LETTERS, _CAPTION_LINES = 6, 130, 2
_NOTE = (
    "Latents, not pictures: the first three channels, each from its 1st to its 99th percentile "
    "in the sample."
)


def write_contact_sheet(path: str | Path, source: SampleSource, samples: int = 16) -> None:
    """Draws samples from the whole source, evenly spread, each with up to 6 frames.

    Sources of pixels show pixels. Others show the first three channels of the latents, and say so.

    Args:
      path: the PNG to write.
      source: the samples.
      samples: number of samples at most.
    """
    manifest = source.manifest
    count = min(samples, len(manifest))
    chosen = np.linspace(0, len(manifest) - 1, count).round().astype(int).tolist()
    captions = source.captions(chosen)
    rows = [_row(source, *each) for each in zip(chosen, captions, strict=True)]
    source.close()
    notes = [] if holds_pixels(manifest) else [_text([_NOTE], _FAINT)]
    _stack([*notes, *rows]).save(path, format="PNG")


def latent_colours(latents: np.ndarray) -> np.ndarray:
    """The first three channels as colours, each from its 1st to its 99th percentile.

    Args:
      latents: [frames, height, width, channels]; a missing channel is black.

    Returns:
      [frames, height, width, 3] uint8.
    """
    found = latents[..., :3].astype(np.float32)
    low, high = np.percentile(found, [1, 99], axis=(0, 1, 2))
    scaled = (found - low) / np.maximum(high - low, 1e-6)
    missing = 3 - found.shape[-1]
    padded = np.pad(np.clip(scaled, 0, 1), [(0, 0)] * 3 + [(0, missing)])
    return (padded * 255).round().astype(np.uint8)


def _row(source: SampleSource, number: int, caption: str | None) -> Image.Image:
    """A heading, the frames and the caption of a sample."""
    manifest = source.manifest
    frames, height, width = manifest.shape[number].tolist()
    heading = _text([f"sample {number} · {frames}×{height}×{width}"], _FAINT)
    try:
        latents = source.read(number)[LATENTS]
    except BadRecordError:
        return _stack([heading, _text(["This record is damaged."], _INK)])
    if holds_pixels(manifest):
        latents = unfold_frames(latents, manifest.vae_stride[0])
    chosen = np.linspace(0, len(latents) - 1, min(_FRAMES, len(latents))).round().astype(int)
    if holds_pixels(manifest):
        pixels = to_bytes(latents[chosen].astype(np.float32))
        pixels = np.broadcast_to(pixels, (*pixels.shape[:-1], 3))
    else:
        pixels = latent_colours(latents[chosen])
    parts = [heading, _strip([_cell(frame) for frame in pixels])]
    if caption:
        parts.append(_text(_lines(caption), _INK))
    return _stack(parts)


def _lines(caption: str) -> list[str]:
    """A caption in a few lines, without characters that cannot be drawn."""
    seen = "".join(letter if letter.isprintable() else " " for letter in caption[:2000])
    return textwrap.wrap(seen, _LETTERS, max_lines=_CAPTION_LINES, placeholder=" …") or [""]


def _cell(frame: np.ndarray) -> Image.Image:
    """A frame that fits a cell; small ones are enlarged without blur."""
    image = Image.fromarray(np.ascontiguousarray(frame))
    most = (_WIDTH - _GAP) // _FRAMES - _GAP
    scale = min(_CELL / image.height, most / image.width)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX)


def _strip(cells: list[Image.Image]) -> Image.Image:
    """Cells side by side."""
    page = Image.new("RGB", (_WIDTH, max(cell.height for cell in cells) + _GAP), _PAPER)
    left = _GAP
    for cell in cells:
        page.paste(cell, (left, 0))
        left += cell.width + _GAP
    return page


def _text(lines: list[str], colour: tuple[int, int, int]) -> Image.Image:
    page = Image.new("RGB", (_WIDTH, len(lines) * _LINE + _GAP), _PAPER)
    draw, font = ImageDraw.Draw(page), label_font(14)
    for number, line in enumerate(lines):
        draw.text((_GAP, number * _LINE), line, fill=colour, font=font)
    return page


def _stack(parts: list[Image.Image]) -> Image.Image:
    """Parts one below the other."""
    page = Image.new("RGB", (_WIDTH, sum(part.height for part in parts) + _GAP), _PAPER)
    top = _GAP // 2
    for part in parts:
        page.paste(part, (0, top))
        top += part.height
    return page
