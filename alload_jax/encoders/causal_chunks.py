"""Runs the networks of HunyuanVideo 1.5's VAE over a few frames at a time.

No frame depends on a later one: convolutions look back two frames, attention looks back at all.
What a chunk needs of those before it is kept, so that the result is that of all frames at once,
within rounding, in memory that does not grow with the frames' pixels. diffusers' own forward pass
takes all frames at once, with a mask of attention of the squared number of latents.
"""

from functools import partial
from typing import Any

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

    def _run(self, x: Any) -> Any:
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

    def _convolve(self, layer: Any, x: Any) -> Any:
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

    def _attend(self, layer: Any, x: Any) -> Any:
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

    def _downsample(self, layer: Any, x: Any) -> Any:
        """Half as many frames, each of two; the first frame of a clip is one alone."""
        if self._is_first or not layer.add_temporal_downsample:
            return type(layer).forward(layer, x)
        joined = layer._dcae_downsample_rearrange(layer.conv(x), r1=2)
        shortcut = layer._dcae_downsample_rearrange(x, r1=2)
        grouped = shortcut.unflatten(1, (joined.shape[1], layer.group_size))
        return joined + grouped.mean(dim=2)

    def _upsample(self, layer: Any, x: Any) -> Any:
        """Twice as many frames, but for the first frame of a clip."""
        if self._is_first or not layer.add_temporal_upsample:
            return type(layer).forward(layer, x)
        split = layer._dcae_upsample_rearrange(layer.conv(x), r1=2)
        shortcut = layer._dcae_upsample_rearrange(x, r1=2)
        return split + shortcut.repeat_interleave(repeats=layer.repeats, dim=1)
