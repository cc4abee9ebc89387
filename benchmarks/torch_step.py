"""One training step of one of diffusers' transformers in PyTorch, in a process of its own.

    python benchmarks/torch_step.py '{"kind": "wan", "model": {…}, "batch": 1, "latents": […], …}'

The JSON's keys are the fields of `Settings`. The last line of stdout is one JSON object: the
settings and what was measured, or `error`. Neither JAX nor anything that imports it is loaded
here: two frameworks in a process would share the device's memory.
"""

import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

# A cached program has the attention of the variant that compiled it.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import torch
import torch._dynamo
from torch_models import MODELS
from torch_trainer import Compiled, Settings, Trainer

from alload_jax.bench.provenance import provenance

PACKAGES = ("torch", "triton", "diffusers", "nvidia-cudnn-cu13")

COMPILATION_ERRORS = (
    torch._dynamo.exc.TorchDynamoException,
    torch._dynamo.exc.FailOnRecompileLimitHit,
)
NO_KERNEL = ("No available kernel", "No viable backend for scaled_dot_product_attention")
"""How PyTorch says that it cannot run attention with the backend asked for."""


def measure(settings: Settings, compiled: Compiled, device: str) -> dict[str, Any]:
    """Trains for a few steps.

    Returns:
      seconds of a step, bytes that timed steps took at most (None on a CPU), seconds before the
      first timed step, graphs that were compiled, operators of attention with their calls in a
      step, loss (None where it is not finite).

    Raises:
      torch.OutOfMemoryError, COMPILATION_ERRORS.
    """
    begin = time.perf_counter()
    trainer = Trainer(settings, compiled, device)
    built = time.perf_counter()
    first = [_timed(trainer, device)[0] for _ in range(settings.warmup)]
    ready = time.perf_counter()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timed = [_timed(trainer, device) for _ in range(settings.steps)]
    seconds, losses = zip(*timed, strict=True)
    kind, config = MODELS[settings.kind], trainer.model.config
    return {
        "seconds": statistics.median(seconds),
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
        **_peak(device),
        "build_seconds": built - begin,
        "warmup_seconds": ready - built,
        "first_step_seconds": first[0] if first else None,
        "parameters": sum(master.numel() for master in trainer.weights.masters),
        "tokens": settings.batch * math.prod(settings.latents) // kind.volume(config),
        "tokens_beside": kind.tokens_beside,
        "compiled_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "loss": losses[-1] if math.isfinite(losses[-1]) else None,
        "loss_finite": all(math.isfinite(loss) for loss in losses),
        "attention_operators": attention_operators(trainer),
    }


def attention_operators(trainer: Trainer) -> dict[str, int]:
    """Operators of attention that one more step calls: which kernels ran, whatever was asked."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        trainer.step()
    return {
        event.key.removeprefix("aten::"): event.count
        for event in profiled.key_averages()
        if event.key.startswith("aten::_") and "attention" in event.key
    }


def run(settings: Settings) -> dict[str, Any]:
    """Measures with as much compiled as can be; an `error` where memory or a kernel is missing."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    failures: dict[str, str] = {}
    result: dict[str, Any] = {"error": "compilation failed"}
    for compiled in _attempts(settings):
        try:
            result = _measure_or_error(settings, compiled, device)
            break
        except COMPILATION_ERRORS as error:
            failures[compiled] = _first_line(error)
        # Only here: a caught error's frames hold the failed attempt's tensors.
        _forget(device)
    return result | {
        "compile_failures": failures,
        "settings": asdict(settings),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **provenance(PACKAGES),
    }


def _measure_or_error(settings: Settings, compiled: Compiled, device: str) -> dict[str, Any]:
    """`measure`, or what was missing; raises COMPILATION_ERRORS."""
    try:
        return {"compiled": compiled} | measure(settings, compiled, device)
    except torch.OutOfMemoryError as error:
        found = {"error": "out of memory", "message": str(error), "compiled": compiled}
        return found | _peak(device)
    except RuntimeError as error:
        if not str(error).startswith(NO_KERNEL):
            raise
        return {"error": "no attention kernel", "message": str(error), "compiled": compiled}


def _attempts(settings: Settings) -> Iterator[Compiled]:
    if settings.compile is True:
        yield "whole"
    if settings.compile:
        yield "blocks"
    yield "no"


def _timed(trainer: Trainer, device: str) -> tuple[float, float]:
    """Seconds of a step, its loss."""
    _synchronize(device)
    begin = time.perf_counter()
    loss = trainer.step()
    _synchronize(device)
    return time.perf_counter() - begin, float(loss)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak(device: str) -> dict[str, int | None]:
    cuda = device == "cuda"
    return {
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
    }


def _forget(device: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


def main(arguments: list[str]) -> None:
    """Prints the result of the settings given as JSON."""
    given = json.loads(arguments[0])
    settings = Settings(**given | {"latents": tuple(given["latents"])})
    print(json.dumps(run(settings)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
