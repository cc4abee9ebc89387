"""Samples during training."""

from pathlib import Path
from types import SimpleNamespace

from alload_jax.errors import InputError
from alload_jax.sampling.pictures import Picture
from alload_jax.training.callbacks.validating import Drawing

RUN = SimpleNamespace(
    done=4, state=SimpleNamespace(averaged_weights=SimpleNamespace(merged=lambda: "values"))
)


class Tracker:
    def __init__(self):
        self.shown = []

    def show(self, step, name, path):
        self.shown.append((step, name, path))

    def close(self):
        self.shown.append("closed")


class Progress:
    """Notes the steps, and writes a picture unless the disk is full."""

    def __init__(self, full=False):
        self.steps, self.full = [], full

    def __contains__(self, step):
        return step in self.steps

    def add(self, step):
        self.steps.append(step)

    def write(self):
        if self.full:
            raise OSError(28, "No space left on device", "progress.png")
        yield Path("a/progress_1x8x8.png")


def test_what_was_drawn_is_shown():
    tracker, paths = Tracker(), [Path("a/1x8x8.png"), Path("a/prompt_0.gif")]
    pictures = [Picture(path, lambda: None) for path in paths]
    writer = SimpleNamespace(pictures=lambda step, values: iter(pictures), count=2)
    drawing = Drawing(writer, 2, tracker, Progress())
    assert drawing.due(RUN)
    assert drawing.missed(RUN)
    drawing.act(RUN)
    assert not drawing.missed(RUN)
    drawing.on_finish(RUN)
    expected = [(4, "samples/1x8x8", paths[0]), (4, "samples/prompt_0", paths[1])]
    expected.append((4, "samples/progress_1x8x8", Path("a/progress_1x8x8.png")))
    assert tracker.shown == [*expected, *expected, "closed"]


def test_nothing_is_missed_where_nothing_is_drawn():
    for count, every in ((0, 2), (1, 3), (1, None)):
        assert not Drawing(SimpleNamespace(count=count), every, Tracker(), Progress()).missed(RUN)


def test_a_picture_that_cannot_be_written_ends_neither_the_run_nor_the_drawing(capsys):
    def fails():
        raise InputError("prompt_0.gif: the generated sample is not finite")

    def full():
        raise OSError(28, "No space left on device", "1x8x8.png")

    names = {"prompt_0.gif": fails, "1x8x8.png": full, "prompt_1.gif": lambda: None}
    drawn = []

    def pictures(step, values):  # other processes draw to the end as well
        for name, write in names.items():
            drawn.append(name)
            yield Picture(Path(name), write)

    tracker = Tracker()
    writer, progress = SimpleNamespace(pictures=pictures, count=3), Progress(full=True)
    Drawing(writer, 2, tracker, progress).on_finish(RUN)
    assert progress.steps == [4]
    assert drawn == list(names)
    warned = capsys.readouterr().err.splitlines()
    assert warned[0] == (
        "warning: samples of step 4: prompt_0.gif: the generated sample is not finite"
    )
    assert "1x8x8.png: No space left on device" in warned[1]
    assert "progress.png: No space left on device" in warned[2]
    assert len(warned) == 3
    assert tracker.shown == [(4, "samples/prompt_1", Path("prompt_1.gif")), "closed"]
