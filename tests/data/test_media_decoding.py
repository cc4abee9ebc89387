"""Frames and pictures as `alload prepare media` decodes them."""

import io
import struct
import zlib
from fractions import Fraction

import av
import numpy as np
import pytest
from media_helpers import (
    grey_frames,
    levels_of,
    moving_frames,
    prepare,
    rows,
    set_display_matrix,
    skipped,
    stored,
    write_audio,
    write_video,
)
from PIL import Image

from alload_jax.data.manifest import read_manifest
from alload_jax.data.prepare.sources import Source
from alload_jax.data.prepare.videos import frames_at, opened_video
from alload_jax.errors import InputError


@pytest.fixture
def media(tmp_path):
    folder = tmp_path / "media"
    folder.mkdir()
    return folder


def one(media, out, **changes):
    """The only sample of a folder of media."""
    prepare(media, out, **changes)
    (clip,) = stored(out)
    return clip


def refused(media, out):
    """The reason why the only file of a folder cannot be used."""
    report = out.with_name("report.parquet")
    with pytest.raises(InputError, match="no file can be used"):
        prepare(media, out, report=report)
    assert not out.exists()
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(out.name)] == []
    (row,) = rows(report)
    return row["reason"]


# ---------------------------------------------------------------- time


@pytest.mark.parametrize(
    ("rate", "fps", "expected"),
    [
        (16, "16", [0, 10, 20, 30, 40, 50, 60, 70, 80]),
        (16, "8", [0, 20, 40, 60, 80]),
        (8, "16", [0, 0, 10, 10, 20, 20, 30, 30, 40]),
        (30, "15", [0, 20, 40, 60, 80]),  # whose time stamps are rounded to milliseconds
        (60, "15", [10, 50, 90, 130, 170]),  # shown up to 0.3 places early
    ],
)
def test_frames_are_resampled_by_time(media, tmp_path, rate, fps, expected):
    write_video(media / "a.mkv", grey_frames(range(0, 200, 10)), rate)
    found = levels_of(one(media, tmp_path / "out", fps=fps, max_clips=1))
    assert found[: len(expected)] == expected


@pytest.mark.parametrize(
    ("seconds", "fps", "expected"),
    [
        ([0, 0.125, 0.25, 1.0, 1.0625, 1.125], "8", [0, 10, 20, 20, 20, 20, 20, 20, 30]),
        ([5 + number / 16 for number in range(9)], "16", list(range(0, 90, 10))),  # starts late
    ],
)
def test_presentation_times_count_from_their_first(media, tmp_path, seconds, fps, expected):
    levels = range(0, 10 * len(seconds), 10)
    write_video(media / "a.mkv", grey_frames(levels), seconds=seconds)
    assert levels_of(one(media, tmp_path / "out", fps=fps)) == expected


def test_time_stamps_that_jump_end_the_video(media, tmp_path):
    seconds = [*(number / 16 for number in range(9)), 4000, 4001]
    write_video(media / "a.mkv", grey_frames([50] * 11), seconds=seconds)
    prepare(media, tmp_path / "out")
    assert len(stored(tmp_path / "out")) == 1
    assert "jump by 4,000 s" in skipped(tmp_path / "out")["a.mkv"]


# ---------------------------------------------------------------- clips


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [1]), (4, [1]), (8, [5]), (9, [9]), (17, [9]), (28, [9, 9, 9])]
)
def test_long_videos_are_cut_and_short_ones_shortened(media, tmp_path, count, expected):
    write_video(media / "a.mkv", moving_frames(count))
    prepare(media, tmp_path / "out")
    assert [len(clip) for clip in stored(tmp_path / "out")] == expected


def test_strides_may_leave_gaps_or_overlap(media, tmp_path):
    levels = list(range(0, 240, 8))
    write_video(media / "a.mkv", grey_frames(levels))
    for seconds, starts in ((1.0, [0, 16]), (0.25, [0, 4, 8, 12, 16, 20])):
        out = tmp_path / str(seconds)
        prepare(media, out, stride_seconds=seconds)
        assert [levels_of(clip) for clip in stored(out)] == [
            levels[start : start + 9] for start in starts
        ]
    prepare(media, tmp_path / "few", stride_seconds=0.25, max_clips=2)
    assert len(stored(tmp_path / "few")) == 2


def test_videos_below_the_least_length_are_skipped(media, tmp_path):
    write_video(media / "a.mkv", moving_frames(7))
    assert len(one(media, tmp_path / "out", min_frames=5)) == 5
    write_video(media / "b.mkv", moving_frames(4))
    prepare(media, tmp_path / "both", min_frames=5)
    assert "too short: 4 frames" in skipped(tmp_path / "both")["b.mkv"]


# ---------------------------------------------------------------- direction, form


