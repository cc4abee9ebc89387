"""`alload report sparsity`: the picture and its command."""

import json

import numpy as np
import pytest
from PIL import Image

from alload_jax.cli import main
from alload_jax.errors import InputError

RED = (0xF8, 0x51, 0x49)


def rows_of(sparsity, sparse):
    """Three steps of two layers with two heads."""
    return [
        {
            "step": 10 * (number + 1),
            "sparsity": np.full((2, 2), share).tolist(),
            "recall": np.full((2, 2), 0.9).tolist(),
            "density": np.full((2, 2), 0.5).tolist(),
            "sparse": on,
        }
        for number, (share, on) in enumerate(zip(sparsity, sparse, strict=True))
    ]


def draw(folder, rows):
    (folder / "layers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", "sparsity", str(folder)]) == 0
    return np.asarray(Image.open(folder / "sparsity.png").convert("RGB")).reshape(-1, 3)


def test_switches_are_marked_and_shares_coloured(tmp_path, capsys):
    never = draw(tmp_path, rows_of([0.1, 0.1, 0.1], [[False, False]] * 3))
    assert not (never == RED).all(axis=1).any()
    switched = draw(tmp_path, rows_of([0.1, 0.5, 0.9], [[False, False]] * 2 + [[True, False]]))
    assert (switched == RED).all(axis=1).any()
    assert "step 30: 1 of 2 layers are sparse" in capsys.readouterr().out
    assert len(np.unique(switched, axis=0)) > len(np.unique(never, axis=0))


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such folder; name a run's folder"):
        main(["report", "sparsity", str(tmp_path / "nowhere")])
    with pytest.raises(InputError, match=r"layers.jsonl holds no sparsity; train with"):
        main(["report", "sparsity", str(tmp_path)])
    (tmp_path / "layers.jsonl").write_text(json.dumps(rows_of([0.1], [[False] * 2])[0]) + "\n")
    with pytest.raises(InputError, match="--out"):
        main(["report", "sparsity", str(tmp_path), "--out", "/nowhere/x.png"])
    with pytest.raises(InputError, match="invalid choice"):
        main(["report", "speed", str(tmp_path)])
