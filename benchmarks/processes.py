"""Measures runs of several processes: their rate, and what a lost process or a slow GPU costs.

    python benchmarks/processes.py --config benchmarks/epoch.yaml --devices 2

Each case trains the same data from the same start; later cases find compiled programs on disk.

- one: all devices in one process.
- several: a process for each device.
- hosts: the same, where JAX takes each process for a host and NCCL has sockets alone.
- link: how fast parameters and gradients travel between these hosts, of both settings, while
  nothing computes. With the step of `one` it predicts the rates of `hosts` and `overlapped`.
- overlapped: the same, with the settings of docs/many-gpus.md for hosts connected by Ethernet.
- killed: the last process is killed some steps after the first checkpoint. The others end, and the
  same commands start all again, which must repeat the losses.
- slowed: one process, and a program that computes beside it on the last GPU.

Further flags are those of train.py.
"""

import itertools
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.bench.random_data import write_random_store
from alload_jax.config import read_config
from alload_jax.errors import InputError, run_command
from alload_jax.models.families import parameter_count
from alload_jax.planning.samples import Samples
from alload_jax.planning.workloads import make_workload
from alload_jax.training.run_files import read_metrics

TRAIN = str(Path(__file__).parents[1] / "train.py")
SAMPLES, EPOCHS = 300, 5
"""Of the data; of a run while a GPU is slowed, whose rates are given."""
EVERY, LOST = 10, 8
"""Steps until the checkpoint, and after it until a process is killed."""
LOST_AFTER = 5
"""Seconds of `cluster.lost_after`."""
_HOST = "JAX_PARTITION_INDEX"  # of a process, its number
HOSTS = dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", _HOST), "1")
OVERLAPPED = HOSTS | dict.fromkeys(("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"), "4")
OVERLAPPED |= {
    "XLA_FLAGS": "--xla_gpu_enable_pipelined_all_reduce=true "
    "--xla_gpu_enable_pipelined_all_gather=true "
    "--xla_gpu_enable_analytical_sol_latency_estimator=true "
    "--xla_gpu_analytical_latency_estimator_options=nic_speed_gbps=4,gpus_per_node=1,"
    "nccl_op_launch_us=20,chunk_prep_us=1,rtt_us=100,chunk_size_bytes=4194304",
}
_INTERVAL, _BUSY, _COMPUTE, _LINK = 0.01, 5e-4, "--compute", "--link"
_PIECE = 2**23  # elements of an array that travels


