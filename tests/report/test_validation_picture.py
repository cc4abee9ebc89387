"""`alload report validation`: the picture and its command."""

import json

import numpy as np
import pytest
from PIL import Image

from alload_jax.cli import main
from alload_jax.errors import InputError

RED = np.array((0xF8, 0x51, 0x49))


def rows_of(losses, first=10, measured="a"):
    return [
        {
            "step": first + 10 * number,
            "validation/set": measured,
            "validation/samples": 3,
            "validation/loss": loss,
            "validation/loss/1x8x8": loss + 0.1,
            "validation/loss/sigma_0.5": loss - 0.1,
        }
        for number, loss in enumerate(losses)
    ]


def draw(folder, rows):
    steps = [{"step": number, "loss": 1.0} for number in range(1, 50)]
    text = "".join(json.dumps(row) + "\n" for row in [*steps, *rows])
    (folder / "metrics.jsonl").write_text(text)
    assert main(["report", "validation", str(folder)]) == 0
    return np.asarray(Image.open(folder / "validation.png").convert("RGB")).astype(int)


def ring(page):
    """Mean place of the ring, (row, column)."""
    return np.argwhere(np.abs(page - RED).sum(axis=-1) < 12).mean(axis=0)


def test_the_lowest_loss_has_a_ring(tmp_path, capsys):
    early = ring(draw(tmp_path, rows_of([0.5, 0.9, 0.8])))
    assert "lowest loss at step 10 of 30" in capsys.readouterr().out
    late = ring(draw(tmp_path, rows_of([0.9, 0.8, 0.5])))
    assert late[1] > early[1] + 200
    assert abs(late[0] - early[0]) < 20


def test_losses_of_another_set_are_not_drawn(tmp_path, capsys):
    draw(tmp_path, [*rows_of([0.1, 0.2], measured="old"), *rows_of([0.9, 0.8], first=30)])
    assert "lowest loss at step 40 of 40" in capsys.readouterr().out


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(InputError, match=r"report validation: .*nowhere: no such folder; name a"):
        main(["report", "validation", str(tmp_path / "nowhere")])
    for rows in ([], [{"step": 10, "validation/set": "a", "validation/samples": 0}]):
        with pytest.raises(InputError, match=r"holds no validation loss; train with validation"):
            draw(tmp_path, rows)
