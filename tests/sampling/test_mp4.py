import av
import numpy as np
import pytest

from alload_jax.errors import InputError
from alload_jax.sampling import config
from alload_jax.sampling.pictures import write_grid


def test_a_clip_becomes_an_mp4_with_its_frames(tmp_path):
    clips = np.random.default_rng(0).uniform(-1, 1, (2, 3, 5, 8, 8, 1)).astype(np.float32)
    clips[:, :, 3:] = 1.0
    write_grid(tmp_path / "clip.mp4", clips, ["0", "1", "2"])
    with av.open(str(tmp_path / "clip.mp4")) as container:
        frames = [frame.to_ndarray(format="gray") for frame in container.decode(video=0)]
    assert len(frames) == 5
    middle = frames[4].shape[0] // 2 + 40, frames[4].shape[1] // 2
    assert frames[4][middle] > 230


def test_mp4_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr(config, "has_mp4", lambda: False)
    with pytest.raises(InputError, match=r"install alload-jax\[media\]"):
        config.SamplingConfig(clip_format="mp4")
