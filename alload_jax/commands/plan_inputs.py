"""The inputs of `alload plan` from flags and a config: samples, settings, costs, M_mem."""

import argparse
import dataclasses
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alload_jax.commands.flags import holds_samples, require_package, source_config, usual_model
from alload_jax.data.manifest import manifest_metadata, read_paths
from alload_jax.data.prepare.inputs import set_items
from alload_jax.data.prepare.settings import MediaSettings
from alload_jax.data.selection import SourceShare, SourceWeight, source_shares, with_weights
from alload_jax.data.sources.grain_samples import SIZE, SizeColumn
from alload_jax.data.sources.opening import open_source
from alload_jax.errors import InputError
from alload_jax.planning import analytic
from alload_jax.planning.architecture import Architecture, architecture_named, from_fields
from alload_jax.planning.cost import CostFile, PowerCost, SparseLayers, read_cost_file, with_layers
from alload_jax.planning.devices import DEVICES, device_named
from alload_jax.planning.factory import ONE_EPOCH, RunLength
from alload_jax.planning.metrics import SimulationSettings
from alload_jax.planning.policies import AUTO, PORTFOLIO, candidates, find_policy, policy_names
from alload_jax.planning.remat import AUTO_REMAT, UNRESOLVED, choose_remat, in_words
from alload_jax.planning.samples import Geometry, Samples, read_sample_paths, read_samples
from alload_jax.planning.settings import PlanningConfig, config_type
from alload_jax.planning.study import Study
from alload_jax.planning.workloads import make_workload

if TYPE_CHECKING:  # a training config needs JAX, which takes a second to import
    from alload_jax.config import Config
    from alload_jax.models.common.config import ModelConfig

_MOST_DRAWN = 2**20
"""Samples of a column of sizes that are planned."""
_DEFAULT_MODEL, _DEFAULT_DEVICE, _DEFAULT_DENSITY = "wan2.1-1.3b", "h200", 0.1


