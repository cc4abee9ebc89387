"""Decodes videos upright, progressive and at a fixed rate, and cuts them into clips."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from typing import NamedTuple, cast

import av
import numpy as np
from av.container import InputContainer
from av.filter import Graph
from av.video.reformatter import Interpolation, VideoReformatter

from alload_jax.data.prepare import sources
from alload_jax.data.prepare.settings import MediaSettings
from alload_jax.errors import InputError

# Playlists and scripts that open other files or addresses must not pass for a video.
_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,mpegvideo,m4v,h264,hevc,asf,flv,ogg,gif,"
    "mxf,dv,yuv4mpegpipe,ivf,obu,rm,nut,mp3,wav,aac,flac"
)
# Of the container alone: as options of its streams too they crash PyAV 14 to 17 on MPEG files.
_OPTIONS = {"format_whitelist": _FORMATS, "protocol_whitelist": "none"}
_LONGEST_HOLD = 60  # seconds; a longer gap is a damaged time stamp
_EARLY = Fraction(3, 10)  # places by which a frame may be shown early
_LATE_END = 0.25  # seconds by which frames may end before the header says
_WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}  # FFmpeg's own decoders leave alpha out
_BT709, _UNKNOWN, _BT601, _BT2020, _ICTCP = 1, 2, 5, 9, (14, 15)  # colours by ITU-T H.273
# All chroma in, all chroma out, accurate rounding: else white of limited range would become 253.
_RESIZE = Interpolation.LANCZOS | 0x4000 | 0x2000 | 0x40000  # PyAV 17 has no names for them
_STILLS = {b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG", b"RIFF": "WebP", b"BM": "BMP"}


class Decoded(NamedTuple):
    """A decoded frame.

    Attributes:
      frame: the frame.
      begin, end: seconds at which it begins and ends to be shown.
      scene: number of its scene.
    """

    frame: av.VideoFrame
    begin: Fraction
    end: Fraction
    scene: int = 0


@contextmanager
def opened_video(source: sources.Source) -> Iterator[InputContainer]:
    """Opens a container that has a video stream.

    Raises:
      UnusableError: it is damaged, no video, without pictures, or too large.
    """
    with sources.opened(source) as file:
        start = file.read(12)
        file.seek(0)
        kind = next((name for magic, name in _STILLS.items() if start.startswith(magic)), None)
        if kind and (kind != "WebP" or start[8:] == b"WEBP"):
            raise sources.UnusableError(f"{kind} image with the suffix of a video; rename it")
        with damage_named("not a video, or damaged"):
            container = av.open(file, "r", container_options=_OPTIONS)
        with container:
            if not container.streams.video:
                what = "audio only" if container.streams.audio else "no video stream"
                raise sources.UnusableError(f"{what}: it has no pictures")
            context = container.streams.video[0].codec_context
            if context is None:
                raise sources.UnusableError("of a codec that cannot be decoded")
            sources.check_pixels(context.height, context.width)
            yield container


@contextmanager
def damage_named(what: str) -> Iterator[None]:
    """Turns the errors of FFmpeg's decoders and filters into an UnusableError that begins so."""
    try:
        yield
    except (av.FFmpegError, ValueError, EOFError, MemoryError) as error:
        if isinstance(error, sources.UnusableError):
            raise
        raise sources.UnusableError(f"{what} ({sources.short(error)})") from error


def frames_at(frames: Iterator[Decoded], fps: Fraction, expected: float = 0.0) -> Iterator[Decoded]:
    """Resamples decoded frames to `fps` by presentation times: the one of each place, in turn.

    A place shows the last frame that begins before it, or at most 0.3 places after it: time stamps
    are often rounded to milliseconds. Frames of a higher rate are shown once at most. The last one
    always is, so that five seconds at 24 frames per second give 81 frames at 16.

    Args:
      frames: in order of time.
      fps: frames per second.
      expected: seconds that the header says; fewer are a truncated video.

    Raises:
      UnusableError: decoding fails, or time stamps jump. What was yielded before is sound.
    """
    first: Fraction | None = None
    last, until = 0, 0
    held: Decoded | None = None
    for decoded in frames:
        first = decoded.begin if first is None else first
        place = max(0, math.ceil((decoded.begin - first) * fps - _EARLY))
        if held is not None and place - last > _LONGEST_HOLD * fps:
            yield held
            seconds = float((place - last) / fps)
            raise sources.UnusableError(f"time stamps jump by {seconds:,.0f} s")
        if held is not None:
            yield from itertools.repeat(held, place - last)
        last, held = place, decoded
        end = (decoded.end - first) * fps
        until = max(place + 1, math.ceil(end - _EARLY))
    if held is None:
        raise sources.UnusableError("no frame can be decoded")
    seconds = float(until / fps)
    if expected - seconds > max(_LATE_END, 0.1 * expected):
        raise sources.UnusableError(f"truncated: {seconds:.1f} of {expected:.1f} s can be decoded")
    yield from itertools.repeat(held, min(until - last, int(_LONGEST_HOLD * fps)))


