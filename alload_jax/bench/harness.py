"""What all measurements share: their JSON, tables, models, and processes that measure.

The commands `alload bench` and `alload calibrate` and the programs in benchmarks/ use it. Nothing
here imports JAX: `--help` and `alload plan` need none.
"""

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import rich.box
from rich.console import Console
from rich.table import Table

from alload_jax.errors import InputError
from alload_jax.files import Json, replacing
from alload_jax.planning.architecture import architecture_named, model_names
from alload_jax.sharding.host_memory import with_defaults

# ---------------------------------------------------------------- files of results


class Record:
    """The JSON of a measurement, written after each result, so that a failure loses none.

    Attributes:
      path: of the file.
      content: the command line, where and with what it ran, and the results.
    """

    def __init__(self, path: str | Path, packages: Iterable[str] = (), **content: Any):
        """Takes what is known before the first result; notes `provenance` if packages are named."""
        self.path = Path(path)
        self.content: Json = {"command": typed()}
        self.content |= (provenance(packages) if packages else {}) | content

    def write(self) -> None:
        """Writes what is known so far."""
        with replacing(self.path) as unfinished:
            unfinished.write_text(json.dumps(self.content, indent=1) + "\n")

    def add(self, *results: Any, to: str = "cases") -> None:
        """Adds results to a list of the content, and writes it."""
        self.content.setdefault(to, []).extend(results)
        self.write()

    def measure(
        self,
        cases: Iterable[Json],
        name: str,
        outcome: Callable[[Json], str],
        table: Callable[[Json], Table],
    ) -> int:
        """Adds cases as they are measured, and prints their outcomes and then a table of all.

        Args:
          cases: the results; what failed has an `error`.
          name: the field of a case that names it.
          outcome: a case in words.
          table: of the content.

        Returns:
          The command's exit status: 1 if no case was measured.
        """
        for case in cases:
            self.add(case)
            console().print(f"{case[name]}: {case.get('error') or outcome(case)}")
        console().print(table(self.content))
        print(f"written: {self.path}")
        return 0 if any("seconds" in case for case in self.content["cases"]) else 1


def typed() -> str:
    """The command line as the user typed it."""
    program = Path(sys.argv[0])
    as_script = program.suffix == ".py" and not program.is_absolute()
    begins = ["python", str(program)] if as_script else [program.name]
    return shlex.join([*begins, *sys.argv[1:]])


def provenance(packages: Iterable[str]) -> Json:
    """Date, commit, GPU and driver (None without nvidia-smi), versions, and XLA_FLAGS if given.

    The commit is None outside a checkout, and ends in `+` where its files were changed.
    """
    gpus = _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    device, _, driver = gpus.splitlines()[0].rpartition(", ") if gpus else (None, None, None)
    versions = {"python": platform.python_version()} | {name: version_of(name) for name in packages}
    flags = os.environ.get("XLA_FLAGS")
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _said(
            "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"
        ),
        "device": device,
        "driver": driver,
        "versions": versions,
    } | ({"xla_flags": flags} if flags else {})


def version_of(package: str) -> str | None:
    """The version; None if no package of this name is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _said(*command: str) -> str | None:
    """What a program prints; None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def benchmark_parser(document: str | None, out: str | Path) -> argparse.ArgumentParser:
    """The parser of a program in benchmarks/: its docstring as help, and `--out` for its JSON."""
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(out), help="the JSON (%(default)s)")
    return parser


# ---------------------------------------------------------------- tables


def console() -> Console:
    """Prints tables as wide as they are: they are made to be copied, not to fit a terminal."""
    return Console(markup=False, highlight=False, soft_wrap=True, width=200)


def gigabytes(count: int | None) -> str:
    """Bytes as text in GB."""
    return "not known" if count is None else f"{count / 1e9:.1f} GB"


T = TypeVar("T")


def table_of(title: str, columns: Mapping[str, Callable[[T], str]], rows: Iterable[T]) -> Table:
    """A table that can be copied as Markdown: the first column are names, the others numbers.

    Args:
      title: of the table.
      columns: what each shows of a row.
      rows: what they are shown of; a case of a JSON that has an `error` shows that.
    """
    table = Table(title=title, box=rich.box.MARKDOWN)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left")
    first, *others = columns.values()
    for row in rows:
        error = row.get("error") if isinstance(row, dict) else None
        table.add_row(first(row), *([error] if error else [read(row) for read in others]))
    return table


# ---------------------------------------------------------------- models


_TINY = {"dim": 32, "num_heads": 2, "ffn_dim": 64, "num_layers": 2}
_TINY_MMDIT = {"family": "hunyuan_video", "refiner_layers": 1, "in_channels": 4}
_TINY_MMDIT |= {"patch_size": (1, 1, 1), "text": {"dim": 16, "length": 8}}

MODELS: dict[str, Json] = {
    name.removeprefix("wan2.1-"): architecture_named(name).fields() for name in model_names()
}
"""Fields of the configs of released models (HunyuanVideo 1.5's is image-to-video), as
`planning.architecture` knows them, and of tiny ones for tests."""
MODELS |= {"tiny": MODELS["1.3b"] | _TINY, "tiny-mmdit": _TINY_MMDIT | _TINY}

NAMES = "Wan 2.1's 1.3B or 14B, HunyuanVideo's 1.5 or 13B, or a tiny one for trying"


def model_fields(name: str, layers: int | None = None) -> Json:
    """Fields of the config of a model of `MODELS`, with `layers` layers if given."""
    if not layers:
        return MODELS[name]
    single = {"single_layers": 2 * layers} if "single_layers" in MODELS[name] else {}
    return MODELS[name] | {"num_layers": layers} | single


def training_fields(model: Json, remat: str = "attention", *, scan_layers: bool = True) -> Json:
    """`model_fields` for training: in bfloat16, and otherwise as given."""
    given = {"remat": remat, "scan_layers": scan_layers}
    return model | given | {"dtype": "bfloat16"}


# ---------------------------------------------------------------- processes


_HERE = "alload_jax.bench.harness"
_ERROR_LINE = re.compile(r"[\w.]*(Error|Exception): ")
_INPUT_ERROR = "alload_jax.errors.InputError: "
_MEMORY_SHARE = "0.95"
"""Of the device, for JAX: what it takes at start is not what is reported."""


def measured(
    program: str | Path, settings: Json, variables: Mapping[str, str] | None = None
) -> Json:
    """The last line that the measurement prints, or how it failed: the others go on.

    What is the user's fault is raised, as it would be without a process in between.

    Args:
      program: module whose `measure` runs, or the path of a script.
      settings: keywords of `measure`, or the script's argument as JSON.
      variables: of its environment, beside this process's own.

    Raises:
      InputError: the measurement did.
    """
    environment = os.environ | {
        "XLA_FLAGS": with_defaults(os.environ.get("XLA_FLAGS", "")),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": _MEMORY_SHARE,
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    environment |= variables or {}
    run = [str(program)] if isinstance(program, Path) else ["-m", _HERE, program]
    command = [sys.executable, *run, json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    for line in done.stderr.splitlines():
        if line.startswith(_INPUT_ERROR):
            raise InputError(line.removeprefix(_INPUT_ERROR))
    errors = [line for line in done.stderr.splitlines() if _ERROR_LINE.match(line)]
    reason = (errors or done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"error": f"ended with status {done.returncode}: {reason}", "settings": settings}


if __name__ == "__main__":
    measure = importlib.import_module(sys.argv[1]).measure
    print(json.dumps(measure(**json.loads(sys.argv[2]))))
