"""Compares training steps of a Wan-1.3B-shaped transformer with the norm kernels and with XLA.

    python benchmarks/wan_step.py --out benchmarks/results/wan_step_h200.json

Measures the time of a step (gradient and update), its peak memory, and the longest clip of 480×832
whose step fits, each in a separate process. It also compares the bytes that autodiff saves for the
modulated norms with those of the same formula in plain jax.numpy, which needs no GPU.
"""

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from alload_jax.bench.provenance import provenance
from alload_jax.bench.step import Step, random_batch, training_spec
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import config_from_fields
from pallas_kernels import layernorm_modulate

SHAPES = {"1x32760": (1, 21, 60, 104), "8x4096": (8, 1, 128, 128)}
"""Tokens → latents (rows, frames, height, width)."""

WARMUP, STEPS = 3, 8
IMPLEMENTATIONS = ("triton", "xla")
MEMORY_SHARE = "0.95"


def model_config(norm: Any, remat: Any) -> ModelConfig:
    """Config of Wan 2.1's 1.3B, except that its condition is classes, not text embeddings."""
    shape: dict[str, Any] = {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30}
    shape |= {"in_channels": 16, "patch_size": (1, 2, 2), "dtype": "bfloat16"}
    return config_from_fields(shape | {"norm": norm, "remat": remat})


def time_step(norm: str, remat: str, shape: str) -> dict[str, Any]:
    """Median seconds and peak bytes of a step."""
    step = Step(training_spec(model_config(norm, remat)))
    gradient = step.compile(SHAPES[shape])
    batch = jax.jit(random_batch, static_argnums=(0, 1))(step.model, SHAPES[shape])
    seconds = [step.run(gradient, batch) for _ in range(WARMUP + STEPS)][WARMUP:]
    return {
        "seconds": statistics.median(seconds),
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
        "peak_bytes": (jax.devices()[0].memory_stats() or {})["peak_bytes_in_use"],
        "temporary_bytes": gradient.memory_analysis().temp_size_in_bytes,
    }


def longest(norm: str, remat: str) -> dict[str, Any]:
    """The largest number of latent frames of 480×832 that fits.

    Extrapolates the memory of two compiled programs, then runs steps until one fits.
    """
    step = Step(training_spec(model_config(norm, remat)))

    def needed(frames: int) -> int:
        memory = step.compile((1, frames, 60, 104)).memory_analysis()
        return memory.temp_size_in_bytes + memory.argument_size_in_bytes

    few, many = 21, 63
    slope = (needed(many) - needed(few)) / (many - few)
    limit = (jax.devices()[0].memory_stats() or {})["bytes_limit"]
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((step.state.opt_state, step.state.ema)))
    frames = int(many + (limit - held - needed(many)) / slope)
    while True:
        latents = (1, frames, 60, 104)
        try:
            seconds = step.run(
                step.compile(latents),
                jax.jit(random_batch, static_argnums=(0, 1))(step.model, latents),
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            # The failed step has deleted the arrays donated to it.
            step, frames = Step(training_spec(model_config(norm, remat))), frames - 1
            continue
        return {
            "latent_frames": frames,
            "tokens": frames * 30 * 52,
            "seconds_with_first_run": seconds,
            "bytes_per_latent_frame": slope,
        }


def adaln_memory() -> dict[str, Any]:
    """Bytes per element of x (bfloat16) that a modulated norm saves for its backward pass."""
    shape = (1, 4096, 1536)
    x = jnp.ones(shape, jnp.bfloat16)
    table = jnp.ones((1, shape[-1]))

    def unfused(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, -1, keepdims=True)
        variance = jnp.mean(centred**2, -1, keepdims=True)
        normed = centred / jnp.sqrt(variance + 1e-6)
        return (normed * (1 + scale[:, None]) + shift[:, None]).astype(x.dtype)

    def kept(function: Any) -> float:
        vjp = jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], x, table, table)
        return sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(vjp)) / x.size

    kernel: Any = kept(partial(layernorm_modulate, implementation="triton"))
    plain = kept(unfused)
    return {
        "bytes_per_element_unfused": plain,
        "bytes_per_element_kernel": kernel,
        "saved_share": 1 - kernel / plain,
    }


def _case(*arguments: str) -> dict[str, Any]:
    """Runs one case in a separate process, so that its peak memory is its own."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY_SHARE}
    command = [sys.executable, __file__, "--case", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    print(*arguments, result, flush=True)
    return {"case": list(arguments), **result}


def main() -> None:
    """Runs all cases and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="wan_step.json")
    parser.add_argument("--remat", nargs="+", default=["attention"])
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        what, *rest = options.case
        run: Any = {"step": time_step, "longest": longest, "adaln_memory": adaln_memory}[what]
        print(json.dumps(run(*rest)))
        return
    content: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        **provenance(["jax", "jaxlib", "flax"]),
        "cases": [],
    }
    cases: list[tuple[str, ...]] = [("adaln_memory",)]
    for remat, shape, norm in itertools.product(options.remat, SHAPES, IMPLEMENTATIONS):
        cases.append(("step", norm, remat, shape))
    cases += [("longest", norm, options.remat[0]) for norm in IMPLEMENTATIONS]
    for case in cases:
        content["cases"].append(_case(*case))
        Path(options.out).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