def quadrants(height=32, width=48):
    """A picture whose corners differ: top left 50, top right 100, bottom left 150, else 200."""
    picture = np.full((height, width, 3), 50, np.uint8)
    picture[: height // 2, width // 2 :] = 100
    picture[height // 2 :, : width // 2] = 150
    picture[height // 2 :, width // 2 :] = 200
    return picture


def corners(picture):
    places = ((3, 3), (3, -4), (-4, 3), (-4, -4))
    return [round(float(picture[place].mean()) / 50) * 50 for place in places]


@pytest.mark.parametrize(
    ("matrix", "size", "expected"),
    [
        ((1, 0, 0, 1), (32, 48), [50, 100, 150, 200]),
        ((0, 1, -1, 0), (48, 32), [150, 50, 200, 100]),  # a phone held upright: 90° clockwise
        ((-1, 0, 0, -1), (32, 48), [200, 150, 100, 50]),
        ((0, -1, 1, 0), (48, 32), [100, 200, 50, 150]),
        ((-1, 0, 0, 1), (32, 48), [100, 50, 200, 150]),  # mirrored
        ("exif", (48, 32), [150, 50, 200, 100]),
    ],
)
def test_media_are_turned_upright(media, tmp_path, matrix, size, expected):
    if matrix == "exif":
        exif = Image.Exif()
        exif[0x0112] = 6  # the camera was turned 90° to the left
        Image.fromarray(quadrants()).save(media / "a.png", exif=exif)
    else:
        write_video(media / "a.mp4", [quadrants()] * 2, codec="mpeg4", pix_fmt="yuv420p")
        set_display_matrix(media / "a.mp4", matrix)
    clip = one(media, tmp_path / "out")
    assert clip.shape[1:3] == size
    assert corners(clip[0]) == expected


def test_interlaced_frames_are_deinterlaced(media, tmp_path):
    frames = moving_frames(9, 48, 64)
    for before, frame in zip([frames[0], *frames], frames, strict=False):
        frame[1::2] = np.roll(before, 30, axis=1)[1::2]  # the second field shows another time
    write_video(media / "a.mpg", frames, 25, "mpeg2video", "yuv420p", flags="+ildct+ilme", b="4M")
    source = Source(media / "a.mpg", 0, (media / "a.mpg").stat().st_size)
    with av.open(str(media / "a.mpg")) as container:
        assert next(container.decode(video=0)).interlaced_frame
    with opened_video(source) as container:
        found = [
            shown.frame.to_ndarray(format="gray") for shown in frames_at(container, Fraction(25))
        ]
    raw = np.mean([comb(frame[..., 0]) for frame in frames])
    assert len(found) == 9
    assert np.mean([comb(frame) for frame in found]) < 0.4 * raw


def comb(frame):
    """Mean difference of a row from the mean of its neighbours."""
    rows = frame.astype(float)
    return np.abs(rows[1:-1] - (rows[:-2] + rows[2:]) / 2).mean()


def test_anamorphic_videos_get_square_pixels(media, tmp_path):
    with av.open(str(media / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=16)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(16, 9)
        frame = av.VideoFrame.from_ndarray(quadrants(32, 32), format="rgb24")
        container.mux([*stream.encode(frame), *stream.encode()])
    clip = one(media, tmp_path / "out", area=("32x64",))
    assert clip.shape == (1, 32, 64, 3)
    assert corners(clip[0]) == [50, 100, 150, 200]


@pytest.mark.parametrize(
    ("size", "suffix"),
    [((33, 47), ".png"), ((33, 333), ".png"), ((41, 37), ".mkv"), ((200, 33), ".mkv")],
)
def test_odd_sizes_are_resized_and_cut(media, tmp_path, size, suffix):
    frame = np.full((*size, 3), 90, np.uint8)
    if suffix == ".png":
        Image.fromarray(frame).save(media / "a.png")
    else:
        write_video(media / "a.mkv", [frame])
    clip = one(media, tmp_path / "out")
    assert clip.shape[1] % 16 == clip.shape[2] % 16 == 0
    assert abs(clip - 90).max() < 2


def test_the_largest_area_that_needs_little_enlarging_is_taken(media, tmp_path):
    for name, side in (("a", 25), ("b", 26), ("c", 64), ("d", 300)):
        Image.new("RGB", (side, side)).save(media / f"{name}.png")
    prepare(media, tmp_path / "out", area=("32x32", "64x64"))
    assert read_manifest(tmp_path / "out").shape.tolist() == [[1, 32, 32], [1, 64, 64], [1, 64, 64]]
    reason = skipped(tmp_path / "out")["a.png"]
    assert "too small: 25 wide × 25 high would be enlarged 1.28 times" in reason


# ---------------------------------------------------------------- colours


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "CMYK"])
def test_pictures_of_every_mode_become_rgb(media, tmp_path, mode):
    path = media / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.new("RGB", (32, 32), (0, 0, 0)).convert(mode).save(path)
    assert abs(one(media, tmp_path / "out")).max() < 8


@pytest.mark.parametrize("name", ["a.png", "a.gif", "a.webp", "a.mkv"])
def test_what_is_transparent_becomes_white(media, tmp_path, name):
    picture = np.zeros((32, 32, 4), np.uint8)
    picture[:, 16:] = (200, 0, 0, 255)
    if name == "a.mkv":
        write_video(media / name, [picture], pix_fmt="bgra")
    elif name == "a.gif":
        palette = Image.fromarray((picture[..., 3] > 0).astype(np.uint8), "P")
        palette.putpalette([0, 0, 0, 200, 0, 0])
        palette.save(media / name, transparency=0)
    else:
        Image.fromarray(picture).save(media / name, lossless=True)
    clip = one(media, tmp_path / "out")
    assert clip[0, 16, 4].tolist() == pytest.approx([255, 255, 255], abs=2)
    assert clip[0, 16, 28].tolist() == pytest.approx([200, 0, 0], abs=2)


def test_sixteen_bits_are_scaled_to_eight(media, tmp_path):
    ramp = np.linspace(0, 65535, 32).astype(np.uint16)
    Image.fromarray(np.tile(ramp[:, None], (1, 32))).save(media / "a.png")
    clip = one(media, tmp_path / "out")
    assert np.allclose(clip[0, :, 0, 0], ramp / 257, atol=1)


# ---------------------------------------------------------------- files that cannot be used


def bomb():
    """A PNG file of 60,000 × 60,000 pixels in 100 bytes."""
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 99)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n"
    for name, body in parts:
        data += struct.pack(">I", len(body)) + name + body
        data += struct.pack(">I", zlib.crc32(name + body))
    return data


def png():
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.mp4", b"", "empty file"),
        ("a.png", bomb(), "decompression bomb"),
        ("a.png", png()[:-30], "damaged image"),
        ("a.png", b"no image at all", "not an image"),
        ("a.mp4", b"no video at all" * 40, "not a video"),
        ("a.mp4", png(), "PNG image with the suffix of a video"),
        ("a.mp4", b"#EXTM3U\n#EXTINF:9,\nsecret.mkv\n#EXT-X-ENDLIST\n", "not a video"),
        ("a.mp4", b"ffconcat version 1.0\nfile secret.mkv\n", "not a video"),
        ("a.bin", b"12", "suffix .bin"),
    ],
)
def test_files_that_cannot_be_used_are_listed(media, tmp_path, name, data, reason):
    (media / name).write_bytes(data)
    assert reason in refused(media, tmp_path / "out")


