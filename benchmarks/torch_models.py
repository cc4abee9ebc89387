"""The transformers of diffusers that `torch_trainer.py` trains, with random inputs for each."""

import importlib
import math
from typing import Any, ClassVar, Protocol

import torch
from torch.nn.attention import SDPBackend


class Kind(Protocol):
    """What a step has to know of a transformer.

    Attributes:
      masks_elsewhere: backends for attention outside the blocks, which keeps its masks.
      tokens_beside: condition tokens of a sample that attend beside those of its latents.
      casts_timestep: whether the timestep has the dtype of the other inputs; else it is float32.
    """

    masks_elsewhere: tuple[SDPBackend, ...]
    tokens_beside: int
    casts_timestep: bool

    def build(self, arguments: dict[str, Any], masked: bool) -> Any:
        """The model; its blocks attend with masks only if `masked`."""

    def latent_channels(self, config: Any) -> int:
        """Channels of clips."""

    def volume(self, config: Any) -> int:
        """Latents of a token."""

    def given(self, config: Any, clips: torch.Tensor) -> list[torch.Tensor]:
        """What the model takes behind the channels of noised clips, [B, C, F, H, W] each."""

    def conditions(
        self, config: Any, rows: int, dtype: torch.dtype, device: str
    ) -> dict[str, torch.Tensor]:
        """Random conditions without padding: keyword arguments of the model's forward."""


class Wan:
    """WanTransformer3DModel, text-to-video."""

    masks_elsewhere: tuple[SDPBackend, ...] = ()
    tokens_beside = 0
    casts_timestep = False
    TEXT_LENGTH: ClassVar[int] = 512

    def build(self, arguments: dict[str, Any], masked: bool) -> Any:
        """See `Kind.build`; this model has no masks."""
        from diffusers import WanTransformer3DModel

        return WanTransformer3DModel(**arguments)

    def latent_channels(self, config: Any) -> int:
        """See `Kind.latent_channels`."""
        return int(config.in_channels)

    def volume(self, config: Any) -> int:
        """See `Kind.volume`."""
        return math.prod(config.patch_size)

    def given(self, config: Any, clips: torch.Tensor) -> list[torch.Tensor]:
        """See `Kind.given`."""
        return []

    def conditions(
        self, config: Any, rows: int, dtype: torch.dtype, device: str
    ) -> dict[str, torch.Tensor]:
        """See `Kind.conditions`."""
        text = torch.randn(rows, self.TEXT_LENGTH, config.text_dim, device=device, dtype=dtype)
        return {"encoder_hidden_states": text}


class HunyuanVideo15:
    """HunyuanVideo15Transformer3DModel, image-to-video."""

    # Its text refiner has masks of its own, which neither flash attention nor cuDNN takes.
    masks_elsewhere = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    LENGTHS: ClassVar[tuple[int, int, int]] = (1000, 256, 729)
    """Tokens of the text, of the glyphs and of the image."""
    tokens_beside = sum(LENGTHS)
    casts_timestep = True

    def build(self, arguments: dict[str, Any], masked: bool) -> Any:
        """See `Kind.build`."""
        from diffusers import HunyuanVideo15Transformer3DModel

        if not masked:
            _drop_masks(importlib.import_module(HunyuanVideo15Transformer3DModel.__module__))
        return HunyuanVideo15Transformer3DModel(**arguments)

    def latent_channels(self, config: Any) -> int:
        """See `Kind.latent_channels`."""
        return int(config.out_channels)

    def volume(self, config: Any) -> int:
        """See `Kind.volume`."""
        return int(config.patch_size_t * config.patch_size**2)

    def given(self, config: Any, clips: torch.Tensor) -> list[torch.Tensor]:
        """See `Kind.given`: latents of the given frames and their mask."""
        return [torch.ones_like(clips), torch.ones_like(clips[:, :1])]

    def conditions(
        self, config: Any, rows: int, dtype: torch.dtype, device: str
    ) -> dict[str, torch.Tensor]:
        """See `Kind.conditions`."""
        widths = (config.text_embed_dim, config.text_embed_2_dim, config.image_embed_dim)
        text, glyphs, image = (
            torch.randn(rows, length, width, device=device, dtype=dtype)
            for length, width in zip(self.LENGTHS, widths, strict=True)
        )
        masks = (torch.ones(part.shape[:2], device=device, dtype=dtype) for part in (text, glyphs))
        return {
            "encoder_hidden_states": text,
            "encoder_hidden_states_2": glyphs,
            "image_embeds": image,
            "encoder_attention_mask": next(masks),
            "encoder_attention_mask_2": next(masks),
        }


def _drop_masks(module: Any) -> None:
    """Lets the blocks of a module of diffusers attend without a mask."""
    dispatch = module.dispatch_attention_fn

    def without_mask(*tensors: torch.Tensor, attn_mask: Any = None, **options: Any) -> Any:
        return dispatch(*tensors, **options)

    module.dispatch_attention_fn = without_mask


MODELS: dict[str, Kind] = {"wan": Wan(), "hunyuan_video": HunyuanVideo15()}
"""By the name of our family."""
