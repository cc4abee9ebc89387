"""Measurements in processes of their own: each with a peak of memory of its own."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alload_jax.errors import InputError
from alload_jax.sharding.xla_flags import with_defaults

_ERROR_LINE = re.compile(r"[\w.]*(Error|Exception): ")
_INPUT_ERROR = "alload_jax.errors.InputError: "
_MEMORY_SHARE = "0.95"
"""Of the device, for JAX: what it takes at start is not what is reported."""


def measured(
    program: str | Path,
    settings: dict[str, Any],
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The last line that the measurement prints, or how it failed: the others go on.

    What is the user's fault is raised, as it would be without a process in between.

    Args:
      program: module to run, or the path of a script.
      settings: its argument, as JSON.
      variables: of its environment, beside this process's own.

    Raises:
      InputError: the measurement did.
    """
    environment = os.environ | {
        "XLA_FLAGS": with_defaults(os.environ.get("XLA_FLAGS", "")),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": _MEMORY_SHARE,
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    environment |= variables or {}
    place = [str(program)] if isinstance(program, Path) else ["-m", program]
    command = [sys.executable, *place, json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    for line in done.stderr.splitlines():
        if line.startswith(_INPUT_ERROR):
            raise InputError(line.removeprefix(_INPUT_ERROR))
    errors = [line for line in done.stderr.splitlines() if _ERROR_LINE.match(line)]
    reason = (errors or done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"error": f"ended with status {done.returncode}: {reason}", "settings": settings}