def video_frames(
    container: InputContainer, note: sources.Note = lambda change: None
) -> Iterator[Decoded]:
    """Decodes the first video stream, in order of time.

    Interlaced frames are deinterlaced (yadif), which is noted.

    Raises:
      UnusableError: decoding fails. What was yielded before is sound.
    """
    stream = container.streams.video[0]
    each = 1 / Fraction(stream.average_rate or stream.guessed_rate or 25)
    after = Fraction(0)
    begun: Fraction | None = None
    for frame in _progressive(_decoded(container, stream), stream, note):
        base = frame.time_base or stream.time_base
        begin, duration = after, each
        if frame.pts is not None and base:
            begin, duration = frame.pts * base, frame.duration * base or each
        if begun is not None and begin <= begun:
            continue  # a time stamp that goes back
        sources.check_pixels(frame.height, frame.width)
        begun, after = begin, begin + duration
        yield Decoded(frame, begin, after)


def first_frame_at_times(container: InputContainer) -> Iterator[Decoded]:
    """The first frame at the times of all frames, of which no other is decoded.

    Raises:
      UnusableError: the container is damaged, or the first frame cannot be decoded.
    """
    stream = container.streams.video[0]
    each, after = 1 / Fraction(stream.average_rate or stream.guessed_rate or 25), Fraction(0)
    first, times = list[av.VideoFrame](), set[tuple[Fraction, Fraction]]()
    with damage_named("damaged video"):
        for packet in container.demux(stream):
            first = first or stream.codec_context.decode(packet)
            if packet.size and not packet.is_discard:
                base = packet.time_base or Fraction(0)
                begin = after if packet.pts is None else packet.pts * base
                after = begin + ((packet.duration or 0) * base or each)
                times.add((begin, after))
    yield from (Decoded(first[0], *time) for time in sorted(times) if first)


def _decoded(container: InputContainer, stream: av.VideoStream) -> Iterator[av.VideoFrame]:
    decoder = stream.codec_context
    # Of HDR: what the container says, where the frames do not, else the matrix of BT.2020.
    said = decoder.colorspace
    matrix = _BT2020 if said == _UNKNOWN else said
    transfer, primaries = decoder.color_trc, decoder.color_primaries
    stored = {"color_trc": transfer, "color_primaries": primaries, "colorspace": matrix}
    with damage_named("damaged video"):
        if stream.metadata.get("alpha_mode") == "1" and decoder.name in _WITH_ALPHA:
            name = _WITH_ALPHA[decoder.name]
            said = _BT601 if decoder.name == "vp8" else said
            decoder = cast(av.VideoCodecContext, av.CodecContext.create(name, "r"))
        # Threads would change nothing but the number of busy cores; workers fill those.
        decoder.thread_count = 1
        packets = container.demux(stream)
        for frame in itertools.chain.from_iterable(map(decoder.decode, packets)):
            if frame.is_corrupt:
                raise sources.UnusableError("damaged video (corrupt frame)")
            if sources.TRANSFERS.keys() & {frame.color_trc, transfer}:
                for name, value in stored.items():
                    if getattr(frame, name) == _UNKNOWN:
                        setattr(frame, name, value)
            if frame.color_primaries == _UNKNOWN:
                frame.color_primaries = primaries
            if frame.colorspace == _UNKNOWN:  # libvpx does not know what container and VP8 say
                frame.colorspace = said
            yield frame


