"""`alload bench epoch`: whole runs of `train.py` on all GPUs of this host, one after the other."""

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import yaml
from rich.table import Table

from alload_jax.bench.harness import Record, gigabytes, measured, table_of
from alload_jax.commands.flags import ABOVE_0, COUNT, require_named, require_place
from alload_jax.config_parser import read_yaml
from alload_jax.errors import InputError
from alload_jax.files import Json
from alload_jax.planning.samples import ASPECT_RATIOS, Geometry, Samples, read_samples
from alload_jax.planning.workloads import make_workload, names

if TYPE_CHECKING:
    from alload_jax.models.common.config import ModelConfig

HELP = "Train an epoch, or for some seconds, with each of several configs on one data folder."

_COMMAND = "alload bench epoch"
_TEXT_TOKENS = 8
"""Of each stored text; training pads it to the model's length."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add("--config", required=True, help="YAML of `train.py` that all cases share, or an example")
    add("--cases", required=True, type=Path, help="YAML: by name, what a case adds to the config")
    add("--only", nargs="+", metavar="CASE", help="cases to measure (default: all)")
    add("--data", required=True, type=Path, help="data folder; written first if there is none")
    add("--workload", help="sizes of the samples of a data folder to write: a manifest, or "
        f"{', '.join(names())}")  # fmt: skip
    add("--samples", type=COUNT, help="number of these samples (default 4000)")
    add("--one-aspect", action="store_true", help="only 16:9 samples: fewer programs")
    add("--longest", type=COUNT, help="maximum tokens of these samples; longer ones are left out")
    add("--seconds", type=ABOVE_0, default=200, help="time of a case after its first steps, if its "
        "epoch takes longer (default 200)")  # fmt: skip
    add("--repeats", type=COUNT, default=1, help="how often all cases are run in turn (default 1)")
    add("--out", default="epoch.json", help="JSON of the results, written after each case")
    add("--picture", type=Path, help="PNG of the tokens/s of the cases")


def run(options: argparse.Namespace) -> int:
    """Measures each case in a process of its own, prints a table and writes JSON."""
    require_place(_COMMAND, "--out", Path(options.out))
    if options.picture:
        require_named(_COMMAND, "--picture", options.picture)
    cases = _cases(options.cases, options.only)
    from alload_jax.config import read_config  # imports JAX

    with TemporaryDirectory() as folder:
        commands: dict[str, list[str]] = {}
        for name, given in cases.items():
            commands[name] = ["--config", options.config]
            if given:
                file = Path(folder) / f"{name}.yaml"
                file.write_text(yaml.safe_dump(given))
                commands[name] += ["--config", str(file)]
            commands[name] += ["--data.folder", str(options.data)]
            config = read_config(commands[name], _COMMAND)
        _require_data(options, config.model)
        record = Record(options.out, ["jax", "jaxlib", "flax"], added=cases)

        def results() -> Iterator[Json]:
            for _ in range(options.repeats):
                for name, argv in commands.items():
                    place = Path(folder) / "run"
                    given = {"argv": argv, "folder": str(place), "seconds": options.seconds}
                    try:
                        found = measured("alload_jax.run.epoch", given)
                    except InputError as error:  # such as a policy that does not fit the data
                        found = {"error": str(error)}
                    yield {"case": name} | found
                    shutil.rmtree(place, ignore_errors=True)

        status = record.measure(results(), "case", outcome, table)
    if options.picture and status == 0:
        from alload_jax.bench.pictures import draw_epoch

        draw_epoch(options.picture, record.content)
        print(f"written: {options.picture}")
    return status


def _cases(file: Path, only: list[str] | None) -> dict[str, Json]:
    """What the cases add to the config, by name.

    Raises:
      InputError: the file cannot be read, or a case is unknown.
    """
    cases = read_yaml(str(file))
    for name in only or ():
        if name not in cases:
            raise InputError(f"{_COMMAND}: --only {name}: {file} has only {', '.join(cases)}")
    for name, given in cases.items():
        if not isinstance(given, dict) or Path(name).name != name:
            raise InputError(f"{file}: {name}: give sections of a config under a plain name")
        for section in given.keys() & {"run", "data", "sampling", "validation", "callbacks"}:
            raise InputError(f"{file}: {name}: {section} is alike in all cases; leave it out")
    return {name: cases[name] for name in only or cases}


def _require_data(options: argparse.Namespace, model: "ModelConfig") -> None:
    """Writes the data folder if there is none.

    Raises:
      InputError: there is none, and --workload is not given.
    """
    if options.data.exists():
        return
    if options.workload is None:
        raise InputError(f"{_COMMAND}: --data {options.data}: no such folder; give --workload")
    from alload_jax.bench.random_data import write_random_store  # imports JAX

    if options.workload in names():
        ratios = {(16, 9): 1.0} if options.one_aspect else ASPECT_RATIOS
        samples = make_workload(options.workload, options.samples or 4000, aspect_ratios=ratios)
    elif options.samples or options.one_aspect:
        raise InputError(f"{_COMMAND}: --samples and --one-aspect need a named workload")
    else:
        samples = read_samples(options.workload, Geometry())
        if not samples.shape.all():
            raise InputError(
                f"{_COMMAND}: --workload {options.workload}: has no frames, height and width; give "
                "a manifest with them"
            )
    if options.longest:
        kept = samples.seq_len <= options.longest
        if not kept.any():
            least = samples.seq_len.min()
            raise InputError(
                f"{_COMMAND}: --longest {options.longest}: the shortest sample has {least} tokens"
            )
        weight = None if samples.weight is None else samples.weight[kept]
        samples = Samples(samples.shape[kept], samples.seq_len[kept], weight)
    print(f"{options.data}: writing {len(samples):,} samples", flush=True)
    write_random_store(options.data, samples, model, _TEXT_TOKENS)


def outcome(case: Json) -> str:
    """A case in words."""
    return f"{case['tokens_per_second']:,.0f} tokens/s"


def table(content: Json) -> Table:
    """A line for each case of the JSON."""

    def share(name: str, case: Json) -> str:
        return f"{case[name]:.1%}" if name in case else "-"

    first: Json = next((case for case in content["cases"] if "devices" in case), {})
    return table_of(
        f"{first.get('devices', 0)} devices",
        {
            "case": lambda case: case["case"],
            "tokens/s": lambda case: f"{case['tokens_per_second']:,.0f}",
            "samples/s": lambda case: f"{case['samples_per_second']:,.2f}",
            "spread": lambda case: share("spread", case),
            "idle": lambda case: share("idle", case),
            "padding": lambda case: share("padding", case),
            "programs": lambda case: f"{case['programs']}",
            "to the first step": lambda case: f"{case['first_step_seconds']:.0f} s",
            "most memory": lambda case: gigabytes(case["peak_bytes"] and max(case["peak_bytes"])),
            "steps": lambda case: (
                f"{case['steps']:,}" + ("" if case["whole_epoch"] else " of more")
            ),
            "loss": lambda case: f"{case['loss']:.4f}",
        },
        content["cases"],
    )
