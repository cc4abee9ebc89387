"""Pictures of the same samples over the steps of a run."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from looks import assert_looks
from PIL import Image

from alload_jax.diffusion.timesteps import TimestepConfig
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.sampling import progress_grid
from alload_jax.sampling.config import GridConfig, SamplingConfig
from alload_jax.sampling.pictures import (
    cell_box,
    clip_suffix,
    middle_frame,
    write_frames,
    write_grid,
)
from alload_jax.sampling.progress_grid import (
    DRAWN_NAME,
    MOST_COLUMNS,
    Progress,
    ProgressGrid,
    Row,
    step_folder,
)
from alload_jax.sampling.samples import SampleWriter

CLASSES, SIDE = 3, 4


def test_a_column_shows_its_class_and_others_that_differ_by_row(tmp_path):
    manifest = SimpleNamespace(vae_stride=(1, 1, 1), longest_text=lambda: 4, origin={}, fps=8)
    model = WanConfig(in_channels=1, num_classes=5, patch_size=(1, 4, 4))
    config = SamplingConfig(grids=(GridConfig(1, 8, 8, rows=2, labels=3),))
    writer = SampleWriter(tmp_path, model, TimestepConfig(), config, manifest, trained_null=True)
    drawn = []

    def draw(values, key, labels, size):
        drawn.append(np.asarray(labels).tolist())
        return np.zeros((len(labels), *size, 1), np.float32)

    writer.draw = draw
    assert len(list(writer.pictures(1, {}))) == 1
    expected = [[c, (c + r) % 5, (c + 2 * r) % 5, 5] for r in (1, 2) for c in range(5)]
    assert drawn == [expected]


def shade(step, label):
    return 60 + 40 * label + step % 40


def write_step(folder, step, frames=1, name="grid"):
    """A grid of the step: rows of samples, each class of one grey, the first row brighter by 1."""
    clips = np.zeros((2, CLASSES, frames, SIDE, SIDE, 1), np.float32)
    for label in range(CLASSES):
        clips[0, label] = shade(step, label) / 127.5 - 1
        clips[:, label, : frames // 2] = -1  # what is not the middle
        clips[:, label, frames // 2 + 1 :] = -1
    place = step_folder(folder, step)
    place.mkdir(parents=True, exist_ok=True)
    write_grid(place / f"{name}{clip_suffix(frames, 'gif')}", clips, ["0", "1", "2"])


def grid_of(frames=1):
    boxes = [cell_box(0, label, CLASSES, SIDE, SIDE) for label in range(CLASSES)]
    file = f"grid{clip_suffix(frames, 'gif')}"
    rows = tuple(Row(f"class {n}", file, box) for n, box in enumerate(boxes))
    return ProgressGrid("progress_grid", rows)


def progress_of(folder, resumed_at=0, grid=None, drawn="same"):
    return Progress(folder, [grid or grid_of()], drawn, resumed_at)


def draw(progress, folder, *steps, frames=1):
    for step in steps:
        write_step(folder, step, frames)
        progress.add(step)
        (path,) = progress.write()
    return np.asarray(Image.open(path).convert("L")).astype(int)


def greys(page):
    """The greys of the cells, row by row: those of large areas that are no paper."""
    values, counts = np.unique(page, return_counts=True)
    return {int(v) for v, c in zip(values, counts, strict=True) if c > 3000 and v > 27}


@pytest.mark.parametrize("frames", [1, 5])
def test_each_class_and_step_is_shown_by_its_middle_frame(tmp_path, frames):
    page = draw(progress_of(tmp_path, grid=grid_of(frames)), tmp_path, 5, 10, 15, frames=frames)
    assert greys(page) == {shade(step, label) for step in (5, 10, 15) for label in range(CLASSES)}
    assert_looks(Image.open(tmp_path / "progress_grid.png"), (457, 422, 0.47))


def test_labels_need_no_folder_to_write_to():
    """As importing matplotlib does, which warns or fails in a container without one."""
    code = (
        "import sys; import alload_jax.run.training as _; from alload_jax.sampling import "
        "progress_grid; progress_grid.label_font(9); sys.exit('matplotlib' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_continued_run_shows_what_an_unbroken_one_does(tmp_path):
    whole = draw(progress_of(tmp_path / "whole"), tmp_path / "whole", 2, 6, 8)
    broken = tmp_path / "broken"
    draw(progress_of(broken), broken, 2, 4, 6)  # with other intervals, and stopped after step 7
    again = progress_of(broken, resumed_at=3)
    assert [step in again for step in (2, 4, 6)] == [True, False, False]
    np.testing.assert_array_equal(draw(again, broken, 6, 8), whole)
    third = progress_of(broken, resumed_at=8)
    assert [step in third for step in (2, 4, 6, 8)] == [True, False, True, True]


def test_steps_at_which_other_samples_were_drawn_are_not_shown(tmp_path):
    draw(progress_of(tmp_path, drawn="before"), tmp_path, 2, 4)
    page = draw(progress_of(tmp_path, resumed_at=4, drawn="now"), tmp_path, 6)
    assert greys(page) == {shade(6, label) for label in range(CLASSES)}
    back = progress_of(tmp_path, resumed_at=6, drawn="before")
    assert [step in back for step in (2, 4, 6)] == [True, True, False]


@pytest.mark.parametrize("content", [None, "", "{}x", "3", '[{"step": 1}]'])
def test_runs_without_a_sound_record_go_on_from_their_folders(tmp_path, content):
    for step in (2, 4, 6, 8):
        write_step(tmp_path, step)
    (tmp_path / "step_x").mkdir()
    if content is not None:
        (tmp_path / DRAWN_NAME).write_text(content)
    known = progress_of(tmp_path, resumed_at=6)
    assert known.columns() == [2, 4]  # the last may be incomplete
    draw(known, tmp_path, 10)
    drawn = [{"step": step, "drawn": "same"} for step in (2, 4, 10)]
    assert json.loads((tmp_path / DRAWN_NAME).read_text()) == drawn


def test_what_stays_in_memory_does_not_grow_with_the_drawings(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_grid, "_MOST_KEPT", most := 2 * MOST_COLUMNS * CLASSES)
    progress, kept = progress_of(tmp_path), []
    for step in range(1, 60):
        draw(progress, tmp_path, step)
        kept.append(len(progress._cells))
    assert max(kept) <= most + MOST_COLUMNS * CLASSES
    whole = draw(progress_of(tmp_path, resumed_at=59), tmp_path, 60)
    np.testing.assert_array_equal(draw(progress, tmp_path, 60), whole)


@given(st.sets(st.integers(1, 10**6), min_size=1, max_size=40))
@settings(max_examples=30)
def test_columns_are_few_and_even_with_the_first_and_the_last(tmp_path_factory, steps):
    known = progress_of(tmp_path_factory.mktemp("few"))
    for step in steps:
        known.add(step)
    found, ordered = known.columns(), sorted(steps)
    assert found == sorted(set(found))
    assert set(found) <= steps
    assert len(found) == min(len(steps), MOST_COLUMNS)
    assert (found[0], found[-1]) == (ordered[0], ordered[-1])
    gaps = np.diff([ordered.index(step) for step in found])
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1


def test_pages_are_bounded_and_long_prompts_are_cut(tmp_path):
    rows = tuple(Row("wörd × " * 100 + "\n\x07", f"none_{n}.png") for n in range(40))
    progress = progress_of(tmp_path, grid=ProgressGrid("progress_prompts", rows))
    tmp_path.joinpath("samples").mkdir()
    for step in range(0, 40_000_000, 1_000_000):
        progress.add(step)
    (path,) = progress.write()
    assert_looks(Image.open(path), (1785, 1722, 3.0))


def test_pictures_that_are_gone_or_damaged_leave_their_cells_empty(tmp_path):
    progress = progress_of(tmp_path)
    draw(progress, tmp_path, 2, 4)
    (step_folder(tmp_path, 2) / "grid.png").write_bytes(b"no picture")
    (step_folder(tmp_path, 4) / "grid.png").unlink()
    page = draw(progress_of(tmp_path, resumed_at=4), tmp_path, 6)
    empty = {41}  # the grey of an empty cell
    assert greys(page) == {shade(6, label) for label in range(CLASSES)} | empty


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_the_middle_of_a_clip_is_its_middle_in_time(tmp_path, suffix):
    shades = [10, 10, 10, 10, 200, 90, 60, 60, 30]  # a GIF stores equal frames once
    frames = [Image.new("RGB", (16, 16), (grey,) * 3) for grey in shades]
    write_frames(tmp_path / f"clip{suffix}", frames, suffix)
    found = middle_frame(tmp_path / f"clip{suffix}")
    assert abs(int(np.asarray(found)[8, 8, 0]) - 200) < 8
    whole = (tmp_path / f"clip{suffix}").read_bytes()
    (tmp_path / f"bad{suffix}").write_bytes(b"nothing")
    (tmp_path / f"cut{suffix}").write_bytes(whole[: {".gif": 103, ".mp4": 1468}[suffix]])
    for name in ("bad", "cut", "none"):
        with pytest.raises(OSError, match=name):
            middle_frame(tmp_path / f"{name}{suffix}")
