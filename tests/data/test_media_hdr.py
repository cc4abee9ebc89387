"""HDR, tone-mapped, against the formulas and matrices that ITU-R BT.2100, 2087 and 1886 print."""

import io
import struct
import zlib
from fractions import Fraction

import av
import numpy as np
import pillow_heif
import pytest
from hypothesis import given
from hypothesis import strategies as st
from media_helpers import changed, prepare, skipped, stored
from PIL import Image, ImageCms

from alload_jax.data.manifest import read_manifest, read_paths
from alload_jax.data.prepare.sources import from_wide, tone_mapped

PQ, HLG = 16, 18
TO_2020 = np.array([[0.6274, 0.3293, 0.0433], [0.0691, 0.9195, 0.0114], [0.0164, 0.0880, 0.8956]])
"""Linear BT.709 to BT.2020, as BT.2087 prints it."""
TO_P3 = np.array([[0.8225, 0.1775, 0.0], [0.0332, 0.9668, 0.0], [0.0171, 0.0724, 0.9105]])
LUMA = np.array([0.2627, 0.6780, 0.0593])


def pq(nits):
    """Signal of PQ for light, by the inverse EOTF of BT.2100."""
    power = (np.asarray(nits) / 10_000) ** 0.1593017578125
    return ((0.8359375 + 18.8515625 * power) / (1 + 18.6875 * power)) ** 78.84375


def hlg(nits):
    """Signal of HLG for [..., 3] light on a screen of 1000 cd/m², by inverse OOTF and OETF."""
    luminance = (nits @ LUMA)[..., None]
    scene = nits / 1000 * (np.maximum(luminance, 1e-9) / 1000) ** (1 / 1.2 - 1)
    upper = 0.17883277 * np.log(np.maximum(12 * scene - 0.28466892, 1e-9)) + 0.55991073
    return np.where(scene <= 1 / 12, np.sqrt(3 * scene), upper)


def sdr(nits):
    """Code of 8 bits that BT.1886 shows as light, where 203 cd/m² are white."""
    return 255 * (np.asarray(nits) / 203) ** (1 / 2.4)


def codes(signal, most=65535):
    return np.round(signal * most).astype(np.uint16 if most > 255 else np.uint8)


def test_signals_of_the_standards_are_known():
    assert pq([100, 203, 1000]) == pytest.approx([0.5081, 0.5807, 0.7518], abs=1e-4)
    assert hlg(np.full((1, 3), 203.0))[0] == pytest.approx(0.75, abs=1e-3)


@pytest.mark.parametrize(("transfer", "signal"), [(PQ, pq), (HLG, hlg)])
def test_light_up_to_reference_white_is_kept_and_more_is_rolled_off(transfer, signal):
    nits = np.concatenate([np.linspace(0, 160, 400), [203, 400, 1000]])
    grey = np.repeat(nits[:, None], 3, 1)
    found = tone_mapped(codes(signal(grey)), 9, transfer).astype(int)
    assert np.ptp(found, axis=1).max() <= 1
    assert abs(found[:400, 0] - sdr(nits[:400])).max() <= 1
    assert 240 <= found[400, 0] < found[401, 0] < found[402, 0] <= 255
    ramp = np.repeat(np.arange(65536, dtype=np.uint16)[:, None], 3, 1)
    assert (np.diff(tone_mapped(ramp, 9, transfer).astype(int), axis=0) >= 0).all()
    ends = tone_mapped(ramp[[0, -1]], 9, transfer).tolist()
    assert ends == [[0] * 3, [255 - (transfer == HLG)] * 3]
    eight = tone_mapped(codes(signal(grey), 255), 9, transfer).astype(int)
    assert abs(eight - found).max() <= 6  # steps of 8 bits


unit = st.floats(0, 1)


