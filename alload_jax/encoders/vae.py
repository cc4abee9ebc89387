"""VAEs of diffusers, of Wan and HunyuanVideo: frames to latents and back, whole or in tiles.

No frame depends on a later one: convolutions look back two frames, attention looks back at all.
What a chunk needs of those before it is kept, so that the result is that of all frames at once,
within rounding, in memory that does not grow with the frames' pixels. diffusers' own forward pass
takes all frames at once, with a mask of attention of the squared number of latents.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np
from typing_extensions import override

from alload_jax.encoders import loading
from alload_jax.errors import InputError, print_stderr
from alload_jax.planning.samples import Triple

if TYPE_CHECKING:
    import torch


class Vae(loading.Encoder, loading.VaeEncoder):
    """A VAE of diffusers in a local folder; see `Encoder`.

    Equal clips give equal latents on the same device. A size that does not fit the GPU's memory is
    encoded or decoded in overlapping tiles, from the first time on that it did not fit; latents of
    tiles differ a little from those of whole frames.

    Attributes:
      name: its name in the origin of data.
      class_name: name of its class in diffusers, which its config.json contains.
      takes_last_frame: whether `encode_given` takes a last frame.
    """

    name: ClassVar[str]
    class_name: ClassVar[str]
    takes_last_frame: ClassVar[bool]

    subfolder = "vae"
    key = "_class_name"
    stem = "diffusion_pytorch_model"
    config_keys: ClassVar[tuple[tuple[str, int], ...]]
    """Names and defaults in config.json of frames and pixels per latent, and of channels."""
    _tiled_from: float = float("inf")
    """Pixels of a frame."""

    @property
    @override
    def stride(self) -> Triple:
        frames, side, _ = self._sizes
        return frames, side, side

    @property
    def channels(self) -> int:
        """Channels of the latents."""
        return self._sizes[2]

    @property
    def _sizes(self) -> Triple:
        frames, side, channels = (int(self._config.get(*key)) for key in self.config_keys)
        return frames, side, channels

    @classmethod
    @override
    def make(cls, options: loading.EncoderOptions) -> Self:
        assert options.folder is not None
        vae = opened(cls, options.folder)
        loading.require_packages(f"--vae {cls.name}")
        return vae

    @override
    def _read_origin(self) -> dict[str, object]:
        files = loading.weight_files(self.folder, self.stem)
        digest = loading.weights_digest(self._config, files)
        return {"name": self.name, "channels": self.channels, "weights": digest}

    @override
    def encode(self, frames: np.ndarray) -> np.ndarray:
        """`latents` as they are stored: float16; what that cannot hold becomes infinite."""
        return loading.as_float16(self.latents(frames))

    def latents(self, frames: np.ndarray) -> np.ndarray:
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

    def pixels(self, frames: np.ndarray) -> "torch.Tensor":
        """[T, H, W, 3] uint8 as [1, 3, T, H, W] float32 from −1 to 1 on the device."""
        import torch

        _ = self._model
        # Sent as bytes, a quarter of the floats; the order of operations is diffusers' own.
        sent = torch.from_numpy(np.array(frames, order="C")).to(self._device)
        return 2.0 * (sent.permute(3, 0, 1, 2)[None].float() / 255.0) - 1.0

    def encode_pixels(self, clip: "torch.Tensor") -> np.ndarray:
        """Encodes what `pixels` gives; [t, h, w, channels] float32, see `latents`."""
        model = self._model
        with loading.inference():
            clip = clip.to(model.dtype)
            area = float(clip.shape[3] * clip.shape[4])
            mode = self._whole_or_tiled(lambda: model.encode(clip).latent_dist.mode(), area)
            latents = self._normalised(mode.float())
            return np.ascontiguousarray(loading.to_host(latents[0].permute(1, 2, 3, 0)))

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
          InputError: as `latents`.
        """

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Decodes normalised latents.

        Args:
          latents: [t, h, w, channels] floats.

        Returns:
          [T, H, W, 3] uint8, T = stride·(t − 1) + 1.

        Raises:
          ValueError: the latents have another shape.
          InputError: as `latents`.
        """
        if latents.ndim != 4 or latents.shape[-1] != self.channels or 0 in latents.shape:
            raise ValueError(
                f"latents have shape {latents.shape}; {self.folder} decodes "
                f"[frames, height, width, {self.channels}]"
            )
        import torch

        model, device = self._model, self._device
        with loading.inference():
            scaled = torch.from_numpy(latents.astype(np.float32)).permute(3, 0, 1, 2)[None]
            scaled = self._as_decoded(scaled.to(device)).to(model.dtype)
            area = float(np.prod(latents.shape[1:3]) * self.stride[1] * self.stride[2])
            video = self._whole_or_tiled(lambda: model.decode(scaled).sample, area)
            video = (video[0].permute(1, 2, 3, 0).float() / 2 + 0.5).clamp(0, 1)
            return np.asarray((video * 255).round().to(torch.uint8).cpu().numpy())

    @override
    def _load(self) -> Any:
        return self._read(f"diffusers.{self.class_name}", self.folder)

    @abstractmethod
    def _normalised(self, latents: "torch.Tensor") -> "torch.Tensor":
        """[1, channels, t, h, w] float32 of the posterior, as models train on them."""

    @abstractmethod
    def _as_decoded(self, latents: "torch.Tensor") -> "torch.Tensor":
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

    def _whole_or_tiled(self, run: "Callable[[], torch.Tensor]", area: float) -> "torch.Tensor":
        """Runs on whole frames, or on tiles where frames of this area did not fit."""
        import torch

        if area < self._tiled_from:
            try:
                return run()
            except torch.OutOfMemoryError:
                self._tiled_from = area
            torch.cuda.empty_cache()
            print_stderr(
                f"{self.folder}: frames of {area:,.0f} pixels do not fit the memory of "
                f"{self._device}; they are taken in tiles"
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


V = TypeVar("V", bound=Vae)


@cache
def opened(kind: type[V], folder: Path) -> V:
    """The VAE of that folder, whose weights then serve its latents and the given frames."""
    return kind(folder)


class WanVae(Vae):
    """The VAE of Wan 2.1 or 2.2; see `Vae`."""

    name = "wan"
    class_name = "AutoencoderKLWan"
    described = "Wan's VAE (AutoencoderKLWan, as diffusers saves it)"
    takes_last_frame = True
    patch_size = (1, 2, 2)
    config_keys = (("scale_factor_temporal", 4), ("scale_factor_spatial", 8), ("z_dim", 16))

    @override
    def __init__(self, folder: str | Path):
        super().__init__(folder)
        for name in ("latents_mean", "latents_std"):
            count = len(self._config.get(name, [0.0] * 16))
            if count != self.channels:
                raise InputError(
                    f"{self.folder / 'config.json'}: {name} has {count} values, but z_dim is "
                    f"{self.channels}; copy it again"
                )

    def encode_given(self, first: np.ndarray, last: np.ndarray | None, frames: int) -> np.ndarray:
        """See `Vae.encode_given`; this is the condition of diffusers' WanImageToVideoPipeline.

        The latents are those of a clip that is mid-grey but for its first and, where it is given,
        last frame. The mask says of which frames each latent was given.

        Returns:
          [t, h, w, stride + channels] float32: first the mask, 0 or 1 for each of a latent's
          frames, then the normalised latents. All frames of the first latent are given.
        """
        given = np.stack([first] if last is None else [first, last])
        if frames < len(given):
            raise ValueError(f"frames is {frames}; {len(given)} given pictures need as many")
        self._check_frames(np.broadcast_to(given[:1], (frames, *given.shape[1:])))
        import torch

        pixels = self.pixels(given)
        clip = torch.zeros((1, 3, frames, *pixels.shape[3:]), device=pixels.device)
        clip[:, :, 0] = pixels[:, :, 0]
        if last is not None:
            clip[:, :, -1] = pixels[:, :, -1]
        latents = self.encode_pixels(clip)
        mask = np.zeros((*latents.shape[:3], self.stride[0]), np.float32)
        mask[0] = 1
        if last is not None:
            mask[-1, ..., -1] = 1
        return np.concatenate([mask, latents], axis=-1)

    def _normalised(self, latents: "torch.Tensor") -> "torch.Tensor":
        mean, inverse_std = self._statistics
        return (latents - mean) * inverse_std

    def _as_decoded(self, latents: "torch.Tensor") -> "torch.Tensor":
        mean, inverse_std = self._statistics
        return latents / inverse_std + mean

    @cached_property
    def _statistics(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """Mean and inverse standard deviation of the latents, [1, channels, 1, 1, 1] float32."""
        import torch

        config = self._model.config
        mean, std = (
            torch.tensor(values, device=self._device).view(1, -1, 1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        return mean, 1.0 / std


_PIXELS = 2**22
"""Most pixels of a chunk of several latent frames."""


class CausalChunks:
    """The encoder or the decoder of diffusers' AutoencoderKLHunyuanVideo15, chunk by chunk.

    Making one changes the network's `forward`. The first chunk is one frame, which the VAE never
    joins with others.
    """

    def __init__(self, network: Any, frames: int, pixels: int):
        """Changes how the network and its layers run.

        Args:
          network: encoder or decoder, an `nn.Module`.
          frames: frames of its input that make one latent frame, 1 for a decoder.
          pixels: pixels of the clip for each place of a frame of its input.
        """
        from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as layers

        self._whole = network.forward
        self._frames, self._pixels = frames, pixels
        self._kept: dict[Any, Any] = {}
        self._is_first = True
        kinds = {
            layers.HunyuanVideo15CausalConv3d: self._convolve,
            layers.HunyuanVideo15AttnBlock: self._attend,
            layers.HunyuanVideo15Downsample: self._downsample,
            layers.HunyuanVideo15Upsample: self._upsample,
        }
        for module in network.modules():
            if (forward := kinds.get(type(module))) is not None:
                module.forward = partial(forward, module)
        network.forward = self._run

    def _run(self, x: "torch.Tensor") -> "torch.Tensor":
        """[B, C, T, H, W] → [B, C', T', H', W'], as the network gives it for all frames."""
        import torch

        latent = self._frames * x.shape[3] * x.shape[4] * self._pixels
        chunk = self._frames * max(1, _PIXELS // latent)
        later = x.shape[2] - 1
        sizes = [1, *[chunk] * (later // chunk), *([later % chunk] if later % chunk else [])]
        found = []
        try:
            for part in x.split(sizes, dim=2):
                found.append(self._whole(part))
                self._is_first = False
        finally:
            self._kept.clear()
            self._is_first = True
        return torch.cat(found, dim=2)

    def _convolve(self, layer: Any, x: "torch.Tensor") -> "torch.Tensor":
        """A convolution with the last frames of the chunk before, or the first frame repeated."""
        import torch
        from torch.nn import functional

        *sides, before, after = layer.time_causal_padding
        if self._is_first:
            x = functional.pad(x, (0, 0, 0, 0, before, after), mode=layer.pad_mode)
        else:
            x = torch.cat([self._kept[layer], x], dim=2)
        self._kept[layer] = x[:, :, x.shape[2] - before :].clone()
        return layer.conv(functional.pad(x, (*sides, 0, 0), mode=layer.pad_mode))

    def _attend(self, layer: Any, x: "torch.Tensor") -> "torch.Tensor":
        """Attention of each frame to itself and to those before it."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        normed = layer.norm(x)
        query, key, value = (
            projected(normed).flatten(3).permute(2, 0, 3, 1)[:, :, None]  # [T, B, 1, H·W, C]
            for projected in (layer.to_q, layer.to_k, layer.to_v)
        )
        found = []
        for frame in range(len(query)):
            now = (key[frame], value[frame])
            if layer in self._kept:
                now = tuple(
                    torch.cat(pair, dim=2) for pair in zip(self._kept[layer], now, strict=True)
                )
            self._kept[layer] = now
            found.append(scaled_dot_product_attention(query[frame], *now))
        attended = torch.stack(found)[:, :, 0].permute(1, 3, 0, 2).reshape(x.shape)
        return layer.proj_out(attended) + x

    def _downsample(self, layer: Any, x: "torch.Tensor") -> "torch.Tensor":
        """Half as many frames, each of two; the first frame of a clip is one alone."""
        if self._is_first or not layer.add_temporal_downsample:
            return type(layer).forward(layer, x)
        joined = layer._dcae_downsample_rearrange(layer.conv(x), r1=2)
        shortcut = layer._dcae_downsample_rearrange(x, r1=2)
        grouped = shortcut.unflatten(1, (joined.shape[1], layer.group_size))
        return joined + grouped.mean(dim=2)

    def _upsample(self, layer: Any, x: "torch.Tensor") -> "torch.Tensor":
        """Twice as many frames, but for the first frame of a clip."""
        if self._is_first or not layer.add_temporal_upsample:
            return type(layer).forward(layer, x)
        split = layer._dcae_upsample_rearrange(layer.conv(x), r1=2)
        shortcut = layer._dcae_upsample_rearrange(x, r1=2)
        return split + shortcut.repeat_interleave(repeats=layer.repeats, dim=1)


