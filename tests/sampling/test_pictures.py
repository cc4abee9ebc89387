import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageSequence

from alload_jax.sampling.pictures import cell_box, clip_suffix, write_grid

WHITE = (255, 255, 255)


def clips_of(value, rows=2, columns=3, frames=1, height=8, width=8, channels=1):
    return np.full((rows, columns, frames, height, width, channels), value, np.float32)


def written(folder, clips, headers=None):
    headers = [str(n) for n in range(clips.shape[1])] if headers is None else headers
    write_grid(folder / f"grid{clip_suffix(clips.shape[2], 'gif')}", clips, headers)
    (path,) = folder.iterdir()
    return Image.open(path)


def frames_of(image):
    return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]


def still(folder, clips, headers=None):
    (frame,) = frames_of(written(folder, clips, headers))
    return frame


def box(frame, colour):
    """(top, bottom, left, right) of the pixels of a colour, which must fill a rectangle."""
    rows, columns = np.nonzero((frame == colour).all(axis=-1))
    top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
    assert len(rows) == (bottom - top) * (right - left)
    return top, bottom, left, right


def lit_cell(folder, row, column, **size):
    clips = clips_of(-1, **size)
    clips[row, column] = 1
    folder.mkdir()
    return box(still(folder, clips), WHITE)


def test_one_frame_makes_a_png(tmp_path):
    assert written(tmp_path, clips_of(0.5)).format == "PNG"
    assert (tmp_path / "grid.png").is_file()


@pytest.mark.parametrize("frames", [2, 5, 17])
def test_more_frames_make_a_looping_gif_of_as_many(tmp_path, frames):
    clips = clips_of(-1, frames=frames, height=20)
    for n in range(frames):
        clips[:, :, n, n] = 1
    image = written(tmp_path, clips)
    assert (tmp_path / "grid.gif").is_file()
    assert image.format == "GIF"
    assert image.n_frames == frames
    assert image.info["loop"] == 0


def test_frames_come_in_order(tmp_path):
    clips = clips_of(-1, rows=1, columns=1, frames=8)
    for n in range(8):
        clips[:, :, n, n] = 1
    tops = [box(frame, WHITE)[0] for frame in frames_of(written(tmp_path, clips))]
    assert len(tops) == 8
    assert len(set(np.diff(tops).tolist())) == 1
    assert tops[1] > tops[0]


@pytest.mark.parametrize("moving", [True, False])
def test_a_clip_plays_as_long_whether_it_moves_or_not(tmp_path, moving):
    clips = clips_of(-1, frames=5)
    if moving:
        clips += np.linspace(0, 2, 5).reshape(1, 1, 5, 1, 1, 1)
    image = written(tmp_path, clips)
    duration = sum(frame.info["duration"] for frame in ImageSequence.Iterator(image))
    assert 5 * 80 <= duration <= 5 * 150


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 12),
    st.sampled_from([8, 16, 40]),
    st.sampled_from([8, 16, 40]),
)
def test_pages_hold_all_cells_as_large_as_fits(rows, columns, height, width):
    with tempfile.TemporaryDirectory() as folder:
        clips = clips_of(1, rows, columns, 1, height, width)
        page = still(Path(folder), clips)
    zoom = np.sqrt((page == 255).all(axis=-1).sum() / (rows * columns * height * width))
    assert zoom == int(zoom) >= 1
    assert page.shape[1] >= columns * width * zoom
    assert page.shape[0] >= rows * height * zoom
    assert page.shape[1] <= 910
    assert page.shape[1] + columns * width > 880


def test_cells_are_equal_rectangles_in_reading_order(tmp_path):
    size = {"rows": 2, "columns": 3, "height": 8, "width": 16}
    boxes = [[lit_cell(tmp_path / f"{r}{c}", r, c, **size) for c in range(3)] for r in range(2)]
    for row, column in np.ndindex(2, 3):
        top, bottom, left, right = boxes[row][column]
        assert (right - left) == 2 * (bottom - top)
        assert (right - left) % 16 == 0
        assert (top, bottom) == boxes[row][0][:2]
        assert (left, right) == boxes[0][column][2:]
    assert boxes[0][0][1] < boxes[1][0][0]
    assert boxes[0][0][3] < boxes[0][1][2] < boxes[0][1][3] < boxes[0][2][2]


