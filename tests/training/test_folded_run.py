"""A run on latents of four frames, and `alload sample` on its model."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image, ImageSequence
from safetensors.numpy import load_file
from training_runs import Runs

from alload_jax.data.datasets.digits import Digits
from alload_jax.data.record import unfold_frames
from alload_jax.sampling.pictures import to_bytes

GRIDS = [
    {"frames": 1, "height": 8, "width": 8, "rows": 1},
    {"frames": 9, "height": 8, "width": 8, "rows": 1},
]
MOTION = {"name": "digit_motion", "clips": 2, "frames": 5, "height": 8, "width": 8}
SMALL = ["--height", 8, "--width", 8, "--steps", 2]


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    """What starts train.py on digits of four frames a latent."""
    data = tmp_path_factory.mktemp("data") / "digits"
    Digits(mix=((5, 8, 8, 12),)).write(data)
    runs = Runs(tmp_path_factory.mktemp("folded"), data)
    config = runs.tiny()
    config["model"]["in_channels"] = 4
    config["sampling"]["grids"] = GRIDS
    config["objective"] = {"given_first_frame": 0.5}
    runs.config.write_text(yaml.safe_dump(config))
    return runs


@pytest.fixture(scope="module")
def run(folded):
    """The folder of a finished run."""
    folded.finish("--run.steps", "3", "--evaluators", json.dumps([MOTION]))
    return folded.folder / "run"


@pytest.fixture
def sample(run, alload):
    """Runs `alload sample` on the run in an empty folder; returns its status and stderr."""
    return lambda *argv: alload("sample", "--checkpoint", run, *SMALL, *argv)[::2]


def frames_of(path):
    with Image.open(path) as picture:
        return [np.asarray(frame.convert("L")) for frame in ImageSequence.Iterator(picture)]


def test_a_run_draws_and_judges_all_frames(run):
    assert json.loads((run / "data.json").read_text())["vae_stride"] == [4, 1, 1]
    drawn = run / "samples" / "step_0000003"
    assert len(frames_of(drawn / "9x8x8.gif")) == 9
    assert len(frames_of(drawn / "1x8x8.png")) == 1
    summary = json.loads((run / "summary.json").read_text())
    assert summary["jerk_over_travel"] > 0
    assert 0 < summary["jerk_over_travel_real"] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("frames", [1, 17])
def test_a_drawn_clip_has_the_frames_that_were_asked_for(sample, frames):
    line = {"class": 3, "frames": frames}
    lines = [json.dumps(line | {"out": name}) for name in ("x.gif", "x.safetensors")]
    Path("list").write_text("\n".join(lines))
    assert sample("--list", "list") == (0, "")
    latents = load_file("x.safetensors")["latents"]
    assert latents.shape == ((frames - 1) // 4 + 1, 8, 8, 4)
    np.testing.assert_array_equal(frames_of("x.gif"), to_bytes(unfold_frames(latents, 4)[..., 0]))
    if frames > 1:
        with Image.open("x.gif") as picture:
            assert picture.info["duration"] == 110  # 9 pixel frames a second, not a VAE's rate


@pytest.mark.slow
def test_a_given_picture_is_the_first_frame(sample):
    given = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
    Image.fromarray(given).save("given.png")
    assert sample("--class", 3, "--frames", 9, "--image", "given.png", "--out", "x.gif") == (0, "")
    frames = frames_of("x.gif")
    assert len(frames) == 9
    np.testing.assert_allclose(frames[0].astype(int), given, atol=1)


def test_frames_between_latents_are_refused(sample):
    status, said = sample("--class", 3, "--frames", 16, "--out", "x.gif")
    assert status == 2
    assert said.startswith("error: alload sample: --frames is 16, which a VAE stride of 4")
    assert said.endswith("nearest: 13 and 17\n")
    assert not Path("x.gif").exists()


def grid(frames, height, width):
    sizes = {"frames": frames, "height": height, "width": width}
    return ("--sampling.grids", json.dumps([sizes]))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            grid(3, 8, 8),
            "(3, 8, 8) is not a multiple of model.patch_size (1, 4, 4) in latents of 1 fr",
        ),
        (grid(5, 8, 10), "sampling.grids: (5, 8, 10) is not a multiple"),
        (grid(1, 2147483648, 8), "sampling.grids: (1, 2147483648, 8) takes more than"),
        (("--evaluators", json.dumps([MOTION | {"frames": 6}])), "6×8×8 pixels, which"),
    ],
)
def test_what_does_not_fit_the_latents_is_one_line(folded, flags, said):
    assert said in folded.refused("--run.folder", "refused", *flags)
