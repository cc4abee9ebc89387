"""The figures of block-sparse attention: `alload bench sparse-attention`, beside other libraries.

    python benchmarks/sparse_attention.py --out benchmarks/results/sparse_attention_h200

takes the command's flags and writes the same JSON and PNG, with those of PyTorch's flex_attention
and cuDNN's frontend in them that are installed.

Each library gets copies of q, k and v in the layout it is made for, and the lists of key blocks in
ascending order, which all of them expect. PyTorch's block mask, with its inverted lists, is made
before the time is taken; the backward of cuDNN inverts the lists each time.
"""

import argparse
import gc
import importlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp

from alload_jax.bench.device import DeviceTime
from alload_jax.bench.harness import version_of
from alload_jax.bench.sparse_attention import Arguments, Part, Rival, Shape
from alload_jax.commands import bench
from alload_jax.errors import run_command
from pallas_kernels.block_sparse_attention import BlockLists

_ITERATIONS = 10


class Call(NamedTuple):
    """Attention in a library, with its arguments.

    Attributes:
      forward: computes the output.
      backward: runs the forward and gives a function that computes the gradients, any number of
        times.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Callable[[], Any]]


def rivals(names: Sequence[str]) -> list[Rival]:
    """Those of LIBRARIES that have these names and whose packages are installed."""
    chosen = {name: LIBRARIES[name] for name in names}
    return [
        partial(_measure, name, call, set())
        for name, (call, *needed) in chosen.items()
        if all(map(version_of, needed))
    ]


def packages() -> list[str]:
    """Names of the installed packages that are measured here."""
    named = dict.fromkeys(name for _, *needed in LIBRARIES.values() for name in needed)
    return [name for name in named if version_of(name)]


def _measure(
    library: str,
    calls: Callable[[Shape, Arguments, BlockLists], Call],
    failed: set[str],
    shape: Shape,
    sets: Sequence[Arguments],
    lists: BlockLists,
) -> Iterator[tuple[str, Part, DeviceTime]]:
    """(name, part, time) of each call. What has failed once is not tried again."""
    if library in failed:
        return
    with _survived(library, shape, failed):
        call = calls(shape, sets[0], lists)
        yield library, "forward", _cuda_events(call.forward)
        yield library, "backward", _cuda_events(call.backward())
        del call
    # Only now nothing refers to tensors any more.
    gc.collect()
    importlib.import_module("torch").cuda.empty_cache()


@contextmanager
def _survived(name: str, shape: Shape, failed: set[str]) -> Iterator[None]:
    """Says on stderr why a library failed, so that the other measurements go on."""
    try:
        yield
    except Exception as error:  # each library has exceptions of its own
        failed.add(name)
        reason = " ".join(str(error).split())[:300]
        where = f"{shape.tokens:,} tokens, {name}"
        print(f"warning: {where}: {type(error).__name__}: {reason}", file=sys.stderr)


def _cuda_events(call: Callable[[], Any]) -> DeviceTime:
    """Time between events before and after each call; the first calls compile and warm up."""
    cuda = importlib.import_module("torch").cuda
    for _ in range(2):
        call()
    events = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_ITERATIONS)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    cuda.synchronize()
    times = [1e3 * begin.elapsed_time(end) for begin, end in events]
    tenths = statistics.quantiles(times, n=10)
    return DeviceTime(statistics.median(times), tenths[0], tenths[-1], ())


def _differentiable(attend: Callable[..., Any], inputs: Any, dout: Any) -> Call:
    """A call of a function of q, k and v that PyTorch differentiates."""
    torch = importlib.import_module("torch")

    def forward() -> Any:
        with torch.no_grad():
            return attend(*inputs)

    def backward() -> Callable[[], Any]:
        leaves = [each.detach().requires_grad_() for each in inputs]
        out = attend(*leaves)
        return partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)

    return Call(forward, backward)


def _heads_first(arguments: Arguments, multiple: int = 1) -> list[Any]:
    """Copies of q, k, v and dout as tensors [1, H, S, D], S filled up with zeros to a multiple."""
    torch = importlib.import_module("torch")
    fill = -arguments.q.shape[1] % multiple
    return [
        torch.nn.functional.pad(
            torch.from_dlpack(each).transpose(1, 2), (0, 0, 0, fill)
        ).contiguous()
        for each in arguments
    ]


def _ascending(lists: BlockLists) -> tuple[Any, Any]:
    """Tensors [1, H, nQ, k_max] of key blocks, ascending in each list, and [1, H, nQ] of counts."""
    torch = importlib.import_module("torch")
    return torch.from_dlpack(jnp.sort(lists.indices, axis=-1)), torch.from_dlpack(lists.counts)


def _flex_attention(shape: Shape, arguments: Arguments, lists: BlockLists) -> Call:
    """PyTorch's, compiled."""
    *inputs, dout = _heads_first(arguments)
    attend = partial(
        _compiled_flex_attention(shape),
        block_mask=_block_mask(shape, lists),
        kernel_options=_FLEX_OPTIONS,
    )
    return _differentiable(attend, inputs, dout)


