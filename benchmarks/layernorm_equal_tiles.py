"""LayerNorm-Modulate at widths that were not searched: tiles of several sizes, and equal tiles.

    python benchmarks/layernorm_equal_tiles.py --dims 1920 4864 5888

times each kernel at each width as the nearest searched width is divided (the tiles become narrower
towards the end of a row), the same in equal tiles, and equal tiles of 512 and 1,024 elements with
four and eight warps. `of_copy` is the least number of bytes over the time, relative to a copy from
the device to itself in the same run.
"""

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

from alload_jax.bench.device_time import copy_bandwidth, require_gpu
from alload_jax.bench.kernel_tuning import timed
from alload_jax.bench.provenance import provenance
from alload_jax.errors import run_command
from pallas_kernels.layernorm_modulate.triton.division import Division, Pass
from pallas_kernels.layernorm_modulate.triton.tuning import MEASURED, nearest

ROOT = Path(__file__).parents[1]
_EQUAL = ((512, 4), (1024, 8))
"""Width and warps of further equal tiles."""


def variants(near: Division) -> list[Division]:
    """The division of the nearest width, in equal tiles too, and the further ones; no two alike."""
    found = [near, dataclasses.replace(near, equal_tiles=True)]
    for tile, warps in _EQUAL:
        per_core = max(1, near.per_core * near.num_warps // warps)
        equal = dataclasses.replace(near, max_tile=tile, num_warps=warps, equal_tiles=True)
        found.append(dataclasses.replace(equal, per_core=per_core))
    return list(dict.fromkeys(found))


def measure(dims: list[int]) -> Iterator[dict[str, Any]]:
    """A row for each width, kernel and variant."""
    copy = copy_bandwidth()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for dim in dims:
            for kernel in get_args(Pass):
                divisions = variants(nearest(MEASURED[kernel], dim))
                for each in timed(kernel, dim, divisions, pool):
                    of_copy = round(each.bytes_per_second / copy, 3)
                    print(dim, kernel, of_copy, each.division, flush=True)
                    row: dict[str, Any] = {"dim": dim, "kernel": kernel, "of_copy": of_copy}
                    yield row | dataclasses.asdict(each.division)


def main(argv: list[str]) -> int:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "benchmarks/results/layernorm_equal_tiles_h200.json"
    parser.add_argument("--dims", type=int, nargs="+", default=[1920, 4864, 5888])
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args(argv)
    require_gpu()
    result = {
        "command": shlex.join(["python", *sys.argv]),
        **provenance(("jax", "jaxlib")),
        "rows": list(measure(options.dims)),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