def only_cell(folder, images):
    """Pixels of the cell of a page that holds a single still."""
    places = []
    for name, clips in (("white", np.ones_like(images)), ("given", images)):
        (folder / name).mkdir()
        places.append(still(folder / name, clips))
    top, bottom, left, right = box(places[0], WHITE)
    return places[1][top:bottom, left:right]


@pytest.mark.parametrize(
    ("value", "level"), [(-1, 0), (1, 255), (0, 127), (-7, 0), (7, 255), (-0.5, 63), (0.5, 191)]
)
def test_minus_one_is_black_and_one_is_white(tmp_path, value, level):
    cell = only_cell(tmp_path, clips_of(value, rows=1, columns=1))
    assert np.abs(cell.astype(int) - level).max() <= (0 if abs(value) >= 1 else 1)


@pytest.mark.parametrize("frames", [1, 3])
def test_channels_are_red_green_and_blue(tmp_path, frames):
    clips = clips_of(-1, rows=1, columns=3, frames=frames, channels=3)
    for channel in range(3):
        clips[:, channel, ..., channel] = 1
    for frame in frames_of(written(tmp_path, clips)):
        boxes = [box(frame, np.eye(3)[channel] * 255) for channel in range(3)]
        assert boxes[0][3] < boxes[1][2] < boxes[1][3] < boxes[2][2]


def test_one_channel_is_grey(tmp_path):
    clips = np.random.default_rng(0).uniform(-1, 1, (1, 1, 1, 8, 8, 1))
    cell = only_cell(tmp_path, clips)
    assert (cell == cell[..., :1]).all()


def test_pixels_are_enlarged_but_not_blurred(tmp_path):
    checkers = np.indices((8, 8)).sum(axis=0) % 2 * 2.0 - 1
    cell = only_cell(tmp_path, checkers.reshape(1, 1, 1, 8, 8, 1))[..., 0]
    zoom = len(cell) // 8
    expected = np.kron((checkers + 1) / 2, np.ones((zoom, zoom))) * 255
    np.testing.assert_array_equal(cell, expected)


def test_headers_are_written_above_the_cells_and_change_nothing_else(tmp_path):
    pages = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pages.append(still(tmp_path / name, clips_of(1, rows=1), [name] * 3))
    changed = np.flatnonzero((pages[0] != pages[1]).any(axis=(1, 2)))
    assert changed.size
    assert changed.max() < np.flatnonzero((pages[0] == 255).all(axis=-1).any(axis=1)).min()


def test_very_many_columns_still_make_a_picture(tmp_path):
    assert (still(tmp_path, clips_of(1, rows=1, columns=300)) == 255).all(-1).sum() == 300 * 64


def test_half_precision_is_good_enough(tmp_path):
    clips = np.random.default_rng(0).uniform(-1, 1, (2, 2, 1, 8, 8, 1)).astype(np.float16)
    (tmp_path / "half").mkdir()
    (tmp_path / "single").mkdir()
    half = still(tmp_path / "half", clips).astype(int)
    single = still(tmp_path / "single", clips.astype(np.float32)).astype(int)
    assert np.abs(half - single).max() <= 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.data())
def test_the_box_of_a_cell_is_where_it_is_drawn(rows, columns, height, width, data):
    row, column = data.draw(st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1)))
    with tempfile.TemporaryDirectory() as folder:
        found = lit_cell(
            Path(folder) / "x", row, column, rows=rows, columns=columns, height=height, width=width
        )
    left, top, right, bottom = cell_box(row, column, columns, height, width)
    assert found == (top, bottom, left, right)