_FLEX_OPTIONS = {"num_stages": 3, "num_warps": 4, "ROWS_GUARANTEED_SAFE": True}
"""For blocks of 64 tokens; the last says that no list is empty."""


@lru_cache(maxsize=1)
def _compiled_flex_attention(shape: Shape) -> Any:
    """For this shape; PyTorch keeps few programs of one function."""
    torch = importlib.import_module("torch")
    torch._dynamo.reset()
    # The backward runs many times on what one forward kept.
    config: Any = importlib.import_module("torch._functorch.config")
    config.donated_buffer = False
    if shape.block == 64:
        _offer_tiles_of_64()
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    return torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)


def _offer_tiles_of_64() -> None:
    """Has PyTorch compile tiles of 64 queries by 64 keys.

    By default it takes tiles of 128 on Hopper, and refuses a mask of smaller blocks. Its autotuning
    finds tiles that fit, but measures each on dense attention, which takes minutes at such lengths.
    """
    names = ("block_m", "block_n", "block_m1", "block_n1", "block_m2", "block_n2")
    tiles = SimpleNamespace(**dict.fromkeys(names, 64), num_stages=3, num_warps=4)
    choices = importlib.import_module("torch._inductor.choices").InductorChoices
    for direction in ("fwd", "bwd"):
        setattr(choices, f"get_flex_attention_{direction}_configs", lambda *_: [tiles])


def _block_mask(shape: Shape, lists: BlockLists) -> Any:
    """The lists as full blocks, to which PyTorch applies no mask, and no others."""
    torch = importlib.import_module("torch")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    indices, counts = _ascending(lists)
    # As many columns as there are blocks of keys, or the inverted lists would be too few.
    fill = lists.key_tokens.shape[1] - indices.shape[-1]
    indices = torch.nn.functional.pad(indices, (0, fill)).contiguous()
    return flex.BlockMask.from_kv_blocks(
        torch.zeros_like(counts),
        torch.zeros_like(indices),
        counts,
        indices,
        BLOCK_SIZE=(lists.query_block, lists.key_block),
        seq_lengths=(shape.tokens, shape.tokens),
    )


def _cudnn_frontend(shape: Shape, arguments: Arguments, lists: BlockLists) -> Call:
    """NVIDIA's kernels in CuTe that come with cuDNN's frontend."""
    torch = importlib.import_module("torch")
    attention = importlib.import_module("cudnn.block_sparse_attention")
    *inputs, dout = _heads_first(arguments, shape.block)
    given = {
        "q2k_block_index": _ascending(lists)[0],
        "block_sizes": torch.from_dlpack(lists.key_tokens)[0]
        if shape.tokens % shape.block
        else None,
        "sparse_block_size": shape.block,
    }
    splits = "auto" if shape.block == 64 else 1
    forward = partial(attention.block_sparse_attention_forward, *inputs, kv_splits=splits, **given)

    def backward() -> Callable[[], Any]:
        kept = forward()
        saved = (kept["o_tensor"], kept["lse_tensor"])
        return partial(attention.block_sparse_attention_backward, dout, *inputs, *saved, **given)

    return Call(forward, backward)


LIBRARIES: dict[str, tuple[Any, ...]] = {
    "flex_attention": (_flex_attention, "torch", "triton"),
    "cudnn_frontend": (_cudnn_frontend, "torch", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl"),
}
"""By name: what makes a call (lists are all of one length), and distributions that it needs."""


def main(argv: list[str]) -> int:
    """Measures what the flags name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    bench.add_sparse_arguments(parser)
    names = list(LIBRARIES)
    parser.add_argument("--rivals", nargs="*", choices=names, default=names)
    options = parser.parse_args(argv)
    return bench.run_sparse(options, rivals(options.rivals), packages())


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