@pytest.mark.parametrize(("transfer", "signal"), [(PQ, pq), (HLG, hlg)])
@given(colour=st.tuples(unit, unit, unit))
def test_colours_of_bt709_are_kept(transfer, signal, colour):
    nits = 160 * np.array([colour])
    for primaries, matrix in ((9, TO_2020), (2, TO_2020), (1, np.eye(3)), (12, TO_P3)):
        if transfer == HLG and primaries in (1, 12):
            continue  # its luminance would need other weights
        found = tone_mapped(codes(signal(nits @ matrix.T)), primaries, transfer)
        light = 203 * (found / 255) ** 2.4
        assert abs(light - nits).max() < 0.02 * nits.max() + 0.1


@given(colour=st.tuples(unit, unit, unit))
def test_wide_gamut_of_standard_range_keeps_the_colours_of_bt709(colour):
    for primaries, matrix in ((9, TO_2020), (12, TO_P3)):
        signal = codes((np.array([colour]) @ matrix.T).clip(0) ** (1 / 2.4), 255)
        # Half a code of the signal, and half of the result.
        slack = 3 * abs((signal / 255) ** 2.4 - ((signal + 1) / 255) ** 2.4).max() + 0.005
        assert abs((from_wide(signal, primaries) / 255) ** 2.4 - [colour]).max() < slack
        grey = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, 1)
        assert abs(from_wide(grey, primaries).astype(int) - grey).max() <= 1


@given(colour=st.tuples(unit, unit, unit), nits=st.floats(50, 4000))
def test_no_colour_changes_its_hue(colour, nits):
    light = np.array([colour]) * nits
    linear = light @ np.linalg.inv(TO_2020).T
    found = (tone_mapped(codes(pq(light)), 9, PQ) / 255) ** 2.4
    before, after = ((each - each @ [[0.2126], [0.7152], [0.0722]])[0] for each in (linear, found))
    if np.linalg.norm(after) > 0.1:
        cosine = before @ after / np.linalg.norm(before) / np.linalg.norm(after)
        assert cosine > 0.99


COLOURS = [[150, 150, 150], [150, 10, 5], [20, 90, 140]]
"""Light of linear BT.709, that SDR can show."""