class PlanRequest:
    """The flags, and the training config that they override.

    Attributes:
      options: the flags.
      config: the training config; None without one.
      model: the config's model.
      joint: whether the lengths of samples count their conditions.
      remat: rematerialisation policy of the model, or those that repeat over its layers.
      patch_size: latents per token (frames, height, width).
      usual: name of the model that is planned for where nothing names one.
      device: of the analytic cost model.
      length: of the run.
      fields: of `PlanningConfig`, as far as flags and config give them, without the ranks.
      ranks: numbers of data-parallel ranks; empty where nothing gives them.
      source, costs_source: descriptions of the data set and of the cost model's source.
      shares: what weighted sources are of an epoch; empty without weights.
      warning: what is odd about the data; "" for nothing.
    """

    config: "Config | None" = None
    model: "ModelConfig | None" = None
    joint: bool = False
    remat: analytic.Remat = "attention"
    length: RunLength = ONE_EPOCH
    usual: str = _DEFAULT_MODEL
    source: str
    costs_source: str
    shares: tuple[SourceShare, ...]
    warning: str

    def __init__(self, options: argparse.Namespace):
        """Reads the config, if one is given.

        Raises:
          InputError: the config is not valid, or there is no such device.
        """
        self.options, self.patch_size = options, Geometry().patch_size
        self.device = device_named(options.device or _DEFAULT_DEVICE)
        self.fields: dict[str, Any] = {}
        if options.config is not None:
            from alload_jax.config import read_config

            self.config = config = read_config(["--config", options.config], prog="alload plan")
            self.model = config.model
            self.joint, self.patch_size = config.model.joint_attention, config.model.patch_size
            self.remat = config.model.step_fields().get("remat", AUTO_REMAT)
            self.length = RunLength(config.run.epochs, config.run.steps or 0)
            self.fields = dict(vars(config.planning))
            if options.workload is None and options.manifest is None:
                options.manifest = config.data.folder
        self.patch_size = options.patch_size or self.patch_size
        if options.epochs:
            self.length = RunLength(options.epochs)
        names = {field.name for kind in setting_types() for field in dataclasses.fields(kind)}
        self.fields |= {name: value for name, value in vars(options).items() if name in names}
        configured = None if self.config is None else self.config.planning.ranks
        self.ranks: list[int] = options.ranks or ([] if configured is None else [configured])
        del self.fields["ranks"]

    @property
    def packs(self) -> bool:
        """Whether packed rows are worth it for model and device; unknown devices run them."""
        model = self.model
        if model is not None and (model.attention == "xla" or model.dtype == "float32"):
            return False
        name = self.options.device
        if name is None and self.fields.get("cost_model"):
            costs = read_cost_file(self.fields["cost_model"])
            if costs.packed_ratio is not None:
                return True
            name = costs.device
        name = name or _DEFAULT_DEVICE
        known = [each for short, each in DEVICES.items() if name in (short, each.name)]
        return all(device.packs for device in known)

    @cached_property
    def architecture(self) -> tuple[Architecture, str]:
        """The model's architecture, and its name or the file of its config."""
        if self.options.model or self.model is None:
            name = self.options.model or self.usual
            return architecture_named(name), name
        return from_fields(self.model.architecture()), self.options.config

    @cached_property
    def trained(self) -> analytic.Trained:
        """The trained parameters of the flags, which need the analytic cost model, or the config.

        Raises:
          InputError: flags exclude each other.
        """
        options, cost_model = self.options, self.fields.get("cost_model")
        if options.trained_parameters is not None:
            if cost_model:
                raise InputError(
                    f"alload plan: --trained-parameters changes the analytic cost model, and "
                    f"{cost_model} replaces it; leave one of them out"
                )
            return analytic.Trained(options.trained_parameters, options.frozen_dtype or "float32")
        several = self._configured_trained()
        if options.frozen_dtype is None:
            return analytic.ALL_TRAINED if options.model or cost_model else several
        if several.parameters is None:
            raise InputError(
                "alload plan: --frozen-dtype is given without --trained-parameters, so nothing is "
                "frozen; give both"
            )
        return dataclasses.replace(several, frozen_dtype=options.frozen_dtype)

    def _configured_trained(self, single: bool = False) -> analytic.Trained:
        """The trained parameters of the config, for steps of several micro-batches or of one."""
        if self.config is None:
            return dataclasses.replace(analytic.ALL_TRAINED, accumulates=not single)
        from alload_jax.training.memory import trained_of

        # Planned for a GPU, whatever this machine has.
        model = self.config.model
        model = dataclasses.replace(model, dtype="bfloat16") if model.dtype == "auto" else model
        return trained_of(model, self.config.parameters, self.config.optimizer, single=single)

    def layers(self) -> SparseLayers | None:
        """The layers as training begins, with what the flags change; None if all are dense.

        Raises:
          InputError: a density is given where no layer is sparse.
        """
        options, known = self.options, None
        if self.model is not None:
            from alload_jax.training.run_plan import first_layers

            known = first_layers(self.model)
        if options.sparse_layers is None and options.density is None:
            return known
        known = known or SparseLayers()
        share = known.share if options.sparse_layers is None else options.sparse_layers
        if options.sparse_layers is None and not share:
            raise InputError(
                "alload plan: --density is given without --sparse-layers, so no layer is sparse; "
                "give both"
            )
        density = known.density if known.share else _DEFAULT_DENSITY
        density = density if options.density is None else options.density
        return dataclasses.replace(known, share=share, density=density)

    def costs(self, samples: Samples) -> tuple[CostFile, str]:
        """The cost model for layers of which some may be sparse, and a description of its source.

        Args:
          samples: the data set.

        Raises:
          InputError: the cost model is not valid, or was made for another device.
        """
        costs, source = self._dense_costs(samples)
        layers = self.layers()
        if layers is None or costs.quadratic is None:
            if layers is not None and layers.share:
                source += "; sparse attention does not change it"
            return costs, source
        if layers.share:
            source += f"; {layers.share:.0%} of the layers sparse, density {layers.density:g}"
        return with_layers(costs, layers), source

    def _dense_costs(self, samples: Samples) -> tuple[CostFile, str]:
        options, fields = self.options, self.fields
        if cost_model := fields.get("cost_model"):
            costs = read_cost_file(cost_model)
            wanted = self.device.name if options.device else costs.device
            if costs.device and wanted != costs.device and not fields.get("foreign_cost_model"):
                raise InputError(
                    f"{cost_model}: was made for {costs.device}, not for {wanted}; run `alload "
                    "calibrate` there, or give --foreign-cost-model"
                )
            made_on = f", {costs.origin or 'given'} for {costs.device}" if costs.device else ""
            return costs, f"{cost_model}{made_on}"
        wanted = options.model or options.device or options.trained_parameters
        if fields.get("p") and not wanted:
            source = f"B·S^p with p = {fields['p']:g}, no unit"
            return CostFile(power=PowerCost(fields["p"])), source
        architecture, model = self.architecture
        remat = self._chosen_remat(samples)
        costs = analytic.analytic_costs(
            architecture,
            self.device,
            remat,
            shards=options.shards,
            margin=options.margin,
            trained=self.trained,
            budget=None if options.memory_gb is None else options.memory_gb * 1e9,
            m_mem=fields.get("m_mem"),
        )
        if self.remat == AUTO_REMAT:
            model += f", model.remat auto: {in_words(analytic.policies_of(remat))},"
        if trained := self.trained.parameters:
            model += f", {trained:,} of {architecture.parameters():,} parameters trained,"
        if self.model is not None and self.model.step_fields().get("matmul", "dtype") != "dtype":
            model += ", as if products were not in float8,"
        source = f"analytic, not measured: {model} on {self.device.name}; see `alload calibrate`"
        return costs, source

    def _chosen_remat(self, samples: Samples) -> analytic.Remat:
        """The config's policy; where it is auto, what the device's memory holds beside M_mem."""
        if self.remat != AUTO_REMAT:
            return self.remat
        if (m_mem := self.fields.get("m_mem")) is None:  # it follows from the memory
            return UNRESOLVED
        budget, given = analytic.USABLE_SHARE * self.device.memory, self.options.memory_gb
        if given is None and self.model is not None:
            given = self.model.memory_budget
        if given is not None:
            budget = given * 1e9
        architecture, trained = self.architecture[0], self.trained
        if self.planning().single_gradient:
            same = trained == self._configured_trained()
            one = dataclasses.replace(trained, accumulates=False)
            trained = self._configured_trained(single=True) if same else one
        rows = samples.most_within(m_mem)
        if (most := self.fields.get("max_segments")) is not None:
            rows = min(rows, most)
        choice = choose_remat(
            architecture,
            getattr(architecture, "num_layers", 1),
            self.device,
            m_mem,
            budget,
            shards=self.options.shards,
            rows=rows,
            trained=trained,
        )
        return choice.policies

    def planning(self) -> PlanningConfig:
        """The planning settings.

        Raises:
          InputError: one is not valid, or missing.
        """
        named = self.options.compare or [self.fields.get("policy", AUTO)]
        kinds = (each for each in map(config_type, named) if each is not PlanningConfig)
        kind = next(kinds, PlanningConfig)
        known = {field.name for field in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in self.fields.items() if name in known})

    def study(self) -> Study:
        """Reads the data and the cost model, and describes them in `source` and what follows it.

        Raises:
          InputError: a value of the config or of a flag is invalid, or nothing gives the ranks.
        """
        options, fields, config = self.options, self.fields, self.config
        if options.compare:
            # This policy has every setting; each case takes those of its own policy.
            fields["policy"] = PORTFOLIO[0]
        policy = fields.get("policy", AUTO)
        self.trained  # noqa: B018 - refuses flags that exclude each other before data are read
        packs = self.packs
        samples, self.source, paths = _samples(self, policy == AUTO or find_policy(policy).packed)
        is_table = (options.manifest or "").endswith((".csv", ".parquet"))
        # A data folder has several clips of one video.
        listed = is_table and not holds_samples(options.manifest)
        self.warning = _repeated_samples(samples, paths) if listed else ""
        weights = _weights_of_flags(options)
        if not weights and options.manifest and config is not None:
            weights = config.data.weights
        self.shares = tuple(source_shares(samples, weights, paths)) if weights else ()
        samples = with_weights(samples, weights, paths)
        if samples.weight is not None:
            self.source += f", {samples.weight.sum():,.10g} an epoch by weights"
        self.source += ", for each of two experts" if config is not None and config.experts else ""
        costs, self.costs_source = self.costs(samples)
        required = any("m_mem" in each.required for each in candidates(policy))
        if fields.get("m_mem") is None and required:
            fields["m_mem"] = costs.m_mem
            if options.memory_gb is not None:
                if costs.memory is None:
                    raise InputError(
                        "alload plan: --memory-gb needs a cost model with memory coefficients; "
                        "give --m-mem"
                    )
                budget, shortest = options.memory_gb * 1e9, int(samples.seq_len.min())
                fields["m_mem"] = costs.memory.max_tokens(budget, options.margin, shortest)
        planning = self.planning()
        if config is not None:
            remat = {} if self.remat == AUTO_REMAT else {"remat": self.remat}
            planning.refuse_foreign_costs(config.model.architecture() | remat, None)
        bucketed = None
        if self.joint and (options.compare or policy == AUTO):
            bucketed = with_weights(_samples(self, packed=False)[0], weights, paths)
        if not self.ranks:
            raise InputError("alload plan: --ranks is not given; give the number of ranks (GPUs)")
        seed = 0 if config is None else config.run.seed
        seed = seed if options.seed is None else options.seed
        replay = None
        if options.simulate:
            replay = SimulationSettings(options.noise, options.all_reduce, seed)
        return Study(
            samples=samples,
            config=planning,
            costs=costs,
            seed=seed,
            epoch=options.epoch,
            replay=replay,
            bucketed=bucketed,
            packs=packs,
            length=self.length,
        )


