"""Compares what a model learns from videos with sparse attention and with dense attention.

    python benchmarks/moving_pictures.py VIDEOS --out clips.npz
    python benchmarks/sparse_quality.py --clips clips.npz --time-limit 480

Trains the model of benchmarks/sparse_quality.yaml, with three seeds of each variant:

- `dense`: dense attention, measured as the others;
- `predictor`, `pooled`: layers become sparse by their measured profile, with these selectors and
  the same thresholds: the highest of a few pairs that half of the layers of the first dense run
  pass midway;
- `random`: a control. Its lists are as long as those of `predictor` in the same step, layer and
  head, but name random blocks beside a block's own.

Each seed first trains on short clips with dense attention. All of its variants go on from there on
long clips: the same ones in the same order, with the same noise. The loss on videos that no run
trains on is measured at fixed noise levels with fixed noise. `--steps 0` takes as many steps as fit
`--time-limit`. Results are written after each run: the JSON to `--out`, and pictures to
`--pictures`. `--draw` draws them again from the JSON. Arguments behind `--` override keys of the
config, such as `-- --model.dim 64`.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from sparse_quality_report import draw, table

from alload_jax.errors import run_command
from alload_jax.sharding.xla_flags import set_xla_flags

ROOT = Path(__file__).parents[1]
VARIANTS = ("dense", "predictor", "pooled", "random")


def main(argv: list[str]) -> int:
    """Trains, measures, writes."""
    began = time.monotonic()
    argv, overrides = (argv, []) if "--" not in argv else _split(argv, "--")
    options = _parser().parse_args(argv)
    if options.draw:
        content = json.loads(options.out.read_text())
        draw(content, options.pictures)
        print(table(content))
        return 0
    set_xla_flags()
    # These modules import JAX, which reads the flags.
    from sparse_quality_record import Record
    from sparse_quality_setup import set_up
    from sparse_quality_study import Study

    setup, content = set_up(options, overrides, began)
    drawn = options.runs / "drawn.npz"
    Study(setup, Record(content, options.out, options.pictures, drawn)).run()
    return 0


def _split(argv: list[str], mark: str) -> tuple[list[str], list[str]]:
    place = argv.index(mark)
    return argv[:place], argv[place + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--clips", type=Path, help="NPZ of moving_pictures.py")
    add("--frames", type=int, default=20, help="frames of a sample (default 20)")
    add("--size", type=int, default=64, help="pixels of a side (default 64)")
    add("--samples", type=int, default=600, help="crops to train on (default 600)")
    add("--held-out", type=int, default=12, help="held-out clips to measure at a time (default 12)")
    add("--first", type=int, nargs=3, default=[8, 32, 32], help="frames and sides of short clips")
    add("--first-tokens", type=int, default=16_384, help="their tokens in a step (default 16384)")
    add("--first-steps", type=int, default=1500, help="steps on short clips (default 1500)")
    add("--steps", type=int, default=0, help="steps of a run; 0 for what fits (default 0)")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--time-limit", type=float, default=480, help="seconds of the whole program (default 480)")
    add("--config", type=Path, default=ROOT / "benchmarks" / "sparse_quality.yaml")
    add("--runs", type=Path, default=ROOT / "runs" / "sparse_quality", help="folder of the runs")
    results = ROOT / "benchmarks" / "results"
    add("--out", type=Path, default=results / "sparse_quality_h200.json", help="the JSON")
    add("--pictures", type=Path, default=ROOT / "docs" / "results" / "sparse_quality")
    add("--show", nargs="+", default=[""], help="parts of names of held-out videos to restore")
    add("--draw", action="store_true", help="only draw the pictures of --out")
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
