"""A block of two streams that attend jointly, and the head that follows the last one."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from alload_jax.models.common.attention import attention
from alload_jax.models.common.fan_out import fan_out
from alload_jax.models.common.feed_forward import FeedForward
from alload_jax.models.common.gated_add import gated_add
from alload_jax.models.common.joint_rows import JointRows
from alload_jax.models.common.linear import Linear
from alload_jax.models.common.output import Auxiliary
from alload_jax.models.common.parts import HEAD, JOINT_ATTENTION, LINEAR, NORM
from alload_jax.models.common.query_key import project_heads
from alload_jax.models.common.remat import LINEAR_OUTPUT, NORM_OUTPUT
from alload_jax.models.common.rotary import RotaryTable
from alload_jax.models.common.single_row import split_single_row
from alload_jax.models.common.sparse_attention import RowsOfLayer, SparseSelfAttention
from alload_jax.models.hunyuan_video.config import HunyuanVideoConfig
from alload_jax.planning.analytic import keeps_feed_forward
from alload_jax.planning.remat import RematPolicy
from pallas_kernels import Segmentation, layernorm_modulate, residual_layernorm_modulate

_EPS = 1e-6


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
    rotary: RotaryTable
    rows: JointRows
    segmentations: tuple[Segmentation | None, ...]
    sharding: NamedSharding | None
    remat: RematPolicy = "none"


class Streams(NamedTuple):
    """video: [B, S, D], tokens of the latents; condition: [B, C, D]."""

    video: jax.Array
    condition: jax.Array


class Stream(nnx.Module):
    """The parameters with which a block computes one of its streams.

    The residual stream has the config's `stream_dtype`; the inputs of attention and feed-forward
    have its `compute_dtype`.
    """

    def __init__(self, config: HunyuanVideoConfig, *, rngs: nnx.Rngs):
        dim, dtype = config.dim, config.compute_dtype

        def linear() -> Linear:
            return Linear(dim, dim, dtype=dtype, rngs=rngs)

        def norm() -> nnx.RMSNorm:
            return nnx.RMSNorm(config.head_dim, epsilon=_EPS, dtype=dtype, rngs=rngs)

        self.dtype, self.num_heads = dtype, config.num_heads
        self.norm_options: dict[str, Any] = {"eps": _EPS, "implementation": config.norm}
        # adaLN-Zero (arXiv 2212.09748): every block starts as the identity.
        self.modulation = nnx.Linear(dim, 6 * dim, kernel_init=nnx.initializers.zeros, rngs=rngs)
        self.query, self.key, self.value, self.out = linear(), linear(), linear(), linear()
        self.query_norm, self.key_norm = norm(), norm()
        self.feed_forward = FeedForward(
            dim, config.ffn_dim, implementation=config.norm, dtype=dtype, rngs=rngs
        )

    @jax.named_scope(NORM)
    def modulations(self, time: jax.Array) -> list[jax.Array]:
        """shift, scale and gate of attention, then of feed-forward: [..., D] float32 each."""
        return jnp.split(self.modulation(time), 6, axis=-1)

    def options(
        self, segmentation: Segmentation | None, sharding: NamedSharding | None
    ) -> dict[str, Any]:
        """Options of the norms."""
        segments = {} if segmentation is None else {"segment_ids": segmentation}
        return self.norm_options | segments | {"sharding": sharding}

    def heads(
        self, y: jax.Array, rotary: RotaryTable | None, sharding: NamedSharding | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value of y: [B, S, D], [B, S, num_heads, head_dim] each."""
        heads = partial(
            project_heads,
            num_heads=self.num_heads,
            norm_implementation=self.norm_options["implementation"],
            sharding=sharding,
        )
        of_query, of_key, of_value = fan_out(y, 3)
        return (
            heads(of_query, self.query, self.query_norm, rotary),
            heads(of_key, self.key, self.key_norm, rotary),
            heads(of_value, self.value),
        )

    def finish(
        self,
        x: jax.Array,
        mixed: jax.Array,
        modulations: list[jax.Array],
        options: dict[str, Any],
        remat: RematPolicy,
    ) -> jax.Array:
        """Adds attention's output [B, S, num_heads, head_dim] and feed-forward to x: [B, S, D]."""
        _, _, gate1, shift2, scale2, gate2 = modulations
        sharding = options["sharding"]
        with jax.named_scope(LINEAR):
            y = split_single_row(self.out, sharding, mixed.reshape(*mixed.shape[:2], -1))
            y = checkpoint_name(y, LINEAR_OUTPUT)
        with jax.named_scope(NORM):
            x, y = residual_layernorm_modulate(x, y, gate1, scale2, shift2, **options)
            y = checkpoint_name(y, NORM_OUTPUT)
        y = self.feed_forward(y, sharding, output_kept=keeps_feed_forward(remat))
        return gated_add(x, y, gate2, options)