def _progressive(
    frames: Iterator[av.VideoFrame], stream: av.VideoStream, note: sources.Note
) -> Iterator[av.VideoFrame]:
    """Passes all frames from the first interlaced one on through yadif, which alters only those."""
    graph: Graph | None = None
    size: tuple[int, int, str] | None = None
    for frame in frames:
        if graph is None and not frame.interlaced_frame:
            yield frame
            continue
        found = (frame.width, frame.height, frame.format.name)
        if graph is None or found != size:
            yield from _passed(graph, None)
            note("interlaced, made progressive")
            graph, size = Graph(), found
            source = graph.add_buffer(
                width=frame.width,
                height=frame.height,
                format=frame.format,
                time_base=frame.time_base or stream.time_base,
            )
            deinterlace = graph.add("yadif", "mode=send_frame:deint=interlaced")
            graph.link_nodes(source, deinterlace, graph.add("buffersink")).configure()
        yield from _passed(graph, frame)
    yield from _passed(graph, None)


def _passed(graph: Graph | None, frame: av.VideoFrame | None) -> Iterator[av.VideoFrame]:
    """Gives a frame, or the end, to a filter; yields what comes out. None passes nothing on."""
    if graph is None:
        return
    graph.push(frame)
    while True:
        try:
            yield graph.vpull()
        except (av.BlockingIOError, av.EOFError):
            return


def animation_frames(source: sources.Source, note: sources.Note) -> Iterator[Decoded]:
    """Decodes an animated image, as `upright` does each frame.

    Raises:
      UnusableError: it is damaged. What was yielded before is sound.
    """
    after = Fraction(0)
    with sources.opened(source) as file:
        with sources.image_errors():
            image, colour = sources.open_image(file)
        for number in range(bool(image.info.get("default_image")), getattr(image, "n_frames", 1)):
            with sources.image_errors():
                image.seek(number)
                image.load()
                picture = sources.as_srgb(*sources.upright(image, colour, note), note)
            frame = av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")
            # Browsers show frames without a duration for as long.
            begin, after = after, after + (Fraction(image.info.get("duration", 0) or 100) / 1000)
            yield Decoded(frame, begin, after)


