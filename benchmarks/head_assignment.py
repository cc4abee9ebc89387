"""Measures how evenly sparse attention is shared by the ranks of a context group.

    python benchmarks/head_assignment.py --out benchmarks/results/head_assignment_h200.json

Each rank of a group computes some heads of a split sample. One GPU computes the heads of each rank
in turn, forward and backward; communication is not measured. Densities of heads are drawn, spread
evenly on a logarithmic scale, for several layers. `consecutive` gives each rank consecutive heads,
`balanced` assigns them as training does. The imbalance of a layer is the time of its slowest rank
over the mean, minus 1.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alload_jax.bench.device import device_time, require_gpu, rotating
from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.errors import run_command
from alload_jax.files import Json
from alload_jax.models.common.sparse_attention.layer import balanced_order
from pallas_kernels.block_sparse_attention import BlockLists, block_sparse_attention

BLOCK, WIDTH = 64, 128
GROUPS = ((12, 2), (12, 4), (40, 2), (40, 4), (40, 8))
"""(heads, ranks of a group): those of Wan's 1.3B and 14B models."""


def main(argv: list[str]) -> int:
    """Measures all groups, prints a line for each and writes JSON."""
    parser = benchmark_parser(__doc__, "head_assignment.json")
    add = parser.add_argument
    add("--tokens", type=int, default=131_072)
    add("--layers", type=int, default=4)
    add("--density", type=float, nargs=2, default=(0.02, 0.5), help="least and most")
    options = parser.parse_args(argv)
    require_gpu()
    sizes = {"tokens": options.tokens, "density": list(options.density)}
    record = Record(options.out, ["jax", "jaxlib", "numpy"], **sizes)
    for heads, ranks in GROUPS:
        layers = list(_layers(options, heads, ranks))
        group: Json = {"heads": heads, "ranks": ranks, "layers": layers}
        for way in ("consecutive", "balanced"):
            found = [layer[way]["imbalance"] for layer in layers]
            group[way] = {"mean": statistics.mean(found), "most": max(found)}
        record.add(group, to="groups")
        text = (
            f"{way} {group[way]['mean']:.1%} (most {group[way]['most']:.1%})"
            for way in ("consecutive", "balanced")
        )
        print(f"{heads} heads, {ranks} ranks: imbalance {', '.join(text)}", flush=True)
    return 0


def _layers(options: argparse.Namespace, heads: int, ranks: int) -> Iterator[Json]:
    """Measurements of each layer."""
    low, high = np.log(options.density)
    measure = _program(options.tokens, heads // ranks, options.density[1])
    for layer in range(options.layers):
        density = np.exp(np.random.default_rng(layer).uniform(low, high, heads))
        orders = {
            "consecutive": np.arange(heads),
            "balanced": np.asarray(balanced_order(jnp.asarray(density, jnp.float32), ranks)),
        }
        found: Json = {"density": density.tolist()}
        for way, order in orders.items():
            times = [measure(density[own]) for own in order.reshape(ranks, -1)]
            imbalance = max(times) / statistics.mean(times) - 1
            found[way] = {"us": times, "imbalance": imbalance}
        yield found


def _program(tokens: int, heads: int, most: float) -> Any:
    """A function that measures heads of given densities, [heads] → µs, forward plus backward."""
    blocks = tokens // BLOCK
    k_max = int(np.ceil(most * blocks))

    @jax.jit
    def make(seed: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(seed), 4)
        size = (1, blocks * BLOCK, heads, WIDTH)
        return [jax.random.normal(key, size, jnp.bfloat16) for key in keys]

    @jax.jit
    def draw(counts: jax.Array) -> jax.Array:
        """Ascending lists of different blocks; those past a list's count come last."""
        noise = jax.random.uniform(jax.random.key(1), (heads, blocks, blocks))
        found = jax.lax.top_k(noise, k_max)[1]
        named = jnp.arange(k_max) < counts[:, None, None]
        return jnp.sort(jnp.where(named, found, blocks), axis=-1).astype(jnp.int32)[None]

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, lists: BlockLists) -> Any:
        out, pull = jax.vjp(partial(block_sparse_attention, blocks=lists), q, k, v)
        return out, pull(dout)

    arrays = make(jnp.int32(0))
    programs: list[Any] = []

    def measure(density: np.ndarray) -> float:
        counts = jnp.asarray(np.maximum(1, np.ceil(density * blocks)), jnp.int32)
        full = jnp.full((1, blocks), BLOCK, jnp.int32)
        by_list = jnp.broadcast_to(counts[None, :, None], (1, heads, blocks))
        sets = [(*arrays, BlockLists(draw(counts), by_list, full, full, BLOCK, BLOCK))]
        if not programs:
            programs.append(rotating(both, sets))
        return device_time(programs[0], sets, iterations=4).median

    return measure


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
