"""Trains adapters in a part of a GPU's memory, to see which clips fit smaller GPUs.

    python benchmarks/memory_measured.py --cases 0 1 2 3 --out memory_24gb_h200.json

Runs `python train.py` on the ready configs with random weights of the released sizes and random
latents. JAX may use 95 % of the memory of the GPU that a case stands for. The rest is for what
JAX's allocator does not hold: the CUDA context and libraries.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy

from alload_jax.bench.harness import Record, benchmark_parser
from alload_jax.config import read_config
from alload_jax.data.store import StoreWriter
from alload_jax.files import Json
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import family_of

ROOT = Path(__file__).parents[1]
SHARE = 0.95
"""Of a GPU's memory, what JAX may use."""
OFFLOAD = ("--model.remat", "offload")
FLOAT8 = ("--parameters.frozen_dtype", "float8", *OFFLOAD)
HOST = (*FLOAT8, "--parameters.frozen_memory", "host")
TEXT_TOKENS, SAMPLES, FILE_BYTES = 512, 2, 2_000_000_000


@dataclass(frozen=True)
class Case:
    """A run that must fit.

    Attributes:
      config: a file of configs/, without its suffix.
      flags: what it changes of the config.
      frames: pixels' frames of a clip.
      memory_gb: memory of the GPU in 10⁹ bytes.
      steps: optimizer steps; the first two are not timed.
      size: pixels' height and width.
    """

    config: str
    flags: tuple[str, ...]
    frames: int
    memory_gb: int
    steps: int = 3
    size: tuple[int, int] = (480, 832)

    @property
    def latents(self) -> tuple[int, int, int]:
        """Frames, height and width of the latents."""
        height, width = self.size
        return (self.frames - 1) // 4 + 1, height // 8, width // 8

    @property
    def clips(self) -> str:
        """Name of the folder of its data."""
        return "clips_{}_{}_{}".format(*self.latents)

    @property
    def tokens(self) -> int:
        """Tokens of a clip."""
        frames, height, width = self.latents
        return frames * height * width // 4


CASES = (
    Case("wan2_1_t2v_14b_lora", FLOAT8, 37, 24),
    Case("wan2_1_t2v_1_3b_lora", (), 221, 24, steps=2),
    Case("wan2_1_t2v_1_3b_lora", OFFLOAD, 401, 24, steps=1),
    Case("wan2_1_t2v_1_3b_lora", (), 81, 24),
    Case("wan2_1_t2v_14b_lora", (), 157, 80, steps=2),
    Case("wan2_1_t2v_14b_lora", (), 81, 80),
    Case("wan2_1_t2v_1_3b_8gpus", ("--mesh.data", "1", "--model.remat", "full"), 81, 80),
    Case("wan2_1_t2v_14b_lora", FLOAT8, 81, 140, steps=5),
    Case("wan2_1_t2v_14b_lora", HOST, 81, 24, steps=5),
    Case("wan2_1_t2v_14b_lora", HOST, 121, 80, steps=1, size=(720, 1280)),
)
"""The longest clips that `alload plan --memory` says fit, clips of 81 frames, and blocks in the
host's memory."""


def main() -> int:
    """Writes weights and data, runs the cases and writes the results after each."""
    parser = benchmark_parser(__doc__, "memory.json")
    parser.add_argument("--scratch", help="where weights are written, such as /dev/shm")
    parser.add_argument("--cases", type=int, nargs="+", help="numbers of cases, from 0")
    options = parser.parse_args()
    cases = CASES if options.cases is None else [CASES[number] for number in options.cases]
    jax.config.update("jax_platforms", "cpu")  # the GPU's memory is for the runs
    record = Record(options.out, ["jax", "jaxlib", "flax", "optax"], share_for_jax=SHARE)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch)
        for name in {case.config for case in cases}:
            config = read_config(["--config", str(ROOT / "configs" / f"{name}.yaml")])
            write_weights(folder / name, config.model)
        for case in cases:
            write_clips(folder / case.clips, case.latents)
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        total = float(found.stdout.split()[0]) * 2**20
        for number, case in enumerate(cases):
            record.add(run(case, folder, folder / f"run_{number}", total))
            print(json.dumps(record.content["cases"][-1]), flush=True)
    return 0


def write_weights(folder: Path, config: ModelConfig) -> None:
    """Writes a transformer folder of random bfloat16 weights in files of some 2 GB."""
    folder.mkdir()
    noise = 0.02 * np.random.default_rng(0).standard_normal(2**20, np.float32)
    tensors = family_of(config).tensors(config, "diffusers")
    most = max(int(np.prod(tensor.shape)) for tensor in tensors)
    values = np.resize(noise.astype(ml_dtypes.bfloat16), most)
    groups: list[list[Any]] = [[]]
    for tensor in tensors:
        if sum(2 * int(np.prod(each.shape)) for each in groups[-1]) > FILE_BYTES:
            groups.append([])
        groups[-1].append(tensor)
    for number, group in enumerate(groups):
        content = {
            tensor.key: values[: int(np.prod(tensor.shape))].reshape(tensor.shape)
            for tensor in group
        }
        safetensors.numpy.save_file(content, folder / f"weights_{number:03d}.safetensors")
    fields = family_of(config).export_fields(config)
    (folder / "config.json").write_text(json.dumps(fields))


def write_clips(folder: Path, latents: tuple[int, int, int]) -> None:
    """Writes a store of random clips with texts, if there is none."""
    if folder.exists():
        return
    rng = np.random.default_rng(0)
    with StoreWriter(folder, vae_stride=(4, 8, 8)) as writer:
        for _ in range(SAMPLES):
            text = rng.standard_normal((TEXT_TOKENS, 4096), np.float32)
            clip = rng.standard_normal((*latents, 16), np.float32)
            frames, height, width = latents
            writer.add(clip, text, (4 * frames - 3, 8 * height, 8 * width))


def run(case: Case, folder: Path, place: Path, total: float) -> Json:
    """What a run says of itself whose JAX may use a part of the GPU's memory."""
    share = SHARE * case.memory_gb * 1e9 / total
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.5f}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    values = {
        "run.folder": place,
        "run.steps": case.steps,
        "run.initial_weights": folder / case.config,
        "run.compilation_cache": "null",
        "data.folder": folder / case.clips,
        "planning.m_mem": case.tokens,
        # As `auto` chooses: packed rows on an H100, one clip a row on GPUs of 24 GB.
        "planning.policy": "auto" if case.memory_gb >= 80 else "equal_tokens",
    }
    flags = [part for key, value in values.items() for part in (f"--{key}", str(value))]
    command = [sys.executable, str(ROOT / "train.py")]
    command += ["--config", str(ROOT / "configs" / f"{case.config}.yaml"), *flags, *case.flags]
    to: Json = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, **to, env=environment, cwd=folder, check=False)
    lines = done.stdout.splitlines()
    content: Json = asdict(case) | {
        "tokens": case.tokens,
        "fits": done.returncode == 0,
        "said": [line for line in lines if "memory of a device" in line],
    }
    if done.returncode:
        return content | {"end": lines[-12:]}
    summary = json.loads((place / "summary.json").read_text())
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(place)
    return content | {
        "peak_bytes": summary.get("peak_memory_bytes"),
        "step_seconds": [row["step_seconds"] for row in rows[2:] if "loss" in row],
        "losses": [row["loss"] for row in rows if "loss" in row],
    }


if __name__ == "__main__":
    sys.exit(main())
