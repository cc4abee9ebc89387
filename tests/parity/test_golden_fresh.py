"""The golden files are what diffusers computes today: draws them anew and compares."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("diffusers")

from draw_wan import CASES, GOLDEN, draw

pytestmark = pytest.mark.parity

# Not bit for bit: other CPUs, thread counts and versions of torch sum in another order, which
# moves float32 results in their last bits. Relative to each tensor's largest element.
TOLERANCE = 1e-5
TENSORS = ("transformer/diffusion_pytorch_model", "inputs", "expected")


def config(folder):
    read = json.loads((folder / "transformer" / "config.json").read_text())
    del read["_diffusers_version"]
    return read


def test_golden_folders_are_the_cases():
    assert {folder.name for folder in GOLDEN.iterdir()} == {case.name for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_files_are_fresh(case, tmp_path):
    draw(case, tmp_path)
    golden = GOLDEN / case.name
    assert config(tmp_path) == config(golden)
    for name in TENSORS:
        drawn, kept = (load_file(folder / f"{name}.safetensors") for folder in (tmp_path, golden))
        assert drawn.keys() == kept.keys()
        for key, expected in kept.items():
            assert drawn[key].dtype == expected.dtype
            bound = TOLERANCE * np.abs(expected).max()
            np.testing.assert_allclose(drawn[key], expected, rtol=0, atol=bound, err_msg=key)
