"""What the VAEs of diffusers have in common: frames to latents and back, whole or in tiles."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from alload_jax.encoders.devices import choose_device, inference, require_packages
from alload_jax.encoders.folders import find_folder, read_config, weight_files, weights_digest
from alload_jax.encoders.loading import load_model
from alload_jax.errors import InputError
from alload_jax.planning.geometry import Triple


class Vae(ABC):
    """A VAE of diffusers in a local folder; the first call that needs weights loads them.

    Equal clips give equal latents on the same device. A size that does not fit the GPU's memory is
    encoded or decoded in overlapping tiles, from the first time on that it did not fit; latents of
    tiles differ a little from those of whole frames.

    Attributes:
      name: its name in the origin of data.
      class_name: name of its class in diffusers, which its config.json contains.
      described: what it is, for messages.
      takes_last_frame: whether `encode_given` takes a last frame.
      folder: folder of config.json and weights.
    """

    name: ClassVar[str]
    class_name: ClassVar[str]
    described: ClassVar[str]
    takes_last_frame: ClassVar[bool]

    def __init__(self, folder: str | Path, *, device: str | None = None, dtype: str | None = None):
        """Reads the config.

        Args:
          folder: local folder of the VAE, or of a pipeline with a subfolder `vae`.
          device: PyTorch device, such as `cuda:1`; None takes a GPU if there is one.
          dtype: `bfloat16` or `float32`; None takes bfloat16 on a GPU and float32 elsewhere.

        Raises:
          InputError: the folder holds no such VAE.
        """
        self.folder = find_folder(Path(folder), "vae", self.described)
        self._config = read_config(self.folder, "_class_name", [self.class_name], self.described)
        self._asked = device, dtype
        self._tiled_from: float = float("inf")  # pixels of a frame

    @property
    @abstractmethod
    def stride(self) -> Triple:
        """Pixels per latent along (frames, height, width)."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """Channels of the latents."""

    def origin(self) -> dict[str, Any]:
        """Name, channels and a digest of config and weights, as JSON values.

        Raises:
          InputError: weights are missing.
        """
        files = weight_files(self.folder, "diffusion_pytorch_model")
        digest = weights_digest(self._config, files)
        return {"name": self.name, "channels": self.channels, "weights": digest}

    def encode(self, frames: np.ndarray) -> np.ndarray:
        """Encodes a clip: the mode of the posterior, normalised as the config says.

        Args:
          frames: [T, H, W, 3] uint8, T = stride·n + 1.

        Returns:
          [t, h, w, channels] float32.

        Raises:
          ValueError: the frames have another shape or dtype.
          InputError: the weights cannot be loaded, or the clip does not fit the device.
        """
        self._check_frames(frames)
        return self.encode_pixels(self.pixels(frames))

    def pixels(self, frames: np.ndarray) -> Any:
        """[T, H, W, 3] uint8 as [1, 3, T, H, W] float32 from −1 to 1 on the device."""
        import torch

        _ = self._model
        # Sent as bytes, a quarter of the floats; the order of operations is diffusers' own.
        sent = torch.from_numpy(np.array(frames, order="C")).to(self._device)
        return 2.0 * (sent.permute(3, 0, 1, 2)[None].float() / 255.0) - 1.0

    def encode_pixels(self, clip: Any) -> np.ndarray:
        """Encodes what `pixels` gives; [t, h, w, channels] float32, see `encode`."""
        model = self._model
        with inference():
            clip = clip.to(model.dtype)
            area = float(clip.shape[3] * clip.shape[4])
            mode = self._whole_or_tiled(lambda: model.encode(clip).latent_dist.mode(), area)
            latents = self._normalised(mode.float())
            return np.ascontiguousarray(latents[0].permute(1, 2, 3, 0).cpu().numpy())

    @abstractmethod
    def encode_given(self, first: np.ndarray, last: np.ndarray | None, frames: int) -> np.ndarray:
        """What image-to-video models take beside the noisy latents: a mask, and latents.

        Args:
          first, last: [H, W, 3] uint8; a last frame needs two frames or more.
          frames: frames of the clip, stride·n + 1.

        Returns:
          [t, h, w, G] float32, in the order of the model's input channels.

        Raises:
          ValueError: a picture has another shape or dtype, or the frames do not fit.
          InputError: as `encode`.
        """

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Decodes normalised latents.

        Args:
          latents: [t, h, w, channels] floats.

        Returns:
          [T, H, W, 3] uint8, T = stride·(t − 1) + 1.

        Raises:
          ValueError: the latents have another shape.
          InputError: as `encode`.
        """
        if latents.ndim != 4 or latents.shape[-1] != self.channels or 0 in latents.shape:
            raise ValueError(
                f"latents have shape {latents.shape}; {self.folder} decodes "
                f"[frames, height, width, {self.channels}]"
            )
        import torch

        model, device = self._model, self._device
        with inference():
            scaled = torch.from_numpy(latents.astype(np.float32)).permute(3, 0, 1, 2)[None]
            scaled = self._as_decoded(scaled.to(device)).to(model.dtype)
            area = float(np.prod(latents.shape[1:3]) * self.stride[1] * self.stride[2])
            video = self._whole_or_tiled(lambda: model.decode(scaled).sample, area)
            video = (video[0].permute(1, 2, 3, 0).float() / 2 + 0.5).clamp(0, 1)
            return np.asarray((video * 255).round().to(torch.uint8).cpu().numpy())

    @abstractmethod
    def _load(self) -> Any:
        """The model with its weights, on the device."""

    @abstractmethod
    def _normalised(self, latents: Any) -> Any:
        """[1, channels, t, h, w] float32 of the posterior, as models train on them."""

    @abstractmethod
    def _as_decoded(self, latents: Any) -> Any:
        """The inverse of `_normalised`."""

    def _check_frames(self, frames: np.ndarray) -> None:
        every, side, _ = self.stride
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
            raise ValueError(
                f"frames are {frames.dtype} of shape {frames.shape}; give uint8 [T, H, W, 3]"
            )
        if (len(frames) - 1) % every or any(size % side or not size for size in frames.shape[1:3]):
            raise ValueError(
                f"frames have shape {frames.shape}; their number must be {every}n + 1, height and "
                f"width multiples of {side}"
            )

    def _whole_or_tiled(self, run: Callable[[], Any], area: float) -> Any:
        """Runs on whole frames, or on tiles where frames of this area did not fit."""
        import torch

        if area < self._tiled_from:
            try:
                return run()
            except torch.OutOfMemoryError:
                self._tiled_from = area
            torch.cuda.empty_cache()
            print(
                f"{self.folder}: frames of {area:,.0f} pixels do not fit the memory of "
                f"{self._device}; they are taken in tiles",
                file=sys.stderr,
            )
        self._model.enable_tiling()
        try:
            return run()
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"{self.folder}: a clip with frames of {area:,.0f} pixels does not fit the memory "
                f"of {self._device}, also in tiles; free memory there, or choose fewer pixels"
            ) from error
        finally:
            self._model.disable_tiling()

    @cached_property
    def _device(self) -> Any:
        return choose_device(self._asked[0])

    @cached_property
    def _model(self) -> Any:
        require_packages(self.described)
        weight_files(self.folder, "diffusion_pytorch_model")
        return self._load()

    def _read(self, kind: Any) -> Any:
        """The model of that class of diffusers from the folder."""
        return load_model(kind, self.folder, self._device, self._asked[1])
