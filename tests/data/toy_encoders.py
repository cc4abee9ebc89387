"""Encoders of frames and captions for tests; processes that are spawned find them here."""

import os
import time
from pathlib import Path

import numpy as np
from patience import wait_until

from alload_jax.data.prepare.encoders import GIVEN_ENCODERS, Given, Pixels
from alload_jax.data.prepare.sources import UnusableError
from alload_jax.encoders import TEXT_ENCODERS, VAE_ENCODERS
from alload_jax.encoders.loading import as_float16
from alload_jax.errors import InputError


class ToldPixels(Pixels):
    """Pixels of one file, until which it waits for the progress of all files before.

    The variable TOLD names a file that has a byte for each.
    """

    encoded = 0

    def encode(self, frames):
        wait_until(lambda: Path(os.environ["TOLD"]).stat().st_size >= self.encoded)
        self.encoded += 1
        time.sleep(0.3)  # notes of progress are at least 0.2 s apart
        return super().encode(frames)


class WeighedPixels(Pixels):
    """Half of the pixels; notes in its folder where it encodes, and does what `weights` says."""

    has_weights = True
    folder: Path

    @classmethod
    def make(cls, options):
        made = cls()
        object.__setattr__(made, "folder", options.folder)
        return made

    def origin(self):
        return {"name": "weighed", "weights": (self.folder / "weights").read_text()}

    def encode(self, frames):
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        (self.folder / f"process-{os.getpid()}").write_text(device)
        weights = (self.folder / "weights").read_text()
        fatal = self.folder / "fatal"
        if weights == "ends" or fatal.exists():
            fatal.unlink(missing_ok=True)
            os._exit(9)
        if weights == "refuses":
            raise InputError("the weights are damaged")
        if weights == "picky" and frames.max() == 255:
            raise UnusableError("white")
        latents = super().encode(frames) * np.float16(0.5)
        latents.flat[0] += np.nan if weights == "nan" else 0
        return latents


class GivenEnds:
    """The first and the last grey level of a clip."""

    @classmethod
    def make(cls, kind, vae_folder, image_folder):
        return cls()

    def origin(self):
        return {"given": "ends"}

    def encode(self, first, last, frames):
        levels = np.array([first.mean(), last.mean()], np.float16)
        return Given(np.broadcast_to(levels, (frames, *first.shape[:2], 2)), None)


class Spoken:
    """A token for each letter, and one of another kind for each exclamation mark."""

    has_weights, default_length = True, 9

    def __init__(self, folder, length):
        self.folder, self.length = folder, length

    @classmethod
    def make(cls, options):
        return cls(options.folder, options.text_length)

    def origin(self):
        return {"name": "spoken", "length": self.length}

    def surplus_tokens(self, text):
        return max(0, len(text) - self.length)

    def encode(self, caption):
        text = caption or ""
        letters = np.array([[ord(letter), 1] for letter in text[: self.length]], np.float32)
        shouts = np.full((text.count("!"), 3), text.count("!") or 1, np.float32)
        words = letters.reshape(-1, 2) * (1e9 if "huge" in text else 1)
        return {"text": as_float16(words), "shouts": as_float16(shouts)}


for registry, name, kind in (
    (VAE_ENCODERS, "told", ToldPixels),
    (VAE_ENCODERS, "weighed", WeighedPixels),
    (GIVEN_ENCODERS, "weighed", GivenEnds),
    (TEXT_ENCODERS, "spoken", Spoken),
):
    if name not in registry.names():
        registry.register(name, kind)