def setting_types() -> tuple[type[PlanningConfig], ...]:
    """The dataclasses of planning settings: that of all policies, and those of registered ones."""
    return tuple(dict.fromkeys((PlanningConfig, *map(config_type, policy_names()))))


def _weights_of_flags(options: argparse.Namespace) -> tuple[SourceWeight, ...]:
    """The pairs of `--weights PATH=WEIGHT ...`.

    Raises:
      InputError: a word is no such pair, or the samples have no paths.
    """
    if options.weights and options.workload:
        raise InputError(
            "alload plan: --weights needs the paths of samples, which a workload has not; give "
            "--manifest"
        )
    found = []
    for word in options.weights or ():
        path, equals, number = word.rpartition("=")
        try:
            found.append(SourceWeight(path, float(number if equals else "")))
        except InputError:
            raise
        except ValueError as error:
            raise InputError(
                f"alload plan: --weights {word}: give PATH=WEIGHT, as portraits=3"
            ) from error
    return tuple(found)


def _samples(request: PlanRequest, packed: bool) -> tuple[Samples, str, np.ndarray | None]:
    """Reads or makes the samples.

    Args:
      request: the flags and the config.
      packed: whether the policy packs rows.

    Returns:
      Samples, a description of the data set, and the paths of the samples if they are recorded.

    Raises:
      InputError: not one of --workload and --manifest is given, or the data cannot be read.
    """
    options = request.options
    if (options.workload is None) == (options.manifest is None):
        raise InputError("alload plan: give either --workload NAME or --manifest FILE")
    stride = options.vae_stride
    if options.manifest:
        # A store has weights, and lengths that include the conditions of a joint model.
        place = Path(options.manifest)
        stored = request.joint or any(place.parent.glob("shard-*.arrayrecord"))
        if place.name == "manifest.parquet" and stored:
            options.manifest = str(place.parent)
        if holds_samples(options.manifest):
            return _source_samples(request, packed)
        stride = stride or manifest_metadata(Path(options.manifest)).get("vae_stride")
    geometry = Geometry(tuple(stride or Geometry().vae_stride), request.patch_size)
    if options.manifest and options.manifest.endswith((".yaml", ".yml")):
        return _media_samples(options.manifest, geometry)
    if options.manifest and Path(options.manifest).name == SIZE:
        column = SizeColumn(Path(options.manifest).parent)
        shape = column.size_of(column.drawn(_MOST_DRAWN))
        drawn = f"{len(shape):,} drawn of {len(column):,} samples, whose epoch is longer"
        samples = Samples(shape, geometry.seq_len(*shape.T))
        return samples, f"{options.manifest}, {drawn}", None
    if options.manifest:
        samples = read_samples(options.manifest, geometry)
        paths = read_sample_paths(options.manifest)
        return samples, f"{options.manifest}, {len(samples):,} samples", paths
    samples = make_workload(options.workload, options.size, geometry=geometry)
    return samples, f"{options.workload}, {len(samples):,} samples", None


