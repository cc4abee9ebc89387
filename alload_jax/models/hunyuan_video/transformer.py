"""HunyuanVideo's diffusion transformer, for latents of any size, and its config."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jaxtyping import PyTree
from typing_extensions import override

from alload_jax.errors import InputError
from alload_jax.models.common import embedding, parts, sublayers
from alload_jax.models.common.attention import AttentionImplementation, attention
from alload_jax.models.common.config import ConditionPart, TextConfig, TransformerConfig
from alload_jax.models.common.layers import StackedTransformer, apply_layers
from alload_jax.models.common.segments import (
    AttentionSegments,
    Grid,
    JointRows,
    PackedMetadata,
    Segments,
    bucketed_joint_rows,
    clip_layout,
    packed_joint_rows,
)
from alload_jax.models.common.sparse_attention.layer import RowsOfLayer, SparseSelfAttention
from alload_jax.planning.analytic import keeps_feed_forward
from alload_jax.planning.remat import RematPolicy
from pallas_kernels import (
    Segmentation,
    layernorm_modulate,
    residual_layernorm_modulate,
    segmentation,
)

TEXT, GLYPHS, IMAGE = "text", "glyphs", "image"
"""Names of the kinds of condition tokens."""
_IMAGE_TOKENS = 729
"""Embeddings of one image by SigLIP at 384×384: 27² patches of 14."""


@dataclass(frozen=True)
class HunyuanVideoConfig(TransformerConfig):
    """Shape and arithmetic of the transformer; `TransformerConfig` has the other fields.

    Attributes:
      family: `hunyuan_video`.
      refiner_layers: number of blocks of the text refiner.
      glyphs: second text, of the characters to be drawn, from byT5; null for none.
      glyph_hidden: width of the layers that embed it.
      rotary_dims: channels of a head that encode (t, h, w), even; null for 1/8, 7/16 and 7/16 of
        them.
      rotary_theta: base of the frequencies of the rotary embedding.
    """

    family: Literal["hunyuan_video", "hunyuan_video_13b"] = "hunyuan_video"
    refiner_layers: int = 2
    glyphs: TextConfig | None = None
    glyph_hidden: int = 2048
    rotary_dims: tuple[int, int, int] | None = None
    rotary_theta: float = 256.0

    joint_attention: ClassVar[bool] = True
    given_optional: ClassVar[bool] = True
    learned_kinds: ClassVar[bool] = True
    """Whether a learned embedding tells the kinds of condition tokens apart."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("refiner_layers", "glyph_hidden")
        if any(size < 0 or size % 2 for size in self.rotary_sizes) or (
            sum(self.rotary_sizes) != self.head_dim
        ):
            raise InputError(
                f"model.rotary_dims is {self.rotary_dims}; they must be even, and their sum "
                f"model.dim / model.num_heads, which is {self.head_dim}"
            )
        if self.image and self.image.positions is not None:
            raise InputError(
                f"model.image.positions is {self.image.positions}, and model.family hunyuan_video "
                "learns none; set it to null"
            )
        for name in (GLYPHS, IMAGE):
            if getattr(self, name) and not self.text:
                raise InputError(f"model.{name} is set without model.text; set both, or neither")

    @override
    def architecture(self) -> dict[str, Any]:
        """The division of a head's channels is always named."""
        return super().architecture() | {"rotary_dims": list(self.rotary_sizes)}

    @override
    def condition_parts(self) -> tuple[ConditionPart, ...]:
        """The null condition keeps its image."""
        kinds = []
        if self.text:
            kinds.append(ConditionPart(TEXT, self.text.dim, self.text.length))
        if self.glyphs:
            kinds.append(ConditionPart(GLYPHS, self.glyphs.dim, self.glyphs.length))
        if self.image:
            kinds.append(ConditionPart(IMAGE, self.image.dim, _IMAGE_TOKENS, dropped=False))
        return tuple(kinds)

    @property
    def rotary_sizes(self) -> tuple[int, int, int]:
        """Channels of a head that encode (t, h, w)."""
        if self.rotary_dims is not None:
            return self.rotary_dims
        spatial = 2 * (7 * self.head_dim // 32)
        return (self.head_dim - 2 * spatial, spatial, spatial)


_EPS = 1e-6
_MLP_RATIO = 4
FREQUENCIES = 256


class Context(NamedTuple):
    """Inputs that all blocks share.

    Attributes:
      time: [B, D] float32, SiLU of the embedded timestep; [R, M, D] for packed rows.
      rotary: rotary table for the queries and keys of the latents.
      rows: where the tokens of both streams stand in attention.
      segmentations: segments of the tokens of the latents and of those of the condition, for the
        norms of packed rows; None each for rows of one sample.
      sharding: sharding of rows over a mesh of Auto axes, which kernels need.
      remat: what the layer keeps for the backward pass.
    """

    time: jax.Array
    rotary: sublayers.RotaryTable
    rows: JointRows
    segmentations: tuple[Segmentation | None, ...]
    sharding: NamedSharding | None
    remat: RematPolicy = "none"


class Streams(NamedTuple):
    """video: [B, S, D], tokens of the latents; condition: [B, C, D]."""

    video: jax.Array
    condition: jax.Array


class Stream(sublayers.AttentionProjections):
    """The parameters with which a block computes one of its streams.

    The residual stream has the config's `stream_dtype`; the inputs of attention and feed-forward
    have its `compute_dtype`.
    """

    def __init__(self, config: HunyuanVideoConfig, *, single: bool = False, rngs: nnx.Rngs):
        """Draws the weights; of a single stream, one layer is the last of both parts."""
        dim, self.dtype = config.dim, config.compute_dtype
        self.modulation_count = 3 if single else 6
        self.norm_options: sublayers.NormOptions = {"eps": _EPS, "implementation": config.norm}
        # adaLN-Zero (arXiv 2212.09748): every block starts as the identity.
        zeros, modulated = nnx.initializers.zeros, self.modulation_count * dim
        self.modulation = nnx.Linear(dim, modulated, kernel_init=zeros, rngs=rngs)
        super().__init__(
            config, norm_width=config.head_dim, eps=_EPS, with_output=not single, rngs=rngs
        )
        self.feed_forward = sublayers.FeedForward(config, beside=dim * single, rngs=rngs)

    @jax.named_scope(parts.NORM)
    def modulations(self, time: jax.Array) -> list[jax.Array]:
        """shift, scale and gate of attention, then of feed-forward: [..., D] float32 each."""
        return jnp.split(self.modulation(time), self.modulation_count, axis=-1)

    def options(
        self, segmentation: Segmentation | None, sharding: NamedSharding | None
    ) -> sublayers.NormOptions:
        """Options of the norms."""
        segments = {} if segmentation is None else {"segment_ids": segmentation}
        return self.norm_options | segments | {"sharding": sharding}

    def finish(
        self,
        x: jax.Array,
        mixed: jax.Array,
        modulations: list[jax.Array],
        options: sublayers.NormOptions,
        remat: RematPolicy,
    ) -> jax.Array:
        """Adds attention's output [B, S, num_heads, head_dim] and feed-forward to x: [B, S, D]."""
        _, _, gate1, shift2, scale2, gate2 = modulations
        sharding = options["sharding"]
        y = self.output(mixed, sharding)
        with jax.named_scope(parts.NORM):
            x, y = residual_layernorm_modulate(x, y, gate1, scale2, shift2, **options)
            y = checkpoint_name(y, parts.NORM_OUTPUT)
        y = self.feed_forward(y, sharding, output_kept=keeps_feed_forward(remat))
        return sublayers.gated_add(x, y, gate2, options)


class Block(nnx.Module):
    """Joint attention of the latents' tokens and the condition's, each with its own parameters."""

    def __init__(self, config: HunyuanVideoConfig, *, rngs: nnx.Rngs):
        self.implementation = config.attention
        self.video = Stream(config, rngs=rngs)
        self.condition = Stream(config, rngs=rngs)
        # Last, so that all other parameters are drawn as without it.
        self.sparse_attention = (
            SparseSelfAttention(config, rngs=rngs) if config.sparse_attention else None
        )

    def __call__(self, x: Streams, context: Context) -> tuple[Streams, parts.Auxiliary]:
        """Computes both streams, in `stream_dtype`, and the layer's auxiliary values."""
        sharding, modules = context.sharding, (self.video, self.condition)
        pairs = zip(modules, context.segmentations, strict=True)
        options = [module.options(segments, sharding) for module, segments in pairs]
        modulations = [module.modulations(context.time) for module in modules]
        streams, inputs = [], []
        for n, module in enumerate(modules):
            shift, scale = modulations[n][:2]
            with jax.named_scope(parts.NORM):
                h, y = residual_layernorm_modulate(x[n], None, None, scale, shift, **options[n])
                streams.append(h)
                inputs.append(checkpoint_name(y.astype(module.dtype), parts.NORM_OUTPUT))
        with jax.named_scope(parts.JOINT_ATTENTION):
            mixed, auxiliary = self._attention(Streams(*inputs), context)
            both = context.rows.separate(mixed, x.video.shape[1])
        finished = (
            module.finish(streams[n], both[n], modulations[n], options[n], context.remat)
            for n, module in enumerate(modules)
        )
        return Streams(*finished), auxiliary

    def _attention(self, y: Streams, context: Context) -> tuple[jax.Array, parts.Auxiliary]:
        """Attention of the joint rows, dense or sparse."""
        rows, sharding = context.rows, context.sharding
        video = self.video.heads(y.video, y.video, context.rotary, sharding)
        condition = self.condition.heads(y.condition, y.condition, None, sharding)
        query, key, value = (rows.join(*both) for both in zip(video, condition, strict=True))
        joint = RowsOfLayer(
            x=y.video,
            heads=(query, key, value),
            rotary=context.rotary,
            samples=rows.packed,
            segments=rows.segments,
            slots=0 if rows.place is None else context.time.shape[1],
            implementation=self.implementation,
            sharding=sharding,
        )
        if self.sparse_attention is None:
            return joint.dense(), {}
        # The table has zeros for the condition's tokens behind those of the latents.
        behind = query.shape[1] - context.rotary[0].shape[-2]
        rotary = context.rotary
        if behind:
            rotary = tuple(jnp.pad(part, ((0, behind), (0, 0))) for part in rotary)
        return self.sparse_attention(joint._replace(x=rows.join(*y), rotary=rotary))


class Head(nnx.Module):
    """Modulated norm and projection from tokens to patches."""

    def __init__(self, config: HunyuanVideoConfig, volume: int, *, rngs: nnx.Rngs):
        dim, self.dtype, self.volume = config.dim, config.compute_dtype, volume
        self.norm_options: sublayers.NormOptions = {"eps": _EPS, "implementation": config.norm}
        zeros = nnx.initializers.zeros
        self.modulation = nnx.Linear(dim, 2 * dim, kernel_init=zeros, rngs=rngs)
        self.out = nnx.Linear(
            dim, volume * config.latent_channels, dtype=self.dtype, kernel_init=zeros, rngs=rngs
        )

    @jax.named_scope(parts.HEAD)
    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """x: [B, S, D] → patches [B, S, volume · channels] as of `patchify`."""
        scale, shift = jnp.split(self.modulation(context.time), 2, axis=-1)
        options = self.norm_options | {"sharding": context.sharding}
        y = layernorm_modulate(x, scale, shift, segment_ids=context.segmentations[0], **options)
        patches = self.out(y.astype(self.dtype))
        # The parameters have diffusers' order: all of a patch for each channel.
        by_channel = patches.reshape(*patches.shape[:-1], -1, self.volume)
        return by_channel.swapaxes(-1, -2).reshape(patches.shape)


class TextRefiner(nnx.Module):
    """Embeds a text: linear, then blocks gated by the timestep and the text's mean."""

    def __init__(self, config: HunyuanVideoConfig, *, rngs: nnx.Rngs):
        assert config.text is not None
        dim, width = config.dim, config.text.dim
        self.longest = config.text.length
        self.time_hidden = nnx.Linear(FREQUENCIES, dim, rngs=rngs)
        self.time_out = nnx.Linear(dim, dim, rngs=rngs)
        self.mean_hidden = nnx.Linear(width, dim, rngs=rngs)
        self.mean_out = nnx.Linear(dim, dim, rngs=rngs)
        self.inner = nnx.Linear(width, dim, dtype=config.compute_dtype, rngs=rngs)
        self.blocks = nnx.vmap(lambda keys: RefinerBlock(config, rngs=keys))(
            rngs.split(config.refiner_layers)
        )

    def __call__(
        self, text: embedding.ConditionTokens, timestep: jax.Array, sharding: NamedSharding | None
    ) -> jax.Array:
        """Refines the tokens of each sample's text by themselves.

        Args:
          text: [R, C, text.dim].
          timestep: [R, M] float32.
          sharding: sharding of rows over a mesh of Auto axes.

        Returns:
          [R, C, D] in the compute dtype.
        """
        time = self.time_out(nnx.silu(self.time_hidden(embedding.sinusoid(timestep, FREQUENCIES))))
        mean = self.mean_out(nnx.silu(self.mean_hidden(embedding.mean_by_sample(text))))
        conditioning = nnx.silu(time + mean)
        x = self.inner(text.values)
        slots, longest = text.segments.length.shape[1], min(self.longest, x.shape[1])
        lengths = ((0, slots), (longest, 0))
        segments = AttentionSegments(text.segments, text.segments, lengths, None)
        graph, layers = nnx.split(self.blocks)

        def apply_layer(x: jax.Array, layer: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(graph, layer)(x, conditioning, segments, sharding), None

        return jax.lax.scan(apply_layer, x, layers)[0]


class RefinerBlock(nnx.Module):
    """Self-attention and feed-forward behind affine norms, each with a gate."""

    def __init__(self, config: HunyuanVideoConfig, *, rngs: nnx.Rngs):
        dim, dtype = config.dim, config.compute_dtype

        def linear() -> nnx.Linear:
            return nnx.Linear(dim, dim, dtype=dtype, rngs=rngs)

        self.num_heads = config.num_heads
        self.implementation: AttentionImplementation = config.attention
        self.attention_norm = parts.layer_norm(dim, _EPS, dtype=dtype, rngs=rngs)
        self.feed_forward_norm = parts.layer_norm(dim, _EPS, dtype=dtype, rngs=rngs)
        self.query, self.key, self.value, self.out = linear(), linear(), linear(), linear()
        self.feed_forward = sublayers.FeedForward(
            config, hidden=_MLP_RATIO * dim, activation=nnx.silu, rngs=rngs
        )
        # As in the other blocks, gates are closed at initialization.
        self.gates = nnx.Linear(dim, 2 * dim, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        conditioning: jax.Array,
        segments: AttentionSegments,
        sharding: NamedSharding | None,
    ) -> jax.Array:
        """x: [R, C, D]; conditioning: [R, M, D] float32 → [R, C, D]."""
        gates = self.gates(conditioning)
        slot = jnp.maximum(segments.query.ids, 0)[..., None]
        first, second = jnp.split(jnp.take_along_axis(gates, slot, axis=1), 2, axis=-1)
        y = self.attention_norm(x)
        query, key, value = (
            linear(y).reshape(*y.shape[:2], self.num_heads, -1)
            for linear in (self.query, self.key, self.value)
        )
        mixed = attention(
            query,
            key,
            value,
            segments=segments,
            implementation=self.implementation,
            sharding=sharding,
        )
        x = sublayers.gated_add(x, self.out(mixed.reshape(*x.shape[:2], -1)), first, {})
        y = self.feed_forward(self.feed_forward_norm(x), sharding)
        return sublayers.gated_add(x, y, second, {})


_GLYPH_NORM_EPS = 1e-5
_KINDS = (TEXT, GLYPHS, IMAGE)
"""Kinds of condition tokens in the order of the learned embedding that tells them apart."""
_ORDER = (IMAGE, GLYPHS, TEXT)
"""Order of a sample's condition tokens; attention does not depend on it."""


class GlyphEmbedding(nnx.Module):
    """Embeds byT5's tokens: norm, linear, GELU, linear, GELU, linear."""

    def __init__(
        self, text: TextConfig, hidden: int, dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.norm = parts.layer_norm(text.dim, _GLYPH_NORM_EPS, dtype=dtype, rngs=rngs)
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
            None
            if with_text
            else embedding.ClassEmbedding(config.num_classes, dim, dtype=dtype, rngs=rngs)
        )
        self.text = TextRefiner(config, rngs=rngs) if with_text else None
        self.glyphs = (
            GlyphEmbedding(glyphs, config.glyph_hidden, dim, dtype=dtype, rngs=rngs)
            if glyphs
            else None
        )
        self.image = embedding.ImageEmbedding(image, dim, dtype=dtype, rngs=rngs) if image else None
        with_kinds = with_text and config.learned_kinds
        self.kind = nnx.Embed(len(_KINDS), dim, dtype=dtype, rngs=rngs) if with_kinds else None

    def __call__(
        self,
        condition: PyTree,
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
        kinds = []
        for name in _ORDER:
            if (module := getattr(self, name)) is not None:
                tokens = condition[name]
                if name == TEXT:
                    values = module(tokens, timestep, sharding)
                else:
                    values = module(tokens.values.astype(self.dtype))
                if self.kind is not None:
                    values = values + self.kind(jnp.asarray(_KINDS.index(name)))
                kinds.append(tokens._replace(values=values))
        joined: embedding.ConditionTokens = embedding.side_by_side(kinds)
        return joined.values, joined.segments


class HunyuanVideoTransformer(StackedTransformer):
    """The transformer. Parameters are float32; those of the blocks are stacked over layers."""

    config: HunyuanVideoConfig

    def __init__(self, config: HunyuanVideoConfig, *, rngs: nnx.Rngs):
        self.config = config
        dim, dtype = config.dim, config.compute_dtype
        volume = math.prod(config.patch_size)
        self.patch_embedding = nnx.Linear(volume * config.in_channels, dim, dtype=dtype, rngs=rngs)
        self.time_embedding = embedding.TimestepEmbedding(dim, FREQUENCIES, rngs=rngs)
        self.condition_embedding = ConditionEmbedding(config, rngs=rngs)
        self.blocks = self.draw_blocks(Block, rngs)
        self.head = Head(config, volume, rngs=rngs)

    def forward(
        self,
        latents: jax.Array,
        timestep: jax.Array,
        condition: PyTree,
        sharding: NamedSharding | None = None,
    ) -> parts.Output:
        """See `Model.forward`; with text, the condition is `ConditionTokens` by name."""
        patch = self.config.patch_size
        grid = self.grid_of(latents)
        rotary = self._rotary(sublayers.grid_positions(*grid), grid)
        found = self._transform(
            parts.patchify(latents, patch), timestep, condition, rotary, sharding, grid
        )
        shape = (*latents.shape[:-1], self.config.latent_channels)
        return found._replace(velocity=parts.unpatchify(found.velocity, shape, patch))

    def forward_packed(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        metadata: PackedMetadata,
        timestep: jax.Array,
        condition: PyTree,
        sharding: NamedSharding | None = None,
    ) -> parts.Output:
        """See `Model.forward_packed`; it computes the same function of each sample as `forward`.

        Behind the tokens of each sample the rows have room for those of its condition.

        Raises:
          NotImplementedError: attention cannot run on packed rows.
        """
        rotary = self._rotary(positions, metadata.grid)
        return self._transform(tokens, timestep, condition, rotary, sharding, metadata)

    def _rotary(self, positions: jax.Array, limits: tuple[int, int, int]) -> sublayers.RotaryTable:
        config = self.config
        theta, sizes = config.rotary_theta, config.rotary_sizes
        return sublayers.rotary_table(positions, limits, config.head_dim, theta, sizes)

    def _transform(
        self,
        tokens: jax.Array,
        timestep: jax.Array,
        condition: PyTree,
        rotary: sublayers.RotaryTable,
        sharding: NamedSharding | None,
        samples: PackedMetadata | Grid,
    ) -> parts.Output:
        """Velocity [B, S, output patch_dim] float32 of tokens [B, S, patch_dim].

        Args:
          tokens, timestep, condition: see `Model.forward` and `Model.forward_packed`.
          rotary: rotary table of the tokens.
          sharding: sharding of rows over a mesh of Auto axes.
          samples: positions of the segments, or the size in tokens of rows of one sample each.
        """
        dtype = self.config.stream_dtype
        packed = samples if isinstance(samples, PackedMetadata) else None
        of_samples = timestep[:, None] if packed is None else timestep
        with jax.named_scope(parts.EMBEDDING):
            embedded, segments = self.condition_embedding(condition, of_samples, packed, sharding)
            x = Streams(self.patch_embedding(tokens).astype(dtype), embedded.astype(dtype))
            time = nnx.silu(self.embed_time(timestep, condition))
        by_segment: list[Segmentation | None] = [None, None]
        if isinstance(samples, PackedMetadata):
            assert segments is not None
            rows = packed_joint_rows(samples, segments, sharding)
            both, slots, dim = (samples.tokens, segments), timestep.shape[1], self.config.dim
            by_segment = [segmentation(each.ids, slots, dim, sharding) for each in both]
        else:
            count, beside, block = *embedded.shape[:2], self.block_of_tiles(samples)
            layout = clip_layout(samples, block, beside).of_rows(count) if block else None
            rows = bucketed_joint_rows(tokens.shape[1], segments, layout)
        context = Context(time, rotary, rows, tuple(by_segment), sharding)
        axes = 1 if packed is None else 2
        x, auxiliary = apply_layers(self.blocks, x, context, self.config, axes)
        video = self.after_blocks(x, context, segments, packed)
        return parts.Output(self.head(video, context).astype(jnp.float32), auxiliary)

    def embed_time(self, timestep: jax.Array, condition: PyTree) -> jax.Array:
        """What modulates all blocks: timestep [B] or [R, M] → [..., D] float32."""
        return self.time_embedding(timestep)

    def after_blocks(
        self,
        x: Streams,
        context: Context,
        condition: Segments | None,
        packed: PackedMetadata | None,
    ) -> jax.Array:
        """The tokens of the latents, [B, S, D], for the head.

        `condition` has the tokens of each sample's condition, None for all in bucketed rows.
        """
        return x.video