class Run:
    """A run of a program whose processes have equally many devices."""

    def __init__(self, place: Path, words: list[str], devices: int, processes: int):
        """Names its files; devices and processes are counts."""
        self.folder, self._output = place, place.with_suffix(".txt")
        self._metrics = place / "metrics.jsonl"
        self._words = [sys.executable, *words, "--run.folder", str(place)]
        self._each, self._number = devices // processes, processes
        self.processes: list[subprocess.Popen[str]] = []
        self._old: int | None = None

    def start(self, environment: Mapping[str, str] = os.environ) -> float:
        """Starts its processes, again or for the first time; returns when."""
        began, words = time.monotonic(), self._words
        self._old = self._metrics.stat().st_ino if self._metrics.exists() else None
        if self._number > 1:
            with socket.create_server(("localhost", 0)) as free:
                address = f"localhost:{free.getsockname()[1]}"
            words = [*words, "--cluster.coordinator", address, "--cluster.lost_after"]
            words += [str(LOST_AFTER), "--cluster.processes", str(self._number)]
        with self._output.open("a") as said:
            for number in range(self._number):
                seen = range(number * self._each, (number + 1) * self._each)
                own = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, seen))}
                own |= {_HOST: str(number)} if _HOST in environment else {}
                flags = environment.get("XLA_FLAGS", "")
                own["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={self._each}"
                numbered = ["--cluster.process", str(number)] if self._number > 1 else []
                command, environ = [*words, *numbered], {**environment, **own}
                started = subprocess.Popen(
                    command, stdout=said, stderr=said, env=environ, text=True
                )
                self.processes.append(started)
        return began

    def rows(self) -> dict[int, dict[str, Any]]:
        """By number, the steps since the last start, which replaces the file of the one before."""
        if not self._metrics.exists() or self._metrics.stat().st_ino == self._old:
            return {}
        return {row["step"]: row for row in read_metrics(self._metrics) if "loss" in row}

    def wait(self, holds: Callable[[], bool]) -> float:
        """When it first held; InputError if a process fails or ends before."""
        while not holds():
            if any(process.poll() is not None for process in self.processes):
                self._fail()
            time.sleep(_INTERVAL)
        return time.monotonic()

    def _fail(self) -> NoReturn:
        raise InputError(f"the run ended: {self._output.read_text().strip()[-600:]}")

    def end(self, well: bool = False) -> float:
        """When all its processes have ended; InputError if all must end `well` and one failed."""
        statuses = [process.wait() for process in self.processes]
        self.processes = []
        if well and any(statuses):
            self._fail()
        return time.monotonic()

    def said(self, what: str) -> list[str]:
        """The lines that its processes have printed of something."""
        return [line for line in self._output.read_text().splitlines() if what in line]


def rate(rows: Iterable[dict[str, Any]]) -> float:
    """Tokens per second of some steps."""
    kept = list(rows)
    return sum(row["tokens"] for row in kept) / sum(row["step_seconds"] for row in kept)


def steady(run: Run, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Trains a run to its end: seconds to its first step, losses, the rate of its second half."""
    first = -run.start(environment) + run.wait(lambda: bool(run.rows()))
    run.end(well=True)
    rows = list(run.rows().values())
    half = rows[len(rows) // 2 :]
    mean = sum(row["step_seconds"] for row in half) / len(half)
    found = {"first_step_seconds": first, "rate": rate(half), "mean_step_seconds": mean}
    return found | {name: [row[name] for row in rows] for name in ("loss", "step_seconds")}


def killed(run: Run) -> dict[str, Any]:
    """Kills the last process of a run, and starts all again."""
    first = -run.start() + run.wait(lambda: bool(run.rows()))
    checkpoint = run.folder / "checkpoints" / str(EVERY)
    run.wait(lambda: checkpoint.exists() and max(run.rows()) >= EVERY + LOST)
    run.processes[-1].kill()
    lost = time.monotonic()
    ended, before = run.end() - lost, run.rows()
    run.start()
    step = run.wait(lambda: max(run.rows(), default=0) > EVERY) - lost
    new = run.wait(lambda: max(run.rows()) > max(before)) - lost
    after = run.rows()
    again = [number for number in before if number > EVERY and number in after]
    return {
        "first_step_seconds": first,
        "kill_to_end_of_others_seconds": ended,
        "said": run.said("was lost"),
        "kill_to_first_step_seconds": step,
        "kill_to_first_new_step_seconds": new,
        "steps_repeated": len(again),
        "losses_equal": sum(before[n]["loss"] == after[n]["loss"] for n in again),
    }


def slowed(run: Run, gpu: int, share: float) -> dict[str, Any]:
    """Trains a run while another program takes a share of a GPU's time."""
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    command = [sys.executable, __file__, _COMPUTE, str(share)]
    with subprocess.Popen(command, env=environ) as busy:
        try:
            found = steady(run)
            if busy.poll() is not None:
                raise InputError("the program beside the run ended, so that it was not slowed")
        finally:
            busy.kill()
    rates = [rate(rows) for _, rows in itertools.groupby(run.rows().values(), itemgetter("epoch"))]
    return found | {"busy": share, "rate_of_epochs": rates, "said": run.said("longer")}


def compute(argv: list[str]) -> None:
    """Computes for a share of the time, half a millisecond at once, until it is killed."""
    share, x = float(argv[0]), jnp.ones((4096, 4096), jnp.bfloat16)
    work = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, y: (y @ x) / 4096, x))

    def seconds(rounds: int) -> float:
        began = time.perf_counter()
        work(x, rounds).block_until_ready()
        return time.perf_counter() - began

    alone = min([seconds(200) for _ in range(4)]) / 200  # the first one compiles
    rounds = max(1, round(_BUSY / alone))
    while True:
        seconds(rounds)
        time.sleep(rounds * alone * (1 / share - 1))


def link(run: Run) -> dict[str, Any]:
    """Seconds in which a process receives a byte, by case and by what travels."""
    found = {}
    for case, environment in (("hosts", HOSTS), ("overlapped", OVERLAPPED)):
        run.start(os.environ | environment)
        run.end(well=True)
        found[case] = json.loads(run.said('"gradients"')[-1])
    return found


