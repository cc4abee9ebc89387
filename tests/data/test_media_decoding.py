"""Frames and pictures as `alload prepare media` decodes them, and files that cannot be used."""

import io
import os
import re
import struct
import zlib
from fractions import Fraction

import av
import numpy as np
import pillow_heif
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from media_helpers import (
    changed,
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
from PIL import Image, ImageCms
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from alload_jax.data.manifest import read_manifest, read_paths
from alload_jax.data.prepare.sources import Source, UnusableError, check_pixels
from alload_jax.data.prepare.videos import (
    Decoded,
    clip_lengths,
    frames_at,
    opened_video,
    video_frames,
)
from alload_jax.errors import InputError


def one(media, out, **changes):
    """The only sample of a folder of media."""
    prepare(media, out, **changes)
    (clip,) = stored(out)
    return clip


def clips_of(out):
    """The clips of each file, by its name without suffix."""
    found = {}
    for path, clip in zip(read_paths(read_manifest(out)), stored(out), strict=True):
        found.setdefault(path.partition(".")[0], []).append(clip)
    return found


@pytest.mark.parametrize(
    ("video", "fps", "expected"),
    [
        ({"rate": 8}, "16", [0, 0, 10, 10, 20, 20, 30, 30, 40]),
        ({"rate": 30}, "15", [0, 20, 40, 60, 80]),  # whose time stamps are in milliseconds
        ({"rate": 60}, "15", [10, 50, 90, 130, 170]),  # shown up to 0.3 places early
        ({"seconds": [0, 0.125, 0.25, 1.0, 1.0625, 1.125]}, "8", [0, 10, *[20] * 6, 30]),
        ({"seconds": [5 + number / 16 for number in range(9)]}, "16", list(range(0, 90, 10))),
    ],
)
def test_frames_are_resampled_by_time_from_their_first(media, tmp_path, video, fps, expected):
    count = len(video.get("seconds", range(20)))
    write_video(media / "a.mkv", grey_frames(range(0, 10 * count, 10)), **video)
    found = levels_of(one(media, tmp_path / "out", fps=fps, max_clips=1))
    assert found[: len(expected)] == expected


@given(
    count=st.integers(1, 90),
    native=st.sampled_from([5, 8, 15, 16, 17, "24000/1001", 24, 25, 30, 50, 60]),
    fps=st.sampled_from([8, 12, 15, 16, "24000/1001", 24]),
    milliseconds=st.booleans(),
)
@example(count=24, native=24, fps=16, milliseconds=True)
@example(count=120, native=24, fps=16, milliseconds=True)
def test_no_frame_of_a_higher_rate_is_shown_twice(count, native, fps, milliseconds):
    native, fps = Fraction(native), Fraction(fps)
    times = [number / native for number in range(count + 1)]
    if milliseconds:
        times = [Fraction(round(1000 * time), 1000) for time in times]
    decoded = (Decoded(n, *times[n : n + 2]) for n in range(count))
    found = [one.frame for one in frames_at(decoded, fps)]
    assert found[-1] == count - 1
    last, end = times[-2] * fps, times[-1] * fps
    assert end - Fraction(3, 10) <= len(found) < max(last + Fraction(17, 10), end + 1)
    for place, number in enumerate(found):
        shown = [n for n in range(count) if times[n] * fps <= place + Fraction(3, 10)]
        assert number == shown[-1]
    if native >= fps:
        assert len(set(found)) == len(found)


def test_time_stamps_that_jump_end_the_video(media, tmp_path):
    for name, jump in (("a", 4000), ("b", 60)):  # longer than a frame is held, or not
        seconds = [*(number / 16 for number in range(9)), 8 / 16 + jump, 8 / 16 + jump + 1]
        write_video(media / f"{name}.mkv", grey_frames([50] * 11), seconds=seconds)
    prepare(media, tmp_path / "out", max_clips=2)
    found = clips_of(tmp_path / "out")
    assert (len(found["a"]), len(found["b"])) == (1, 2)
    (reason,) = skipped(tmp_path / "out").values()
    assert "jump by 4,000 s" in reason


def test_long_videos_are_cut_and_short_ones_shortened_or_skipped(media, tmp_path):
    expected = {1: [1], 4: [1], 8: [5], 9: [9], 17: [9], 28: [9, 9, 9]}
    for count in expected:
        write_video(media / f"{count}.mkv", moving_frames(count))
    for least in (1, 5):
        out = tmp_path / str(least)
        prepare(media, out, min_frames=least)
        found = {int(n): [len(clip) for clip in clips] for n, clips in clips_of(out).items()}
        assert found == {n: each for n, each in expected.items() if each[0] >= least}
    assert skipped(tmp_path / "5").keys() == {"1.mkv", "4.mkv"}
    assert "too short: 4 frames" in skipped(tmp_path / "5")["4.mkv"]
    assert clip_lengths(81) == (81, 65, 49, 33, 17, 9, 5, 1)
    assert [clip_lengths(n) for n in (1, 13)] == [(1,), (13, 9, 5, 1)]


def test_strides_may_leave_gaps_or_overlap(media, tmp_path):
    levels = list(range(0, 240, 8))
    write_video(media / "a.mkv", grey_frames(levels))
    for seconds, most, starts in ((1.0, 9, [0, 16]), (0.25, 9, range(0, 24, 4)), (0.25, 2, [0, 4])):
        out = tmp_path / f"{seconds} {most}"
        prepare(media, out, stride_seconds=seconds, max_clips=most)
        found = [levels_of(clip) for clip in stored(out)]
        assert found == [levels[start : start + 9] for start in starts]


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


def test_media_are_turned_upright(media, tmp_path):
    cases = [
        ((1, 0, 0, 1), (32, 48), [50, 100, 150, 200]),
        ((0, 1, -1, 0), (48, 32), [150, 50, 200, 100]),  # a phone held upright: 90° clockwise
        ((-1, 0, 0, -1), (32, 48), [200, 150, 100, 50]),
        ((0, -1, 1, 0), (48, 32), [100, 200, 50, 150]),
        ((-1, 0, 0, 1), (32, 48), [100, 50, 200, 150]),  # mirrored
        ("exif", (48, 32), [150, 50, 200, 100]),
    ]
    for number, (matrix, *_) in enumerate(cases):
        if matrix == "exif":
            exif = Image.Exif()
            exif[0x0112] = 6  # the camera was turned 90° to the left
            Image.fromarray(quadrants()).save(media / f"{number}.png", exif=exif)
        else:
            path = media / f"{number}.mp4"
            write_video(path, [quadrants()] * 2, codec="mpeg4", pix_fmt="yuv420p")
            set_display_matrix(path, matrix)
    prepare(media, tmp_path / "out")
    for clip, (_, size, expected) in zip(stored(tmp_path / "out"), cases, strict=True):
        assert clip.shape[1:3] == size
        assert corners(clip[0]) == expected


def test_videos_have_the_colours_of_stills(media, tmp_path):
    levels = list(range(0, 256, 51))
    write_video(media / "grey.mkv", grey_frames(levels, 64, 64), pix_fmt="yuv420p")
    stripes = np.full((64, 64, 3), (220, 0, 0), np.uint8)
    stripes[:, np.arange(64) % 8 < 4] = (20, 40, 230)
    write_video(media / "moving.mkv", [stripes])
    Image.fromarray(stripes).save(media / "still.png")
    prepare(media, tmp_path / "out")
    found = clips_of(tmp_path / "out")
    assert np.abs(np.subtract(levels_of(found["grey"][0]), levels[:5])).max() <= 1
    assert np.abs(found["moving"][0] - found["still"][0]).max() <= 1


@pytest.mark.parametrize(
    ("size", "said", "meant"),
    [((64, 64), 2, 601), ((1280, 32), 2, 709), ((32, 578), 2, 709), ((64, 64), 1, 709),
     ((1280, 32), 6, 601)],
)  # fmt: skip
def test_videos_that_do_not_say_their_colours_are_read_as_players_do(
    media, tmp_path, size, said, meant
):
    red, blue = (0.299, 0.114) if meant == 601 else (0.2126, 0.0722)  # by H.273
    r, g, b = colour = np.array([200, 40, 30])
    y = red * r + (1 - red - blue) * g + blue * b
    chroma = (b - y) / (2 - 2 * blue), (r - y) / (2 - 2 * red)
    (width, height), values = size, [16 + y * 219 / 255, *(128 + c * 224 / 255 for c in chroma)]
    planes = np.full((3, height, width), np.round(values)[:, None, None], np.uint8)
    frame = av.VideoFrame.from_ndarray(planes, format="yuv444p")
    frame.colorspace = said
    with av.open(str(media / "x.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=16)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv444p"
        stream.codec_context.colorspace = said
        container.mux([*stream.encode(frame), *stream.encode()])
    prepare(media, tmp_path / "out")
    ((clip,),) = clips_of(tmp_path / "out").values()
    assert np.abs(clip[0] - colour).max() <= 2


def test_large_vp8_with_alpha_is_read_as_without(media, tmp_path):
    red = np.full((32, 1280, 4), (200, 40, 30, 255), np.uint8)
    for name, pix_fmt in (("alpha", "yuva420p"), ("plain", "yuv420p")):
        flags = {"auto-alt-ref": "0", "b": "4M"}
        write_video(media / f"{name}.webm", [red], 16, "libvpx", pix_fmt, **flags)
    prepare(media, tmp_path / "out")
    for name, (clip,) in clips_of(tmp_path / "out").items():
        assert np.abs(clip[0] - red[0, 0, :3]).max() <= 4, name


def comb(frame):
    """Mean difference of a row from the mean of its neighbours."""
    rows = frame.astype(float)
    return np.abs(rows[1:-1] - (rows[:-2] + rows[2:]) / 2).mean()


def test_interlaced_frames_are_deinterlaced(media):
    frames = moving_frames(9, 48, 64)
    for before, frame in zip([frames[0], *frames], frames, strict=False):
        frame[1::2] = np.roll(before, 30, axis=1)[1::2]  # the second field shows another time
    write_video(media / "a.mpg", frames, 25, "mpeg2video", "yuv420p", flags="+ildct+ilme", b="4M")
    with opened_video(Source(media / "a.mpg", 0, (media / "a.mpg").stat().st_size)) as container:
        shown = list(frames_at(video_frames(container), Fraction(25)))
    assert len(shown) == 9
    found = np.mean([comb(each.frame.to_ndarray(format="gray")) for each in shown])
    assert found < 0.4 * np.mean([comb(frame[..., 0]) for frame in frames])


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


def test_odd_sizes_are_resized_and_cut_around_the_centre(media, tmp_path):
    for size in ((33, 47), (33, 333), (41, 37), (200, 33)):
        frame = np.full((*size, 3), 90, np.uint8)
        Image.fromarray(frame).save(media / f"{size[0]}.{size[1]}.png")
        write_video(media / f"{size[0]}.{size[1]}.mkv", [frame])
    wide = np.zeros((32, 40, 3), np.uint8)
    wide[12:20, 16:24] = 200
    Image.fromarray(wide.swapaxes(0, 1)).save(media / "tall.png")
    Image.fromarray(wide).save(media / "wide.png")
    prepare(media, tmp_path / "out")
    *found, tall, cut = stored(tmp_path / "out")
    assert len(found) == 8
    for clip in found:
        assert clip.shape[1] % 16 == clip.shape[2] % 16 == 0
        assert abs(clip - 90).max() < 2
    middle = (each[0, ..., 0] for each in (tall, tall.swapaxes(1, 2), cut, cut.swapaxes(1, 2)))
    for levels in (each[len(each) // 2] for each in middle):
        assert (levels > 100).sum() == 10  # 1.2 times as large, not squeezed
        np.testing.assert_allclose(levels, levels[::-1], atol=2)


def test_the_largest_area_that_needs_little_enlarging_is_taken(media, tmp_path):
    for name, side in (("a", 25), ("b", 26), ("c", 64), ("d", 300)):
        Image.new("RGB", (side, side)).save(media / f"{name}.png")
    prepare(media, tmp_path / "out", area=("32x32", "64x64"))
    assert read_manifest(tmp_path / "out").shape.tolist() == [[1, 32, 32], [1, 64, 64], [1, 64, 64]]
    reason = skipped(tmp_path / "out")["a.png"]
    assert "too small: 25 wide × 25 high would be enlarged 1.28 times" in reason


def test_pictures_of_every_mode_become_rgb_on_white(media, tmp_path):
    for mode in ("RGBA", "LA", "P", "1", "CMYK"):
        suffix = "jpg" if mode == "CMYK" else "png"
        Image.new("RGB", (32, 32), (0, 0, 0)).convert(mode).save(media / f"{mode}.{suffix}")
    picture = np.zeros((32, 32, 4), np.uint8)
    picture[:, 16:] = (200, 0, 0, 255)
    for suffix in ("png", "webp"):
        Image.fromarray(picture).save(media / f"clear {suffix}.{suffix}", lossless=True)
    palette = Image.fromarray((picture[..., 3] > 0).astype(np.uint8), "P")
    palette.putpalette([0, 0, 0, 200, 0, 0])
    palette.save(media / "clear gif.gif", transparency=0)
    write_video(media / "clear mkv.mkv", [picture], pix_fmt="bgra")
    opaque = np.dstack([picture[..., :3], np.full((32, 32), 255, np.uint8)])
    write_video(media / "opaque.mkv", [opaque], pix_fmt="bgra")
    for codec in ("libvpx", "libvpx-vp9"):
        flags = {"auto-alt-ref": "0", "b": "4M"}
        write_video(media / f"clear {codec}.webm", [picture], 16, codec, "yuva420p", **flags)
    for suffix in ("avif", "heif"):
        pillow_heif.register_heif_opener()
        Image.fromarray(picture).save(media / f"clear {suffix}.{suffix}", quality=99)
    sixteen = Image.fromarray(np.where(picture[..., 3] > 0, 0, 70).astype(np.uint16))
    sixteen.save(media / "clear sixteen.png", transparency=70)
    ramp = np.linspace(0, 65535, 32).astype(np.uint16)
    Image.fromarray(np.tile(ramp[:, None], (1, 32))).save(media / "ramp.png")
    prepare(media, tmp_path / "out", files_per_shard=100)
    found = {name: clip for name, (clip,) in clips_of(tmp_path / "out").items()}
    for mode in ("RGBA", "LA", "P", "1", "CMYK"):
        assert abs(found[mode]).max() < 8
    clear = {name: clip for name, clip in found.items() if name.startswith("clear")}
    assert len(clear) == 9
    for name, clip in clear.items():
        assert clip[0, 16, 4].tolist() == pytest.approx([255, 255, 255], abs=2), name
        red = 0 if "sixteen" in name else 200
        assert clip[0, 16, 28].tolist() == pytest.approx([red, 0, 0], abs=4), name
    noted = {n.partition(".")[0] for n, c in changed(tmp_path / "out").items() if len(c) > 1}
    assert noted == clear.keys()
    assert np.allclose(found["ramp"][0, :, 0, 0], ramp / 257, atol=1)


def test_colour_profiles_of_pictures_are_applied(media, tmp_path):
    pillow_heif.register_heif_opener()
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    names = {b"rXYZ": b"gXYZ", b"gXYZ": b"rXYZ"}  # red becomes green
    swapped = re.sub(b"rXYZ|gXYZ", lambda found: names[found[0]], profile)
    red = Image.new("RGB", (32, 32), (200, 0, 0))
    for suffix in ("png", "jpg", "webp", "tif", "heic", "avif"):
        red.save(media / f"{suffix}.{suffix}", quality=99, icc_profile=swapped)
    red.convert("RGBA").save(media / "alpha.png", icc_profile=swapped)
    others = [Image.new("RGB", (32, 32), (200, 0, level)) for level in range(4)]
    red.save(media / "moving.webp", save_all=True, append_images=others, icc_profile=swapped)
    unnamed = profile[:16] + b"R\xe9B " + profile[20:]  # no name of a colour space
    owns = {"plain": None, "srgb": profile, "damaged": swapped[:200], "damaged 2": unnamed}
    for name, own in owns.items():
        red.save(media / f"{name}.png", icc_profile=own)
    tags = ImageFileDirectory_v2()
    tags.tagtype[34675], tags[34675] = 2, "text"  # 34675 is the profile
    red.save(media / "damaged 3.tif", tiffinfo=tags)
    words = (160, 2 << 24, b"mntr", b"GRAY", b"XYZ ", b"acsp", 63190, 65536, 54061)
    linear = struct.pack(">I4xI4s4s4s12x4s28x3i", *words).ljust(128, b"\0")
    linear += struct.pack(">I4sII4s4xIH2x", 1, b"kTRC", 144, 16, b"curv", 1, 256)  # 100 is 168
    grey = Image.new("L", (32, 32), 100)
    sixteen = Image.fromarray(np.full((32, 32), 100 * 257, np.uint16))
    for name, image in {"L": grey, "LA": grey.convert("LA"), "16": sixteen}.items():
        image.save(media / f"grey {name}.png", icc_profile=linear)
    grey.save(media / "grey clear.png", icc_profile=linear, transparency=3)
    prepare(media, tmp_path / "out", files_per_shard=100)
    for name, (clip,) in clips_of(tmp_path / "out").items():
        shown = [200, 0, 0] if name.partition(" ")[0] in owns else [0, 200, 0]
        shown = [168] * 3 if name.startswith("grey") else shown
        assert clip[0, 16, 16].tolist() == pytest.approx(shown, abs=4), name
    noted = {name for name, c in changed(tmp_path / "out").items() if len(c) > 1}
    assert noted == {"damaged.png", "damaged 2.png", "damaged 3.tif"}


def test_colours_are_converted_of_the_pixels_that_are_kept(media, tmp_path, monkeypatch):
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    picture = Image.new("RGB", (320, 640), (90, 90, 90))
    for name, image in {"RGB": picture, "P": picture.quantize()}.items():
        image.save(media / f"{name}.png", icc_profile=profile)
    convert, sizes = ImageCms.profileToProfile, []

    def noted(image, *of, **how):
        sizes.append(image.size)
        return convert(image, *of, **how)

    monkeypatch.setattr(ImageCms, "profileToProfile", noted)
    prepare(media, tmp_path / "out")
    assert sizes == [(32, 64)] * 2
    for name, (clip,) in clips_of(tmp_path / "out").items():
        assert np.abs(clip - 90).max() <= 1, name


@pytest.mark.parametrize(
    ("suffix", "options"),
    [("WebP", {"lossless": True}), ("png", {}), ("apng", {}), ("avif", {"quality": 99})],
)
def test_animated_images_are_videos(media, tmp_path, suffix, options):
    levels = [0, 40, 80, 120, 160]
    frames = [Image.new("RGBA", (32, 32), (level, level, level, 255)) for level in levels]
    frames.append(Image.new("RGBA", (32, 32), (0, 0, 0, 0)))

    def save(name, frames, **more):
        rest = {"append_images": frames[1:], "format": suffix.replace("apng", "png")}
        frames[0].save(media / f"{name}.{suffix}", save_all=True, **rest | options | more)

    save("even", frames, duration=125)
    save("uneven", frames[:2], duration=[125, 500])
    save("one", frames[:1])
    if suffix != "avif":  # whose frames have a duration
        save("hasty", frames[:3], duration=0)
    if "png" in suffix:
        save("poster", frames, duration=125, default_image=True)
    prepare(media, tmp_path / "out", fps="8", frames=5, files_per_shard=9)
    found = {name: levels_of(clip) for name, (clip, *_) in clips_of(tmp_path / "out").items()}
    expected = {"even": levels, "uneven": [0, 40, 40, 40, 40], "one": [0]}
    expected |= {"hasty": [0]} if suffix != "avif" else {}  # three tenths of a second
    expected |= {"poster": [*levels[1:], 255]} if "png" in suffix else {}
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name] == pytest.approx(each, abs=1), name


def png(width=32, height=32, *more, data=None):
    """A PNG file of an 8-bit RGB header, chunks, data and an end."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(97 * 32)) if data is None else data
    found = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", header), *more, (b"IDAT", data), (b"IEND", b"")):
        found += struct.pack(">I", len(body)) + name + body
        found += struct.pack(">I", zlib.crc32(name + body))
    return found


def gif_bomb():
    """A GIF file of 65,535 × 65,535 pixels."""
    screen = struct.pack("<HHBBB", 65535, 65535, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x02\x02\x4c\x01\x00"
    return b"GIF89a" + screen + frame + b";"


def tiff(mode):
    file = io.BytesIO()
    Image.new(mode, (16, 16)).save(file, "TIFF")
    return file.getvalue()


WIDTH = struct.pack("<HHII", 256, 4, 1, 16), struct.pack("<HHII", 256, 4, 1, 2**31 - 1)
TEXT_BOMB = (b"zTXt", b"note\0\0" + zlib.compress(bytes(80_000_000)))
UNUSABLE = {
    "zero.mp4": (b"", "empty file"),
    "zero.png": (b"", "empty file"),
    "bomb.png": (png(60000, 60000), "decompression bomb"),
    "text bomb.png": (png(32, 32, TEXT_BOMB), "damaged image"),
    "bomb.gif": (gif_bomb(), "(Invalid"),
    "bomb.tif": (tiff("L").replace(*WIDTH), "decompression bomb"),
    "floats.tif": (tiff("F"), "image of floats"),
    "cut.png": (png()[:-30], "damaged image"),
    "words.png": (b"no image at all", "not an image"),
    "words.heic": (b"\0\0\0\x18ftypheic" + bytes(99), "not an image"),
    "words.mp4": (b"no video at all" * 40, "not a video"),
    "png.mp4": (png(), "PNG image with the suffix of a video"),
    "riff.mp4": (b"RIFFxxxxWEBPxxxx", "WebP image with the suffix of a video"),
    "wave.mp4": (b"RIFFxxxxWAVExxxx", "not a video"),
    "list.mp4": (b"#EXTM3U\n#EXTINF:9,\nsecret.mkv\n#EXT-X-ENDLIST\n", "not a video"),
    "playlist.ts": (b"#EXTM3U\n#EXTINF:1,\n../secret.txt\n", "not a video"),
    "concat.mp4": (b"ffconcat version 1.0\nfile secret.mkv\n", "not a video"),
    "script.mkv": (b"#!/bin/sh\ntouch /tmp/owned\n", "not a video"),
    "a.bin": (b"12", "suffix .bin"),
    "line\nbreak \x1b[31m.png": (b"no image", "not an image"),
    "\u202e\u2066gnp.exe.png": (b"no image", "not an image"),
    "-rf.png": (b"no image", "not an image"),
    "x" * 250 + ".png": (b"no image", "not an image"),
}
CAPTIONS = (
    *("[" * 100_000 + "]" * 100_000, "NaN", '{"caption": {"a": 1}}'),
    '{"caption": ["\\u0000\\u001b[31m red"]}',
)
"""JSON captions that are no plain text; the first cannot be read."""


def contents_without_links(folder):
    found = (path for path in folder.rglob("*") if path.is_file())
    paths = (path for path in found if "up" not in path.relative_to(folder).parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_pictures_have_at_most_2_27_pixels():
    check_pixels(2**13, 2**14)
    with pytest.raises(UnusableError, match="decompression bomb"):
        check_pixels(2**13, 2**14 + 1)


def test_a_hostile_folder_harms_nothing_and_each_file_has_its_reason(media, tmp_path, monkeypatch):
    (tmp_path / "secret.txt").write_text("secret")
    for name, (data, _) in UNUSABLE.items():
        (media / name).write_bytes(data)
    (media / "folder.mp4").mkdir()
    (media / "link.png").symlink_to("../secret.txt")
    (media / "up").symlink_to("..")
    os.mkfifo(media / "pipe.mp4")
    write_audio(media / "sound.mp4")
    write_video(media / "a.mkv", moving_frames(2)).rename(media / "video.png")
    frames = moving_frames(2, 64, 80)
    write_video(media / "large.mp4", frames, codec="mpeg4", pix_fmt="yuv420p")
    good = Image.new("RGB", (64, 64), (9, 99, 199))
    for number, caption in enumerate(CAPTIONS):
        good.save(media / f"good {number}.png")
        (media / f"good {number}.json").write_text(caption)
    with open(os.fsencode(media) + b"/\xff.png", "wb") as file:  # a name that is not UTF-8
        good.save(file, "PNG")
    monkeypatch.setattr("alload_jax.data.prepare.sources.MOST_PIXELS", 64 * 64)
    before = contents_without_links(tmp_path)
    report = prepare(media, tmp_path / "out")
    after = contents_without_links(tmp_path)
    assert {name: data for name, data in after.items() if not name.startswith("out/")} == before
    found = skipped(tmp_path / "out")
    expected = {name: reason for name, (_, reason) in UNUSABLE.items()}
    expected |= {"link.png": "link out", "up": "not followed", "pipe.mp4": "not a regular file"}
    expected |= {"sound.mp4": "audio only", "large.mp4": "80×64 pixels"}
    expected |= {"video.png": "not an image", "good 0.png": "caption", "good 2.png": "an object"}
    assert found.keys() == expected.keys()
    assert [name for name in expected if expected[name] not in found[name]] == []
    assert all("\n" not in reason for reason in found.values())
    captions = [row["caption"] for row in rows(tmp_path / "out/manifest.parquet")]
    assert sorted(captions) == ["", "", "[31m red"]
    assert report.used == 3


@pytest.mark.parametrize("faststart", [None, "between", "within", "mkv"])
def test_of_a_truncated_video_whole_clips_are_kept(media, tmp_path, faststart):
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 255, (32, 32, 3)).astype(np.uint8) for _ in range(40)]
    flags = {"container": {"options": {"movflags": "+faststart"}}} if faststart else {}
    path, out, report = media / "a.mp4", tmp_path / "out", tmp_path / "report.parquet"
    if faststart == "mkv":  # FFmpeg knows no length of its stream, and its end raises nothing
        path, flags = media / "a.mkv", {}
    write_video(path, frames, codec="mpeg4", pix_fmt="yuv420p", **flags)
    whole = path.read_bytes()
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    # The file ends with a frame, or within one.
    end = packets[23].pos + packets[23].size if faststart == "between" else len(whole) * 6 // 10
    path.write_bytes(whole[:end])
    if not faststart:  # the table of frames stood at the end
        with pytest.raises(InputError, match="no file can be used"):
            prepare(media, out, report=report)
        assert "not a video, or damaged" in rows(report)[0]["reason"]
        assert {path.name for path in tmp_path.iterdir()} == {"media", "report.parquet"}
        return
    prepare(media, out)
    lengths = [len(clip) for clip in stored(out)]
    assert lengths in ([9], [9, 9])
    row, note = rows(out / "skipped.parquet")
    assert (row["path"], row["clips"], row["used"]) == (path.name, len(lengths), False)
    reasons = {"between": "truncated: 1.5 of 2.5 s", "mkv": "of 2.5 s can be decoded"}
    assert reasons.get(faststart, "damaged") in row["reason"]
    assert note == {"path": path.name, "clips": len(lengths), "reason": "no caption", "used": True}


def test_random_damage_never_crashes(media, tmp_path):
    rng = np.random.default_rng(0)
    write_video(media / "good.mkv", moving_frames(9))
    write_video(tmp_path / "a.mp4", moving_frames(20), codec="mpeg4", pix_fmt="yuv420p")
    pillow_heif.register_heif_opener()
    more = {"save_all": True, "append_images": [Image.fromarray(quadrants()[::-1])]}
    kinds = {"a.png": {}, "a.jpg": {}, "a.heic": {}, "a.apng": more, "a.webp": more, "a.avif": more}
    for name, flags in kinds.items():
        Image.fromarray(quadrants()).save(tmp_path / name, **flags)
    for name in ("a.mp4", *kinds):
        whole = np.frombuffer((tmp_path / name).read_bytes(), np.uint8)
        for number in range(12):
            data = whole.copy()
            places = rng.integers(0, len(data), 1 + 4 * number)
            data[places] = rng.integers(0, 256, len(places))
            (media / f"{number}{name}").write_bytes(data.tobytes())
    report = prepare(media, tmp_path / "out", files_per_shard=100)
    assert report.used >= 1
