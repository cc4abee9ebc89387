"""Times block-sparse attention against cuDNN's dense attention."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from alload_jax.bench.device import DeviceTime, call_time, pass_times
from pallas_kernels import devices
from pallas_kernels.block_sparse_attention import (
    BlockLists,
    BlockSegments,
    PooledScores,
    block_sparse_attention,
    full_lists,
    pool_blocks,
    top_k_blocks,
)
from pallas_kernels.block_sparse_attention.block_lists import invert

Popularity = Literal["random", "zipf"]
Part = Literal["forward", "backward", "selection"]

KERNELS = ("mosaic", "triton")
"""Our implementations, the one that "auto" prefers first."""
SELECTIONS = ("triton", "xla")
"""Ways to choose blocks, the one that "auto" prefers first."""
_PRODUCTS = {"forward": 2, "backward": 5}
"""Matrix products over the pairs of queries and keys that a pass needs at least."""
_ZIPF = 1.0
"""Exponent of the popularity of keys in "zipf"."""


class Shape(NamedTuple):
    """A shape to measure.

    Attributes:
      tokens: S = T, of one row.
      heads: H.
      width: D.
      block: tokens of a block of queries and of keys.
    """

    tokens: int
    heads: int = 12
    width: int = 128
    block: int = 64


class Entry(NamedTuple):
    """One measurement.

    Attributes:
      shape: of q, k and v, bfloat16.
      implementation: one of `KERNELS`, cudnn (dense), one of `SELECTIONS`, or the name that a
        rival gives itself.
      popularity: random lists, or lists in which some keys are popular (Zipf's law).
      sparsity: share of pairs of blocks that no list names; 0 for dense attention.
      part: forward, backward, or selection: pooling, scores, the best of each, inverting.
      us, us_low, us_high, kernels: as in `DeviceTime`.
    """

    shape: Shape
    implementation: str
    popularity: Popularity
    sparsity: float
    part: Part
    us: float
    us_low: float
    us_high: float
    kernels: tuple[tuple[str, float], ...]

    @property
    def flops_per_second(self) -> float:
        """FLOP/s of the products that the pass needs, over the pairs that are computed."""
        pairs = self.shape.tokens**2 * (1 - self.sparsity) * self.shape.heads
        return _PRODUCTS.get(self.part, 0) * 2 * pairs * self.shape.width / (self.us * 1e-6)


Rival = Callable[[Shape, "Sequence[Arguments]", BlockLists], Iterator[tuple[str, Part, DeviceTime]]]
"""Measures the same function in another library: (name, part, time)."""


class Arguments(NamedTuple):
    """Of one call: q, k, v and the output's cotangent, [1, S, H, D] bfloat16."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    dout: jax.Array


def measure(
    shapes: Sequence[Shape],
    sparsities: Sequence[float],
    popularities: Sequence[Popularity],
    kernels: Sequence[str] = KERNELS,
    rivals: Sequence[Rival] = (),
) -> Iterator[Entry]:
    """Measures dense attention, then our kernels at each sparsity, and rivals with them."""
    for shape in dict.fromkeys(shapes):
        sets = make_arguments(shape)
        exact_sparsities = dict.fromkeys(
            1 - _listed(shape, sparsity) / _blocks(shape) for sparsity in sparsities
        )
        dense = partial(jax.nn.dot_product_attention, implementation="cudnn")
        for part, time in _passes(dense, sets):
            yield Entry(shape, "cudnn", "random", 0.0, part, *time)
        for popularity in popularities:
            for exact in exact_sparsities:
                lists = make_lists(shape, exact, popularity)
                for name in kernels:
                    sparse = partial(block_sparse_attention, implementation=name)
                    for part, time in _passes(sparse, sets, lists):
                        yield Entry(shape, name, popularity, exact, part, *time)
                for rival in rivals:
                    for name, part, time in rival(shape, sets, lists):
                        yield Entry(shape, name, popularity, exact, part, *time)
        unsupported = devices.unsupported_triton(sets[0].q, interpret=False)
        for exact, name in itertools.product(exact_sparsities, SELECTIONS[bool(unsupported) :]):
            time = _selection(shape, sets, exact, name)
            yield Entry(shape, name, "random", exact, "selection", *time)


def make_arguments(shape: Shape) -> list[Arguments]:
    """Two sets of random arguments."""

    @jax.jit
    def make(seed: jax.Array) -> Arguments:
        size = (1, shape.tokens, shape.heads, shape.width)
        keys = jax.random.split(jax.random.key(seed), 4)
        return Arguments(*(jax.random.normal(key, size, jnp.bfloat16) for key in keys))

    return [make(jnp.int32(seed)) for seed in range(2)]


def make_lists(shape: Shape, sparsity: float, popularity: Popularity) -> BlockLists:
    """Lists of equal length of random key blocks, drawn without repetition for each list.

    They are ascending, as `top_k_blocks` makes them. With `zipf`, the key of rank n is drawn with a
    probability in proportion to 1/n, and ranks are random numbers of blocks, others in each head.
    """
    blocks, most = _blocks(shape), _listed(shape, sparsity)
    tokens = jnp.minimum(shape.block, shape.tokens - jnp.arange(blocks) * shape.block)[None]
    full = full_lists(tokens, tokens, shape.heads, shape.block, shape.block)
    if most == blocks:
        return full

    @jax.jit
    def draw(key: jax.Array) -> jax.Array:
        noise, order = jax.random.split(key)
        # The largest of log p plus Gumbel noise: a draw without repetition.
        chance = jax.random.gumbel(noise, (shape.heads, blocks, blocks))
        if popularity == "zipf":
            first = jnp.broadcast_to(jnp.arange(1, blocks + 1), (shape.heads, blocks))
            ranks = jax.random.permutation(order, first, axis=1, independent=True)
            chance -= _ZIPF * jnp.log(ranks)[:, None, :]
        return jnp.sort(jax.lax.top_k(chance, most)[1], axis=-1)

    return BlockLists(
        draw(jax.random.key(0))[None].astype(jnp.int32),
        jnp.full(full.counts.shape, most, jnp.int32),
        full.query_tokens,
        full.key_tokens,
        shape.block,
        shape.block,
    )


def runnable_kernels() -> list[str]:
    """Those of `KERNELS` that this device can run."""
    x = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
    tokens = jnp.full((1, 1), 64)
    found = []
    for name in KERNELS:
        try:
            block_sparse_attention(x, x, x, full_lists(tokens, tokens, 1), implementation=name)
        except NotImplementedError:
            continue
        found.append(name)
    return found


def _passes(
    attend: Callable[..., jax.Array], sets: Sequence[Arguments], *lists: BlockLists
) -> Iterator[tuple[Part, DeviceTime]]:
    return pass_times(attend, [(*each[:3], *lists) for each in sets], [each.dout for each in sets])


def _selection(
    shape: Shape, sets: Sequence[Arguments], sparsity: float, implementation: str
) -> DeviceTime:
    """Time to pool queries and keys, to choose blocks for each, and to invert the lists."""
    blocks, most = _blocks(shape), _listed(shape, sparsity)
    lists = make_lists(shape, 1 - 1 / blocks, "random")
    ids = jnp.zeros((1, blocks), jnp.int32)

    def choose(q: jax.Array, k: jax.Array, tokens: jax.Array) -> Any:
        pooled = [pool_blocks(x, tokens, block=shape.block) for x in (q, k)]
        chosen = top_k_blocks(
            PooledScores(*pooled),
            most,
            BlockSegments(ids, ids),
            tokens,
            tokens,
            k_max=most,
            query_block=shape.block,
            key_block=shape.block,
            implementation=implementation,
        )
        return chosen, invert(chosen)

    return call_time(choose, [(each.q, each.k, lists.key_tokens) for each in sets])


def _blocks(shape: Shape) -> int:
    return -(-shape.tokens // shape.block)


def _listed(shape: Shape, sparsity: float) -> int:
    """Length of lists of about this sparsity."""
    return max(1, round(_blocks(shape) * (1 - sparsity)))


class Speed(NamedTuple):
    """Forward and backward of a sparse case beside dense attention.

    Attributes:
      shape: of q, k and v.
      implementation: its name.
      popularity: of keys in the lists.
      sparsity: of the lists.
      forward: how many times as fast as cuDNN's dense attention.
      backward: likewise.
      both: likewise, forward plus backward.
      selection: time of the selection over that of forward plus backward; NaN if not measured.
    """

    shape: Shape
    implementation: str
    popularity: Popularity
    sparsity: float
    forward: float
    backward: float
    both: float
    selection: float


def speeds(entries: Sequence[Entry]) -> list[Speed]:
    """The sparse cases of which forward and backward were measured."""
    us = {(e.shape, e.implementation, e.popularity, e.sparsity, e.part): e.us for e in entries}
    found = []
    for e in entries:
        case = (e.shape, e.implementation, e.popularity, e.sparsity)
        if e.part != "forward" or e.implementation == "cudnn" or (*case, "backward") not in us:
            continue
        dense = [us[e.shape, "cudnn", "random", 0.0, part] for part in ("forward", "backward")]
        own = [e.us, us[*case, "backward"]]
        ways = [(e.shape, name, "random", e.sparsity, "selection") for name in SELECTIONS]
        chosen = next((us[way] for way in ways if way in us), math.nan)
        forward, backward = (d / o for d, o in zip(dense, own, strict=True))
        found.append(Speed(*case, forward, backward, sum(dense) / sum(own), chosen / sum(own)))
    return found


def preferred(found: Sequence[Speed]) -> str:
    """The implementation that "auto" prefers, of those that were measured."""
    names = {each.implementation for each in found}
    return next((name for name in KERNELS if name in names), KERNELS[-1])


def break_even(found: Sequence[Speed], shape: Shape) -> float | None:
    """The sparsity from which our kernels are faster than dense attention, by interpolation.

    Of random lists, forward plus backward; None where the measured sparsities do not show it.
    """
    case = (shape, preferred(found), "random")
    ours = [each for each in found if (each.shape, each.implementation, each.popularity) == case]
    ordered = sorted((each.sparsity, 1 / each.both) for each in ours)
    for (low, slower), (high, faster) in itertools.pairwise(ordered):
        if slower >= 1 > faster:
            return low + (high - low) * (slower - 1) / (slower - faster)
    return None
