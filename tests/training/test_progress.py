"""Progress on a terminal and in a log."""

import io
import re

import pytest
from rich.console import Console

from alload_jax.training import progress
from alload_jax.training.progress import ProgressBar


@pytest.mark.parametrize("terminal", [False, True])
def test_steps_done_before_count_for_no_speed(monkeypatch, terminal):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=200)
    with ProgressBar("work", total=110, console=console) as bar:
        bar.skip(90)
        for _ in range(10):
            now[0] += 1.5
            bar.advance("note")
    lines = written.getvalue()
    if terminal:
        assert "100/110" in lines
    else:  # the 10 left take as long as the 10 done
        assert re.findall(r"\d+/110 · note · \d+ s left", lines) == ["97/110 · note · 20 s left"]
