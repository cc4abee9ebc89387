"""Samples and grids of them as PNG, GIF, MP4 and files of latents."""

import ctypes
import json

import av
import numpy as np
import pytest
import safetensors
from looks import assert_looks
from PIL import Image, ImageSequence

from alload_jax.errors import InputError
from alload_jax.sampling import config, pictures
from alload_jax.sampling.pictures import (
    cell_box,
    check_format,
    clip_suffix,
    to_bytes,
    write_clip,
    write_frames,
    write_grid,
)


def clip(*shape):
    """[frames, height, width, channels]."""
    return np.random.default_rng(0).uniform(-1.2, 1.2, shape).astype(np.float32)


def frames_of(path):
    """The frames of an MP4 in grey, and its frames per second."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="gray") for frame in container.decode(video=0)]
        return frames, float(container.streams.video[0].average_rate)


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("channels", [1, 3])
def test_a_still_is_its_pixels_enlarged_sharply(tmp_path, channels):
    still = clip(1, 4, 6, channels)
    for zoom in (1, 3):
        write_clip(tmp_path / "x.png", still, {}, zoom=zoom)
        with Image.open(tmp_path / "x.png") as picture:
            found = np.asarray(picture).reshape(4 * zoom, 6 * zoom, channels)
        levels = np.rint(np.clip((still[0] + 1) * 127.5, 0, 255))
        np.testing.assert_array_equal(found, levels.repeat(zoom, 0).repeat(zoom, 1))


@pytest.mark.parametrize(("fps", "duration"), [(None, 110), (40, 20), (500, 10)])
def test_a_gif_holds_every_frame_and_loops(tmp_path, fps, duration):
    write_clip(tmp_path / "x.gif", clip(5, 4, 6, 3), {}, fps=fps)
    with Image.open(tmp_path / "x.gif") as picture:
        assert (picture.n_frames, picture.size, picture.info["loop"]) == (5, (6, 4), 0)
        assert picture.info["duration"] == duration


@pytest.mark.parametrize(("count", "channels"), [(5, 1), (5, 3), (1, 3)])
def test_an_mp4_holds_every_frame(tmp_path, count, channels):
    bright = clip(count, 17, 25, channels)  # MP4 has even sizes
    bright[count // 2 :] = 1.0
    bright[count // 2 :, :8, :8] = -1.0
    write_clip(tmp_path / "x.mp4", bright, {})
    frames, fps = frames_of(tmp_path / "x.mp4")
    assert [frame.shape for frame in frames] == [(16, 24)] * count
    expected = np.pad(np.zeros((8, 8)), ((0, 8), (0, 16)), constant_values=255)
    assert np.abs(frames[-1] - expected).max() < 25
    assert fps == pytest.approx(9)


def test_an_mp4_says_how_its_colours_are_stored(tmp_path):
    colour = np.float32([200, 40, 30]) / 127.5 - 1
    write_clip(tmp_path / "x.mp4", np.broadcast_to(colour, (2, 64, 64, 3)), {})
    with av.open(str(tmp_path / "x.mp4")) as container:
        frame = next(container.decode(video=0))
    # By H.273, BT.709 and limited range, which players take where an HD file says nothing.
    said = (frame.colorspace, frame.color_primaries, frame.color_trc, frame.color_range)
    assert said == (1, 1, 1, 1)
    y, cb, cr = (np.frombuffer(plane, np.uint8)[0] for plane in frame.planes)
    y, cb, cr = (y - 16.0) / 219, (cb - 128.0) / 224, (cr - 128.0) / 224
    red, blue = y + 1.5748 * cr, y + 1.8556 * cb
    green = (y - 0.2126 * red - 0.0722 * blue) / 0.7152
    assert np.multiply([red, green, blue], 255) == pytest.approx([200, 40, 30], abs=3)


def test_latents_are_kept_exactly_beside_the_notes(tmp_path):
    latents = clip(3, 4, 6, 16)
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
    for path, names in ((first, "abcdefgh"), (second, "hgfedcba")):
        write_clip(path, clip(*size), dict.fromkeys(names, 1))
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == [first.name, second.name]


def test_an_mp4_does_not_depend_on_what_memory_held_before(tmp_path):
    mallopt, written = ctypes.CDLL(None).mallopt, set()
    for held in (0, 85, 170):
        mallopt(-6, held)  # M_PERTURB: fills what is allocated from now on
        try:
            write_clip(tmp_path / "x.mp4", clip(5, 64, 96, 3), {})
        finally:
            mallopt(-6, 0)
        written.add((tmp_path / "x.mp4").read_bytes())
    assert len(written) == 1


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    def fail(path, frames, suffix, fps=None):
        path.write_text("half")
        raise OSError("no space")

    monkeypatch.setattr(pictures, "write_frames", fail)
    (tmp_path / "x.gif").write_text("old")
    with pytest.raises(InputError, match=r"x.gif: cannot be written \(no space\); free disk space"):
        write_clip(tmp_path / "x.gif", clip(3, 4, 6, 1), {})
    with pytest.raises(InputError, match="not finite"):
        write_clip(tmp_path / "x.gif", np.full((2, 4, 4, 1), np.nan, np.float32), {})
    with pytest.raises(OSError, match="no space"):
        write_grid(tmp_path / "x.gif", clip(3, 4, 6, 1)[None, None], ["0"])
    assert [path.name for path in tmp_path.iterdir()] == ["x.gif"]
    assert (tmp_path / "x.gif").read_text() == "old"


@pytest.mark.parametrize(
    ("name", "size", "channels", "message"),
    [
        ("x.jpg", (1, 8, 8), 1, "suffixes .png, .gif, .mp4, .safetensors"),
        ("x.png", (2, 8, 8), 1, "choose .gif or .mp4"),
        ("x.mp4", (2, 9, 8), 3, "9×8 pixels"),
        ("x.mp4", (2, 8, 9), 3, "8×9 pixels"),
        ("x.gif", (2, 8, 65536), 1, "8×65536 pixels, but GIF"),
        ("x.mp4", (2, 16386, 8), 3, "16386×8 pixels, but MP4 supports sides up to 16384"),
        ("x.gif", (2, 8, 8), None, "need a decoder; give --vae"),
        ("x.PNG", (1, 9, 9), 3, None),
        ("x.mp4", (2, 8, 8), 1, None),
        ("x.gif", (2, 9, 65535), 1, None),
        ("x.mp4", (2, 16384, 8), 1, None),
        ("x.safetensors", (2, 9, 9), None, None),
    ],
)
def test_what_cannot_be_written_so_is_refused(tmp_path, name, size, channels, message):
    if message is None:
        check_format("--out", tmp_path / name, size, channels)
    else:
        with pytest.raises(InputError, match=message):
            check_format("--out", tmp_path / name, size, channels)


def test_mp4_without_its_package_and_unknown_formats_are_refused(monkeypatch, tmp_path):
    for module in (pictures, config):
        monkeypatch.setattr(module, "has_mp4", lambda: False)
    with pytest.raises(InputError, match=r"install alload-jax\[media\], or choose .gif"):
        check_format("--out", tmp_path / "x.mp4", (2, 8, 8), 1)
    with pytest.raises(InputError, match=r"install alload-jax\[media\]"):
        config.SamplingConfig(clip_format="mp4")
    with pytest.raises(ValueError, match="jpg is no format"):
        write_frames(tmp_path / "x.jpg", [], ".jpg")


def test_the_levels_of_a_store_of_pixels_come_back():
    levels = np.arange(256)
    for dtype in (np.float16, np.float32):
        stored = (levels / 127.5 - 1).astype(dtype)
        assert to_bytes(stored.astype(np.float32)).tolist() == levels.tolist()


# ---------------------------------------------------------------- grids


def grid(folder, clips, headers=None):
    """The frames of a written grid."""
    headers = [str(n) for n in range(clips.shape[1])] if headers is None else headers
    path = folder / f"grid{clip_suffix(clips.shape[2], 'gif')}"
    write_grid(path, clips, headers)
    with Image.open(path) as image:
        assert image.format == path.suffix[1:].upper()
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]


def cell(page, row, column, columns, height, width):
    left, top, right, bottom = cell_box(row, column, columns, height, width)
    return page[top:bottom, left:right]


def test_grids_are_as_large_as_fits_with_headers_above(tmp_path):
    for rows, columns, height, width, looks in (
        (2, 12, 5, 40, (532, 48, -0.36)),
        (3, 2, 40, 8, (892, 6642, -6.77)),
        (1, 300, 8, 8, (3604, 42, -1.54)),
    ):
        clips = clip(rows * columns, height, width, 1).reshape(rows, columns, 1, height, width, 1)
        write_grid(tmp_path / "x.png", clips, [f"{n}" for n in range(columns)])
        assert_looks(Image.open(tmp_path / "x.png"), looks)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("frames", [1, 3])
def test_cells_show_their_samples_frame_by_frame_enlarged_but_not_blurred(
    tmp_path, frames, channels
):
    dtype = np.float16 if channels == 1 else np.float32
    clips = np.random.default_rng(0).uniform(-1.2, 1.2, (2, 3, frames, 4, 8, channels))
    clips = np.sign(clips).astype(dtype) if frames > 1 else clips.astype(dtype)
    pages = grid(tmp_path, clips)
    assert len(pages) == frames
    for n, row, column in np.ndindex(frames, 2, 3):
        found = cell(pages[n], row, column, 3, 4, 8).astype(int)
        levels = np.clip((clips[row, column, n].astype(np.float64) + 1) * 127.5, 0, 255)
        zoom = found.shape[0] // 4
        expected = np.broadcast_to(levels, (4, 8, 3)).repeat(zoom, 0).repeat(zoom, 1)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1)


def test_a_grid_of_clips_becomes_an_mp4_with_its_frames(tmp_path):
    clips = np.random.default_rng(0).uniform(-1, 1, (2, 3, 5, 8, 9, 1)).astype(np.float32)
    clips[:, :, 3:] = 1.0
    write_grid(tmp_path / "clip.mp4", clips, ["0", "1", "2"])
    frames, _ = frames_of(tmp_path / "clip.mp4")
    assert len(frames) == 5
    assert cell(frames[4], 1, 2, 3, 8, 9)[8:-8, 8:-8].min() > 230
