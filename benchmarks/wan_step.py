"""Compares training steps of a Wan-1.3B-shaped transformer with the norm kernels and with XLA.

    python benchmarks/wan_step.py --out benchmarks/results/wan_step_h200.json

Measures the time of a step (gradient and update), its peak memory, and the longest clip of 480×832
whose step fits, each in a separate process. It also compares the bytes that autodiff saves for the
modulated norms with those of the same formula in plain jax.numpy, which needs no GPU.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from alload_jax.bench.harness import Record, benchmark_parser, measured
from alload_jax.errors import run_command
from alload_jax.files import Json
from alload_jax.models.families import config_from_fields
from alload_jax.training.device_memory import out_of_memory
from alload_jax.training.trial_step import Step, training_spec
from pallas_kernels import layernorm_modulate

SHAPES = {"1x32760": (1, 21, 60, 104), "8x4096": (8, 1, 128, 128)}
"""Tokens → latents (rows, frames, height, width)."""

WARMUP, STEPS = 3, 8
IMPLEMENTATIONS = ("triton", "xla")
MEMORY_SHARE = "0.95"


def model_fields(norm: str, remat: str) -> Json:
    """Of Wan 2.1's 1.3B, except that its condition is classes, not text embeddings."""
    shape: Json = {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30}
    shape |= {"in_channels": 16, "patch_size": (1, 2, 2), "dtype": "bfloat16"}
    return shape | {"norm": norm, "remat": remat}


def longest(norm: str, remat: str) -> Json:
    """The largest number of latent frames of 480×832 that fits.

    Extrapolates the memory of two compiled programs, then runs steps until one fits.
    """
    spec = training_spec(config_from_fields(model_fields(norm, remat)))
    step = Step(spec)

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
            seconds = step.run(step.compile(latents), step.batch(latents))
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            # The failed step has deleted the arrays donated to it.
            step.renew()
            frames -= 1
            continue
        return {
            "latent_frames": frames,
            "tokens": frames * 30 * 52,
            "seconds_with_first_run": seconds,
            "bytes_per_latent_frame": slope,
        }


def adaln_memory() -> Json:
    """Bytes per element of x (bfloat16) that a modulated norm saves for its backward pass."""
    shape = (1, 4096, 1536)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    table = jax.ShapeDtypeStruct((1, shape[-1]), jnp.float32)

    def unfused(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, -1, keepdims=True)
        variance = jnp.mean(centred**2, -1, keepdims=True)
        normed = centred / jnp.sqrt(variance + 1e-6)
        return (normed * (1 + scale[:, None]) + shift[:, None]).astype(x.dtype)

    def kept(function: Any) -> float:
        vjp = jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], x, table, table)
        return sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(vjp)) / math.prod(shape)

    kernel: Any = kept(partial(layernorm_modulate, implementation="triton"))
    plain = kept(unfused)
    return {
        "bytes_per_element_unfused": plain,
        "bytes_per_element_kernel": kernel,
        "saved_share": 1 - kernel / plain,
    }


def main(argv: list[str]) -> int:
    """Runs all cases and writes the results."""
    parser = benchmark_parser(__doc__, "wan_step.json")
    parser.add_argument("--remat", nargs="+", default=["attention"])
    parser.add_argument("--longest", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.longest:
        print(json.dumps(longest(options.longest, options.remat[0])))
        return 0
    record = Record(options.out, ["jax", "jaxlib", "flax"])
    record.add({"case": ["adaln_memory"], **adaln_memory()})
    for remat, shape, norm in itertools.product(options.remat, SHAPES, IMPLEMENTATIONS):
        rows, *latents = SHAPES[shape]
        settings = {"model": model_fields(norm, remat), "batch": rows, "latents": latents}
        settings |= {"warmup": WARMUP, "steps": STEPS}
        found = measured("alload_jax.bench.step_process", settings)
        record.add({"case": ["step", norm, remat, shape], **found})
        print(record.content["cases"][-1], flush=True)
    for norm in IMPLEMENTATIONS:
        environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY_SHARE}
        command = [sys.executable, __file__, "--longest", norm, "--remat", options.remat[0]]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        case = ["longest", norm, options.remat[0]]
        record.add({"case": case, **json.loads(done.stdout.splitlines()[-1])})
        print(record.content["cases"][-1], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