def travel(argv: list[str]) -> None:
    """Prints what `link` returns of a case, as JSON; argv is that of a process of train.py."""
    config = read_config(argv, __file__)
    own = config.cluster
    jax.distributed.initialize(own.coordinator, own.processes, own.process)
    sizes = [_PIECE] * math.ceil(parameter_count(config.model) / _PIECE)
    mesh, count = Mesh(np.array(jax.devices()), "i"), jax.device_count()
    split, whole = PartitionSpec("i"), PartitionSpec()

    def seconds(dtype: Any, given: Any, taken: Any, move: Any) -> float:
        specs = {"in_specs": given, "out_specs": taken, "check_vma": False}
        each = partial(jax.tree.map, lambda x: move(x, "i", tiled=True))
        work = jax.jit(jax.shard_map(each, mesh=mesh, **specs))
        placed = NamedSharding(mesh, given)
        arrays = jax.jit(lambda: [jnp.ones(n, dtype) for n in sizes], out_shardings=placed)()
        times = []
        for _ in range(8):  # the first one compiles
            began = time.perf_counter()
            jax.block_until_ready(work(arrays))
            times.append(time.perf_counter() - began)
        received = sum(x.nbytes for x in arrays) * (count - 1) / count
        return sorted(times)[len(times) // 2] / received

    parameters = seconds(jnp.float32, split, whole, jax.lax.all_gather)
    gradients = seconds(jnp.bfloat16, whole, split, jax.lax.psum_scatter)
    if own.process == 0:
        print(json.dumps({"parameters": parameters, "gradients": gradients}), flush=True)


def predicted(found: Mapping[str, Any], model: Any, hosts: int, gpus: int = 1) -> dict[str, Any]:
    """Rates of `hosts` and `overlapped` by the step of `one` and the `link`.

    A parameter's gradient (2 bytes) goes to the host that updates it, and 4 bytes come back: its
    float32 value, or for the forward and the backward pass its bfloat16 one. In `overlapped` the
    layers' traffic is hidden behind computation but for the first gather and the last gradient.
    The GPUs of a host share its traffic, each with a link of its own; latency is left out.
    """
    one, share = found["one"], (hosts - 1) / hosts / gpus
    whole = parameter_count(model)
    layer = parameter_count(replace(model, num_layers=model.num_layers + 1)) - whole
    rates = {}
    for case in ("hosts", "overlapped"):
        each = found["link"][case]
        gradients, values = share * 2 * each["gradients"], share * 4 * each["parameters"]
        exposed = whole * (gradients + values)
        if case == "overlapped":
            layers = model.num_layers * layer * (gradients + values)
            exposed += layer * (gradients + values / 2) - min(layers, one["mean_step_seconds"])
        rates[case] = one["rate"] / (1 + exposed / one["mean_step_seconds"])
    return {"parameters": whole, "of_a_layer": layer, "rates": rates}


def main(argv: list[str]) -> int:
    """Measures the cases and writes the JSON after each."""
    if beside := {_COMPUTE: compute, _LINK: travel}.get(argv[0] if argv else ""):
        beside(argv[1:])
        return 0
    parser, cases = benchmark_parser(__doc__, "processes.json"), list(CASES)
    parser.add_argument("--config", required=True, help="YAML of train.py, or an example")
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--busy", type=float, default=0.2, help="share of a slowed GPU")
    options, further = parser.parse_known_args(argv)
    record = Record(options.out, ("jax", "jaxlib", "flax", "orbax-checkpoint"))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        words = ["--config", options.config, "--data.folder", f"{place}/data", *further]
        words += ["--planning.m_mem", str(options.tokens)]
        words += ["--run.compilation_cache", f"{place}/compiled"]
        drawn = make_workload("wan-480p", SAMPLES)
        short = drawn.seq_len <= options.tokens
        samples = Samples(drawn.shape[short], drawn.seq_len[short])
        config = read_config(words, "processes.py")
        write_random_store(place / "data", samples, config.model)
        found: dict[str, Any] = {}
        for case in options.cases:
            alone, given, measure = CASES[case]
            chosen = [word.format(devices=options.devices) for word in given]
            program = [__file__, _LINK] if case == "link" else [TRAIN]
            command, processes = [*program, *words, *chosen], 1 if alone else options.devices
            run = Run(place / case, command, options.devices, processes)
            try:
                found[case] = measure(run, options)
            except InputError as error:
                found[case] = {"error": str(error)}
            finally:
                for process in run.processes:
                    process.kill()
                run.end()
            record.add({"case": case} | found[case])
            print(case, found[case], flush=True)
        if {"one", "link"} <= {case for case in found if "error" not in found[case]}:
            record.add({"case": "predicted"} | predicted(found, config.model, options.devices))
    return 0


STEPS, FSDP = ("--run.steps", "24", "--checkpoint.every", "null"), ("--mesh.fsdp", "{devices}")
SAVED = ("--run.steps", str(4 * EVERY), "--checkpoint.every", str(EVERY))
WINDOWS = ("--run.steps", "null", "--run.epochs", str(EPOCHS), "--planning.recalibrate", "window")
CASES: dict[str, tuple[bool, tuple[str, ...], Callable[[Run, Any], dict[str, Any]]]] = {
    "one": (True, STEPS, lambda run, _: steady(run)),
    "several": (False, STEPS, lambda run, _: steady(run)),
    "hosts": (False, STEPS, lambda run, _: steady(run, os.environ | HOSTS)),
    "link": (False, (), lambda run, _: link(run)),
    "overlapped": (False, (*STEPS, *FSDP), lambda run, _: steady(run, os.environ | OVERLAPPED)),
    "killed": (False, SAVED, lambda run, _: killed(run)),
    "slowed": (True, (*STEPS, *WINDOWS), lambda run, o: slowed(run, o.devices - 1, o.busy)),
}
"""Whether in one process, further flags of train.py, and what is measured."""


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
