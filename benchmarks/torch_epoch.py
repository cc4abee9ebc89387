"""An epoch of diffusers' Wan in PyTorch, a process for each GPU, beside `alload bench epoch`.

    python benchmarks/torch_epoch.py --config run.yaml --data data/mine --out epoch.json

adds a case to the JSON of `alload bench epoch`, with the same config, data and figures. All ranks
have batches of one shape, of at most M_mem tokens. Each shape is tried before the first step, as
our runs compile before it. Needs the extra `parity`.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing import ProcessRaisedException, spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch_step import BACKENDS, PACKAGES, Settings, Trainer, Weights, build, compiled

from alload_jax.bench.harness import Record, benchmark_parser, provenance, typed
from alload_jax.commands.bench_epoch import outcome, table
from alload_jax.commands.flags import COUNT
from alload_jax.data.manifest import read_manifest
from alload_jax.data.record import LATENTS, TEXT
from alload_jax.data.store import StoreReader
from alload_jax.errors import InputError, run_command
from alload_jax.files import Json, read_json
from alload_jax.planning.cost import CostModel
from alload_jax.planning.metrics import step_metrics
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.bucketed import EqualTokens
from alload_jax.planning.policies.policy import RankTopology

COMMAND = "torch_epoch.py"
WARM_UP = 3
"""As in `alload_jax.run.epoch`."""


class OneShape(EqualTokens):
    """`equal_tokens` whose batches have one shape each: diffusers' model takes no others."""

    merges: ClassVar[bool] = False


