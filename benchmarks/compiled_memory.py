"""Compares predicted memory with that of training steps that XLA compiles without a GPU.

    python benchmarks/compiled_memory.py

`bytes` is what state, gradients and the gradient's program take together; `predicted` is from the
arithmetic that `model.remat: auto` and `alload plan --memory` use, less what it allows for the work
spaces of libraries. See `benchmarks/gpu_target.py` for what the programs lack.
"""

import dataclasses
import math
import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import gpu_target
from compiled_step import CLIP, IMAGES

from alload_jax.bench.harness import benchmark_parser, model_fields, training_fields
from alload_jax.errors import run_command
from alload_jax.files import Json
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import config_from_fields
from alload_jax.planning.analytic import WORKSPACE_BYTES, step_memory
from alload_jax.planning.architecture import from_fields
from alload_jax.planning.devices import DEVICES
from alload_jax.planning.remat import LADDER, OFFLOADED, RematPolicy
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.memory import trained_of
from alload_jax.training.optimizer import OptimizerConfig
from alload_jax.training.parameters import ALL_TRAINED, ParametersConfig
from alload_jax.training.trial_step import tokens_beside, training_spec

WAN, LARGE, JOINT = ("1.3b", 30), ("14b", 8), ("hunyuan-video-1.5", 16)
SINGLE = ("hunyuan-video-13b", 4)
"""Models and layers, of the last with twice as many of one stream."""
SHORT = (128, (1, 32, 32))
SINGLE_CLIP = (1, (5, 90, 160))
JOINT_CLIP, JOINT_IMAGES = (1, (9, 45, 80)), (8, (1, 45, 80))
CLIPS = ((WAN, CLIP), (LARGE, CLIP), (JOINT, JOINT_CLIP), (SINGLE, SINGLE_CLIP))
FULL = ((1, (121, 60, 104)), (800, (1, 32, 32)))
"""About what an H200 holds: one long clip, and many short samples."""
ADAPTERS: tuple[RematPolicy, ...] = ("full", "offload", "attention", "matmuls_and_attention")
PATTERNS = (
    ("full", "attention"),
    *(("attention",) * (10 - more) + ("feed_forward_and_attention",) * more for more in (1, 5, 9)),
    ("feed_forward_and_attention", "matmuls_and_attention", "matmuls_and_attention"),
    ("feed_forward_and_attention",) * 3 + ("matmuls_and_attention",) * 7,
    ("matmuls_and_attention", "norms_matmuls_and_attention"),
)
_RANK = 32


class Case(NamedTuple):
    """A training step.

    Attributes:
      model: of `harness.MODELS`.
      layers: of the model.
      rows: of a micro-batch.
      latents: (frames, height, width) of a row.
      policies: of the layers, repeated.
      frozen: dtype of what is frozen beside adapters; None where all weights are trained.
      single: whether a step has one micro-batch.
    """

    model: str
    layers: int
    rows: int
    latents: tuple[int, int, int]
    policies: tuple[str, ...]
    frozen: Literal["bfloat16", "float8"] | None = None
    single: bool = True

    def trained(self) -> tuple[ParametersConfig, OptimizerConfig]:
        """Which parameters are trained, and how."""
        if not self.frozen:
            return ALL_TRAINED, OptimizerConfig()
        parameters = ParametersConfig(trained=("lora",), frozen_dtype=self.frozen)
        return parameters, OptimizerConfig(ema_decay=None)

    def config(self) -> ModelConfig:
        """The model's config."""
        fields = training_fields(model_fields(self.model, self.layers), "none")
        fields |= {"remat_layers": list(self.policies)}
        return config_from_fields(fields | ({"lora": {"rank": _RANK}} if self.frozen else {}))


def cases() -> Iterator[Case]:
    """All steps."""
    for policy in (*LADDER, *OFFLOADED):
        for model, shape in CLIPS:
            yield Case(*model, *shape, (policy,))
    for policy in LADDER:
        for model, shape in ((WAN, IMAGES), (WAN, SHORT), (JOINT, JOINT_IMAGES)):
            yield Case(*model, *shape, (policy,))
    for kept in ADAPTERS:
        for model, shape in CLIPS:
            yield Case(*model, *shape, (kept,), "float8" if model is LARGE else "bfloat16")
    for model, shape in ((WAN, CLIP), (JOINT, JOINT_CLIP)):
        yield Case(*model, *shape, ("attention",), single=False)
    for policies in PATTERNS:
        yield Case(*WAN, *CLIP, policies)
    yield Case(*JOINT, *JOINT_CLIP, ("attention", "feed_forward_and_attention"))
    for shape in FULL:
        yield Case(*WAN, *shape, ("attention",))


def compiled_bytes(case: Case, device: Any) -> int:
    """What a step takes, as XLA assigns memory."""
    with gpu_target.traced_for(device):
        parameters, optimizer = case.trained()
        spec = training_spec(case.config(), optimizer, parameters=parameters)
        mesh = make_mesh(MeshConfig(), [device])
        given = (spec, mesh, case.rows, case.latents)
        return gpu_target.compiled_gradient(*given, single=case.single).bytes


def predicted_bytes(case: Case) -> float:
    """The same by arithmetic."""
    model = dataclasses.replace(case.config(), dtype="bfloat16")
    trained = trained_of(model, *case.trained(), single=case.single)
    tokens = math.prod(case.latents) // math.prod(model.patch_size) + tokens_beside(model, 1)
    architecture = from_fields(model.architecture())
    memory = step_memory(architecture, DEVICES["h200"], case.policies, trained=trained)
    return memory.bytes_of(case.rows * tokens, case.rows) - WORKSPACE_BYTES


def rows(devices: list[Any]) -> Iterator[Json]:
    """What the JSON says of each case."""
    for case in cases():
        held, predicted = compiled_bytes(case, devices[0]), round(predicted_bytes(case))
        yield case._asdict() | {"bytes": held, "predicted": predicted}


def main(argv: list[str]) -> int:
    """Compiles all cases and writes the result."""
    options = benchmark_parser(__doc__, "compiled_memory.json").parse_args(argv)
    return gpu_target.record(options.out, rows, "flax")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
