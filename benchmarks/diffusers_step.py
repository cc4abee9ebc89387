"""The README's figures of a training step against diffusers: `alload bench step`, run from here.

    python benchmarks/diffusers_step.py --out benchmarks/results/diffusers_step_h200.json

takes the same flags and writes the same JSON.
"""

import sys

from alload_jax.cli import main
from alload_jax.errors import run_command

if __name__ == "__main__":
    sys.exit(run_command(main, ["bench", "step", "--against", "diffusers", *sys.argv[1:]]))
