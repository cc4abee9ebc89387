"""Compiles programs for an NVIDIA GPU on a machine that has none.

XLA needs the description of a GPU in place of the GPU itself, JAX's CUDA plugin and NVIDIA's
libraries: `pip install "jax[cuda12]"`. What chooses by measurement does not run: cuBLAS's
algorithms, and kernels of widths that no table knows. All else is the program that the GPU would
get: its kernels, their order and its memory. (openxla/xla pull request 16913, jax-ml/jax pull
request 33542.)
"""

import contextlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from alload_jax.bench.harness import Record
from alload_jax.errors import InputError
from alload_jax.files import Json
from alload_jax.sharding.host_memory import set_xla_flags
from alload_jax.sharding.mesh import batch_sharding, replicated
from alload_jax.training.state import TrainingSpec, TrainState, abstract_state
from alload_jax.training.step import accumulator_shardings, make_accumulate, zero_accumulator
from alload_jax.training.trial_step import random_batch
from pallas_kernels import devices

_TEXT = 512
"""Tokens of a text."""
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H200"
"""
_OLDER = {
    "8.0": ("NVIDIA A100-SXM4-80GB", 108, 2048, 167936),
    "8.6": ("NVIDIA GeForce RTX 3090", 82, 1536, 102400),
    "8.9": ("NVIDIA GeForce RTX 4090", 128, 1536, 102400),
}
"""Name, multiprocessors, threads and bytes of shared memory of each, by compute capability."""
FLAGS = "--xla_gpu_autotune_level=0"
"""Of XLA, beside those of training: nothing can be measured."""


def _description(capability: str) -> str:
    """What XLA reads of the GPU of a compute capability."""
    if capability == "9.0":
        return _H200
    name, cores, threads, shared = _OLDER[capability]
    major, minor = capability.split(".")
    changes = {
        r'"NVIDIA H200"': f'"{name}"',
        r"core_count: \d+": f"core_count: {cores}",
        r"threads_per_core_limit: \d+": f"threads_per_core_limit: {threads}",
        r"memory_per_core: \d+": f"memory_per_core: {shared}",
        r"optin: \d+": f"optin: {shared - 1024}",
        r"capability { major: 9": f"capability {{ major: {major} minor: {minor}",
    }
    text = _H200
    for pattern, words in changes.items():
        text = re.sub(pattern, words, text)
    return text


def devices_of_host(count: int, capability: str = "9.0") -> list[Any]:
    """H200s of one host that are not there, for meshes of programs to compile; or older GPUs.

    Raises:
      InputError: JAX's CUDA plugin is not installed.
    """
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise InputError('JAX\'s CUDA plugin is missing; pip install "jax[cuda12]"')
    found = topologies.get_topology_desc(
        platform="cuda", target_config=_description(capability), topology=f"1x1x{count}"
    )
    return list(found.devices)


@contextlib.contextmanager
def traced_for(device: Any) -> Iterator[None]:
    """Within it, models choose what they would on the device."""
    chosen = SimpleNamespace(
        platform="gpu",
        device_kind=device.device_kind,
        compute_capability=device.compute_capability,
        core_count=device.core_count,
    )
    with (
        mock.patch.object(jax, "default_backend", return_value="gpu"),
        mock.patch.object(devices, "current_device", return_value=chosen),
    ):
        yield


def record(
    out: Path, rows: Callable[[list[Any]], Iterator[Json]], *packages: str, gpus: int = 1
) -> int:
    """Compiles cases, prints them and writes the JSON after each; the status of the program.

    Args:
      out: the file.
      rows: devices → what the JSON says of each case.
      packages: whose versions matter beside JAX's.
      gpus: devices that it compiles for, H200s of one host that are not there.

    Raises:
      InputError: JAX's CUDA plugin is not installed.
    """
    # JAX must not look for a GPU, nor compare kernels of widths that no table knows with XLA.
    os.environ["PALLAS_KERNELS_FIRST_USE"] = "0"
    jax.config.update("jax_platforms", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    set_xla_flags()
    devices, named = devices_of_host(gpus), ("jax", "jaxlib", *packages, "jax-cuda12-plugin")
    found = Record(out, named, compiled_for=devices[0].device_kind, cases=[])
    found.write()  # or fails before it compiles
    for row in rows(devices):
        found.add(row)
        print({name: value for name, value in row.items() if name != "moved"}, flush=True)
    return 0


def compiled(function: Any, *arguments: Any, **options: Any) -> Any:
    """The program of a jitted function for shapes on a mesh of such a device.

    Args:
      function: jitted.
      arguments: shapes with shardings.
      options: of XLA's compiler.
    """
    return function.trace(*arguments).lower(lowering_platforms=("cuda",)).compile(options)


class CompiledGradient(NamedTuple):
    """A compiled program, and shapes of what it takes.

    Attributes:
      program: compiled.
      state: of training.
      sums: the accumulator of gradients.
    """

    program: Any
    state: TrainState
    sums: Any

    @property
    def bytes(self) -> int:
        """What state, accumulator and program take together."""
        arrays = jax.tree.leaves((self.state, self.sums))
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
        return held + self.program.memory_analysis().temp_size_in_bytes


def compiled_gradient(
    spec: TrainingSpec, mesh: Mesh, rows: int, latents: tuple[int, ...], *, single: bool = True
) -> CompiledGradient:
    """The program of a micro-batch of `rows` rows of all devices together.

    Args:
      spec: what is trained.
      mesh: of devices that are not there.
      rows: of the micro-batch.
      latents: (frames, height, width) of a row.
      single: whether a step has one micro-batch.
    """

    def batch_of(rows: int, latents: tuple[int, ...]) -> Any:
        return jax.eval_shape(lambda: random_batch(spec.model, (rows, *latents), _TEXT))

    def placed(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    state = abstract_state(spec, mesh, 0)
    smallest = batch_of(mesh.size // mesh.shape["tensor"], spec.model.patch_size)
    sums = jax.eval_shape(
        lambda: zero_accumulator(spec, mesh, state.weights, smallest, single=single)
    )
    program = compiled(
        make_accumulate(spec, mesh, single=single),
        state.weights,
        jax.tree.map(placed, sums, accumulator_shardings(sums, spec, mesh)),
        placed(batch_of(rows, latents), batch_sharding(mesh)),
        placed(state.key, replicated(mesh)),
    )
    return CompiledGradient(program, state, sums)
