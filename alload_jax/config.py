"""A run's whole config: every part stands beside the code that it configures."""

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import jax
import yaml
from jsonargparse import ArgumentParser

from alload_jax.data.datasets.digits import DigitsConfig
from alload_jax.data.source import LoaderConfig
from alload_jax.distributed.initialize import ClusterConfig
from alload_jax.errors import InputError
from alload_jax.models.wan.config import WanConfig
from alload_jax.models.wan.transformer import packing_unsupported_reason
from alload_jax.objectives.flow_matching import DiffusionConfig
from alload_jax.planning.policies.registry import AUTO
from alload_jax.planning.settings import PlanningConfig
from alload_jax.sampling.samples import SamplingConfig
from alload_jax.sharding.mesh import MeshConfig
from alload_jax.training.checkpoint import CheckpointConfig
from alload_jax.training.optimizer import OptimizerConfig
from alload_jax.training.telemetry import write_whole


@dataclass(frozen=True)
class RunConfig:
    """The run itself.

    Attributes:
      folder: for everything that the run writes. If it holds a checkpoint, the run goes on there.
      steps: optimizer steps.
      seed: of weights, noise and the order of samples.
      initial_weights: to start from: a `transformer/` folder of diffusers, a folder of Wan's own
        repository, or one safetensors file of either; null draws them.
      compilation_cache: folder in which compiled programs outlive the run; null for none.
      status_when_stopped: exit status after a signal, once all is saved; one that is not 0 makes a
        scheduler start the run again.
    """

    folder: str
    steps: int = 1000
    seed: int = 0
    initial_weights: str | None = None
    compilation_cache: str | None = None
    status_when_stopped: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.status_when_stopped < 126:
            raise InputError(
                f"run.status_when_stopped is {self.status_when_stopped}; it must be 0 to 125"
            )
        if self.steps < 1:
            raise InputError(f"run.steps is {self.steps}; it must be at least 1")
        if self.seed < 0:
            raise InputError(f"run.seed is {self.seed}; it must be 0 or more")


@dataclass(frozen=True)
class DataConfig:
    """What the run learns from.

    Attributes:
      folder: a data folder: manifest.parquet and its shards.
      digits: makes the folder from moving digits if it is not there.
      loader: how samples are read.
    """

    folder: str
    digits: DigitsConfig | None = None
    loader: LoaderConfig = field(default_factory=LoaderConfig)


