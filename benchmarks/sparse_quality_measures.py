"""What benchmarks/sparse_quality.py evaluates of weights: held-out losses, samples, lists."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from flax import nnx
from sparse_quality_switch import switch_of, with_switch

from alload_jax.config import Config
from alload_jax.diffusion.flow import TIMESTEP_SCALE, interpolate, squared_error, velocity
from alload_jax.diffusion.samplers import sample
from alload_jax.models.common.sparse_attention import layer, region
from alload_jax.models.common.sparse_attention.profile import Profile, sample_attention
from alload_jax.models.common.tile_layout import whole_blocks
from alload_jax.models.families import abstract_model
from alload_jax.training.state import Weights

NOISE_SEED = 20_000
"""Seed of the noise of held-out clips; no run trains with it."""


def losses_of(
    config: Config, rows: int, weights: Weights, clips: jax.Array, levels: jax.Array
) -> jax.Array:
    """Loss of each clip at each level, [levels, clips], with fixed noise."""
    model = nnx.merge(abstract_model(config.model).graph, weights.merged())
    shape = clips.shape[1:]
    data = to_latents(clips).reshape(-1, rows, *shape)
    noise = _noise(len(clips), shape).reshape(data.shape)

    def of_rows(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        data, noise, level = part
        sigma = jnp.full(rows, level)
        latents = interpolate(data, noise, sigma)
        found = model.forward(latents, sigma * TIMESTEP_SCALE, jnp.zeros((rows, 1), jnp.int32))
        return squared_error(found.velocity, velocity(data, noise))

    def at(level: jax.Array) -> jax.Array:
        return jax.lax.map(of_rows, (data, noise, jnp.full(len(data), level))).ravel()

    return jax.lax.map(at, levels)


def draw(config: Config, weights: Weights, latents: jax.Array, levels: jax.Array) -> jax.Array:
    """Follows the flow from the first level to the last, from data at the first."""
    model = nnx.merge(abstract_model(config.model).graph, weights.merged())

    def slope(latents: jax.Array, sigma: jax.Array, condition: jax.Array) -> jax.Array:
        return model.forward(latents, sigma * TIMESTEP_SCALE, condition).velocity

    null = jnp.zeros((len(latents), 1), jnp.int32)
    return sample("euler", slope, latents, null, levels)


def mass_of_lists(
    config: Config, rows: int, weights: Weights, clips: jax.Array, level: jax.Array
) -> dict[str, jax.Array]:
    """What `measuring_lists` measures on held-out clips, means over them: [layers, num_heads]."""
    none = jnp.zeros_like(switch_of(weights.variables)["step"])
    # The same blocks of queries for all runs.
    variables = with_switch(weights.variables, step=none, measured=none)
    weights = weights._replace(variables=variables)
    model = nnx.merge(abstract_model(config.model).graph, weights.merged())
    shape = clips.shape[1:]
    data = to_latents(clips).reshape(-1, rows, *shape)
    noise = _noise(len(clips), shape).reshape(data.shape)

    def of_rows(part: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        data, noise = part
        sigma = jnp.full(rows, level)
        latents = interpolate(data, noise, sigma)
        found = model.forward(latents, sigma * TIMESTEP_SCALE, jnp.zeros((rows, 1), jnp.int32))
        return jax.tree.map(lambda value: value.mean(axis=0), found.auxiliary)

    return jax.tree.map(lambda value: value.mean(axis=0), jax.lax.map(of_rows, (data, noise)))


@contextmanager
def measuring_lists() -> Iterator[None]:
    """What is traced meanwhile measures lists in place of sparsity and recall.

    The auxiliary value of recall is then the share of the attention that the layer's lists hold,
    and that of sparsity what the best lists of the same lengths would hold.
    """
    before = layer.measure
    layer.measure = _measure_lists
    try:
        yield
    finally:
        layer.measure = before


def to_latents(clips: jax.Array) -> jax.Array:
    """Bytes as the model sees them, −1 to 1."""
    return clips.astype(jnp.float32) / 127.5 - 1


def _noise(clips: int, shape: tuple[int, ...]) -> jax.Array:
    """The noise of each held-out clip, the same in every call."""
    key = jax.random.key(NOISE_SEED)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(clips))
    return jax.vmap(lambda key: jax.random.normal(key, shape))(keys)


def _measure_lists(heads: region.Heads, rows: region.Rows, choice: region.Choice) -> Profile:
    layout = rows.layout
    assert layout is not None
    query, key = (whole_blocks(x, layout) for x in (heads.query, heads.key))
    found = sample_attention(query, key, layout, choice.place.measured, choice.config)
    longest = choice.config.list_densities()[0]
    lists = region._lists(heads, layout, choice._replace(list_density=longest))
    place = found.block[:, None, :, None]
    indices = jnp.take_along_axis(lists.indices, place, axis=2)
    count = jnp.take_along_axis(lists.counts, place[..., 0], axis=2)
    listed = jnp.arange(indices.shape[-1]) < count[..., None]
    held = jnp.take_along_axis(found.mass, jnp.where(listed, indices, 0), axis=-1)
    best = jnp.sort(found.mass, axis=-1, descending=True)[..., : indices.shape[-1]]

    def mean(mass: jax.Array) -> jax.Array:
        return jnp.where(listed, mass, 0).sum(axis=-1).mean(axis=-1)[:, None]

    some = jnp.ones((len(query), 1))
    return Profile(some, mean(best), mean(held), jnp.zeros_like(mean(held)))
