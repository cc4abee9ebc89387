"""Embeddings of the timestep and of the conditions, whose tokens the blocks get in one array."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from alload_jax.models.common.condition_tokens import ConditionTokens, side_by_side
from alload_jax.models.common.config import TextConfig
from alload_jax.models.common.embedding import ClassEmbedding, ImageEmbedding, sinusoid
from alload_jax.models.common.segments import PackedMetadata, Segments
from alload_jax.models.hunyuan_video.config import GLYPHS, IMAGE, TEXT, HunyuanVideoConfig
from alload_jax.models.hunyuan_video.refiner import TextRefiner

_GLYPH_NORM_EPS = 1e-5
_FREQUENCIES = 256
"""Width of the timestep's sinusoidal embedding."""
_KINDS = (TEXT, GLYPHS, IMAGE)
"""Kinds of condition tokens in the order of the learned embedding that tells them apart."""
_ORDER = (IMAGE, GLYPHS, TEXT)
"""Order of a sample's condition tokens; attention does not depend on it."""


class TimeEmbedding(nnx.Module):
    """Embeds the timestep: sinusoid, linear, SiLU, linear; float32."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(_FREQUENCIES, dim, rngs=rngs)
        self.out = nnx.Linear(dim, dim, rngs=rngs)

    def __call__(self, timestep: jax.Array) -> jax.Array:
        """timestep: [...], 0 to 1000 → [..., D] float32."""
        return self.out(nnx.silu(self.hidden(sinusoid(timestep, _FREQUENCIES))))


class GlyphEmbedding(nnx.Module):
    """Embeds byT5's tokens: norm, linear, GELU, linear, GELU, linear."""

    def __init__(
        self, text: TextConfig, hidden: int, dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.norm = nnx.LayerNorm(
            text.dim, epsilon=_GLYPH_NORM_EPS, use_fast_variance=False, dtype=dtype, rngs=rngs
        )
        self.inner = nnx.Linear(text.dim, hidden, dtype=dtype, rngs=rngs)
        self.hidden = nnx.Linear(hidden, hidden, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(hidden, dim, dtype=dtype, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        """text: [R, C, width] → [R, C, D]."""
        x = nnx.gelu(self.inner(self.norm(text)), approximate=False)
        return self.out(nnx.gelu(self.hidden(x), approximate=False))


class ConditionEmbedding(nnx.Module):
    """Embeds classes, or text, glyphs and image, as tokens of the blocks' second stream."""

    def __init__(self, config: HunyuanVideoConfig, *, rngs: nnx.Rngs):
        dim, dtype = config.dim, config.compute_dtype
        self.dtype = dtype
        with_text, glyphs, image = config.text is not None, config.glyphs, config.image
        self.classes = (
            None if with_text else ClassEmbedding(config.num_classes, dim, dtype=dtype, rngs=rngs)
        )
        self.text = TextRefiner(config, rngs=rngs) if with_text else None
        self.glyphs = (
            GlyphEmbedding(glyphs, config.glyph_hidden, dim, dtype=dtype, rngs=rngs)
            if glyphs
            else None
        )
        self.image = ImageEmbedding(image, dim, dtype=dtype, rngs=rngs) if image else None
        self.kind = nnx.Embed(len(_KINDS), dim, dtype=dtype, rngs=rngs) if with_text else None

    def __call__(
        self,
        condition: Any,
        timestep: jax.Array,
        packed: PackedMetadata | None,
        sharding: NamedSharding | None,
    ) -> tuple[jax.Array, Segments | None]:
        """Embeds the tokens of all kinds and brings those of each sample together.

        Args:
          condition: [R, C] int32 classes, or `ConditionTokens` by name.
          timestep: [R, M] float32; M is 1 in bucketed rows.
          packed: of packed rows; None for bucketed ones.
          sharding: sharding of rows over a mesh of Auto axes.

        Returns:
          [R, ΣC, D], zeros in padding; the tokens of each sample, None if rows of one sample each
          have no padding.
        """
        if self.classes is not None:
            segments = None if packed is None else packed.condition
            return self.classes(condition, segments), segments
        parts = []
        for name in _ORDER:
            if (module := getattr(self, name)) is not None:
                tokens = condition[name]
                values = tokens.values.astype(self.dtype)
                if name == TEXT:
                    values = module(tokens, timestep, packed is not None, sharding)
                else:
                    values = module(values)
                parts.append(tokens._replace(values=values + self._kind(name)))
        joined: ConditionTokens = side_by_side(parts)
        return joined.values, joined.segments

    def _kind(self, name: str) -> jax.Array:
        """[D], the learned embedding of a kind of tokens."""
        assert self.kind is not None
        return self.kind(jnp.asarray(_KINDS.index(name)))
