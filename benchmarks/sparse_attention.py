"""The figures of block-sparse attention: `alload bench sparse-attention`, beside other libraries.

    python benchmarks/sparse_attention.py --out benchmarks/results/sparse_attention_h200

takes the command's flags and writes the same JSON and PNG, with those of PyTorch's flex_attention,
cuDNN's frontend and FlashAttention 4 in them that are installed.
"""

import argparse
import sys

import sparse_attention_rivals

from alload_jax.commands import bench_sparse_attention
from alload_jax.errors import run_command


def main(argv: list[str]) -> int:
    """Measures what the flags name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    bench_sparse_attention.add_arguments(parser)
    parser.add_argument(
        "--rivals",
        nargs="*",
        choices=list(sparse_attention_rivals.LIBRARIES),
        default=list(sparse_attention_rivals.DEFAULT),
        help=f"other libraries (default {' '.join(sparse_attention_rivals.DEFAULT)})",
    )
    options = parser.parse_args(argv)
    rivals = sparse_attention_rivals.rivals(options.rivals)
    return bench_sparse_attention.run(options, rivals, sparse_attention_rivals.packages())


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
