"""The config of a run; each part is defined beside the code that it configures.

Some parts are selected by name: the model by `model.family`, the objective by `objective.name`, the
data set by `data.dataset.name`, and each of `evaluators`, `callbacks` and `trackers` by its `name`.
The fields depend on the name, so `read_config` reads the names first.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from pathlib import Path

import jax
import yaml

from alload_jax.config_parser import Part, as_section, given_value, given_values, parse_config
from alload_jax.data.datasets import DATASETS, Dataset
from alload_jax.data.loader import LoaderConfig
from alload_jax.data.selection import SourceWeight
from alload_jax.data.sources import SOURCES, SourceConfig
from alload_jax.data.store.reader import is_address
from alload_jax.distributed.cluster import Cluster
from alload_jax.distributed.initialize import ClusterConfig
from alload_jax.errors import InputError, print_stderr
from alload_jax.files import Json, parse_yaml, read_text
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.sparse_attention.config import PREDICTOR_NAME, PREDICTOR_PATTERN
from alload_jax.models.families import DEFAULT_FAMILY, FAMILIES
from alload_jax.objectives import DEFAULT_OBJECTIVE, OBJECTIVES, Objective
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies import AUTO, candidates
from alload_jax.planning.settings import PlanningConfig, config_type, read_by_others
from alload_jax.sampling.config import SamplingConfig
from alload_jax.sampling.evaluators import EVALUATORS, Evaluator
from alload_jax.sharding.mesh import MeshConfig
from alload_jax.training import (
    EXPERTS,
    CheckpointConfig,
    DivergenceConfig,
    ExpertsConfig,
    RunConfig,
    ValidationConfig,
    WatchdogConfig,
    expert_places,
)
from alload_jax.training.callbacks import CALLBACKS, CallbackConfig
from alload_jax.training.optimizer import (
    OptimizerConfig,
    OptimizerGroup,
    group_of,
    learning_rate_schedule,
)
from alload_jax.training.parameters import ParametersConfig
from alload_jax.training.run_files import write_atomically
from alload_jax.training.trackers import TRACKERS, TensorBoardConfig, TrackerConfig
from alload_jax.training.update_rules import OptimizerName


@dataclass(frozen=True)
class DataConfig:
    """Training data.

    Attributes:
      folder: data folder, of alload or of another trainer; or the address of one of alload in
        object storage, such as s3://bucket/folder.
      source: how the samples are read; `name` selects what reads them. Null for what the files in
        the folder say.
      dataset: data set that is written to the folder if it does not exist; `name: digits` selects
        moving digits.
      weights: how often samples stand in an epoch, by patterns over the paths of their files; the
        first that matches counts, and samples that none matches stand once.
      exclude: text file of the numbers of samples to leave out, one per line; the others keep their
        places in the plan. Null for none.
      loader: settings for reading samples.
    """

    folder: str
    source: SourceConfig | None = None
    dataset: Dataset | None = None
    weights: tuple[SourceWeight, ...] = ()
    exclude: str | None = None
    loader: LoaderConfig = field(default_factory=LoaderConfig)

    def __post_init__(self) -> None:
        if self.source is not None and self.dataset is not None:
            raise InputError(
                "data.source and data.dataset are both given, but a data set is written as a "
                "store; leave one out"
            )
        if self.dataset is not None and is_address(self.folder):
            raise InputError(
                f"data.folder is {self.folder}, but data.dataset is written to a folder of this "
                "machine; name one, or leave data.dataset out"
            )


@dataclass(frozen=True)
class Config:
    """Config of a training run.

    Attributes:
      run: general settings.
      data: training data.
      planning: limits of micro-batches, and the policy.
      model: the model; `family` selects its family.
      objective: the training objective; `name` selects it.
      parameters: which parameters are trained.
      optimizer: the optimizer, its schedule, and EMA.
      mesh: mesh of devices.
      cluster: processes, if there are several.
      checkpoint: when checkpoints are saved and which are kept.
      validation: held-out samples on which the loss is measured, and when.
      sampling: which samples are generated, and when.
      evaluators: metrics of generated samples at the end; `name` selects each.
      callbacks: additional callbacks during training; `name` selects each.
      watchdog: how long a run may make no progress.
      divergence: how far the loss may rise.
      trackers: where figures and pictures are shown; `name` selects each.
      experts: two models for high and low noise, trained one after the other; null for one model.
    """

    run: RunConfig
    data: DataConfig
    planning: PlanningConfig
    model: ModelConfig = field(default_factory=lambda: FAMILIES.get(DEFAULT_FAMILY).config())
    objective: Objective = field(default_factory=lambda: OBJECTIVES.get(DEFAULT_OBJECTIVE)())
    parameters: ParametersConfig = field(default_factory=ParametersConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    evaluators: tuple[Evaluator, ...] = ()
    callbacks: tuple[CallbackConfig, ...] = ()
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    trackers: tuple[TrackerConfig, ...] = (TensorBoardConfig(),)
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        self._complete()
        experts_of(self)  # checks them
        if self.checkpoint.keep_best and not self.validation.enabled:
            raise InputError(
                f"checkpoint.keep_best is {self.checkpoint.keep_best}, but nothing is validated; "
                "give validation.share or validation.folder"
            )
        if (high := self.sampling.high_noise) and (self.sampling.grids or self.evaluators):
            raise InputError(
                f"sampling.high_noise is {high}, which draws the beginning of prompts alone; leave "
                "it out, or sampling.grids and evaluators"
            )
        if self.run.epochs is not None and self.planning.recalibrate == "epoch":
            raise InputError(
                f"run.epochs is {self.run.epochs}, but with planning.recalibrate epoch the length "
                "of later epochs is not known before; give run.steps, and null for run.epochs"
            )
        if (scale := self.planning.noise_scale) is not None:
            policy, place = self.planning.policy, f"planning.noise_scale is {scale:g}"
            if getattr(self.objective, "weighting", "sample") == "token":
                raise InputError(
                    f"{place} samples, but objective.weighting is token, whose steps it does not "
                    "describe; leave it out"
                )
            if policy != AUTO and not hasattr(self.planning.traits, "noise_scale"):
                raise InputError(
                    f"{place}, by which {policy} plans nothing; leave it out, or give "
                    "planning.policy auto or balanced"
                )
        if self.run.steps is not None:
            learning_rate_schedule(self.optimizer, self.run.steps)  # checks that it fits
        self.model.require_divisible(self.mesh.tensor)
        if self.planning.context == "auto":
            raise InputError(
                "planning.context is auto, which only `alload plan` accepts; set mesh.context to "
                "the number that it finds"
            )
        if self.planning.context not in (1, self.mesh.context):
            raise InputError(
                f"planning.context is {self.planning.context}, but mesh.context is "
                f"{self.mesh.context}; set only mesh.context, which applies to both"
            )

    def _complete(self) -> None:
        """Trains adapters, and predictors of sparse attention by an optimizer of their own."""
        sparse = self.model.sparse_attention
        predicts = sparse is not None and sparse.selector == "predictor"
        if self.model.lora is not None:
            parameters = self.parameters.with_lora((PREDICTOR_PATTERN,) if predicts else ())
            object.__setattr__(self, "parameters", parameters)
        elif self.run.initial_lora is not None:
            raise InputError(
                f"run.initial_lora is {self.run.initial_lora}, but model.lora is null; set "
                "model.lora.rank to that of the file"
            )
        if not predicts:
            return
        if not self.parameters.trains(PREDICTOR_NAME):
            raise InputError(
                "parameters freezes the predictors of model.sparse_attention, so that no layer "
                f"would ever become sparse; add {PREDICTOR_PATTERN} to parameters.trained, or "
                "choose selector pooled"
            )
        if group_of(PREDICTOR_NAME, self.optimizer.groups) is None:
            rule: OptimizerName | None = "adamw" if self.optimizer.name == "prodigy" else None
            own = OptimizerGroup(
                (PREDICTOR_PATTERN,), rule, learning_rate=_PREDICTOR_RATE, weight_decay=0.0
            )
            groups = (*self.optimizer.groups, own)
            optimizer = dataclasses.replace(self.optimizer, groups=groups)
            object.__setattr__(self, "optimizer", optimizer)


_PREDICTOR_RATE = 1e-3

_PARTS = (
    Part("planning", "policy", AUTO, config_type),
    Part("model", "family", DEFAULT_FAMILY, lambda name: FAMILIES.get(name).config),
    Part("objective", "name", DEFAULT_OBJECTIVE, OBJECTIVES.get),
    Part("data.source", "name", None, SOURCES.get),
    Part("data.dataset", "name", None, DATASETS.get),
    Part("validation.source", "name", None, SOURCES.get),
)
"""The parts whose fields depend on a name."""

_LISTS = {"evaluators": EVALUATORS, "callbacks": CALLBACKS, "trackers": TRACKERS}
"""The parts that are lists of configs with names."""

_RENAMED = {
    "diffusion": "objective",
    "data.digits": "data.dataset, with name: digits",
    "planning.max_delay": "nothing: each epoch holds all of its samples",
    "sampling.digits_read": "evaluators: [{name: digit_accuracy, per_digit: ...}]",
}
"""Keys of earlier versions and their replacements."""


def experts_of(config: Config) -> tuple[Config, ...]:
    """The configs of two experts in the order of training; the config itself where there are none.

    Each is an ordinary run, in a folder of its own, on its part of the noise levels. Validation has
    the levels in this part, if they are given, else some that are spread over it.

    Raises:
      InputError: another part of the config takes the place of `experts`.
    """
    if (experts := config.experts) is None:
        return (config,)
    timesteps, sampling, folder = config.objective.timesteps, config.sampling, config.run.folder
    for key, given, remedy in (
        ("run.initial_weights", config.run.initial_weights, "experts.high_noise and low_noise"),
        ("a range of objective.timesteps", timesteps.lowest or timesteps.highest < 1, "boundary"),
        ("sampling.high_noise", sampling.high_noise, "the first expert's run"),
        ("sampling.grids", sampling.grids, "`alload sample`, which draws with both"),
        ("evaluators", config.evaluators, "`alload sample`, which draws with both"),
    ):
        if given:
            raise InputError(f"{key} is given beside experts; leave it out for {remedy}")
    found, levels = [], config.validation.noise_levels
    parts = (experts.high_noise, experts.boundary, 1.0), (experts.low_noise, 0.0, experts.boundary)
    for number, (weights, low, high) in enumerate(parts):
        within = tuple(level for level in levels if low <= level <= high)
        if not within or levels == ValidationConfig.noise_levels:
            within = tuple(round(low + (high - low) * level, 6) for level in levels)
        of_range = dataclasses.replace(timesteps, lowest=low, highest=high)
        before, place = f"{folder}/{EXPERTS[0]}", f"{folder}/{EXPERTS[number]}"
        own = dataclasses.replace(config.run, folder=place, initial_weights=weights)
        if own.initial_lora:
            lora = str(expert_places(own.initial_lora)[-number])
            own = dataclasses.replace(own, initial_lora=lora)
        found.append(
            dataclasses.replace(
                config,
                experts=None,
                run=own,
                objective=dataclasses.replace(config.objective, timesteps=of_range),  # type: ignore[type-var]
                validation=dataclasses.replace(config.validation, noise_levels=within),
                sampling=dataclasses.replace(sampling, high_noise=before if number else None),
            )
        )
    return tuple(found)


def run_steps(run: RunConfig, plan: Plan) -> int:
    """Returns the number of optimizer steps of a run; its epochs are those of the plan."""
    if run.epochs is not None:
        return plan.first_step(run.epochs)
    assert run.steps is not None  # `RunConfig` sees to it
    return run.steps


def read_config(argv: Sequence[str], prog: str = "train.py") -> Config:
    """Reads the config from a command line: `--config FILE` and `--section.key value`.

    What `model` leaves out of the architecture is that of run.initial_weights.

    Raises:
      InputError: a key is unknown or a value is invalid.
    """
    model = _model_of_weights(argv)
    family = str(model.get("family", DEFAULT_FAMILY))
    parts = [part._replace(default=family) if part.key == "model" else part for part in _PARTS]
    defaults = {f"model.{key}": value for key, value in model.items()}
    return Config(**parse_config(argv, prog, Config, parts, _LISTS, _RENAMED, defaults))


def _model_of_weights(argv: Sequence[str]) -> Json:
    """The architecture of run.initial_weights, or of the run if these weights are gone.

    Empty if nothing describes it and `model` gives one, if it is of another family than
    model.family, or if a file has all keys of `model`, as those that runs write.

    Raises:
      InputError: nothing describes it, nor does `model`.
    """
    place, key = given_value(argv, "run.initial_weights"), "run.initial_weights"
    if place is None:
        place, key = given_value(argv, "experts.high_noise"), "experts.high_noise"
    if not isinstance(place, str) or place in ("", "null"):
        return {}
    given = {flag.split(".")[1].split("=")[0] for flag in argv if flag.startswith("--model.")}
    for section in map(as_section, given_values(argv, "model")):
        given |= set(section if isinstance(section, dict) else ())
    name = given_value(argv, "model.family")
    if name is not None and name not in FAMILIES.names():
        return {}
    if name and {each.name for each in fields(FAMILIES.get(name).config)} <= given:
        return {}
    from alload_jax.training.restore import described_model  # imports Orbax, which takes a second

    gone, folder = not os.path.exists(place), str(given_value(argv, "run.folder"))
    found = folder if gone else place
    model = described_model(Path(found)) if os.path.exists(found) else None
    besides = {"family", "lora", "sparse_attention"}
    # Neither does a length of texts tell which model it is.
    if model is None and not given.difference(besides, ("text", *ModelConfig.arithmetic_fields)):
        raise InputError(
            f"{key} is {place}, "
            + ("which is not there" if gone else "and no config.json there describes the model")
            + "; name a transformer folder, or give the architecture as in "
            "configs/wan2_1_t2v_1_3b.yaml"
        )
    if model is None or name not in (None, model.family):
        return {}
    return {key: value for key, value in model.architecture().items() if key not in besides} | {
        "family": model.family
    }


def without_effect(config: Config) -> list[str]:
    """What differs from the defaults though nothing in a run of this config reads it, in words."""
    parameters, planning, optimizer = config.parameters, config.planning, config.optimizer
    frozen = bool(parameters.identity()), "nothing is frozen (model.lora, parameters.trained)"
    packed = planning.policy != AUTO and planning.traits.packed
    one_shape = not packed, "packed rows have one shape on all ranks"
    min_snr = getattr(config.objective, "noise_weighting", "min_snr") == "min_snr"
    sampling, levels = config.sampling, config.objective.timesteps.distribution
    drawn = bool(sampling.grids or sampling.prompts or config.evaluators)
    other = False, f"planning.policy is {planning.policy}"
    of_levels = {"mean": "logit_normal", "std": "logit_normal", "mode_scale": "mode"}
    found = []
    for key, read, why in (
        ("parameters.frozen_dtype", *frozen),
        ("parameters.frozen_memory", *frozen),
        ("planning.ranks_mode", *one_shape),
        ("planning.ranks_per_group", *one_shape),
        *((f"planning.{name}", *other) for name in read_by_others(planning)),
        ("optimizer.decay_steps", optimizer.schedule == "wsd", "optimizer.schedule is not wsd"),
        ("objective.min_snr_gamma", min_snr, "objective.noise_weighting is not min_snr"),
        *(
            (f"objective.timesteps.{name}", levels == wanted, f"distribution is {levels}")
            for name, wanted in of_levels.items()
        ),
        ("sampling.every", drawn, "sampling.grids and sampling.prompts are empty"),
    ):
        *place, name = key.split(".")
        part = reduce(getattr, place, config)
        if not read and (value := getattr(part, name)) != getattr(type(part), name):
            found.append(f"{key} is {value}, but {why}; leave it out")
    return found


def with_context(config: Config) -> Config:
    """Splits samples over the mesh's context groups, if the policy can split samples."""
    if not any(policy.splits_samples for policy in candidates(config.planning.policy)):
        return config
    planning = dataclasses.replace(config.planning, context=config.mesh.context)
    return dataclasses.replace(config, planning=planning)