def _media_samples(place: str, geometry: Geometry) -> tuple[Samples, str, np.ndarray | None]:
    """The samples that `alload prepare media` would make of a set of folders; see `_samples`."""
    require_package("av", "prepare", "alload plan --manifest of a set of folders")
    from alload_jax.data.prepare.unit import clip_sizes  # which needs the package

    settings = MediaSettings()
    token = np.multiply(geometry.vae_stride, geometry.patch_size).tolist()
    found = list(clip_sizes(items := set_items(Path(place), settings), settings, token))
    if not found:
        raise InputError(f"{place}: no file can be used; `alload prepare media` says why")
    shape, weight = np.array([size for _, size in found]), np.array([i.weight for i, _ in found])
    weights = None if (weight == 1).all() else weight
    samples = Samples(shape, geometry.seq_len(*shape.T), weights)
    source = f"{place}, {len(samples):,} samples that its {len(items):,} files would give"
    return samples, source, np.array([item.name for item, _ in found], object)


def _source_samples(request: PlanRequest, packed: bool) -> tuple[Samples, str, np.ndarray | None]:
    """The samples of a folder of data, or of a file of another trainer; see `_samples`.

    With the config of a model with joint attention, a sample's length counts its condition.
    """
    from alload_jax.data.condition import conditions_for, samples_for  # import JAX

    options, model = request.options, request.model
    if options.vae_stride:
        raise InputError(
            f"alload plan: --vae-stride does not apply to the latents in {options.manifest}; leave "
            "it out, or set data.source.vae_stride in --config"
        )
    manifest = open_source(options.manifest, source_config(options.config, "alload plan")).manifest
    usual, patch_size = usual_model(manifest)
    told = ""
    if model is None and not options.patch_size:
        request.patch_size, request.usual = patch_size, usual or _DEFAULT_MODEL
        told = f", patch size {','.join(map(str, patch_size))} (--patch-size gives another)"
    samples = manifest.samples(request.patch_size)
    if model is not None and request.joint:
        samples = samples_for(model, manifest, conditions_for(model, manifest), packed)
    source = f"{options.manifest}, {len(samples):,} samples{told}"
    if model is None and manifest.form.parts:  # data of models with joint attention
        source += ", without the tokens of their conditions, which --config counts"
    return samples, source, read_paths(manifest)


def _repeated_samples(samples: Samples, paths: np.ndarray | None) -> str:
    """Says how many samples have the path and size of another; "" for none, or without paths."""
    if paths is None:
        return ""
    first: dict[tuple[str, ...], int] = {}
    sizes = np.column_stack([samples.seq_len, samples.shape]).tolist()
    keys = [(str(path), *map(str, size)) for path, size in zip(paths, sizes, strict=True)]
    again = [row for row, key in enumerate(keys) if key[0] and first.setdefault(key, row) != row]
    if not again:
        return ""
    row = again[0]
    count = f"{len(again):,} sample{'s have' if len(again) > 1 else ' has'}"
    return (
        f"{count} the path and the size of another one, such as row {row} and row "
        f"{first[keys[row]]} ({paths[row]}); each is planned. They are clips of one video, or the "
        "same sample: remove what is there twice"
    )
