"""Pictures of the same samples over the steps of a run: a row for each, a column for each step."""

import functools
import json
import textwrap
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from alload_jax.files import read_json, replacing
from alload_jax.sampling.pictures import Box, middle_frame


@functools.cache
def label_font(size: int) -> ImageFont.FreeTypeFont:
    """A font of this size in pixels, with Latin, Greek and Cyrillic letters and accents."""
    # Pillow's own font lacks × and accents. Importing matplotlib would need a folder to write to.
    path = distribution("matplotlib").locate_file("matplotlib/mpl-data/fonts/ttf/DejaVuSans.ttf")
    return ImageFont.truetype(str(path), size)


def lines_of(text: str, letters: int, lines: int) -> list[str]:
    """A text in a few lines of so many letters, without characters that cannot be drawn."""
    seen = "".join(letter if letter.isprintable() else " " for letter in text[:2000])
    return textwrap.wrap(seen, letters, max_lines=lines, placeholder=" …") or [""]


MOST_ROWS, MOST_COLUMNS = 16, 12
_MOST_KEPT = 2000
"""Cells that stay in memory, of 49 kB each at most, before those that are not shown are left."""
DRAWN_NAME = "drawn.json"
"""File in the folder of the samples: the steps that were drawn, and a digest of what was."""

_CELL, _GAP, _HEADER, _MARGIN = 128, 4, 26, 8
_LETTERS, _LINES, _LINE = 26, 6, 17
_SIZE = 13
_PAPER, _EMPTY, _INK = (24, 26, 32), (38, 41, 50), (220, 224, 232)


class Row(NamedTuple):
    """A sample that is drawn at many steps.

    Attributes:
      label: what it shows, such as a class or a prompt.
      file: name of its picture or clip in the folder of a step.
      box: its part of the picture; None for all.
    """

    label: str
    file: str
    box: Box | None = None


class ProgressGrid(NamedTuple):
    """A picture of rows.

    Attributes:
      name: of the file, without suffix.
      rows: at most `MOST_ROWS` of them are shown.
    """

    name: str
    rows: tuple[Row, ...]


class Progress:
    """Draws progress grids from the files of the steps; of a long run, some are read again.

    Steps after `resumed_at` belong to an earlier start that was interrupted. They do not count
    until they are drawn again; nor do those at which other samples were drawn. All processes note
    the steps, and only the first one writes.
    """

    def __init__(self, folder: Path, grids: Sequence[ProgressGrid], drawn: str, resumed_at: int):
        """Reads which steps earlier starts have drawn, in runs of old versions from the folders.

        Args:
          folder: folder of the samples, which holds a folder for each of the steps.
          grids: what to draw.
          drawn: digest of the samples.
          resumed_at: number of steps that are done.
        """
        self._folder, self._grids, self._drawn = folder, grids, drawn
        try:
            content = read_json(folder / DRAWN_NAME)
            known = {int(each["step"]): str(each["drawn"]) for each in content}
        except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged
            # The last one may be incomplete.
            names = [path.name.removeprefix("step_") for path in folder.glob("step_*")]
            steps = [int(name) for name in names if name.isascii() and name.isdecimal()]
            known = {step: drawn for step in steps if step < resumed_at}
        self._known = {step: what for step, what in known.items() if step <= resumed_at}
        self._cells: dict[tuple[int, Row], Image.Image | None] = {}

    def __contains__(self, step: int) -> bool:
        return self._known.get(step) == self._drawn

    def add(self, step: int) -> None:
        """Adds a step whose files are written."""
        self._known[step] = self._drawn
        self._cells = {key: cell for key, cell in self._cells.items() if key[0] != step}

    def columns(self) -> list[int]:
        """The steps to show: the first, the last, and others evenly between them."""
        steps = sorted(step for step in self._known if step in self)
        places = np.linspace(0, len(steps) - 1, min(len(steps), MOST_COLUMNS))
        return [steps[place] for place in places.round().astype(int).tolist()]

    def write(self) -> Iterator[Path]:
        """Writes the steps and all grids; yields the file of each grid.

        Raises:
          OSError: a file cannot be written.
        """
        content = [{"step": step, "drawn": what} for step, what in sorted(self._known.items())]
        with replacing(self._folder / DRAWN_NAME) as unfinished:
            unfinished.write_text(json.dumps(content) + "\n")
        columns = self.columns()
        if len(self._cells) > _MOST_KEPT:  # those between are shown again, but rarely
            self._cells = {key: cell for key, cell in self._cells.items() if key[0] in columns}
        for grid in self._grids:
            rows, path = grid.rows[:MOST_ROWS], self._folder / f"{grid.name}.png"
            cells = [[self._cell(step, row) for step in columns] for row in rows]
            with replacing(path) as unfinished:
                _page([row.label for row in rows], columns, cells).save(unfinished, format="PNG")
            yield path

    def _cell(self, step: int, row: Row) -> Image.Image | None:
        """A sample at a step, of the size of a cell; None if it cannot be read."""
        key = (step, row)
        if key not in self._cells:
            try:
                picture = middle_frame(step_folder(self._folder, step) / row.file)
            except OSError:  # it was not drawn, or it was removed
                self._cells[key] = None
                return None
            picture = picture.crop(row.box) if row.box else picture
            scale = _CELL / max(picture.size)
            scale = float(int(scale)) if scale >= 1 else scale  # small ones stay sharp
            size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
            how = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX
            self._cells[key] = picture.resize(size, how)
        return self._cells[key]


def step_folder(folder: Path, step: int) -> Path:
    """The folder of the samples of a step."""
    return folder / f"step_{step:07d}"


def _page(
    labels: Sequence[str], steps: Sequence[int], cells: Sequence[Sequence[Image.Image | None]]
) -> Image.Image:
    texts = [lines_of(label, _LETTERS, _LINES) for label in labels]
    font = label_font(_SIZE)
    margin = 2 * _MARGIN + round(max(font.getlength(line) for text in texts for line in text))
    width = max((cell.width for row in cells for cell in row if cell), default=_CELL)
    width = max(width, *(round(font.getlength(f"{step:,}")) + _GAP for step in steps))
    heights = [
        max([_LINE * len(text), *(cell.height for cell in row if cell)])
        for text, row in zip(texts, cells, strict=True)
    ]
    size = (margin + len(steps) * (width + _GAP), _HEADER + sum(heights) + _GAP * len(heights))
    page = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((_MARGIN, _HEADER / 2), "step", fill=_INK, font=font, anchor="lm")
    for column, step in enumerate(steps):
        centre = margin + column * (width + _GAP) + width / 2
        draw.text((centre, _HEADER / 2), f"{step:,}", fill=_INK, font=font, anchor="mm")
    top = _HEADER
    for text, row, height in zip(texts, cells, heights, strict=True):
        begin = top + (height - _LINE * len(text)) / 2
        for number, line in enumerate(text):
            place = (_MARGIN, begin + (number + 0.5) * _LINE)
            draw.text(place, line, fill=_INK, font=font, anchor="lm")
        for column, cell in enumerate(row):
            left = margin + column * (width + _GAP)
            if cell is None:
                draw.rectangle((left, top, left + width - 1, top + height - 1), fill=_EMPTY)
            else:
                inset = ((width - cell.width) // 2, (height - cell.height) // 2)
                page.paste(cell, (left + inset[0], top + inset[1]))
        top += height + _GAP
    return page
