"""What a transformer of Wan's kind computes and holds, counted from its shape; no JAX."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from alload_jax.errors import InputError

LABEL_TOKENS = 1
"""Condition tokens of a sample with a class, where nothing else is said."""


@dataclass(frozen=True)
class Architecture:
    """Shape of the transformer in `alload_jax.models.wan.transformer`; the defaults are Wan 2.1's.

    Attributes:
      dim: width of the residual stream.
      ffn_dim: width of the feed-forward layer.
      num_heads: attention heads.
      num_layers: transformer blocks.
      in_channels: channels of the latents that enter.
      text_length: tokens of the condition, T.
      text_dim: width of the text's embeddings; None where the condition is classes.
      patch_size: latent (frames, height, width) that make one token.
      out_channels: channels of what is predicted; None for `in_channels`.
      num_classes: classes, where the condition is classes.
      freq_dim: size of the timestep's sinusoid.
      qk_norm: RMSNorm of queries and keys.
      cross_norm: an affine LayerNorm before cross-attention.
    """

    dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int
    in_channels: int = 16
    text_length: int = 512
    text_dim: int | None = 4096
    patch_size: tuple[int, int, int] = (1, 2, 2)
    out_channels: int | None = None
    num_classes: int = 10
    freq_dim: int = 256
    qk_norm: bool = True
    cross_norm: bool = True

    def forward_flops(self, seq_len: int) -> float:
        """FLOPs of the blocks' forward on one sample of S tokens; a multiply-add counts as two.

        L·[12·S·d² + 4·S·d·f + 4·S²·d + 4·T·d² + 4·S·T·d]: queries, keys, values and out of
        self-attention (8·S·d²), queries and out of cross-attention (4·S·d²), feed-forward,
        self-attention, keys and values of the text, cross-attention. The embeddings and the head,
        under 1 % for Wan, are left out, as are norms and other elementwise work.
        """
        per_token = self.matmul_flops_per_token + self.cross_flops_per_token
        return (
            self.matmul_flops_per_sequence
            + per_token * seq_len
            + self.attention_flops_per_pair * float(seq_len) ** 2
        )

    def step_flops(self, seq_len: np.ndarray) -> float:
        """FLOPs of a training step on samples of these lengths: three times their forward's.

        What rematerialisation computes again does not count.

        Args:
          seq_len: [N] integers.
        """
        lengths, counts = np.unique(seq_len, return_counts=True)
        each = (self.forward_flops(int(length)) for length in lengths)
        return 3.0 * sum(n * flops for n, flops in zip(counts.tolist(), each, strict=True))

    @property
    def matmul_flops_per_token(self) -> float:
        """Of the blocks' matrix products, forward, for each token of latents."""
        return self.num_layers * (12.0 * self.dim**2 + 4.0 * self.dim * self.ffn_dim)

    @property
    def matmul_flops_per_sequence(self) -> float:
        """Of keys and values of one sequence's condition, forward."""
        return self.num_layers * 4.0 * self.text_length * self.dim**2

    @property
    def cross_flops_per_token(self) -> float:
        """Of attention to the condition, forward, for each token of latents."""
        return self.num_layers * 4.0 * self.text_length * self.dim

    @property
    def attention_flops_per_pair(self) -> float:
        """Of self-attention, forward, for each pair of tokens of a sequence."""
        return self.num_layers * 4.0 * self.dim

    def block_parameters(self) -> int:
        """Parameters of one block."""
        dim, ffn = self.dim, self.ffn_dim
        attention = 4 * (dim**2 + dim) + 2 * dim * self.qk_norm
        feed_forward = 2 * dim * ffn + ffn + dim
        return 6 * dim + 2 * attention + 2 * dim * self.cross_norm + feed_forward

    def parameters(self) -> int:
        """Parameters of the model, exactly."""
        dim, patch = self.dim, math.prod(self.patch_size)
        out = patch * (self.in_channels if self.out_channels is None else self.out_channels)
        embedding = (patch * self.in_channels + 1) * dim
        time = (self.freq_dim + 1) * dim + (dim + 1) * dim + (dim + 1) * 6 * dim
        if self.text_dim is None:
            condition = (self.num_classes + 1) * dim
        else:
            condition = (self.text_dim + 1) * dim + (dim + 1) * dim
        head = 2 * dim + (dim + 1) * out
        return embedding + time + condition + head + self.num_layers * self.block_parameters()

    def fields(self) -> dict[str, Any]:
        """The architecture as `from_fields` reads it."""
        fields = dataclasses.asdict(self)
        length, width = fields.pop("text_length"), fields.pop("text_dim")
        if width is None:
            fields["condition_tokens"] = length
        else:
            fields["text"] = {"dim": width, "length": length}
        fields = {k: v for k, v in fields.items() if v is not None}
        return fields | {"patch_size": list(self.patch_size)}


NAMED = {
    "wan2.1-1.3b": Architecture(1536, 8960, 12, 30),
    "wan2.1-14b": Architecture(5120, 13824, 40, 40),
}
"""Wan 2.1's text-to-video models, as in their config.json."""


def from_fields(fields: Mapping[str, Any]) -> Architecture:
    """The architecture that fields describe, as `WanConfig.architecture()` gives them.

    Args:
      fields: `text` is {"dim", "length"}, or missing where the condition is classes; then
        `condition_tokens` says how many (default 1). Fields of the arithmetic, such as `remat`,
        are passed over.

    Raises:
      InputError: a field is missing or no whole number, or the model has an image condition.
    """
    if fields.get("image"):
        raise InputError("model.image is set; models with an image condition have no cost model")
    known = {field.name for field in dataclasses.fields(Architecture)}
    chosen = {name: value for name, value in fields.items() if name in known}
    chosen["patch_size"] = tuple(fields.get("patch_size") or (1, 2, 2))
    if text := fields.get("text"):
        chosen |= {"text_dim": text.get("dim"), "text_length": text.get("length")}
    else:
        chosen |= {"text_dim": None, "text_length": fields.get("condition_tokens", LABEL_TOKENS)}
    for name in ("dim", "ffn_dim", "num_heads", "num_layers", "text_length"):
        value = chosen.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"model.{name} is {value!r}; give a whole number of at least 1")
    return Architecture(**chosen)


def architecture_named(name: str) -> Architecture:
    """One of `NAMED`.

    Raises:
      InputError: there is no such name.
    """
    if name not in NAMED:
        raise InputError(f"model {name!r} is unknown; choose one of {', '.join(NAMED)}")
    return NAMED[name]
