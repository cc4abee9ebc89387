"""Counts FLOPs, bytes and parameters of Wan-like transformers from their shape, without JAX."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from typing_extensions import override

from alload_jax.planning.architecture import (
    BlockArchitecture,
    BlockTensors,
    ForwardFlops,
    linear,
)
from alload_jax.planning.remat import OFFLOADED

_TENSORS = BlockTensors(
    kernels=60,
    # Three norms with residual and gate 10, query and key norms with rotary embedding 9, the last
    # gate 3; GELU reads and writes the hidden layer.
    forward_traffic=(22, 2),
    # Norms 15, query and key norms 12, gates 3, gradients of biases 8, sums of gradients 4; the
    # hidden layer: GELU's gradient 3, its output once more 1.
    backward_traffic=(42, 4),
    once_traffic=(0, 2),
    # Of the forward's: outputs of three norms; query and key norms.
    norms_traffic=(3 + 9, 0),
    # As compiled (benchmarks/compiled_memory.py), like what is kept.
    working_set=(20, 3),
    adapters=(1, 0),
    kept={
        "full": (1, 0),
        **dict.fromkeys(OFFLOADED, (0, 0)),  # in the host's memory
        # Both attentions' outputs.
        "attention": (1 + 2, 0),
        # Besides: the feed-forward layer's output.
        "feed_forward_and_attention": (1 + 2 + 1, 0),
        # Besides: query, key, value, out; cross-attention's query and out; the hidden layer.
        "matmuls_and_attention": (1 + 2 + 1 + 6, 1),
        # Besides: three norms; normed queries and keys.
        "norms_matmuls_and_attention": (1 + 2 + 1 + 6 + 6, 1),
        # Besides: two sums of the residual stream, and what XLA copies of them in a loop.
        "none": (1 + 2 + 1 + 6 + 6 + 4, 1),
    },
    exchanged=(4, 0),  # query, key, value and output of self-attention
)
_CONDITION_TENSORS = 8
"""Live tensors of T × dim beside the text itself: Wan 1.3B was measured at 8.2 of them a sample
(`per_sequence` in benchmarks/results/calibration_wan_1_3b_h200.json)."""
_KEPT_CONDITION = {
    # Keys and values; normed keys.
    "matmuls_and_attention": 2,
    "norms_matmuls_and_attention": 3,
    "none": 3,
}
"""Tensors of T × dim that a block keeps, by rematerialisation policy; 0 for others."""
_CLIP_TOKENS = 257
"""Tokens of a picture of 224×224 in patches of 14×14, and one for the whole."""


@dataclass(frozen=True)
class WanArchitecture(BlockArchitecture):
    """Shape of the transformer in `alload_jax.models.wan.transformer`; the defaults are Wan 2.1's.

    Attributes:
      text_length: tokens of the condition, T.
      text_dim: width of the text's embeddings; None where the condition is classes.
      freq_dim: size of the timestep's sinusoid.
      qk_norm: RMSNorm of queries and keys.
      cross_norm: an affine LayerNorm before cross-attention.
      position_embedding: a linear map of the positions' cosines and sines.
      image_dim: width of the image's embeddings; None without an image.
      image_positions: embeddings of the image that have a learned position; None for none.
    """

    text_length: int = 512
    text_dim: int | None = 4096
    freq_dim: int = 256
    qk_norm: bool = True
    cross_norm: bool = True
    position_embedding: bool = False
    image_dim: int | None = None
    image_positions: int | None = None

    tensors: ClassVar[BlockTensors] = _TENSORS
    sections: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text": ("dim", "length"),
        "image": ("dim", "positions"),
    }

    @classmethod
    @override
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Where the condition is classes, `condition_tokens` says how many (default 1)."""
        if not fields.get("text"):
            fields = {**fields, "text": {"length": fields.get("condition_tokens", 1)}}
        return super().from_fields(fields)

    @override
    def fields(self) -> dict[str, Any]:
        found = super().fields()
        if self.text_dim is None:
            found["condition_tokens"] = self.text_length
        if not self.position_embedding:
            del found["position_embedding"]  # older files do not name it
        return found

    def flops(self) -> ForwardFlops:
        """FLOPs of the forward pass of all blocks.

        On one sample, L·[12·S·d² + 4·S·d·f + 4·S²·d + 4·T·d² + 4·S·T·d]: queries, keys, values and
        out of self-attention (8·S·d²), queries and out of cross-attention (4·S·d²), feed-forward,
        self-attention, keys and values of the text, cross-attention. T counts the image's tokens
        too. The embeddings and the head, under 1 % for Wan, are left out, as are norms and other
        elementwise work.
        """
        condition = self.text_length + self._image_tokens()
        return ForwardFlops(
            matmul_per_token=self.num_layers * (12.0 * self.dim**2 + 4.0 * self.dim * self.ffn_dim),
            matmul_per_sequence=self.num_layers * 4.0 * condition * self.dim**2,
            attention_per_pair=self.num_layers * 4.0 * self.dim,
            attention_per_token=self.num_layers * 4.0 * condition * self.dim,
            feed_forward_output=self.num_layers * 2.0 * self.dim * self.ffn_dim,
        )

    @override
    def condition_values(self) -> float:
        live = _CONDITION_TENSORS * self.dim
        text = self.text_length * (live + (self.text_dim or 0))
        return text + self._image_tokens() * (live + (self.image_dim or 0))

    @override
    def kept_condition(self, remat: str) -> float:
        tokens = self.text_length + self._image_tokens()
        return float(_KEPT_CONDITION.get(remat, 0) * self.num_layers * tokens * self.dim)

    def _image_tokens(self) -> int:
        """Tokens of the image's embeddings, as of CLIP ViT-H/14 where no positions say."""
        if self.image_dim is None:
            return 0
        return self.image_positions or _CLIP_TOKENS

    def parameters(self) -> int:
        """Parameters of the model, exactly."""
        dim, patch = self.dim, math.prod(self.patch_size)
        out = patch * (self.in_channels if self.out_channels is None else self.out_channels)
        embedding = linear(patch * self.in_channels, dim)
        embedding += self.position_embedding * linear(dim // self.num_heads, dim)
        time = linear(self.freq_dim, dim) + linear(dim, dim) + linear(dim, 6 * dim)
        if self.text_dim is None:
            condition = (self.num_classes + 1) * dim
        else:
            condition = linear(self.text_dim, dim) + linear(dim, dim)
        attention = 4 * linear(dim, dim) + 2 * dim * self.qk_norm
        feed_forward = linear(dim, self.ffn_dim) + linear(self.ffn_dim, dim)
        block = 6 * dim + 2 * attention + 2 * dim * self.cross_norm + feed_forward
        if (width := self.image_dim) is not None:
            condition += 2 * width + linear(width, width) + linear(width, dim) + 2 * dim
            condition += width * (self.image_positions or 0)
            block += 2 * linear(dim, dim) + dim * self.qk_norm
        head = 2 * dim + linear(dim, out)
        return embedding + time + condition + head + self.num_layers * block


WAN_1_3B = WanArchitecture(1536, 8960, 12, 30)
WAN_14B = WanArchitecture(5120, 13824, 40, 40)
"""Wan 2.1's text-to-video models, as in their config.json."""
