import json

import av
import numpy as np
import pytest
import safetensors
from PIL import Image

from alload_jax.errors import InputError
from alload_jax.sampling import pictures
from alload_jax.sampling.pictures import check_format, to_bytes, write_clip


def clip(frames=3, height=4, width=6, channels=1):
    shape = (frames, height, width, channels)
    return np.random.default_rng(0).uniform(-1.2, 1.2, shape).astype(np.float32)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_still_is_its_pixels(tmp_path, channels):
    still = clip(1, channels=channels)
    write_clip(tmp_path / "x.png", still, {})
    with Image.open(tmp_path / "x.png") as picture:
        found = np.asarray(picture).reshape(4, 6, channels)
    np.testing.assert_allclose(found, np.clip((still[0] + 1) * 127.5, 0, 255), atol=1)


def test_zoom_repeats_pixels(tmp_path):
    write_clip(tmp_path / "x.png", clip(1), {})
    write_clip(tmp_path / "large.png", clip(1), {}, zoom=3)
    with Image.open(tmp_path / "x.png") as small, Image.open(tmp_path / "large.png") as large:
        np.testing.assert_array_equal(np.asarray(small).repeat(3, 0).repeat(3, 1), large)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_gif_holds_every_frame_and_loops(tmp_path, channels):
    write_clip(tmp_path / "x.gif", clip(5, channels=channels), {})
    with Image.open(tmp_path / "x.gif") as picture:
        assert (picture.n_frames, picture.size, picture.info["loop"]) == (5, (6, 4), 0)


@pytest.mark.parametrize("channels", [1, 3])
def test_an_mp4_holds_every_frame(tmp_path, channels):
    bright = clip(5, 16, 24, channels)
    bright[3:] = 1.0
    write_clip(tmp_path / "x.mp4", bright, {})
    with av.open(str(tmp_path / "x.mp4")) as container:
        frames = [frame.to_ndarray(format="gray") for frame in container.decode(video=0)]
    assert [frame.shape for frame in frames] == [(16, 24)] * 5
    assert frames[4].min() > 230


def test_latents_are_kept_exactly_beside_the_notes(tmp_path):
    latents = clip(channels=16)
    write_clip(tmp_path / "x.safetensors", latents, {"seed": 3, "shift": 5.0, "sampler": "ü"})
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        assert json.loads(file.metadata()["sampling"]) == {"seed": 3, "shift": 5.0, "sampler": "ü"}
        assert list(file.keys()) == ["latents"]
        np.testing.assert_array_equal(file.get_tensor("latents"), latents)


@pytest.mark.parametrize("suffix", [".png", ".gif", ".mp4", ".safetensors"])
def test_the_same_sample_gives_the_same_bytes_and_replaces_what_was_there(tmp_path, suffix):
    size = (1 if suffix == ".png" else 4, 16, 16, 3)
    first, second = tmp_path / f"a{suffix}", tmp_path / "new" / f"b{suffix.upper()}"
    first.write_text("old")
    notes = {name: name for name in "abcdefgh"}
    for path in (first, second):
        write_clip(path, clip(*size), notes)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == [first.name, second.name]


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    def fail(path, frames, suffix, fps):
        path.write_text("half")
        raise OSError("no space")

    monkeypatch.setattr(pictures, "write_frames", fail)
    (tmp_path / "x.gif").write_text("old")
    with pytest.raises(InputError, match=r"x.gif: cannot be written \(no space\); free disk space"):
        write_clip(tmp_path / "x.gif", clip(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["x.gif"]
    assert (tmp_path / "x.gif").read_text() == "old"


def test_what_is_not_finite_is_refused(tmp_path):
    with pytest.raises(InputError, match="not finite"):
        write_clip(tmp_path / "x.gif", np.full((2, 4, 4, 1), np.nan, np.float32), {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "size", "channels", "message"),
    [
        ("x.jpg", (1, 8, 8), 1, "suffixes .png, .gif, .mp4, .safetensors"),
        ("x", (1, 8, 8), 1, "suffixes"),
        ("x.png", (2, 8, 8), 1, "choose .gif or .mp4"),
        ("x.mp4", (2, 9, 8), 3, "9×8 pixels"),
        ("x.gif", (2, 8, 65536), 1, "8×65536 pixels, but GIF"),
        ("x.gif", (2, 8, 8), None, "need a decoder; give --vae"),
    ],
)
def test_what_cannot_be_written_so_is_refused(tmp_path, name, size, channels, message):
    with pytest.raises(InputError, match=message):
        check_format("--out", tmp_path / name, size, channels)


def test_mp4_without_its_package_is_refused(monkeypatch, tmp_path):
    check_format("--out", tmp_path / "x.mp4", (2, 8, 8), 1)
    monkeypatch.setattr(pictures, "has_mp4", lambda: False)
    with pytest.raises(InputError, match=r"install alload-jax\[media\], or choose .gif"):
        check_format("--out", tmp_path / "x.mp4", (2, 8, 8), 1)


def test_the_levels_of_a_store_of_pixels_come_back():
    levels = np.arange(256)
    for dtype in (np.float16, np.float32):
        stored = (levels / 127.5 - 1).astype(dtype)
        assert to_bytes(stored.astype(np.float32)).tolist() == levels.tolist()
