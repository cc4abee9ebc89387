"""Counts FLOPs, bytes and parameters of HunyuanVideo-like transformers, without JAX."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from alload_jax.planning.architecture import (
    ActivationCounts,
    BlockArchitecture,
    BlockTensors,
    ForwardFlops,
    linear,
)
from alload_jax.planning.remat import OFFLOADED

_FREQUENCIES = 256
_REFINER_RATIO = 4

_REFINER_TENSORS = 45
"""Live values of each text token in a layer of the refiner, over dim, as compiled."""

_TENSORS = BlockTensors(
    kernels=80,
    # Two norms, one with residual and gate, and the last gate 9, query and key norms with rotary
    # embedding 4, joining and separating the streams 8; GELU reads and writes the hidden layer.
    forward_traffic=(21, 2),
    # Norms 12, query and key norms 8, gates 3, streams 8, gradients of biases 6, sums of gradients
    # 3; the hidden layer: GELU's gradient 3, its output once more 1.
    backward_traffic=(40, 4),
    once_traffic=(0, 2),
    # Of the forward's: outputs of two norms; query and key norms.
    norms_traffic=(2 + 4, 0),
    # As compiled (benchmarks/compiled_memory.py), like what is kept.
    working_set=(22, 3),
    adapters=(1, 0),
    kept={
        "full": (1, 0),
        **dict.fromkeys(OFFLOADED, (0, 0)),  # in the host's memory
        "attention": (1 + 1, 0),
        # Besides: the feed-forward layers' output.
        "feed_forward_and_attention": (1 + 1 + 1, 0),
        # Besides: query, key, value, out; the hidden layer.
        "matmuls_and_attention": (1 + 1 + 1 + 4, 1),
        # Besides: two norms; normed queries and keys.
        "norms_matmuls_and_attention": (1 + 1 + 1 + 4 + 4, 1),
        # Besides: a sum of the residual stream; keys and values of both streams, joined.
        "none": (1 + 1 + 1 + 4 + 4 + 3, 1),
    },
    exchanged=(4, 0),  # query, key, value and output of attention
)


@dataclass(frozen=True)
class HunyuanVideoArchitecture(BlockArchitecture):
    """Shape of the transformer in `alload_jax.models.hunyuan_video.transformer`.

    A sample's length in tokens is that of its latents and of its condition together: both streams
    have equal layers, so that a token costs the same in either.

    Attributes:
      refiner_layers: blocks of the text refiner.
      text_dim, text_length: width and most tokens of the text; None where the condition is classes.
      glyphs_dim, glyphs_length: likewise of the second text; None for none.
      glyph_hidden: width of the layers that embed it.
      image_dim: width of image embeddings; None for none.
    """

    refiner_layers: int = 2
    in_channels: int = 65
    out_channels: int | None = 32
    patch_size: tuple[int, int, int] = (1, 1, 1)
    text_dim: int | None = 3584
    text_length: int | None = 1000
    glyphs_dim: int | None = 1472
    glyphs_length: int | None = 256
    glyph_hidden: int = 2048
    image_dim: int | None = 1152

    tensors: ClassVar[BlockTensors] = _TENSORS
    family: ClassVar[str] = "hunyuan_video"
    sections: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text": ("dim", "length"),
        "glyphs": ("dim", "length"),
        "image": ("dim",),
    }
    kinds: ClassVar[int] = 3
    """Kinds of condition tokens that a learned embedding tells apart."""

    def flops(self) -> ForwardFlops:
        """FLOPs of the forward pass of all blocks on a sample of S tokens of both kinds.

        L·[8·S·d² + 4·S·d·f + 4·S²·d]: query, key, value and out, feed-forward, joint attention.
        Per sample, the modulation of both streams, 24·L·d², and the refiner of the longest text,
        which are small. The embeddings and the head are left out, as is elementwise work.
        """
        dim, layers = self.dim, self.num_layers
        refined = self.text_length or 0
        per_text_token = 8.0 * dim**2 + 4.0 * _REFINER_RATIO * dim**2
        return ForwardFlops(
            matmul_per_token=layers * (8.0 * dim**2 + 4.0 * dim * self.ffn_dim),
            matmul_per_sequence=layers * 24.0 * dim**2
            + self.refiner_layers * refined * per_text_token,
            attention_per_pair=layers * 4.0 * dim,
            feed_forward_output=layers * 2.0 * dim * self.ffn_dim,
            attention_per_sequence=self.refiner_layers * 4.0 * dim * refined**2,
        )

    @override
    def condition_values(self) -> float:
        """A sample's condition is its longest."""
        text, glyphs = self.text_length or 0, self.glyphs_length or 0
        given = text * (self.text_dim or 0) + glyphs * (self.glyphs_dim or 0)
        return float(given + text * _REFINER_TENSORS * self.refiner_layers * self.dim)

    def parameters(self) -> int:
        """Parameters of the model, exactly."""
        dim, patch = self.dim, math.prod(self.patch_size)
        out = patch * (self.in_channels if self.out_channels is None else self.out_channels)
        time = linear(_FREQUENCIES, dim) + linear(dim, dim)
        outside = linear(patch * self.in_channels, dim) + linear(dim, 2 * dim) + linear(dim, out)
        stream = linear(dim, 6 * dim) + 4 * linear(dim, dim) + 2 * (dim // self.num_heads)
        stream += linear(dim, self.ffn_dim) + linear(self.ffn_dim, dim)
        return time + outside + self._condition_parameters() + 2 * self.num_layers * stream

    def _condition_parameters(self) -> int:
        dim = self.dim
        if self.text_dim is None:
            return (self.num_classes + 1) * dim
        width, hidden = self.text_dim, _REFINER_RATIO * dim
        total = self.kinds * dim + 2 * linear(width, dim) + 2 * linear(dim, dim)
        total += linear(_FREQUENCIES, dim)
        block = 4 * dim + 4 * linear(dim, dim) + linear(dim, hidden) + linear(hidden, dim)
        total += self.refiner_layers * (block + linear(dim, 2 * dim))
        if self.glyphs_dim:
            width, hidden = self.glyphs_dim, self.glyph_hidden
            total += 2 * width + linear(width, hidden) + linear(hidden, hidden)
            total += linear(hidden, dim)
        if self.image_dim:
            width = self.image_dim
            total += 2 * width + linear(width, width) + linear(width, dim) + 2 * dim
        return total


HUNYUAN_VIDEO_1_5 = HunyuanVideoArchitecture(2048, 8192, 16, 54)
"""HunyuanVideo 1.5, as in its config.json."""


# ---------------------------------------------------------------- the first model, of 13 billion

_SINGLE_TENSORS = dataclasses.replace(
    _TENSORS,
    kernels=40,
    # The norm 2, query and key norms with rotary embedding 4, the gate 3, attention's output
    # beside the hidden layer 2; that and GELU read and write the hidden layer.
    forward_traffic=(11, 4),
    # Norms 6, query and key norms 8, gate 3, gradients of biases 4, sums of gradients 4, what
    # was side by side 2; the hidden layer: GELU's gradient 3, its output once more and beside 3.
    backward_traffic=(27, 6),
    once_traffic=(2, 4),
    norms_traffic=(1 + 4, 0),
    kept={
        **_TENSORS.kept,
        # As above, without the layer behind attention, a norm, and streams that are joined.
        "matmuls_and_attention": (1 + 1 + 1 + 3, 1),
        "norms_matmuls_and_attention": (1 + 1 + 1 + 3 + 3, 1),
        "none": (1 + 1 + 1 + 3 + 3 + 1, 1),
    },
)
"""Of the blocks of one stream, whose peak and exchange are those of two."""
_SUMMED = ("forward_traffic", "backward_traffic", "once_traffic", "norms_traffic", "split_exchange")


@dataclass(frozen=True)
class HunyuanVideo13bArchitecture(HunyuanVideoArchitecture):
    """Shape of the transformer in `alload_jax.models.hunyuan_video.transformer_13b`.

    Attributes:
      single_layers: blocks of one stream.
      pooled_dim: width of the pooled text; None for none.
      embedded_guidance: anything but None where the model embeds a scale of guidance.
    """

    in_channels: int = 16
    out_channels: int | None = None
    patch_size: tuple[int, int, int] = (1, 2, 2)
    text_dim: int | None = 4096
    text_length: int | None = 256
    glyphs_dim: int | None = None
    glyphs_length: int | None = None
    image_dim: int | None = None
    single_layers: int = 40
    pooled_dim: int | None = 768
    embedded_guidance: float | None = 1.0

    family: ClassVar[str] = "hunyuan_video_13b"
    counted: ClassVar[tuple[str, ...]] = (*HunyuanVideoArchitecture.counted, "single_layers")
    kinds: ClassVar[int] = 0

    @override
    def flops(self) -> ForwardFlops:
        """A token meets as many products in a block of one stream as in one of two."""
        layers, square = self.single_layers, 2.0 * self.dim**2
        alike = dataclasses.replace(self, num_layers=self.num_layers + layers)
        found = HunyuanVideoArchitecture.flops(alike)
        return dataclasses.replace(
            found,
            matmul_per_sequence=found.matmul_per_sequence - layers * 9 * square,
            feed_forward_output=found.feed_forward_output + layers * square,
        )

    @override
    def activations(self) -> ActivationCounts:
        """Sums over all blocks."""
        both = super().activations()
        single = self.activations_of(_SINGLE_TENSORS, self.single_layers)
        sums = {name: getattr(both, name) + getattr(single, name) for name in _SUMMED}
        return dataclasses.replace(both, **sums)

    @override
    def kept_activations(self, remat: str) -> float:
        kept = self._values(_SINGLE_TENSORS.kept[remat])
        return super().kept_activations(remat) + self.single_layers * kept

    @override
    def kernels(self) -> int:
        return super().kernels() + self.single_layers * _SINGLE_TENSORS.kernels

    @override
    def parameters(self) -> int:
        dim, ffn_dim = self.dim, self.ffn_dim
        block = linear(dim, 3 * dim) + 3 * linear(dim, dim) + 2 * (dim // self.num_heads)
        block += linear(dim, ffn_dim) + linear(dim + ffn_dim, dim)
        total = super().parameters() + self.single_layers * block
        if self.pooled_dim is not None:
            total += linear(self.pooled_dim, dim) + linear(dim, dim)
        if self.embedded_guidance is not None:
            total += linear(_FREQUENCIES, dim) + linear(dim, dim)
        return total


HUNYUAN_VIDEO_13B = HunyuanVideo13bArchitecture(3072, 12288, 24, 20)
"""HunyuanVideo's first model, as in its config.json."""
