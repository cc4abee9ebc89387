"""The text refiner: blocks that let a text's tokens attend to each other before all others."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from alload_jax.models.common.attention import AttentionImplementation, attention
from alload_jax.models.common.condition_tokens import ConditionTokens, mean_by_sample
from alload_jax.models.common.embedding import sinusoid
from alload_jax.models.common.feed_forward import FeedForward
from alload_jax.models.common.segments import AttentionSegments, Segments
from alload_jax.models.hunyuan_video.config import HunyuanVideoConfig

_EPS = 1e-6
_MLP_RATIO = 4
_FREQUENCIES = 256


class TextRefiner(nnx.Module):
    """Embeds a text: linear, then blocks gated by the timestep and the text's mean."""

    def __init__(self, config: HunyuanVideoConfig, *, rngs: nnx.Rngs):
        assert config.text is not None
        dim, width = config.dim, config.text.dim
        self.longest = config.text.length
        self.time_hidden = nnx.Linear(_FREQUENCIES, dim, rngs=rngs)
        self.time_out = nnx.Linear(dim, dim, rngs=rngs)
        self.mean_hidden = nnx.Linear(width, dim, rngs=rngs)
        self.mean_out = nnx.Linear(dim, dim, rngs=rngs)
        self.inner = nnx.Linear(width, dim, dtype=config.compute_dtype, rngs=rngs)
        self.blocks = nnx.vmap(lambda keys: RefinerBlock(config, rngs=keys))(
            rngs.split(config.refiner_layers)
        )

    def __call__(
        self,
        text: ConditionTokens,
        timestep: jax.Array,
        packed: bool,
        sharding: NamedSharding | None,
    ) -> jax.Array:
        """Refines the tokens of each sample's text by themselves.

        Args:
          text: [R, C, text.dim].
          timestep: [R, M] float32.
          packed: whether rows may hold several samples.
          sharding: sharding of rows over a mesh of Auto axes.

        Returns:
          [R, C, D] in the compute dtype.
        """
        time = self.time_out(nnx.silu(self.time_hidden(sinusoid(timestep, _FREQUENCIES))))
        mean = self.mean_out(nnx.silu(self.mean_hidden(mean_by_sample(text))))
        conditioning = nnx.silu(time + mean)
        x = self.inner(text.values)
        graph, layers = nnx.split(self.blocks)

        def apply_layer(x: jax.Array, layer: nnx.State) -> tuple[jax.Array, None]:
            block = nnx.merge(graph, layer)
            return block(x, conditioning, text.segments, self._segments(text, packed), sharding)

        return jax.lax.scan(apply_layer, x, layers)[0]

    def _segments(self, text: ConditionTokens, packed: bool) -> AttentionSegments | None:
        if not packed:
            return None
        slots, longest = text.segments.length.shape[1], min(self.longest, text.values.shape[1])
        lengths = ((0, slots), (longest, 0))
        return AttentionSegments(text.segments, text.segments, lengths, None)


class RefinerBlock(nnx.Module):
    """Self-attention and feed-forward behind affine norms, each with a gate."""

    def __init__(self, config: HunyuanVideoConfig, *, rngs: nnx.Rngs):
        dim, dtype = config.dim, config.compute_dtype

        def linear() -> nnx.Linear:
            return nnx.Linear(dim, dim, dtype=dtype, rngs=rngs)

        def norm() -> nnx.LayerNorm:
            return nnx.LayerNorm(dim, epsilon=_EPS, use_fast_variance=False, dtype=dtype, rngs=rngs)

        self.num_heads = config.num_heads
        self.implementation: AttentionImplementation = config.attention
        self.attention_norm, self.feed_forward_norm = norm(), norm()
        self.query, self.key, self.value, self.out = linear(), linear(), linear(), linear()
        self.feed_forward = FeedForward(
            dim, _MLP_RATIO * dim, activation=nnx.silu, dtype=dtype, rngs=rngs
        )
        # As in the other blocks, gates are closed at initialization.
        self.gates = nnx.Linear(dim, 2 * dim, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        conditioning: jax.Array,
        tokens: Segments,
        segments: AttentionSegments | None,
        sharding: NamedSharding | None,
    ) -> tuple[jax.Array, None]:
        """x: [R, C, D]; conditioning: [R, M, D] float32 → [R, C, D], and nothing to stack."""
        gates = self.gates(conditioning)
        slot = jnp.maximum(tokens.ids, 0)[..., None]
        first, second = jnp.split(jnp.take_along_axis(gates, slot, axis=1), 2, axis=-1)
        y = self.attention_norm(x)
        query, key, value = (
            linear(y).reshape(*y.shape[:2], self.num_heads, -1)
            for linear in (self.query, self.key, self.value)
        )
        mixed = attention(
            *(query, key, value),
            segments=segments,
            lengths=tokens.length[:, 0] if segments is None else None,
            implementation=self.implementation,
            sharding=sharding,
        )
        x = _gated(x, self.out(mixed.reshape(*x.shape[:2], -1)), first)
        return _gated(x, self.feed_forward(self.feed_forward_norm(x), sharding), second), None


def _gated(x: jax.Array, y: jax.Array, gate: jax.Array) -> jax.Array:
    """x + y·gate in float32, rounded once."""
    return (x.astype(jnp.float32) + y.astype(jnp.float32) * gate).astype(x.dtype)
