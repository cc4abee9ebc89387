"""Checks that a step of M_mem tokens runs and that a step beyond the device's memory fails.

Each step runs in a separate process. The calling process must not use the device, because JAX
reserves most of a GPU's memory when it starts.
"""

import json
import subprocess
import sys
from typing import Any

from alload_jax.bench.calibration_cases import Case
from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile

BEYOND = 1.1
"""Tokens of the step that should fail, relative to those that fill the memory completely."""


def check_memory(costs: CostFile) -> dict[str, Any]:
    """Runs one step of M_mem tokens and one of `BEYOND` · M_mem / (1 − margin).

    Rows have the shortest length, with which M_mem tokens use the most memory.

    Args:
      costs: the cost model as `alload calibrate` writes it.

    Returns:
      The cases "within" and "beyond": tokens, whether the step ran, the allocator's peak in bytes
      (None on CPUs), the predicted bytes, and their relative error.

    Raises:
      InputError: the cost model was not measured.
    """
    if not (costs.details and costs.memory and costs.m_mem and costs.model):
        raise InputError("memory check: the cost model was not measured; run alload calibrate")
    memory = costs.details["memory"]
    seq_len, beside = memory["shortest"], memory.get("beside", 0)
    beyond = BEYOND * costs.m_mem / (1 - costs.details["margin"])
    return {
        "within": _step(costs, Case(max(1, costs.m_mem // seq_len), seq_len, beside)),
        "beyond": _step(costs, Case(-(-int(beyond) // seq_len), seq_len, beside)),
    }


def _step(costs: CostFile, case: Case) -> dict[str, Any]:
    assert costs.memory
    assert costs.model
    fields = dict(costs.model)
    settings = {
        "condition_tokens": fields.pop("condition_tokens", 1),
        "model": fields,
        "batch": case.rows,
        "latents": case.latents(tuple(fields["patch_size"]))[1:],
        "warmup": 0,
        "steps": 1,
    }
    found = _measured(settings)
    predicted, peak = costs.memory.bytes_of(case.tokens, case.rows), found.get("peak_bytes")
    return {
        "rows": case.rows,
        "seq_len": case.seq_len,
        "tokens": case.tokens,
        "ran": "error" not in found,
        "error": found.get("error"),
        "seconds_with_first_run": found.get("seconds"),
        "predicted_bytes": predicted,
        "peak_bytes": peak,
        "relative_error": predicted / peak - 1 if peak else None,
    }


def _measured(settings: dict[str, Any]) -> dict[str, Any]:
    """The JSON that the measurement prints, or the error that ended it."""
    command = [sys.executable, "-m", "alload_jax.bench.step_process", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and done.stdout:
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"error": f"ended with status {done.returncode}: {last}"}
