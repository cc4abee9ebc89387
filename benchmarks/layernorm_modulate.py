"""The figures of the LayerNorm-Modulate kernels: `alload bench kernel`, beside other libraries.

    python benchmarks/layernorm_modulate.py --out benchmarks/results/layernorm_modulate_h200

takes the command's flags and writes the same JSON and PNG, with PyTorch (eager and compiled) and
tokamax in them where those are installed.
"""

import argparse
import sys

import layernorm_rivals

from alload_jax.commands import bench_kernel
from alload_jax.errors import run_command


def main(argv: list[str]) -> int:
    """Measures what the flags name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    bench_kernel.add_arguments(parser)
    options = parser.parse_args(argv)
    packages = layernorm_rivals.installed()
    return bench_kernel.run(options, [layernorm_rivals.measure], packages)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