def turn_of(frame: av.VideoFrame) -> tuple[bool, bool, bool]:
    """How the frame's display matrix asks to turn it, to quarter turns, to be upright.

    Returns:
      whether it is transposed first, and whether it is then mirrored in x and in y.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return False, False, False
    values = np.frombuffer(bytes(cast(bytes, matrix)), np.int32)
    a, b, _, c, d = (int(value) for value in values[:5])
    # FFmpeg's matrix takes a point (x, y) to (a·x + c·y, b·x + d·y).
    transpose = abs(b) > abs(a)
    return (transpose, c < 0, b < 0) if transpose else (transpose, a < 0, d < 0)


def shown_size(frame: av.VideoFrame, aspect: Fraction | None) -> tuple[float, float]:
    """(height, width) of a frame as shown: with square pixels and upright."""
    width = float(frame.width * (aspect or 1))
    transpose, _, _ = turn_of(frame)
    return (width, frame.height) if transpose else (frame.height, width)


def to_picture(
    frame: av.VideoFrame,
    aspect: Fraction | None,
    bucket: sources.Bucket,
    scaler: VideoReformatter,
    note: sources.Note,
) -> np.ndarray:
    """Resizes a decoded frame, turns it upright and cuts it: [height, width, 3] uint8.

    HDR is tone-mapped and transparent parts become white, which is noted.

    Args:
      frame: the frame.
      aspect: width over height of its pixels; None for square ones.
      bucket: its size then.
      scaler: resizes; one for all frames of a video, because it takes long to set up.
      note: is told what is changed.

    Raises:
      UnusableError: its pixel format cannot be converted.
    """
    transpose, flip_x, flip_y = turn_of(frame)
    height, width = sources.covering(bucket, *shown_size(frame, aspect))
    height, width = (width, height) if transpose else (height, width)
    with_alpha = any(part.is_alpha for part in frame.format.components)
    with_alpha = with_alpha or frame.format.has_palette
    is_hdr = frame.color_trc in sources.TRANSFERS
    is_dolby = frame.color_trc == _UNKNOWN and "DOVI_RPU_BUFFER" in frame.side_data
    if is_dolby or frame.colorspace in _ICTCP:
        raise sources.UnusableError(
            "colours as ICtCp, of HDR or Dolby Vision, which are not converted"
        )
    wide = "rgba64le" if with_alpha else "rgb48le"
    # As players do: what says nothing is BT.709 if it is larger than standard definition.
    is_hd = frame.width >= 1280 or frame.height > 576
    with damage_named("pixel format that cannot be converted"):
        picture = scaler.reformat(
            frame,
            width=width,
            height=height,
            format=wide if is_hdr else "rgba" if with_alpha else "rgb24",
            src_colorspace=_BT709 if is_hd and frame.colorspace == _UNKNOWN else None,
            interpolation=_RESIZE,
            threads=1,  # else as many as cores, in each worker
        ).to_ndarray()
    alpha: np.ndarray
    picture, alpha = picture[..., :3], picture[..., 3:]
    if is_hdr:
        note(sources.TONE_MAPPED.format(sources.TRANSFERS[frame.color_trc]))
        picture = sources.tone_mapped(picture, frame.color_primaries, frame.color_trc)
        alpha = alpha // 256
    elif frame.color_primaries in sources.WIDE:
        picture = sources.from_wide(picture, frame.color_primaries)
    if with_alpha and alpha.min() < 255:
        note(sources.ON_WHITE)
        alpha = alpha.astype(np.uint16)
        mixed = picture * alpha + sources.BACKGROUND * (255 - alpha)
        picture = ((mixed + 127) // 255).astype(np.uint8)
    picture = picture.swapaxes(0, 1) if transpose else picture
    picture = picture[:, ::-1] if flip_x else picture
    picture = picture[::-1] if flip_y else picture
    return sources.cut(picture, bucket)


_LONGEST_SIDE = 256
"""Pixels to which frames are reduced, about as PySceneDetect reduces them."""
_RATE = 25.0
"""Frames are numbered, not timed: the detector only compares numbers."""


def require_detector() -> None:
    """Checks that PySceneDetect can be imported.

    Raises:
      InputError: it cannot.
    """
    try:
        import scenedetect  # noqa: F401
    except ImportError as error:  # or OpenCV's libraries
        raise InputError(
            f"--scenes needs the package scenedetect ({sources.short(error)}); install "
            "alload-jax[scenes]"
        ) from error


def numbered_scenes(threshold: float, frames: Iterator[Decoded]) -> Iterator[Decoded]:
    """Numbers the scenes of decoded frames.

    It passes all frames on, two later than they come. PySceneDetect's AdaptiveDetector compares
    the change at each frame with the changes at two frames before and two after it, so that
    moving cameras are no cuts.

    Args:
      threshold: ratio of these changes from which there is a cut.
      frames: in order of time.
    """
    from scenedetect import FrameTimecode
    from scenedetect.detectors import AdaptiveDetector

    detector = AdaptiveDetector(adaptive_threshold=threshold, min_scene_len=0)
    delay = detector.event_buffer_length  # frames after which it is known whether one is the first
    fed, decided = itertools.count(), itertools.count()
    cuts: set[int] = set()
    waiting: deque[Decoded] = deque()
    picture: np.ndarray | None = None
    scene = 0

    def feed(picture: np.ndarray, times: int) -> None:
        for _ in range(times):
            found = detector.process_frame(FrameTimecode(next(fed), _RATE), picture)
            cuts.update(each.frame_num - delay for each in found)

    # The first and the last frame are repeated, without which cuts beside them were not found.
    for decoded in frames:
        before, picture = picture, _small(decoded.frame, picture)
        feed(picture, 1 if before is not None else 1 + delay)
        waiting.append(decoded)
        if len(waiting) > delay:
            scene += next(decided) in cuts
            yield waiting.popleft()._replace(scene=scene)
    if picture is not None:
        feed(picture, delay)
    for decoded in waiting:
        scene += next(decided) in cuts
        yield decoded._replace(scene=scene)


def _small(frame: av.VideoFrame, like: np.ndarray | None) -> np.ndarray:
    """A frame as [height, width, 3] uint8 in OpenCV's order of colours, in the size of another."""
    scale = min(1.0, _LONGEST_SIDE / max(frame.height, frame.width))
    size = [max(1, round(side * scale)) for side in (frame.height, frame.width)]
    height, width = size if like is None else like.shape[:2]
    with damage_named("pixel format that cannot be converted"):
        small = frame.reformat(width, height, "bgr24", interpolation=Interpolation.AREA, threads=1)
        return small.to_ndarray()


