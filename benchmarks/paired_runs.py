"""Compares runs of train.py in pairs of seeds: held-out losses, and the seconds of their steps.

    python benchmarks/paired_runs.py float8 --out benchmarks/results/float8_loss_h200.json
    python benchmarks/simulator.py --out data/walks/media --samples 2400
    python benchmarks/simulator.py --out data/walks/held_out --samples 192 --seed 1
    python benchmarks/paired_runs.py sparse --out benchmarks/results/sparse_runs_h200.json

Runs of a seed have the same weights at first, batches and noise, also in validation. Others are
compared with the first kind of run. Flags that the program does not know are given to train.py.

`float8`: products in float8 and in bfloat16, 100 million parameters on moving digits; runs share
GPUs. A control says what chance does: bfloat16 with a learning rate that is 0.01 % larger.

`sparse`: dense attention, layers that become sparse by themselves, and eight of twelve layers with
a density of 0.2; 120 million parameters on clips of benchmarks/simulator.py, of 65 frames and
52,224 tokens. All runs go on from one that was trained with dense attention on shorter clips. Each
has a GPU of its own, so that its seconds count.
"""

import argparse
import csv
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from shutil import which

from alload_jax import cli
from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.data.datasets.digits import Digits
from alload_jax.errors import InputError, run_command
from alload_jax.files import Json
from alload_jax.training.run_files import VALIDATION, is_validation, read_metrics

ROOT = Path(__file__).parents[1]
RUNNING: list[subprocess.Popen[str]] = []
"""Runs, which end with the program."""
LEVEL = f"{VALIDATION}loss/sigma_"
"""What names of held-out losses at a noise level begin with."""
VALIDATIONS, LEAST_STEPS = 2, 8
"""Of a run, evenly spaced."""
FRAMES, SIZE = 65, (120, 160)
"""Of the walks that are taken, height and width."""


def digits_data(place: Path, _: argparse.Namespace) -> None:
    """Moving digits of 80 and 160 tokens, of which train.py holds out a share."""
    Digits(mix=((17, 16, 16, 3000), (17, 16, 32, 3000))).write(place / "data")


def walks_data(place: Path, options: argparse.Namespace) -> None:
    """Long clips, long ones that are held out, and short ones: `data`, `held_out`, `short`."""
    stores = (
        ("data", options.media, "96x128", FRAMES),
        ("held_out", options.held_out, "96x128", FRAMES),
        ("short", options.media, "48x64", 33),
    )
    for name, media, area, frames in stores:
        with (place / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["path", "caption"])
            for path in long_clips(media):
                table.writerow([path.name, path.with_suffix(".txt").read_text()])
        words = ["prepare", "media", str(place / f"{name}.csv"), "--out", str(place / name)]
        words += ["--area", area, "--frames", str(frames), "--min-frames", str(frames)]
        words += ["--frames-per-latent", "4", "--text-length", "64", "--media-root", str(media)]
        words += ["--workers", str(len(os.sched_getaffinity(0)))]
        cli.main(words)


def long_clips(media: Path) -> list[Path]:
    """Those of `FRAMES` frames of `SIZE`, in order."""
    import av  # float8 needs no videos

    found = []
    for path in sorted(media.glob("*.mp4")):
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            if stream.frames == FRAMES and (stream.height, stream.width) == SIZE:
                found.append(path)
    if not found:
        size = f"{FRAMES} frames of {SIZE[0]}×{SIZE[1]}"
        raise InputError(f"{media}: has no clips of {size}; see benchmarks/simulator.py")
    return found


@dataclass(frozen=True)
class Study:
    """What runs are compared in.

    Attributes:
      flags: of all runs.
      arms: further flags by the kind of run; others are compared with the first.
      data: writes the folder `data`, and `held_out` if there is one.
      steps: of a run, if not said otherwise.
      first: flags of the run that all begin from; None for new weights.
      alone: whether a run has a GPU of its own.
    """

    flags: str
    arms: dict[str, str]
    data: Callable[[Path, argparse.Namespace], None]
    steps: int
    first: str | None = None
    alone: bool = False


def sparse(**fields: object) -> str:
    """The flag of sparse attention with blocks that are chosen by pooled queries and keys."""
    chosen = {"selector": "pooled", "min_tokens": 1024} | fields
    return f"--model.sparse_attention {json.dumps(chosen, separators=(',', ':'))}"


NO_OTHERS = "--evaluators [] --trackers [] --validation.max_shapes null "
STUDIES = {
    "float8": Study(
        NO_OTHERS
        + """--config configs/digits.yaml --planning.m_mem 8192 --planning.policy balanced
        --model.dim 1024 --model.ffn_dim 4096 --model.num_heads 16 --model.num_layers 8
        --model.dtype bfloat16 --model.remat attention --optimizer.name adamw
        --model.patch_size [1,4,4] --model.prediction velocity --model.position_embedding false
        --objective.timesteps.std 1 --sampling.grids [] --checkpoint.every null --data.dataset null
        --run.compilation_cache null --validation.share 0.1 --validation.max_samples null
        --optimizer.learning_rate 3e-4""",
        {
            "bfloat16": "",
            "float8": "--model.matmul float8",
            "control": "--optimizer.learning_rate 3.0003e-4",
        },
        digits_data,
        1000,
    ),
    "sparse": Study(
        NO_OTHERS
        + """--config configs/walks.yaml --model.patch_size [1,2,2] --planning.policy equal_tokens
        --planning.m_mem 52224 --model.scan_layers true --model.remat attention
        --optimizer.learning_rate 5e-4 --optimizer.warmup_steps 20 --optimizer.ema_decay 0.98
        --optimizer.schedule constant --sampling.prompts [] --checkpoint.minutes null
        --data.loader.processes 2 --validation.share null --validation.max_samples 6""",
        {
            "dense": "",
            # Runs are much shorter than those that the defaults are for.
            "switching": sparse(
                profile_every=5,
                sparse_profile_every=20,
                dense_steps=20,
                anneal_steps=40,
                min_sparsity=0.5,
                min_recall=0.8,
                max_density=0.5,
                capacities=[0.25, 0.1],
            ),
            "forced": sparse(forced=[1, 1, *[0.2] * 8, 1, 1]),
        },
        walks_data,
        240,
        """--run.steps 500 --planning.m_mem 27648 --optimizer.learning_rate 1e-3
        --validation.folder null""",
        alone=True,
    ),
}


