"""Measures how soon a run that was killed takes its next step, and whether it repeats its losses.

    python benchmarks/restart.py --config configs/wan2_1_t2v_1_3b.yaml

The run is killed by SIGKILL some steps after its first checkpoint, and the same command starts it
again. Its programs are then on disk, as those of each run with `run.compilation_cache` are. Further
flags are those of train.py.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.bench.random_data import write_random_store
from alload_jax.config import read_config
from alload_jax.errors import InputError, run_command
from alload_jax.planning.samples import Samples
from alload_jax.planning.workloads import make_workload
from alload_jax.training.run_files import read_metrics

ROOT = Path(__file__).parents[1]
SAMPLES, LONGEST = 400, 16_384
"""Of the workload wan-480p, and tokens of the longest of them, and of a micro-batch."""
EVERY, LOST = 10, 8
"""Steps until the checkpoint, and after it until the run is killed."""
_INTERVAL = 0.01


def main(argv: list[str]) -> int:
    """Measures a start, and a restart after a kill, and writes the JSON."""
    parser = benchmark_parser(__doc__, "restart.json")
    parser.add_argument("--config", required=True, help="YAML of train.py, or an example")
    options, further = parser.parse_known_args(argv)
    drawn = make_workload("wan-480p", SAMPLES)
    short = drawn.seq_len <= LONGEST
    with tempfile.TemporaryDirectory() as place:
        model = read_config(["--config", options.config, *further], "restart.py").model
        samples = Samples(drawn.shape[short], drawn.seq_len[short])
        write_random_store(Path(place) / "data", samples, model)
        folder, output = Path(place) / "run", Path(place) / "output.txt"
        metrics = folder / "metrics.jsonl"
        words = ["--config", options.config, "--data.folder", f"{place}/data", *further]
        words += ["--planning.m_mem", str(LONGEST)]
        words += ["--run.folder", str(folder), "--checkpoint.every", str(EVERY)]
        words += ["--run.compilation_cache", str(Path(place) / "compiled")]

        def losses(inode: int | None = None) -> dict[int, float]:
            """The losses of the steps of a start, which replaces the file of the one before."""
            if not metrics.exists() or metrics.stat().st_ino == inode:
                return {}
            return {row["step"]: row["loss"] for row in read_metrics(metrics) if "loss" in row}

        def start() -> subprocess.Popen[str]:
            command = [sys.executable, str(ROOT / "train.py"), *words]
            with output.open("a") as said:
                return subprocess.Popen(command, stdout=said, stderr=said, text=True)

        def wait(process: subprocess.Popen[str], holds: Callable[[], bool]) -> float:
            """When it first held; InputError if the run ends before."""
            while not holds():
                if process.poll() is not None:
                    raise InputError(f"the run ended: {output.read_text().strip()[-300:]}")
                time.sleep(_INTERVAL)
            return time.monotonic()

        begin = time.monotonic()
        process = start()
        try:
            first = wait(process, lambda: bool(losses())) - begin
            checkpoint = folder / "checkpoints" / str(EVERY)
            wait(process, lambda: checkpoint.exists() and max(losses()) >= EVERY + LOST)
            process.kill()
            killed = time.monotonic()
            process.wait()
            before, inode = losses(), metrics.stat().st_ino
            process = start()
            step = wait(process, lambda: max(losses(inode), default=0) > EVERY) - killed
            new = wait(process, lambda: max(losses(inode)) > max(before)) - killed
            after = losses(inode)
        finally:
            process.kill()
            process.wait()
    again = [number for number in before if number > EVERY and number in after]
    found = {
        "first_start_to_first_step_seconds": first,
        "kill_to_first_step_seconds": step,
        "kill_to_first_new_step_seconds": new,
        "steps_repeated": len(again),
        "losses_equal": sum(before[number] == after[number] for number in again),
    }
    record = Record(options.out, ("jax", "jaxlib", "orbax-checkpoint"), case=found)
    record.write()
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