class Batches(Dataset):
    """A rank's batch of each step of a plan; texts are padded to a shape [L, width]."""

    def __init__(self, rank: int, plan: Plan, folder: str, text: tuple[int, int], costs: CostModel):
        self.plan, self.text, self.rank, self.costs = plan, text, rank, costs
        self.reader = StoreReader(read_manifest(folder))

    def __len__(self) -> int:
        return self.plan.steps_per_epoch

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int, Json]:
        """Clips [B, C, F, H, W], texts [B, L, width], samples among them; figures of all ranks."""
        if index >= len(self):
            raise IndexError(index)
        step = self.plan.step(index)
        ours = step.micro_batches[self.rank]
        clips, texts = self.empty(ours.rows, ours.shape)
        for row, number in enumerate(ours.samples):
            sample = self.reader.read(number)
            clips[row] = torch.from_numpy(sample[LATENTS].astype(np.float32)).movedim(-1, 0)
            text = torch.from_numpy(sample[TEXT][: self.text[0]].astype(np.float32))
            texts[row, : len(text)] = text
        figures = step_metrics(step, self.plan, self.costs)._asdict()
        return clips, texts, len(ours.samples), figures

    def empty(self, rows: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Clips of a shape in pixels, and texts, of zeros."""
        *grid, channels = self.reader.manifest.latent_shape(shape)
        return torch.zeros(rows, channels, *grid), torch.zeros(rows, *self.text)


class ParallelTrainer(Trainer):
    """Trains on given batches, in the processes of the default group."""

    def __init__(self, settings: Settings, device: str):
        self.settings, self.device, self.given = settings, device, []
        self.model = build(settings, device)
        self.forward = compiled(self.model, settings)
        sharded = settings.precision == "sharded"
        if sharded:
            dtypes = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mp_policy=dtypes)
        self.weights = Weights(self.model, settings)
        if not sharded:  # by now the weights have their dtypes
            self.forward = DistributedDataParallel(self.model)
        torch.manual_seed(dist.get_rank())

    def put(self, clips: torch.Tensor, texts: torch.Tensor, rows: int) -> None:
        """What the next step trains on."""
        dtype = torch.float32 if self.settings.precision == "autocast" else torch.bfloat16
        self.clips, self.rows = clips.to(self.device, non_blocking=True), rows
        texts = texts.to(self.device, non_blocking=True)
        self.conditions = {"encoder_hidden_states": texts.to(dtype)}


def train(
    rank: int, settings: Settings, data: tuple[Any, ...], folder: str, begin: float, seconds: float
) -> None:
    """Trains an epoch, or for some seconds after `WARM_UP` steps; rank 0 writes the figures.

    Args:
      rank: of this process.
      settings: of the model and the step.
      data: arguments of `Batches`, but the rank.
      folder: where `metrics.jsonl` and `found.json` are written.
      begin: when the processes were started, as `time.time`.
      seconds: after which an epoch is not finished.
    """
    cuda, ranks = torch.cuda.is_available(), data[0].topology.ranks
    device, backend = ("cuda", "nccl") if cuda else ("cpu", "gloo")
    if cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)  # processes share the cores
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=ranks)
    hosts: Any = dist.new_group(backend="gloo")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    torch.manual_seed(0)
    batches, trainer = Batches(rank, *data), ParallelTrainer(settings, device)
    shapes = np.unique(np.column_stack(batches.plan.bucket_shapes()), axis=0)
    for count, _, *shape in shapes[np.argsort(-shapes[:, 0] * shapes[:, 1])].tolist():
        trainer.put(*batches.empty(count, tuple(shape)), count)
        trainer.loss_and_gradient()
        trainer.model.zero_grad(set_to_none=True)
    marks, rows = [_now(cuda)], []
    ready, ends = time.time() - begin, torch.full((1,), math.inf, dtype=torch.float64)
    loader = DataLoader(batches, batch_size=None, num_workers=2, pin_memory=cuda)
    for index, (clips, texts, own, figures) in enumerate(loader):
        trainer.put(clips, texts, own)
        rows.append(figures | {"loss": trainer.step() * len(clips)})
        marks.append(_now(cuda))
        if index == WARM_UP:
            ends[0] = time.monotonic() + seconds
        dist.broadcast(enough := (time.monotonic() > ends).int(), 0, group=hosts)
        if enough:
            break
    losses, peaks = torch.stack([row["loss"] for row in rows]), [None] * ranks
    dist.all_reduce(losses)
    dist.all_gather_object(peaks, torch.cuda.max_memory_allocated() if cuda else None)
    if rank == 0:
        for row, loss, (last, mark) in zip(
            rows, losses.tolist(), itertools.pairwise(marks), strict=True
        ):
            row["loss"], row["epoch"] = loss / row["samples"], 0
            row["step_seconds"] = last.elapsed_time(mark) / 1000 if cuda else mark - last
        Path(folder, "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        found = {"ready": ready, "programs": len(shapes), "peak_bytes": peaks if cuda else None}
        found["whole_epoch"] = len(rows) == len(batches)
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier(group=hosts)
    dist.destroy_process_group()


def _now(cuda: bool) -> Any:
    """An event of the GPU; without one, seconds."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def measure(options: argparse.Namespace) -> Json:
    """Trains in processes of their own: provenance and the figures of `alload bench epoch`.

    Raises:
      InputError: the model is not Wan's for text-to-video, or a sample is over M_mem.
    """
    from alload_jax.config import read_config  # imports JAX, which must not be where PyTorch trains
    from alload_jax.models.families import family_of
    from alload_jax.run.epoch import figures_of

    config = read_config(["--config", options.config, "--data.folder", options.data], COMMAND)
    model, manifest = config.model, read_manifest(options.data)
    fields = family_of(model).export_fields(model)
    if model.family != "wan" or model.given_channels or model.image:
        raise InputError(f"{COMMAND}: {options.config}: model is not Wan text-to-video; give one")
    settings = Settings(
        "wan",
        {name: value for name, value in fields.items() if name[0] != "_"},
        0,
        (0, 0, 0),
        **{name: getattr(options, name) for name in ("remat", "compile", "attention")},
        precision="sharded" if options.parallel == "fsdp" else options.precision,
        learning_rate=config.optimizer.learning_rate,
    )
    samples, topology = manifest.samples(model.patch_size), RankTopology(options.processes)
    costs = config.planning.costs()
    policy = OneShape.from_config(config.planning, costs)
    plan = Plan(samples, policy.fitted(samples, topology), topology, config.run.seed)
    assert model.text is not None  # it can be exported
    data = (
        plan,
        options.data,
        (model.text.length, model.text.dim),
        config.planning.predictor(costs),
    )
    recorded = provenance(PACKAGES) | {"devices": options.processes, "settings": vars(settings)}
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with TemporaryDirectory() as folder:
        given = (settings, data, folder, time.time(), options.seconds)
        try:
            spawn(train, given, options.processes)
        except ProcessRaisedException as error:
            if "OutOfMemoryError" not in str(error):
                raise
            return recorded | {"error": "out of memory"}
        found = read_json(Path(folder, "found.json"))
        return recorded | found | figures_of(Path(folder), found.pop("ready"))


def main(argv: list[str]) -> int:
    """Measures a case, adds it to the JSON, and prints the table of all that it has."""
    parser = benchmark_parser(__doc__, "epoch.json")
    add = parser.add_argument
    add("--config", required=True, help="YAML of train.py, as for `alload bench epoch`")
    add("--data", required=True, help="data folder")
    add("--parallel", choices=("ddp", "fsdp"), default="ddp")
    add("--precision", choices=("bf16_copy", "autocast"), default="bf16_copy", help="with ddp")
    add("--remat", choices=("full", "attention", "none"), default="attention")
    add("--attention", choices=(*BACKENDS, "default"), default="cudnn")
    add("--compile", choices=("blocks", "no"), default="blocks")
    add("--processes", type=COUNT, default=max(1, torch.cuda.device_count()))
    add("--seconds", type=float, default=200, help="time of the case after its first steps")
    options = parser.parse_args(argv)
    record = Record(options.out)
    record.content = read_json(options.out) or record.content
    name = ("PyTorch", options.parallel, options.precision * (options.parallel == "ddp"))
    case = {"case": " ".join(name).strip(), "command": typed()} | measure(options)
    return record.measure([case], "case", outcome, table) or int("error" in case)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