def values_of(config: Config) -> Json:
    """Returns every value by dotted key, as JSON, without the settings that differ by process."""
    return dict(_leaves("", _shared_values(config)))


def values_in(path: Path) -> Json:
    """Returns the values of a file of `write_config` by dotted key; none if there is no such file.

    Raises:
      InputError: the file is not YAML.
    """
    if not path.is_file():
        return {}
    remedy = "fix it or remove it"
    return dict(_leaves("", parse_yaml(read_text(path, remedy), str(path), remedy)))


def _leaves(name: str, content: object) -> Iterator[tuple[str, object]]:
    if isinstance(content, dict):
        for key, part in content.items():
            yield from _leaves(f"{name}.{key}" if name else key, part)
    else:
        yield name, content


def _shared_values(config: Config) -> Json:
    """Returns the config as JSON values without the settings that differ by process."""
    cluster = dataclasses.replace(config.cluster, coordinator=None, processes=None, process=None)
    values = dataclasses.asdict(dataclasses.replace(config, cluster=cluster))
    return json.loads(json.dumps(values))  # with lists in place of tuples


def write_config(config: Config, path: Path) -> None:
    """Writes the config as YAML that `--config` can read.

    It omits the settings that differ by process, because the next start may use other processes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, yaml.dump(_shared_values(config), Dumper=_Dumper, sort_keys=False))


class _Dumper(yaml.SafeDumper):
    """Quotes a text such as 1e-4, which jsonargparse takes for a number and YAML does not."""


_NUMBER = re.compile(r"([-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+|\._[0-9_]*)$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def use_compilation_cache(run: RunConfig, cluster: Cluster | None = None) -> None:
    """Makes JAX keep compiled programs on disk if `run.compilation_cache` is set.

    Not where the processes of `cluster` have other folders of that path, as on disks of their own:
    those that find no program would compile it, and XLA, which divides the timing of algorithms
    among all, waits a day for the others.
    """
    if run.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(run.compilation_cache).absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    folder = jax.config.values["jax_compilation_cache_dir"]
    place = Path(folder) if folder and not is_address(folder) else None
    if cluster is None or cluster.shares(place):
        return
    jax.config.update("jax_compilation_cache_dir", None)
    if cluster.process_id == 0:
        print_stderr(
            f"note: compiled programs are not kept: not all processes see what process 0 writes to "
            f"{folder}; name a folder that all hosts share as run.compilation_cache"
        )