def write_hdr(path, light, transfer, codec, pix_fmt="yuv420p10le", matrix=9, **options):
    """A video of one colour in 10 bits, by the matrix of BT.2020 that BT.2020 prints."""
    red, green, blue = (pq if transfer == PQ else hlg)(np.array(light) @ TO_2020.T)
    luma = LUMA @ (red, green, blue)
    planes = 64 + 876 * luma, 512 + 896 * (blue - luma) / 1.8814, 512 + 896 * (red - luma) / 1.4746
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=16, options=dict(options))
        stream.width, stream.height, stream.pix_fmt = 64, 64, pix_fmt
        context = stream.codec_context
        context.color_trc, context.color_primaries, context.colorspace = transfer, 9, matrix
        context.color_range = 1
        frame = av.VideoFrame(64, 64, pix_fmt)
        frame.pts, frame.time_base = 0, Fraction(1, 16)
        for number, plane in enumerate(frame.planes):
            samples = np.zeros((plane.height, plane.line_size // 2), np.uint16)
            if number < 3:
                samples[:] = round(planes[number])
            else:
                samples[:, 32:64] = 1023  # alpha
            plane.update(samples.tobytes())
        container.mux([*stream.encode(frame), *stream.encode()])


def write_png(path, image, primaries, transfer):
    file = io.BytesIO()
    image.save(file, "PNG")
    start, chunk = file.getvalue()[:33], bytes([primaries, transfer, 0, 1])
    cicp = b"\0\0\0\4cICP" + chunk + struct.pack(">I", zlib.crc32(b"cICP" + chunk))
    path.write_bytes(start + cicp + file.getvalue()[33:])


@pytest.mark.parametrize("transfer", [PQ, HLG])
def test_hdr_of_each_format_shows_the_colours_of_sdr(media, tmp_path, transfer):
    quiet, fine = {"x265-params": "log-level=none:bframes=0"}, {"crf": "4"}
    kinds = dict.fromkeys(("hevc.mp4", "hevc.mkv"), ("libx265", quiet))
    kinds |= dict.fromkeys(("a.avif", "av1.webm"), ("libsvtav1", fine))
    kinds["clear.mov"] = ("prores_ks", {"pix_fmt": "yuva444p10le"})  # whose frames say nothing
    kinds["bare.mkv"] = ("libx265", quiet | {"matrix": 2})
    for number, light in enumerate(COLOURS):
        for name, (codec, options) in kinds.items():
            write_hdr(media / f"{number}.{name}", light, transfer, codec, **options)
        signal = (pq if transfer == PQ else hlg)(np.array(light) @ TO_2020.T)
        image = Image.fromarray(np.broadcast_to(codes(signal, 255), (64, 64, 3)))
        profile = {"color_primaries": 9, "transfer_characteristics": transfer}
        pillow_heif.from_pillow(image).save(
            media / f"{number}.HEIC", save_nclx_profile=True, quality=-1, chroma=444, **profile
        )
        write_png(media / f"{number}.png", image, 9, transfer)
    prepare(media, tmp_path / "out", files_per_shard=100)
    names = read_paths(read_manifest(tmp_path / "out"))
    assert len(names) == 8 * len(COLOURS)
    kind = {PQ: "PQ", HLG: "HLG"}[transfer]
    for name, clip in zip(names, stored(tmp_path / "out"), strict=True):
        expected = sdr(COLOURS[int(name[0])])
        least = 12 if "avif" in name else 5  # 8 bits of PQ from Pillow are coarse
        assert abs(clip[0, 16, 24] - expected).max() < least, name
        assert f"{kind}, tone-mapped to standard range" in changed(tmp_path / "out")[name]
        if "clear" in name:
            assert clip[0, 16, 4] == pytest.approx([255] * 3, abs=1)


def test_wide_gamut_of_standard_range_is_converted(media, tmp_path):
    """Screen recordings of macOS name P3."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for number, light in enumerate(np.array(COLOURS) / 203):
        for primaries, matrix in ((9, TO_2020), (12, TO_P3)):
            picture = np.broadcast_to(codes((matrix @ light) ** (1 / 2.4), 255), (64, 64, 3))
            image, name = Image.fromarray(picture), f"{number}.{primaries}"
            write_png(media / f"{name}.png", image, primaries, 13)
            profile = {"color_primaries": primaries, "transfer_characteristics": 13}
            heif = {"save_nclx_profile": True, "quality": -1, "chroma": 444}
            pillow_heif.from_pillow(image).save(media / f"{name}.heic", **heif, **profile)
            image.save(media / f"{name}.profile.png", icc_profile=srgb)  # which alone counts
            for kind in ("mp4", "mkv"):
                with av.open(str(media / f"{name}.{kind}"), "w") as container:
                    stream = container.add_stream("libx264", rate=16, options={"crf": "1"})
                    stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv444p"
                    context = stream.codec_context
                    context.color_primaries, context.color_trc, context.colorspace = primaries, 1, 1
                    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture))
                    frame = frame.reformat(format="yuv444p", dst_colorspace="ITU709")
                    container.mux([*stream.encode(frame), *stream.encode()])
    prepare(media, tmp_path / "out", files_per_shard=100)
    names = read_paths(read_manifest(tmp_path / "out"))
    assert len(names) == 5 * 2 * len(COLOURS)
    for name, clip in zip(names, stored(tmp_path / "out"), strict=True):
        expected = sdr(COLOURS[int(name[0])])
        near = abs(clip[0, 16, 24] - expected).max() < 4
        assert near != ("profile" in name and "0." not in name), name


def test_dolby_vision_without_a_picture_for_others_is_refused(media, tmp_path):
    write_hdr(
        media / "a.hevc", [90, 90, 90], 2, "libx265", **{"x265-params": "log-level=none:bframes=0"}
    )
    unit = b"\0\0\0\1\x7c\x01\x19" + bytes(range(1, 60))  # of the kind that holds its metadata
    (media / "a.mp4").write_bytes((media / "a.hevc").read_bytes() + unit)
    (media / "a.hevc").unlink()
    Image.new("RGB", (64, 64)).save(media / "good.png")
    prepare(media, tmp_path / "out")
    assert "Dolby Vision" in skipped(tmp_path / "out")["a.mp4"]
