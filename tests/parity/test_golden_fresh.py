"""The golden files are what diffusers computes today: draws them anew and compares."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("diffusers")

import draw_hunyuan_video
import draw_wan

pytestmark = pytest.mark.parity

# Not bit for bit: other CPUs, thread counts and versions of torch sum in another order, which
# moves float32 results in their last bits. Relative to each tensor's largest element.
TOLERANCE = 1e-5
OF_ANGLES = 6e-5
"""Of what multiplies sines of up to 1,000, where the values of float32 are 6e-5 apart."""
SMALLEST = 1e-2
"""Gradients that are zero up to rounding have no digits in common."""
TENSORS = ("transformer/diffusion_pytorch_model", "inputs", "expected")


def config(folder):
    read = json.loads((folder / "transformer" / "config.json").read_text())
    del read["_diffusers_version"]
    return read


FAMILIES = (draw_wan, draw_hunyuan_video)
CASES = [
    pytest.param(family, case, id=f"{family.GOLDEN.name}-{case.name}")
    for family in FAMILIES
    for case in family.CASES
]


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_folders_are_the_cases(family):
    folders = {folder.name for folder in family.GOLDEN.iterdir()}
    assert folders == {case.name for case in family.CASES}


@pytest.mark.parametrize(("family", "case"), CASES)
def test_golden_files_are_fresh(family, case, tmp_path):
    family.draw(case, tmp_path)
    golden = family.GOLDEN / case.name
    assert config(tmp_path) == config(golden)
    for name in TENSORS:
        drawn, kept = (load_file(folder / f"{name}.safetensors") for folder in (tmp_path, golden))
        assert drawn.keys() == kept.keys()
        for key, expected in kept.items():
            assert drawn[key].dtype == expected.dtype
            tolerance = OF_ANGLES if "timestep_embedder.linear_1" in key else TOLERANCE
            bound = tolerance * max(np.abs(expected).max(), SMALLEST)
            np.testing.assert_allclose(drawn[key], expected, rtol=0, atol=bound, err_msg=key)
