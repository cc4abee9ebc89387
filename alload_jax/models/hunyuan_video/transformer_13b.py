"""HunyuanVideo's first transformer, of 13 billion parameters, and its config.

Behind blocks of two streams as in 1.5 it has blocks of one, in which latents and condition have the
same layers. The pooled text and the scale of a guidance that the model was distilled with modulate
all blocks beside the timestep.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree
from typing_extensions import override

from alload_jax.errors import InputError, require_fields, require_positive
from alload_jax.models.common.attention import attention
from alload_jax.models.common.config import ConditionPart
from alload_jax.models.common.embedding import TIMESTEP_SCALE, TimestepEmbedding, mean_by_sample
from alload_jax.models.common.layers import apply_layers
from alload_jax.models.common.parts import JOINT_ATTENTION, NORM, NORM_OUTPUT, Auxiliary
from alload_jax.models.common.segments import PackedMetadata, Segments
from alload_jax.models.common.sublayers import gated_add
from alload_jax.models.hunyuan_video import transformer
from alload_jax.planning.analytic import keeps_feed_forward
from pallas_kernels import residual_layernorm_modulate, segmentation

POOLED = "pooled"
"""Name of the pooled text among the kinds of condition tokens; no block has it as a token."""


@dataclass(frozen=True)
class HunyuanVideo13bConfig(transformer.HunyuanVideoConfig):
    """Shape and arithmetic of the transformer; `HunyuanVideoConfig` has the other fields.

    Attributes:
      family: `hunyuan_video_13b`.
      single_layers: number of blocks of one stream, behind `num_layers` of two.
      pooled_dim: width of the pooled text, CLIP's; null for none.
      embedded_guidance: scale of guidance that training tells the model, 1 for weights that were
        distilled with one; null for models that embed none. Samples have a setting of their own.
    """

    family: Literal["hunyuan_video_13b"] = "hunyuan_video_13b"
    single_layers: int = 4
    pooled_dim: int | None = None
    embedded_guidance: float | None = None

    learned_kinds: ClassVar[bool] = False
    stacks: ClassVar[tuple[str, ...]] = ("num_layers", "single_layers")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("model.", self, "pooled_dim")
        require_fields("model.", self, "embedded_guidance", lambda v: 0 <= v < 1e6, "0 or more")
        for name in ("glyphs", "image", "sparse_attention"):
            if getattr(self, name):
                raise InputError(f"model.{name} is set, which {self.family} lacks; set it to null")
        if self.pooled_dim and not self.text:
            raise InputError("model.pooled_dim is set without model.text; set both, or neither")

    @override
    def architecture(self) -> dict[str, Any]:
        """The scale of the guidance changes no parameter."""
        has_guidance = self.embedded_guidance is not None
        return super().architecture() | {"embedded_guidance": 1.0 if has_guidance else None}

    @override
    def condition_parts(self) -> tuple[ConditionPart, ...]:
        """The pooled text counts as a token of a sample's length."""
        width = self.pooled_dim
        pooled = [ConditionPart(POOLED, width, 1, required=True)] if width else []
        return (*super().condition_parts(), *pooled)

    @override
    def with_guidance(self, guidance: float) -> Self:
        is_told = self.embedded_guidance is not None
        return replace(self, embedded_guidance=guidance) if is_told else self


class SingleBlock(transformer.Stream):
    """Joint attention and feed-forward beside each other, with the same layers for all tokens."""

    def __init__(self, config: HunyuanVideo13bConfig, *, rngs: nnx.Rngs):
        self.implementation = config.attention
        super().__init__(config, single=True, rngs=rngs)

    def __call__(self, x: jax.Array, context: transformer.Context) -> tuple[jax.Array, Auxiliary]:
        """x: [B, S, D], latents and condition in joint rows, in `stream_dtype` → likewise."""
        sharding, (segments,) = context.sharding, context.segmentations
        options = self.options(segments, sharding)
        shift, scale, gate = self.modulations(context.time)
        with jax.named_scope(NORM):
            x, y = residual_layernorm_modulate(x, None, None, scale, shift, **options)
            y = checkpoint_name(y.astype(self.dtype), NORM_OUTPUT)
        with jax.named_scope(JOINT_ATTENTION):
            mixed = attention(
                *self.heads(y, y, context.rotary, sharding),
                segments=context.rows.segments,
                implementation=self.implementation,
                sharding=sharding,
            )
        mixed = mixed.reshape(*y.shape[:2], -1)
        y = self.feed_forward(y, sharding, mixed, output_kept=keeps_feed_forward(context.remat))
        return gated_add(x, y, gate, options), {}


class HunyuanVideo13bTransformer(transformer.HunyuanVideoTransformer):
    """The transformer; see `HunyuanVideoTransformer`."""

    config: HunyuanVideo13bConfig

    def __init__(self, config: HunyuanVideo13bConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        dim, pooled = config.dim, config.pooled_dim
        told = config.embedded_guidance is not None
        self.guidance_embedding = (
            TimestepEmbedding(dim, transformer.FREQUENCIES, rngs=rngs) if told else None
        )
        self.pooled_hidden = nnx.Linear(pooled, dim, rngs=rngs) if pooled else None
        self.pooled_out = nnx.Linear(dim, dim, rngs=rngs) if pooled else None
        keys = rngs.split(config.single_layers)
        self.single_blocks = nnx.vmap(lambda keys: SingleBlock(config, rngs=keys))(keys)

    @override
    def embed_time(self, timestep: jax.Array, condition: PyTree) -> jax.Array:
        """Adds the pooled text, zeros where a sample has none, and the scale of guidance."""
        time = super().embed_time(timestep, condition)
        if self.guidance_embedding is not None:
            assert self.config.embedded_guidance is not None
            scale = self.config.embedded_guidance * TIMESTEP_SCALE
            time = time + self.guidance_embedding(jnp.full_like(timestep, scale))
        if self.pooled_hidden is not None and self.pooled_out is not None:
            pooled = mean_by_sample(condition[POOLED])
            pooled = pooled if timestep.ndim > 1 else pooled[:, 0]
            time = time + self.pooled_out(nnx.silu(self.pooled_hidden(pooled)))
        return time

    @override
    def after_blocks(
        self,
        x: transformer.Streams,
        context: transformer.Context,
        condition: Segments | None,
        packed: PackedMetadata | None,
    ) -> jax.Array:
        """Runs the blocks of one stream on joint rows."""
        rows, tokens, slots = context.rows, x.video.shape[1], context.time.shape[1]

        def of_all(part: jax.Array, value: float) -> jax.Array:
            """Part of the rotary table; that of the condition turns nothing."""
            beside = jnp.full((*x.condition.shape[:2], part.shape[-1]), value)
            shared = part.ndim == 2  # as it is in bucketed rows
            return jnp.concatenate([part, beside[0]]) if shared else rows.join(part, beside)

        segments = None
        if packed is not None:
            assert condition is not None
            ids = rows.join(packed.tokens.ids, condition.ids)
            segments = segmentation(ids, slots, self.config.dim, context.sharding)
        rotary = (of_all(context.rotary[0], 1.0), of_all(context.rotary[1], 0.0))
        context = context._replace(rotary=rotary, segmentations=(segments,))
        axes = 1 if packed is None else 2
        joined, _ = apply_layers(self.single_blocks, rows.join(*x), context, self.config, axes)
        return rows.separate(joined, tokens)[0]