class Block(nnx.Module):
    """Joint attention of the latents' tokens and the condition's, each with its own parameters."""

    def __init__(self, config: HunyuanVideoConfig, *, rngs: nnx.Rngs):
        self.implementation = config.attention
        self.video = Stream(config, rngs=rngs)
        self.condition = Stream(config, rngs=rngs)
        sparse, shape = config.sparse_attention, (config.dim, config.num_heads)
        # Last, so that all other parameters are drawn as without it.
        self.sparse_attention = (
            SparseSelfAttention(sparse, *shape, config.compute_dtype, rngs=rngs) if sparse else None
        )

    def __call__(self, x: Streams, context: Context) -> tuple[Streams, Auxiliary]:
        """Computes both streams, in `stream_dtype`, and the layer's auxiliary values."""
        sharding, modules = context.sharding, (self.video, self.condition)
        pairs = zip(modules, context.segmentations, strict=True)
        options = [module.options(segments, sharding) for module, segments in pairs]
        modulations = [module.modulations(context.time) for module in modules]
        streams, inputs = [], []
        for n, module in enumerate(modules):
            shift, scale = modulations[n][:2]
            with jax.named_scope(NORM):
                h, y = residual_layernorm_modulate(x[n], None, None, scale, shift, **options[n])
                streams.append(h)
                inputs.append(checkpoint_name(y.astype(module.dtype), NORM_OUTPUT))
        with jax.named_scope(JOINT_ATTENTION):
            mixed, auxiliary = self._attention(Streams(*inputs), context)
            parts = context.rows.separate(mixed, x.video.shape[1])
        finished = (
            module.finish(streams[n], parts[n], modulations[n], options[n], context.remat)
            for n, module in enumerate(modules)
        )
        return Streams(*finished), auxiliary

    def _attention(self, y: Streams, context: Context) -> tuple[jax.Array, Auxiliary]:
        """Attention of the joint rows, dense or sparse."""
        rows, sharding = context.rows, context.sharding
        video = self.video.heads(y.video, context.rotary, sharding)
        condition = self.condition.heads(y.condition, None, sharding)
        query, key, value = (rows.join(*parts) for parts in zip(video, condition, strict=True))
        if self.sparse_attention is not None:
            joint = RowsOfLayer(
                x=rows.join(*y),
                heads=(query, key, value),
                rotary=_for_row(context.rotary, query.shape[1]),
                layout=None,
                packed=rows.packed,
                implementation=self.implementation,
                sharding=sharding,
                lengths=rows.lengths,
            )
            return self.sparse_attention(joint)
        mixed = attention(
            *(query, key, value),
            segments=rows.segments,
            lengths=rows.lengths,
            implementation=self.implementation,
            sharding=sharding,
        )
        return mixed, {}


def _for_row(rotary: RotaryTable, tokens: int) -> RotaryTable:
    """The table of the latents' tokens, with zeros for those of conditions behind them."""
    behind = tokens - rotary[0].shape[-2]
    return tuple(jnp.pad(part, ((0, behind), (0, 0))) if behind else part for part in rotary)


class Head(nnx.Module):
    """Modulated norm and projection from tokens to patches."""

    def __init__(self, config: HunyuanVideoConfig, volume: int, *, rngs: nnx.Rngs):
        dim, self.dtype, self.volume = config.dim, config.compute_dtype, volume
        self.norm_options: dict[str, Any] = {"eps": _EPS, "implementation": config.norm}
        zeros = nnx.initializers.zeros
        self.modulation = nnx.Linear(dim, 2 * dim, kernel_init=zeros, rngs=rngs)
        self.out = nnx.Linear(
            dim, volume * config.latent_channels, dtype=self.dtype, kernel_init=zeros, rngs=rngs
        )

    @jax.named_scope(HEAD)
    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """x: [B, S, D] → patches [B, S, volume · channels] as of `patchify`."""
        scale, shift = jnp.split(self.modulation(context.time), 2, axis=-1)
        options = self.norm_options | {"sharding": context.sharding}
        y = layernorm_modulate(x, scale, shift, segment_ids=context.segmentations[0], **options)
        patches = self.out(y.astype(self.dtype))
        # The parameters have diffusers' order: all of a patch for each channel.
        by_channel = patches.reshape(*patches.shape[:-1], -1, self.volume)
        return by_channel.swapaxes(-1, -2).reshape(patches.shape)
