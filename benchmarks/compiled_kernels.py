"""Says how many registers kernels take, and what they spill.

    python benchmarks/compiled_kernels.py

XLA compiles them without a GPU (see `benchmarks/gpu_target.py`), and NVIDIA's ptxas says what a
thread takes. Backward kernels are compiled for an H100 or H200, attention in packed rows for GPUs
before them. `fit` is whether all programs of a multiprocessor that a kernel is divided for hold
their registers at the same time: 65,536 of them.
"""

import glob
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest import mock

import gpu_target
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from alload_jax.bench.harness import benchmark_parser
from alload_jax.errors import run_command
from alload_jax.files import Json
from alload_jax.models.common.attention import triton_packed
from alload_jax.models.common.segments import AttentionSegments, Segments
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from pallas_kernels import op
from pallas_kernels.bias_gelu import api as gelu_operands
from pallas_kernels.bias_gelu import triton as gelu_calls
from pallas_kernels.block_sparse_attention import PooledScores, selection
from pallas_kernels.block_sparse_attention import selection_triton as selection_calls
from pallas_kernels.block_sparse_attention import triton as attention_calls
from pallas_kernels.block_sparse_attention.api import Pass
from pallas_kernels.layernorm_modulate import mosaic as mosaic_calls
from pallas_kernels.layernorm_modulate import operands as norm_operands
from pallas_kernels.layernorm_modulate import triton as norm_calls
from pallas_kernels.layernorm_modulate import tuning as norm_tuning
from pallas_kernels.rms_norm_rotary import api as rotary_operands
from pallas_kernels.rms_norm_rotary import triton as rotary_calls

_REGISTERS, _THREADS = 65_536, 32
_TOKENS, _HEAD = 8192, 128
_WARPS = 4
"""Of a group of threads of a Mosaic kernel."""


class Case(NamedTuple):
    """A kernel at a width.

    Attributes:
      kernel: its name in PTX.
      dim: the width.
      variant: which way of it.
      warps, per_core: of a program, and programs of a multiprocessor.
      call: runs it.
      shapes: of the call's arguments.
      capability: of the GPU.
    """

    kernel: str
    dim: int
    variant: str
    warps: int
    per_core: int
    call: Callable[..., Any]
    shapes: tuple[Any, ...]
    capability: str = "9.0"


def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """The shape of an array, of bfloat16 unless said otherwise."""
    return jax.ShapeDtypeStruct(shape, dtype)


wide = partial(array, dtype=jnp.float32)


def gelu_cases() -> Iterator[Case]:
    """Its backward with the output."""
    blocks, options = gelu_calls.BACKWARD_BLOCKS, op.Plain()
    for dim in (8192, 8960, 13824):
        x = array(1, _TOKENS, dim)
        shapes = (gelu_operands.GeluOperands(x, array(dim)), x)
        call = partial(gelu_calls.backward, options=options, with_output=True)
        which = ("bias_gelu_backward", dim, "with the output")
        yield Case(*which, blocks.num_warps, blocks.per_core, call, shapes)


