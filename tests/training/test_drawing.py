"""Samples during training."""

from pathlib import Path
from types import SimpleNamespace

from alload_jax.errors import InputError
from alload_jax.training.callbacks.drawing import Drawing

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


def test_what_was_drawn_is_shown():
    tracker, paths = Tracker(), [Path("a/1x8x8.png"), Path("a/prompt_0.gif")]
    writer = SimpleNamespace(write=lambda step, values: iter(paths), count=2)
    drawing = Drawing(writer, 2, tracker)
    assert drawing.due(RUN)
    drawing.act(RUN)
    drawing.on_finish(RUN)
    expected = [(4, "samples/1x8x8", paths[0]), (4, "samples/prompt_0", paths[1])]
    assert tracker.shown == [*expected, *expected, "closed"]


def test_a_picture_that_cannot_be_drawn_does_not_end_the_run(capsys):
    def write(step, values):
        yield Path("1x8x8.png")
        raise InputError("prompt_0.gif: the generated sample is not finite")

    tracker = Tracker()
    drawing = Drawing(SimpleNamespace(write=write, count=2), 2, tracker)
    drawing.act(RUN)
    drawing.on_finish(RUN)
    warned = capsys.readouterr().err.splitlines()
    line = "warning: samples of step 4: prompt_0.gif: the generated sample is not finite"
    assert warned == [line, line]
    first = (4, "samples/1x8x8", Path("1x8x8.png"))
    assert tracker.shown == [first, first, "closed"]