def test_media_of_other_kinds_and_video_bombs_are_listed(media, tmp_path, monkeypatch):
    good = Image.new("RGB", (40, 40))
    good.save(media / "good.png")
    write_audio(media / "audio.mp4")
    write_video(media / "a.mkv", moving_frames(2)).rename(media / "video.png")
    frames = moving_frames(2, 64, 64)
    write_video(media / "bomb.mp4", frames, codec="mpeg4", pix_fmt="yuv420p")
    monkeypatch.setattr("alload_jax.data.prepare.images.MOST_PIXELS", 64 * 63)
    prepare(media, tmp_path / "out")
    found = skipped(tmp_path / "out")
    assert found.keys() == {"audio.mp4", "video.png", "bomb.mp4"}
    for name, reason in (("audio", "audio only"), ("bomb", "64×64 pixels")):
        assert reason in found[f"{name}.mp4"]
    assert "not an image" in found["video.png"]


@pytest.mark.parametrize("faststart", [False, True])
def test_of_a_truncated_video_whole_clips_are_kept(media, tmp_path, faststart):
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 255, (32, 32, 3)).astype(np.uint8) for _ in range(40)]
    flags = {"container": {"options": {"movflags": "+faststart"}}} if faststart else {}
    path = media / "a.mp4"
    write_video(path, frames, codec="mpeg4", pix_fmt="yuv420p", **flags)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    if not faststart:  # the table of frames stood at the end
        assert "not a video, or damaged" in refused(media, tmp_path / "out")
        return
    prepare(media, tmp_path / "out")
    lengths = [len(clip) for clip in stored(tmp_path / "out")]
    assert lengths in ([9], [9, 9])
    (row,) = rows(tmp_path / "out" / "skipped.parquet")
    assert (row["path"], row["clips"]) == ("a.mp4", len(lengths))
    assert "damaged" in row["reason"] or "truncated" in row["reason"]


def test_random_damage_never_crashes(media, tmp_path):
    rng = np.random.default_rng(0)
    write_video(media / "good.mkv", moving_frames(9))
    write_video(tmp_path / "a.mp4", moving_frames(20), codec="mpeg4", pix_fmt="yuv420p")
    Image.fromarray(quadrants()).save(tmp_path / "a.png")
    Image.fromarray(quadrants()).save(tmp_path / "a.jpg")
    for name in ("a.mp4", "a.png", "a.jpg"):
        whole = np.frombuffer((tmp_path / name).read_bytes(), np.uint8)
        for number in range(12):
            data = whole.copy()
            places = rng.integers(0, len(data), 1 + 4 * number)
            data[places] = rng.integers(0, 256, len(places))
            (media / f"{number}{name}").write_bytes(data.tobytes())
    report = prepare(media, tmp_path / "out", files_per_shard=100)
    assert report.used >= 1