def clip_lengths(frames: int) -> tuple[int, ...]:
    """Lengths that clips may have, longest first: `frames`, then …, 49, 33, 17, 9, 5, 1."""
    steps = {1, 5, 9, *range(17, frames, 16), frames}
    return tuple(sorted((length for length in steps if length <= frames), reverse=True))


def video_clips(
    source: sources.Source,
    choose: Callable[[int, int], sources.Bucket],
    settings: MediaSettings,
    animated_image: bool,
    times_only: bool,
    note: sources.Note,
) -> Iterator[np.ndarray]:
    """Decodes a video or an animated image and cuts it into clips.

    Where scenes are not asked for it is one scene. A short scene gives one clip, of the length that
    fits; it is left out where no clip of `min_frames` fits. What is left after the last whole clip
    of a scene is dropped.

    Args:
      source: the file.
      choose: gives the bucket for (height, width) in pixels.
      settings: say how frames become clips.
      animated_image: whether Pillow decodes it.
      times_only: whether to show the first frame of a video always, without decoding others.
      note: called with what is changed in its pictures.

    Yields:
      [frames, height, width, 3] uint8.

    Raises:
      UnusableError: the video cannot be used, or not on from here; or all scenes are too short.
    """
    with ExitStack() as stack:
        aspect, expected, decoded = None, 0.0, animation_frames(source, note)
        if not animated_image:
            container = stack.enter_context(opened_video(source))
            stream, decoded = container.streams.video[0], video_frames(container, note)
            if times_only and settings.cut_threshold is None:
                decoded = first_frame_at_times(container)
            aspect = stream.sample_aspect_ratio
            expected = float((stream.duration or 0) * (stream.time_base or 0))
            expected = expected or _end_in_tags(stream)
        if (threshold := settings.cut_threshold) is not None:
            decoded = numbered_scenes(threshold, decoded)
        chosen: list[sources.Bucket] = []
        scaler = VideoReformatter()

        def picture(frame: av.VideoFrame) -> np.ndarray:
            """A picture in the bucket of the first frame."""
            if not chosen:
                chosen.append(choose(*(round(side) for side in shown_size(frame, aspect))))
            return to_picture(frame, aspect, chosen[0], scaler, note)

        longest = clips = 0
        shown = frames_at(decoded, settings.rate, expected)
        for _, scene in itertools.groupby(shown, key=lambda one: one.scene):
            for window in _windows(scene, picture, settings.stride, settings.frames):
                longest = max(longest, len(window))
                length = next(n for n in clip_lengths(settings.frames) if n <= len(window))
                if length >= settings.min_frames:
                    yield np.stack(window[:length])
                    clips += 1
                if clips == settings.max_clips:
                    return
        if clips == 0:
            raise sources.UnusableError(f"too short: {longest} frames at the asked rate")


def _end_in_tags(stream: av.VideoStream) -> float:
    """Seconds of a stream of Matroska or WebM, whose end is a tag as 00:00:02.500; 0 for none."""
    try:
        hours, minutes, seconds = map(float, stream.metadata.get("DURATION", "").split(":"))
    except ValueError:
        return 0.0
    begin = float((stream.start_time or 0) * (stream.time_base or 0))
    return hours * 3600 + minutes * 60 + seconds - begin


def _windows(
    scene: Iterator[Decoded],
    picture: Callable[[av.VideoFrame], np.ndarray],
    stride: int,
    frames: int,
) -> Iterator[list[np.ndarray]]:
    """The pictures of each whole clip of a scene; if there is none, all of its pictures.

    The frames that a clip needs are converted, each once.
    """
    window: list[np.ndarray] = []
    start, whole = 0, False
    last: av.VideoFrame | None = None
    array = np.empty(0, np.uint8)
    for place, one in enumerate(scene):
        if place % stride >= frames:
            continue  # between clips
        if one.frame is not last:
            last, array = one.frame, picture(one.frame)
        if place == start + len(window):
            window.append(array)
        if len(window) == frames:
            yield window
            start, whole = start + stride, True
            window = window[stride:]
    if not whole:
        yield window