_RATIOS = ("temporal_compression_ratio", "spatial_compression_ratio", "latent_channels")


class HunyuanVideoVae(Vae):
    """The VAE of HunyuanVideo 1.5; see `Vae`. Long clips are taken a few frames at a time."""

    name = "hunyuan_video"
    class_name = "AutoencoderKLHunyuanVideo15"
    described = "HunyuanVideo 1.5's VAE (AutoencoderKLHunyuanVideo15, as diffusers saves it)"
    takes_last_frame = False
    patch_size = (1, 1, 1)
    config_keys = tuple(zip(_RATIOS, (4, 16, 32), strict=True))

    def encode_given(self, first: np.ndarray, last: np.ndarray | None, frames: int) -> np.ndarray:
        """See `Vae.encode_given`; as diffusers' HunyuanVideo15ImageToVideoPipeline makes it.

        Returns:
          [t, h, w, channels + 1] float32: the normalised latents of the first frame, zeros behind
          them, and a mask that is 1 for the first frame.

        Raises:
          ValueError: as `Vae.encode_given`, or a last frame is given, which the models do not take.
        """
        if last is not None:
            raise ValueError("last is given, but the models take a first frame only; give None")
        self._check_frames(np.broadcast_to(first[None], (frames, *first.shape)))
        latents = self.latents(first[None])
        given = np.zeros(
            ((frames - 1) // self.stride[0] + 1, *latents.shape[1:3], self.channels + 1), np.float32
        )
        given[:1, ..., :-1] = latents
        given[:1, ..., -1] = 1
        return given

    @override
    def _load(self) -> Any:
        model = super()._load()
        frames, height, width = self.stride
        CausalChunks(model.encoder, frames, 1)
        CausalChunks(model.decoder, 1, frames * height * width)
        return model

    def _normalised(self, latents: "torch.Tensor") -> "torch.Tensor":
        return latents * self._model.config.scaling_factor

    def _as_decoded(self, latents: "torch.Tensor") -> "torch.Tensor":
        return latents / self._model.config.scaling_factor


class HunyuanVideo13bVae(HunyuanVideoVae):
    """The VAE of HunyuanVideo's first model; see `Vae`.

    Its norms are over all frames that it is given: more than 16 are taken in overlapping parts, as
    diffusers takes them.
    """

    name = "hunyuan_video_13b"
    class_name = "AutoencoderKLHunyuanVideo"
    described = "HunyuanVideo's VAE (AutoencoderKLHunyuanVideo, as diffusers saves it)"
    patch_size = (1, 2, 2)
    config_keys = tuple(zip(_RATIOS, (4, 8, 16), strict=True))

    @override
    def _load(self) -> Any:
        return Vae._load(self)
