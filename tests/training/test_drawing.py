"""Samples during training."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from alload_jax.errors import InputError
from alload_jax.sampling.pictures import Picture
from alload_jax.training.callbacks.drawing import Drawing

RUN = SimpleNamespace(
    done=4, state=SimpleNamespace(averaged_weights=SimpleNamespace(merged=lambda: "values"))
)
FULL = OSError(28, "No space left on device", "full.png")


class Shown(list):
    """A tracker that notes what it is shown."""

    def show(self, step, name, path):
        self.append((step, name, path))

    def close(self):
        self.append("closed")


class Progress(list):
    """Notes the steps, and writes a picture unless the disk is full."""

    full, add = False, list.append

    def write(self):
        if self.full:
            raise FULL
        yield Path("a/progress_1x8x8.png")


def writer_of(pictures):
    """Draws pictures: their paths and what writing them does; and the paths that were drawn."""
    drawn = []

    def draw(step, values):  # other processes draw to the end as well
        assert (step, values) == (4, "values")
        for path, write in pictures.items():
            drawn.append(path)
            yield Picture(path, write)

    return SimpleNamespace(pictures=draw, count=len(pictures)), drawn


def failing(error):
    def fail():
        raise error

    return fail


def test_what_was_drawn_is_shown():
    paths = [Path("a/1x8x8.png"), Path("a/prompt_0.gif")]
    writer, _ = writer_of(dict.fromkeys(paths, lambda: None))
    drawing = Drawing(writer, 2, shown := Shown(), Progress())
    assert drawing.due(RUN)
    assert drawing.missed(RUN)
    drawing.act(RUN)
    assert not drawing.missed(RUN)
    drawing.on_finish(RUN)
    expected = [(4, "samples/1x8x8", paths[0]), (4, "samples/prompt_0", paths[1])]
    expected.append((4, "samples/progress_1x8x8", Path("a/progress_1x8x8.png")))
    assert shown == [*expected, *expected, "closed"]


@pytest.mark.parametrize(("seconds", "said"), [(5.0, []), (8.0, ["8% of the time, 8.0 s every 2"])])
def test_drawings_that_take_long_are_said_once(seconds, said, capsys, monkeypatch):
    clock, durations = SimpleNamespace(now=0.0), iter([50.0, seconds, seconds, seconds])

    def draw():
        clock.now += next(durations)  # the first time compiles

    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    drawing = Drawing(writer_of({Path("a.png"): draw})[0], 2, Shown(), Progress())
    for _ in range(4):
        clock.now += 100 - seconds
        drawing.act(RUN)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(said)
    for line, words in zip(told, said, strict=True):
        assert words in line
        assert "with sampling.every 4 it takes 5%" in line


@pytest.mark.parametrize(("count", "every"), [(0, 2), (1, 3), (1, None)])
def test_nothing_is_missed_where_nothing_is_drawn(count, every):
    assert not Drawing(SimpleNamespace(count=count), every, Shown(), Progress()).missed(RUN)


def test_a_picture_that_cannot_be_written_ends_neither_the_run_nor_the_drawing(capsys):
    pictures = {
        Path("prompt_0.gif"): failing(InputError("prompt_0.gif: the sample is not finite")),
        Path("1x8x8.png"): failing(FULL),
        Path("prompt_1.gif"): lambda: None,
    }
    writer, drawn = writer_of(pictures)
    progress, shown = Progress(), Shown()
    progress.full = True
    Drawing(writer, 2, shown, progress).on_finish(RUN)
    assert (progress, drawn) == ([4], [*pictures])
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "warning: samples of step 4: prompt_0.gif: the sample is not finite"
    assert ["full.png: No space left on device" in line for line in others] == [True, True]
    assert shown == [(4, "samples/prompt_1", Path("prompt_1.gif")), "closed"]