def rotary_cases() -> Iterator[Case]:
    """Its backward, with a bias where that is summed by the kernel."""
    for dim, per_head in ((1024, False), (1536, False), (2048, True), (3072, False), (5120, False)):
        blocks = rotary_calls.backward_blocks(dim, per_head)
        options = rotary_operands.RmsNormOptions(_HEAD, per_head, 1e-6)
        tables = (wide(_TOKENS, _HEAD // 2),) * 2
        weight, heads = wide(_HEAD if per_head else dim), (dim // _HEAD, _HEAD)
        operands = rotary_operands.RmsNormOperands(
            array(1, _TOKENS, dim), weight, array(dim), *tables
        )
        summed = rotary_calls.sums_bias(dim, per_head)
        words = "each head" if per_head else "whole width"
        words += ", with the sum of the bias" if summed else ""
        call = partial(rotary_calls.backward, options=options)
        which = ("rms_norm_rotary_backward", dim, words)
        shapes = (operands, array(1, _TOKENS, *heads))
        yield Case(*which, blocks.num_warps, blocks.per_core, call, shapes)


def after_residual(dim: int, segments: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """Options and shapes of a backward after a residual, of rows or of 42 segments."""
    dtype = jnp.dtype(jnp.bfloat16)
    layout: norm_operands.ModulationLayout = "segment" if segments else "row"
    options = norm_operands.NormOptions(layout, 1e-6, dtype, dtype, dtype, h="sum")
    stream, table = array(1, _TOKENS, dim), wide(1, 42, dim) if segments else wide(1, dim)
    ids = array(1, _TOKENS, dtype=jnp.int32) if segments else None
    given = (stream, wide(1, _TOKENS, 2), table, wide(0), stream, table, ids)
    return options, (norm_operands.NormResiduals(*given), stream, stream)


def norm_cases() -> Iterator[Case]:
    """The backward after a residual."""
    for dim in (1536, 3072, 5120, 6144, 7168, 8192):
        options, shapes = after_residual(dim)
        division = norm_tuning.division_for(norm_tuning.MEASURED["residual_backward"], dim)
        call = partial(norm_calls.backward, options=options, blocks=division)
        which = ("layernorm_modulate_backward", dim, "after a residual")
        yield Case(*which, division.num_warps, division.per_core, call, shapes)


def mosaic_cases() -> Iterator[Case]:
    """The same through Mosaic GPU, of rows and of segments."""
    for dim in (1536, 5120, 7296, 8192, 10_240):
        for segments in (False, True):
            options, shapes = after_residual(dim, segments)
            way = norm_tuning.way_for("residual_backward", dim, 8)
            assert way is not None
            call = partial(mosaic_calls.backward, options=options, way=way)
            which = (mosaic_calls.BACKWARD, dim, "after a residual" + ", segments" * segments)
            yield Case(*which, way.groups * _WARPS, way.per_core, call, shapes)


def packed_attention_cases() -> Iterator[Case]:
    """Attention in a packed row of two segments, on the GPUs that have no cuDNN for it."""
    tokens = array(1, _TOKENS, 12, _HEAD)
    slots = array(1, 2, dtype=jnp.int32)
    segments = Segments(slots, slots, array(1, _TOKENS, dtype=jnp.int32))
    packed = AttentionSegments(segments, segments, ((0, 2), (_TOKENS, 0)), None)

    def total(q: jax.Array, k: jax.Array, v: jax.Array, packed: AttentionSegments) -> jax.Array:
        return triton_packed(q, k, v, packed).astype(jnp.float32).sum()

    for capability in ("8.0", "8.6", "8.9"):
        for part in get_args(Pass):
            tiles = attention_calls.tiles_for(part, 128)
            call = total if part == "forward" else jax.grad(total, (0, 1, 2))
            which = (f"block_sparse_attention_{part}", _HEAD, f"packed rows, sm_{capability}")
            shapes = (tokens,) * 3 + (packed,)
            yield Case(*which, tiles.num_warps, 1, call, shapes, capability)


def selection_cases() -> Iterator[Case]:
    """The choice of blocks, whose scores are kept (32,768, 75,600, 131,072 tokens) or not."""
    for blocks in (512, 1182, 2048, 4096):
        scores = PooledScores(*(wide(1, blocks, 12, _HEAD),) * 2)
        of_blocks = array(1, blocks, dtype=jnp.int32)
        lists = array(1, 12, blocks, dtype=jnp.int32)
        options = selection.SelectionOptions((64, 64), blocks // 10, True, False)
        call = partial(selection_calls.choose, options=options)
        shapes = (selection.SelectionOperands(scores, lists, of_blocks, of_blocks),)
        which = (selection.NAME, _HEAD, f"of {blocks} blocks of keys")
        yield Case(*which, selection_calls.WARPS, 1, call, shapes)


def compiled_case(case: Case) -> Json:
    """Registers of a thread, and bytes that it spills."""
    (device,) = gpu_target.devices_of_host(1, case.capability)
    everywhere = NamedSharding(make_mesh(MeshConfig(), [device]), PartitionSpec())
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), case.shapes
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_TO": folder}),
        gpu_target.traced_for(device),
    ):
        gpu_target.compiled(jax.jit(case.call), *shapes, xla_dump_to=folder)
        words = of_ptxas(folder, case.kernel, case.capability)
    registers = int(re.findall(r"Used (\d+) registers", words)[0])
    spilled = int(re.findall(r"(\d+) bytes spill stores", words)[0])
    held = registers * _THREADS * case.warps * case.per_core
    fields = ("kernel", "dim", "variant", "warps", "per_core")
    return {name: getattr(case, name) for name in fields} | {
        "registers": registers,
        "spilled_bytes": spilled,
        "fit": held <= _REGISTERS,
    }


def of_ptxas(folder: str, kernel: str, capability: str) -> str:
    """What NVIDIA's assembler says of a kernel; Mosaic has asked it and dumps the answer."""
    if found := glob.glob(f"{folder}/{kernel}*.ptxas"):
        return Path(found[0]).read_text()
    entry = f".entry {kernel}"
    return next(
        ptxas(path, capability)
        for path in glob.glob(f"{folder}/*.ptx")
        if entry in Path(path).read_text()
    )


def ptxas(path: str, capability: str) -> str:
    """What NVIDIA's assembler says of a file."""
    installed = importlib.util.find_spec("nvidia.cuda_nvcc")
    assert installed is not None
    [folder] = installed.submodule_search_locations or []
    arch = "sm_" + capability.replace(".", "") + ("a" if capability == "9.0" else "")
    given = [f"{folder}/bin/ptxas", "-v", f"-arch={arch}", path, "-o", "/dev/null"]
    return subprocess.run(given, capture_output=True, text=True, check=True).stderr


def rows(devices: list[Any]) -> Iterator[Json]:
    """What the JSON says of each case."""
    cases = (gelu_cases, rotary_cases, norm_cases, mosaic_cases, packed_attention_cases)
    for case in itertools.chain(*(each() for each in (*cases, selection_cases))):
        yield compiled_case(case)


def main(argv: list[str]) -> int:
    """Compiles all cases and writes the result."""
    options = benchmark_parser(__doc__, "compiled_kernels.json").parse_args(argv)
    return gpu_target.record(options.out, rows, "nvidia-cuda-nvcc-cu12")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
