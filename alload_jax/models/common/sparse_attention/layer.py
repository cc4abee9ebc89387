"""The self-attention of a layer: dense or sparse, as its state says."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from alload_jax.models.common.attention import (
    AttentionImplementation,
    attention,
    attention_of_rows,
    attention_within,
    head_spec,
)
from alload_jax.models.common.output import Auxiliary
from alload_jax.models.common.rotary import RotaryTable
from alload_jax.models.common.segments import PackedMetadata, SplitRows
from alload_jax.models.common.sparse_attention import switching
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.common.sparse_attention.profile import Profile
from alload_jax.models.common.sparse_attention.region import (
    Choice,
    Heads,
    Place,
    Rows,
    attend,
    measure,
)
from alload_jax.models.common.sparse_attention.selectors import TokensOfLayer, make_selector
from alload_jax.models.common.sparse_attention.split_rows import attend_split, measure_split
from alload_jax.models.common.sparse_attention.switching import Switch
from alload_jax.models.common.split_attention import Within
from alload_jax.models.common.tile_layout import TileLayout

Samples = TileLayout | PackedMetadata
"""The samples of rows: one in each, all in the same tiles, or packed."""


class RowsOfLayer(NamedTuple):
    """What the attention of a layer is given.

    Attributes:
      x: [R, S, width], input of the attention.
      heads: query, key and value, [R, S, num_heads, head_dim] each.
      rotary: table that queries and keys were rotated by, [S, ...] or [R, S, ...].
      layout: tiles of rows that hold one sample each, whose tokens are in the order of the tiles;
        None if their attention is always dense.
      packed: the segments of packed rows, with their tiles; None for rows of one sample each.
      implementation: of dense attention.
      sharding: of the rows over a mesh of Auto axes.
      lengths: [R] int32, tokens of rows that hold one sample each and its condition, whose segments
        and tiles `packed` says too; None for other rows.
    """

    x: jax.Array
    heads: tuple[jax.Array, jax.Array, jax.Array]
    rotary: RotaryTable
    layout: TileLayout | None
    packed: PackedMetadata | None
    implementation: AttentionImplementation
    sharding: NamedSharding | None
    lengths: jax.Array | None = None

    def dense(self) -> jax.Array:
        """Dense attention."""
        packed = self.packed if self.lengths is None else None
        return attention(
            *self.heads,
            segments=None if packed is None else packed.within_tokens(),
            lengths=self.lengths,
            implementation=self.implementation,
            sharding=self.sharding,
        )

    def within(self) -> Within | None:
        """Dense attention within the segments of one device's packed rows."""
        if self.packed is None:
            return None
        if self.lengths is not None:
            return attention_of_rows(self.implementation)
        return attention_within(*self.heads[:2], self.implementation, self.sharding)

    def samples(self) -> Samples | None:
        """The samples, if some of them may have sparse attention."""
        if self.packed is None:
            return None if self.layout is None else self.layout.of_rows(len(self.x))
        return None if self.packed.tiles() is None else self.packed

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of the auxiliary values of samples: (R,), or (R, M) for packed rows."""
        if self.packed is None or self.lengths is not None:
            return self.x.shape[:1]
        return self.packed.tokens.offset.shape


class SparseSelfAttention(nnx.Module):
    """Attention of a layer's queries to its keys, after projection and rotation."""

    def __init__(
        self,
        config: SparseAttentionConfig,
        width: int,
        num_heads: int,
        dtype: jnp.dtype,
        *,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.switch = Switch(config, num_heads)
        self.selector = make_selector(config, width, num_heads, dtype, rngs)

    def __call__(self, rows: RowsOfLayer) -> tuple[jax.Array, Auxiliary]:
        """Attends, and measures every few steps.

        Returns:
          [R, S, num_heads, head_dim]; auxiliary values of each sample.
        """
        samples = rows.samples()
        if samples is None:
            return rows.dense(), self._auxiliary(rows, None)
        profile = self._profile(rows, samples)
        densities = self.config.list_densities()
        sparse = [partial(self._sparse, rows, samples, density) for density in densities]
        output = jax.lax.switch(self._branch(densities), [rows.dense, *sparse])
        return output, self._auxiliary(rows, profile)

    def _branch(self, densities: tuple[float, ...]) -> jax.Array:
        """0 for dense attention, else the number of the shortest lists that hold every head's."""
        densest = self.switch.density[...].max()
        enough = jnp.asarray(densities, jnp.float32) >= densest
        return jnp.where(self.switch.sparse[...], jnp.maximum(enough.sum(dtype=jnp.int32), 1), 0)

    def _profile(self, rows: RowsOfLayer, samples: Samples) -> Profile | None:
        """What this step finds; zeros if it does not measure, None where nothing ever does."""
        config = self.config
        if not config.measures:
            return None

        def found() -> Profile:
            run = partial(_measure_rows, config, rows.within())
            heads = self._heads(rows)._replace(value=None)
            return self._on_devices(run, _profile_specs, rows, heads, samples)

        def nothing() -> Profile:
            slots = 1 if len(rows.sample_shape) == 1 else rows.sample_shape[1]
            none = jnp.zeros((len(rows.x), slots))
            per_head = jnp.zeros((*none.shape, rows.heads[0].shape[2]))
            return Profile(none, per_head, per_head, per_head)

        every = jnp.where(
            self.switch.sparse[...], config.sparse_profile_every, config.profile_every
        )
        return jax.lax.cond(self.switch.step[...] % every == 0, found, nothing)

    def _sparse(self, rows: RowsOfLayer, samples: Samples, list_density: float) -> jax.Array:
        run = partial(_attend_rows, self.config, rows.within(), list_density)
        return self._on_devices(run, head_spec, rows, self._heads(rows), samples)

    def _heads(self, rows: RowsOfLayer) -> Heads:
        query, key, value = rows.heads
        tokens = TokensOfLayer(rows.x, query, key, rows.rotary, rows.sharding)
        number = jnp.arange(query.shape[2], dtype=jnp.int32)
        return Heads(query, key, value, self.selector(tokens), self.switch.density[...], number)

    def _on_devices(
        self,
        run: Callable[..., Any],
        out_specs: Callable[[NamedSharding], Any],
        rows: RowsOfLayer,
        heads: Heads,
        samples: Samples,
    ) -> Any:
        """Runs on each device's rows and heads; nothing but split samples is communicated."""
        switch, sharding = self.switch, rows.sharding
        place = Place(switch.step[...], switch.layer[...], switch.measured[...])
        if sharding is None or sharding.mesh.size == 1:
            return run(heads, samples, place)
        by_head = head_spec(sharding)
        of_heads = PartitionSpec(by_head[2])
        split: Any = Heads
        in_specs = split(*(by_head,) * 4, density=of_heads, number=of_heads)
        return jax.shard_map(
            run,
            mesh=sharding.mesh,
            in_specs=(in_specs, PartitionSpec(by_head[0]), PartitionSpec()),
            out_specs=out_specs(sharding),
            check_vma=False,
        )(heads, samples, place)

    def _auxiliary(self, rows: RowsOfLayer, profile: Profile | None) -> Auxiliary:
        shape, num_heads = rows.sample_shape, rows.heads[0].shape[2]
        if profile is None:
            per_head = jnp.zeros((*shape, num_heads))
            profile = Profile(jnp.zeros(shape), per_head, per_head, per_head)
        auxiliary = {
            switching.PROFILED: profile.found.reshape(shape),
            switching.SPARSITY: profile.sparsity.reshape(*shape, num_heads),
            switching.RECALL: profile.recall.reshape(*shape, num_heads),
        }
        if self.config.selector == "predictor":
            auxiliary[switching.PREDICTOR_LOSS] = profile.loss.mean(axis=-1).reshape(shape)
        return auxiliary


def _profile_specs(sharding: NamedSharding) -> Any:
    by_head = head_spec(sharding)
    return Profile(PartitionSpec(by_head[0]), *(by_head,) * 3)  # type: ignore[arg-type]


def _attend_rows(
    config: SparseAttentionConfig,
    within: Within | None,
    list_density: float,
    heads: Heads,
    samples: Samples,
    place: Place,
) -> jax.Array:
    choice = Choice(config, list_density, within, place)
    if isinstance(samples, PackedMetadata) and samples.split is not None:
        return attend_split(heads, samples.split, choice)
    return attend(heads, _rows(samples), choice)


def _measure_rows(
    config: SparseAttentionConfig,
    within: Within | None,
    heads: Heads,
    samples: Samples,
    place: Place,
) -> Profile:
    choice = Choice(config, 1.0, within, place)
    if isinstance(samples, PackedMetadata) and samples.split is not None:
        return measure_split(heads, samples, choice)
    return measure(heads, _rows(samples), choice)


def _rows(samples: Samples) -> Rows:
    if isinstance(samples, TileLayout):
        return Rows(samples, None, 1)
    segments = samples.within_tokens()
    assert not isinstance(segments, SplitRows)
    return Rows(samples.row_tiles, segments, samples.tokens.offset.shape[1])