def trained(folder: Path, flags: list[str], gpu: str | None, alone: bool) -> list[Json]:
    """Trains in a folder, on one GPU, which others may use too; returns its metrics' lines."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"PYTHONPATH": path}
    if gpu is not None:
        variables |= {"CUDA_VISIBLE_DEVICES": gpu}
    if not alone:
        variables |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, str(ROOT / "train.py"), *flags, "--run.folder", str(folder)]
    pipes: Json = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    RUNNING.append(process := subprocess.Popen(command, cwd=ROOT, env=variables, **pipes))
    said, _ = process.communicate()
    if process.returncode:
        raise InputError(f"{folder.name}: {said[-800:]}")
    return list(read_metrics(folder / "metrics.jsonl"))


def result_of(folder: Path, rows: list[Json]) -> Json:
    """What a run has shown: seconds are those of its steps so far, without the first three."""
    seconds = [row["step_seconds"] for row in rows if not is_validation(row)]
    last = statistics.median(seconds[-(len(seconds) // 4) :])
    found: Json = {"last_quarter_step_seconds": last, "held_out": []}
    for row in filter(is_validation, rows):
        losses = {name.removeprefix(LEVEL): loss for name, loss in row.items() if LEVEL in name}
        mean = statistics.geometric_mean(losses.values())
        so_far = {"step": row["step"], "seconds": sum(seconds[3 : row["step"]]), "loss": mean}
        found["held_out"].append(so_far | {"losses": losses})
    if (layers := folder / "layers.jsonl").exists():
        found["layers"] = json.loads(layers.read_text().splitlines()[-1])
    return found


def ratios_of(cases: list[Json], first: str) -> Json:
    """Of each kind of run over the `first`, by seed: seconds, and last losses at noise levels.

    `loss` is their geometric mean: of other means the ratio would be that of the largest.
    """
    last = {(case["arm"], case["seed"]): case | case["held_out"][-1] for case in cases}
    ratios: Json = {}
    for (arm, seed), case in sorted(last.items()):
        than = last[first, seed]
        found = {name: loss / than["losses"][name] for name, loss in case["losses"].items()}
        found["loss"] = statistics.geometric_mean(found.values())
        for name in ("seconds", "last_quarter_step_seconds"):
            found[name] = case[name] / than[name]
        for name, ratio in found.items():
            ratios.setdefault(arm, {}).setdefault(name, []).append(ratio)
    del ratios[first]
    return ratios


def gpus() -> list[str | None]:
    """Numbers of the GPUs that may be used; None for a CPU."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None and which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        listed = ",".join(subprocess.run(command, capture_output=True, text=True).stdout.split())
    return [*filter(None, (listed or "").split(","))] or [None]


def runs_of(
    study: Study, place: Path, seeds: list[int], steps: int, more: list[str]
) -> Iterator[Json]:
    """Trains all kinds of runs with all seeds, and says what each has shown."""
    flags = study.flags.split()
    if (place / "held_out").exists():
        flags += ["--validation.folder", str(place / "held_out")]
    devices, pairs = gpus(), list(itertools.product(seeds, study.arms))
    free: Queue[str | None] = Queue()
    for device in devices * (1 if study.alone else len(pairs)):
        free.put(device)

    def run(pair: tuple[int, str]) -> Json:
        seed, arm = pair
        words = ["--run.steps", str(steps), "--validation.every", str(steps // VALIDATIONS)]
        words += [*flags, *study.arms[arm].split(), "--data.folder", str(place / "data")]
        words += ["--run.seed", str(seed), *more]
        folder, device = place / f"{arm}_{seed}", free.get()
        try:
            rows = trained(folder, words, device, study.alone)
        finally:
            free.put(device)
        return {"arm": arm, "seed": seed} | result_of(folder, rows)

    pool = ThreadPoolExecutor(free.qsize())
    try:
        if study.first is not None:
            words = [*flags, *study.first.split(), *more, "--data.folder", str(place / "short")]
            trained(place / "first", words, devices[0], study.alone)
            flags += ["--run.initial_weights", str(place / "first")]
        for done in as_completed([pool.submit(run, pair) for pair in pairs]):
            yield done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in RUNNING:
            process.kill()


def main(argv: list[str]) -> int:
    """Trains all runs and writes the JSON after each."""
    parser = benchmark_parser(__doc__, "paired_runs.json")
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    for name in ("media", "held-out"):
        default = Path("data/walks", name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=Path, default=default, metavar="FOLDER")
    options, more = parser.parse_known_args(argv)
    study = STUDIES[options.study]
    steps = study.steps if options.steps is None else options.steps
    if steps < LEAST_STEPS:
        raise InputError(f"--steps {steps}: give at least {LEAST_STEPS}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    record = Record(options.out, ("jax", "jaxlib", "flax"), steps=steps, cases=[])
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        study.data(place, options)
        for case in runs_of(study, place, options.seeds, steps, more):
            record.add(case)
    record.content["ratios"] = ratios_of(record.content["cases"], next(iter(study.arms)))
    record.write()
    print(record.content["ratios"])
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