@dataclass(frozen=True)
class Config:
    """A training run.

    Attributes:
      run: the run itself.
      data: what it learns from.
      planning: what a micro-batch may hold.
      model: the transformer.
      diffusion: how samples are noised.
      optimizer: AdamW and EMA.
      mesh: devices.
      cluster: processes, if there are several.
      checkpoint: when to save.
      sampling: what is drawn, and when.
    """

    run: RunConfig
    data: DataConfig
    planning: PlanningConfig
    model: WanConfig = field(default_factory=WanConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        shares = self.mesh.context * self.mesh.tensor
        if self.model.num_heads % shares:
            raise InputError(
                f"mesh.context·mesh.tensor is {shares}, which does not divide model.num_heads "
                f"{self.model.num_heads}; choose a divisor"
            )
        if self.planning.context not in (1, self.mesh.context):
            raise InputError(
                f"planning.context is {self.planning.context}, but mesh.context is "
                f"{self.mesh.context}; give mesh.context alone, which decides for both"
            )


def read_config(argv: Sequence[str], prog: str = "train.py") -> Config:
    """The config that a command line asks for: `--config FILE` and `--section.key value`.

    Raises:
      InputError: something in it is wrong.
    """
    _check_yaml(_config_files(argv))
    description = "Train a video diffusion transformer."
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    parser.command_line = argv
    parser.add_argument("--config", action="config", help="a YAML file; later flags override it")
    parser.add_class_arguments(Config)
    arguments = parser.parse_args(list(argv))
    try:
        parsed = parser.instantiate(arguments)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(_reason_in_union(str(error))) from error
    return Config(**{part.name: parsed[part.name] for part in dataclasses.fields(Config)})


def with_policy(config: Config) -> Config:
    """With a policy in place of planning.policy auto, by this process's devices.

    A policy that can split samples splits them over the mesh's context groups.
    """
    planning = config.planning
    if planning.policy == AUTO:
        planning = planning.resolved(packs=not packing_unsupported_reason(config.model))
    if planning.traits.splits_samples:
        planning = dataclasses.replace(planning, context=config.mesh.context)
    return dataclasses.replace(config, planning=planning)


def values_of(config: Config) -> dict[str, Any]:
    """Every value by its dotted key, as JSON, but for who the processes are."""

    def leaves(name: str, content: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(content, dict):
            for key, part in content.items():
                yield from leaves(f"{name}.{key}" if name else key, part)
        else:
            yield name, content

    return dict(leaves("", _everywhere(config)))


def _everywhere(config: Config) -> dict[str, Any]:
    """The config as JSON values, without what tells processes from each other."""
    cluster = dataclasses.replace(config.cluster, coordinator=None, processes=None, process=None)
    return _plain(dataclasses.asdict(dataclasses.replace(config, cluster=cluster)))


def write_config(config: Config, path: Path) -> None:
    """Writes the config as YAML that `--config` reads, but for who the processes are.

    The next start may have others.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, yaml.safe_dump(_everywhere(config), sort_keys=False))


def use_compilation_cache(run: RunConfig) -> None:
    """Lets JAX keep compiled programs on disk, if the run asks for it."""
    if run.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(run.compilation_cache).absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def known_keys(kind: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key that a config may hold."""
    for name, annotation in typing.get_type_hints(kind).items():
        yield prefix + name
        for part in (annotation, *typing.get_args(annotation)):
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                yield from known_keys(part, f"{prefix}{name}.")


class _Parser(ArgumentParser):
    """Turns jsonargparse's messages into InputErrors of one line, with the nearest key."""

    command_line: Sequence[str] = ()

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        cause: BaseException | None = ex
        while cause is not None:
            if isinstance(cause, InputError):
                raise cause
            cause = cause.__cause__ or cause.__context__
        raise InputError(_one_line(message, self.command_line)) from ex


def _check_yaml(files: Sequence[str]) -> None:
    """Names a file that is no YAML, and the line, which jsonargparse does not."""
    for file in files:
        try:
            yaml.safe_load(Path(file).read_text())
        except OSError:
            continue
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            mark = getattr(error, "problem_mark", None)
            line = f": line {mark.line + 1}" if mark else ""
            reason = " ".join((getattr(error, "problem", None) or str(error)).split())
            raise InputError(f"{file}{line}: is no YAML ({reason}); mend it") from error


def _one_line(message: str, argv: Sequence[str]) -> str:
    for pattern, key in (
        (r"Option '([\w.]+)' is not accepted", "{0}"),
        (r"Group '([\w.]+)' does not accept option '([\w.]+)'", "{0}.{1}"),
        (r"nrecognized arguments: --([\w.]+)", "{0}"),
    ):
        if found := re.search(pattern, message):
            return _unknown(key.format(*found.groups()), argv)
    text = re.sub(r"\s+", " ", message).strip()
    if text.startswith("Unexpected config"):
        files = " or ".join(_config_files(argv))
        return f"{files}: is empty or holds no sections; start from configs/digits.yaml"
    text = re.sub(r"Expected a typing\.Literal(\[[^\]]*\])", r"expected one of \1", text)
    text = re.sub(r"Expected a <class '(\w+)'>", r"expected \1", text)
    text = text.replace("Parser key", "key")
    if "required" in text:
        return f"{text}; give --config FILE, such as configs/digits.yaml"
    place = " or ".join(_config_files(argv))
    typed = any(part.startswith("--") and part[2:].split("=")[0] in text for part in argv)
    return text if typed or not place else f"{place}: {text}; `--help` explains every key"


def _reason_in_union(message: str) -> str:
    """What our own check said of a part that may also be null: jsonargparse lists all reasons."""
    reasons = re.findall(r"^  - (.*)$", message, re.MULTILINE)
    return next((r for r in reasons if not r.startswith("Expected a")), message.splitlines()[0])


def _unknown(key: str, argv: Sequence[str]) -> str:
    typed = any(part.split("=")[0] == f"--{key}" for part in argv)
    place = "command line" if typed else " or ".join(_config_files(argv))
    if not (near := difflib.get_close_matches(key, list(known_keys()), n=1, cutoff=0.5)):
        return f"{place}: key {key} is unknown; `--help` lists all keys"
    return f"{place}: key {key} is unknown; did you mean {near[0]}?"


def _config_files(argv: Sequence[str]) -> list[str]:
    after = [file for flag, file in pairwise(argv) if flag == "--config"]
    return after + [part.split("=", 1)[1] for part in argv if part.startswith("--config=")]


def _plain(value: Any) -> Any:
    """Tuples to lists, which YAML has."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
