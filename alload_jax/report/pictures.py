"""Pictures of a run's sparsity and validation, and contact sheets of data."""

import base64
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from alload_jax.data.record import LATENTS, unfold_frames
from alload_jax.data.sources import SampleSource
from alload_jax.data.store import BadRecordError
from alload_jax.errors import InputError
from alload_jax.files import replacing
from alload_jax.sampling.pictures import to_bytes
from alload_jax.sampling.progress_grid import label_font, lines_of
from alload_jax.training import LOSS, MEASURED_SET


def write_sparsity_picture(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Draws a heat map: a line for each head, layer by layer, and a column for each recorded step.

    A mark shows where a layer's attention becomes sparse, and a fainter one where it is dense
    again. Below it, the density of the lists, the recall and the sparsity, means over all heads.

    Args:
      path: the PNG to write.
      rows: lines of layers.jsonl, at least one: step, sparsity, recall and density
        [layers][heads], sparse [layers].
      title: of the picture.
    """
    from matplotlib.figure import Figure  # takes a second to import

    steps = np.array([row["step"] for row in rows])
    values = {
        name: np.array([row[name] for row in rows]) for name in ("sparsity", "density", "recall")
    }
    _, layers, heads = values["sparsity"].shape
    figure = Figure((8.4, 3.2 + 0.09 * layers * heads), layout="constrained")
    heat, lines = figure.subplots(
        2, sharex=True, height_ratios=[max(1.0, 0.05 * layers * heads), 1]
    )
    edges = np.append(0, steps)
    shares = 100 * values["sparsity"].reshape(len(rows), -1).T
    mesh = heat.pcolormesh(
        edges, np.arange(layers * heads + 1), shares, cmap="viridis", vmin=0, vmax=100
    )
    figure.colorbar(mesh, ax=heat, label="sparsity, %", pad=0.01)
    heat.set_yticks(np.arange(layers) * heads + heads / 2, np.arange(layers))
    heat.set_ylabel(f"layer, {heads} heads each")
    heat.invert_yaxis()
    for boundary in range(1, layers):
        heat.axhline(boundary * heads, color="white", lw=0.6)
    sparse = np.array([row["sparse"] for row in rows])
    before = np.vstack([np.zeros_like(sparse[:1]), sparse[:-1]])
    for column, layer in np.argwhere(sparse != before).tolist():
        top, alpha = layer * heads, 1 if sparse[column, layer] else 0.4
        heat.vlines(edges[column], top, top + heads, color="#f85149", lw=2, alpha=alpha)
    for name, colour in (("sparsity", "#1f6feb"), ("recall", "#3fb950"), ("density", "#f0883e")):
        lines.plot(steps, 100 * values[name].mean(axis=(1, 2)), color=colour, label=name)
    lines.set_ylim(0, 102)
    lines.set_xlabel("step")
    lines.set_ylabel("mean, %")
    lines.legend(frameon=False, ncols=3, loc="lower right")
    lines.spines[["top", "right"]].set_visible(False)
    heat.set_title(title, loc="left")
    figure.savefig(path, dpi=140)


_LEVEL = f"{LOSS}/sigma_"


def write_validation_picture(path: Path, rows: Sequence[dict[str, Any]], title: str) -> int:
    """Draws the loss of each size and at each noise level over the steps.

    A ring marks the lowest loss of all samples. Where the held-out samples or the settings changed
    during the run, losses of the last ones are drawn.

    Args:
      path: the PNG to write.
      rows: validations of metrics.jsonl.
      title: of the picture.

    Returns:
      The step with the lowest loss.

    Raises:
      InputError: no validation has a loss.
    """
    rows = [row for row in rows if LOSS in row]
    if not rows:
        raise InputError("metrics.jsonl holds no validation loss; train with validation.share")
    rows = [row for row in rows if row.get(MEASURED_SET) == rows[-1].get(MEASURED_SET)]
    # They take a second to import.
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in rows for name in row if name.startswith(LOSS)))
    levels = [name for name in names if name.startswith(_LEVEL)]
    sizes = [name for name in names if name not in (LOSS, *levels)]
    figure = Figure((10, 4.2), layout="constrained")
    panels = figure.subplots(ncols=2, sharex=True)
    for panel, parts, heading in zip(
        panels, (sizes, levels), ("by size", "by noise level σ"), strict=True
    ):
        shades = colormaps["viridis"](np.linspace(0, 0.85, max(1, len(parts))))
        for name, colour in zip(parts, shades, strict=False):
            label = name.removeprefix(_LEVEL).removeprefix(f"{LOSS}/")
            panel.plot(*_points(rows, name), color=colour, marker=".", lw=1.2, label=label)
        panel.plot(*_points(rows, LOSS), color="black", marker=".", lw=2, label="all")
        panel.set_title(heading, loc="left", fontsize=10)
        panel.set_xlabel("step")
        panel.legend(frameon=False, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    best = min(rows, key=lambda row: (row[LOSS], row["step"]))
    panels[0].plot(best["step"], best[LOSS], "o", ms=12, mfc="none", mec="#f85149", mew=1.8)
    panels[0].set_ylabel("validation loss")
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=140)
    return int(best["step"])


def _points(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    known = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in known], [value for _, value in known]


_PAPER, _INK, _FAINT = (24, 26, 32), (220, 224, 232), (150, 156, 168)
_WIDTH, _CELL, _GAP, _LINE = 1200, 150, 6, 20
_FRAMES, _LETTERS, _CAPTION_LINES = 6, 130, 2
_NOTE = (
    "Latents, not pictures: the first three channels, each from its 1st to its 99th percentile "
    "in the sample."
)


def write_contact_sheet(
    path: str | Path, source: SampleSource, samples: int = 16, previews: Sequence[str] = ()
) -> None:
    """Draws samples from the whole source, evenly spread, each with up to 6 frames.

    Sources of pixels show pixels. Others show the first three channels of the latents, and say so.

    Args:
      path: the PNG to write.
      source: the samples.
      samples: number of samples at most.
      previews: pictures of the first samples, PNG in base64, which are drawn in place of others.
    """
    manifest = source.manifest
    count = min(samples, len(manifest))
    chosen = np.linspace(0, len(manifest) - 1, count).round().astype(int).tolist()
    if previews:
        chosen = list(range(len(previews)))
    strips = [Image.open(io.BytesIO(base64.b64decode(each))) for each in previews]
    captions = source.captions(chosen)
    parts = [] if previews or manifest.holds_pixels else [_text([_NOTE], _FAINT)]
    for each in itertools.zip_longest(chosen, captions, strips):
        parts += _row(source, *each)
    source.close()
    with replacing(Path(path)) as unfinished:
        Image.fromarray(np.vstack(parts)).save(unfinished, format="PNG")


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


def _row(
    source: SampleSource, number: int, caption: str | None, strip: Image.Image | None
) -> list[np.ndarray]:
    """A heading, the frames, which `strip` may show, and the caption of a sample."""
    manifest = source.manifest
    frames, height, width = manifest.shape[number].tolist()
    heading = _text([f"sample {number} · {frames}×{height}×{width}"], _FAINT)
    cells = [] if strip is None else [_cell(np.asarray(strip), columns=1)]
    try:
        cells = cells or [_cell(frame) for frame in _pictures(source, number)]
    except BadRecordError:
        return [heading, _text(["This record is damaged."], _INK)]
    page = Image.new("RGB", (_WIDTH, max(cell.height for cell in cells) + _GAP), _PAPER)
    left = _GAP
    for cell in cells:
        page.paste(cell, (left, 0))
        left += cell.width + _GAP
    lines = [_text(lines_of(caption, _LETTERS, _CAPTION_LINES), _INK)] if caption else []
    return [heading, np.asarray(page), *lines]


def _pictures(source: SampleSource, number: int) -> np.ndarray:
    """[frames, height, width, 3] uint8, of a sample as it is stored."""
    manifest, latents = source.manifest, source.read(number)[LATENTS]
    if manifest.holds_pixels:
        latents = unfold_frames(latents, manifest.vae_stride[0])
    chosen = np.linspace(0, len(latents) - 1, min(_FRAMES, len(latents))).round().astype(int)
    if not manifest.holds_pixels:
        return latent_colours(latents[chosen])
    pixels = to_bytes(latents[chosen].astype(np.float32))
    return np.broadcast_to(pixels, (*pixels.shape[:-1], 3))


def _cell(frame: np.ndarray, columns: int = _FRAMES) -> Image.Image:
    """A frame that fits a cell; small ones are enlarged without blur."""
    image = Image.fromarray(np.ascontiguousarray(frame))
    most = (_WIDTH - _GAP) // columns - _GAP
    scale = min(_CELL / image.height, most / image.width)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX)


def _text(lines: list[str], colour: tuple[int, int, int]) -> np.ndarray:
    """Lines of text over the whole width."""
    page = Image.new("RGB", (_WIDTH, len(lines) * _LINE + _GAP), _PAPER)
    draw, font = ImageDraw.Draw(page), label_font(14)
    for number, line in enumerate(lines):
        draw.text((_GAP, number * _LINE), line, fill=colour, font=font)
    return np.asarray(page)
