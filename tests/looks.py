"""Pictures that look as when they were last looked at."""

from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

PINS = dict(
    line.split("==")
    for line in (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
    if "==" in line
)


def assert_looks(picture, expected):
    """Compares its size, and the sum of its colours, each with a factor of its place.

    Other versions of what draws may draw otherwise.
    """
    values = np.asarray(picture.convert("RGB").reduce(7)).ravel() / 255
    found = (*picture.size, float(np.cos(np.arange(values.size)) @ values))
    if all(version(name) == PINS[name] for name in ("matplotlib", "pillow")):
        assert found == pytest.approx(expected, abs=0.02)
