"""TensorBoard's events: figures, pictures and clips."""

import io
import struct

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import Event

from alload_jax.sampling.pictures import write_clip
from alload_jax.training.trackers import TensorBoard


def events(folder):
    """The events of a folder's files, in the order of their times."""
    found = []
    for path in folder.glob("events*"):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return sorted(found, key=lambda event: event.wall_time)


def values(folder):
    return [(event.step, value) for event in events(folder) for value in event.summary.value]


def test_figures_are_shown_also_after_closing(tmp_path):
    tracker = TensorBoard(tmp_path, resumed_at=4)
    tracker.log(5, {"loss": 0.5})
    tracker.close()
    tracker.log(6, {"loss": 0.25})
    tracker.close()
    tracker.close()
    found = [(step, value.tag, value.simple_value) for step, value in values(tmp_path)]
    assert found == [(5, "loss", 0.5), (6, "loss", 0.25)]
    starts = [event.step for event in events(tmp_path) if event.HasField("session_log")]
    assert starts == [5]  # once: TensorBoard drops what was written from this step on


@pytest.mark.parametrize("name", ["clip.gif", "clip.mp4", "still.png"])
def test_pictures_and_clips_are_shown_as_a_browser_shows_them(tmp_path, name):
    if name.endswith("mp4"):
        pytest.importorskip("av")
    frames = 1 if name.endswith("png") else 5
    ramp = np.linspace(-1, 1, frames * 32 * 48).reshape(frames, 32, 48, 1)
    clip = np.broadcast_to(ramp, (frames, 32, 48, 3)).astype(np.float32)
    path = tmp_path / name
    write_clip(path, clip, {}, fps=5)
    tracker = TensorBoard(tmp_path / "tensorboard", resumed_at=0)
    tracker.show(7, "samples/one", path)
    tracker.close()
    ((step, value),) = values(tmp_path / "tensorboard")
    assert (step, value.tag, value.image.height, value.image.width) == (7, "samples/one", 32, 48)
    shown = Image.open(io.BytesIO(value.image.encoded_image_string))
    assert shown.format == ("PNG" if frames == 1 else "GIF")
    assert getattr(shown, "n_frames", 1) == frames
    if frames > 1:
        assert shown.info["duration"] == 200
    for number in range(frames):
        shown.seek(number)
        pixels = np.asarray(shown.convert("RGB"), np.float32)
        assert np.abs(pixels - (clip[number] + 1) * 127.5).max() < 12


def test_latents_are_not_shown(tmp_path):
    path = tmp_path / "latents.safetensors"
    write_clip(path, np.zeros((1, 4, 4, 16), np.float32), {})
    tracker = TensorBoard(tmp_path / "tensorboard", resumed_at=0)
    tracker.show(7, "samples/one", path)
    tracker.close()
    assert not values(tmp_path / "tensorboard")
