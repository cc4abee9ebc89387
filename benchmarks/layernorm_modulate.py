"""The docs' figures of the LayerNorm-Modulate kernels: `alload bench kernel`, run from here.

    python benchmarks/layernorm_modulate.py --out benchmarks/results/layernorm_modulate_h200

takes the same flags and writes the same JSON and PNG.
"""

import sys

from alload_jax.cli import main
from alload_jax.errors import run_command

if __name__ == "__main__":
    sys.exit(run_command(main, ["bench", "kernel", *sys.argv[1:]]))
