"""Reads the inputs of `alload plan` from flags and a config: samples, settings, cost model."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from alload_jax.commands.plan_weights import described, weigh, weights_of_flags
from alload_jax.commands.source_config import holds_samples, source_config
from alload_jax.data.weights import SourceShare, SourceWeight
from alload_jax.errors import InputError
from alload_jax.planning.analytic import (
    ALL_TRAINED,
    USABLE_SHARE,
    Remat,
    Trained,
    analytic_costs,
    policies_of,
)
from alload_jax.planning.architectures.architecture import Architecture
from alload_jax.planning.architectures.registry import architecture_named, from_fields
from alload_jax.planning.cost import CostFile, PowerCost, read_cost_file
from alload_jax.planning.devices import DEVICES, device_named
from alload_jax.planning.geometry import Geometry
from alload_jax.planning.policies.registry import AUTO, AUTO_PACKED, candidates, find_policy
from alload_jax.planning.remat import AUTO_REMAT, UNRESOLVED, choose_remat, in_words
from alload_jax.planning.samples import Samples, read_sample_paths, read_samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.sparse_cost import SparseLayers, with_layers
from alload_jax.planning.workloads import make_workload

if TYPE_CHECKING:  # it needs JAX, which takes a second to import
    from alload_jax.config import Config
    from alload_jax.models.common.config import ModelConfig

_DEFAULT_MODEL, _DEFAULT_DEVICE, _DEFAULT_DENSITY = "wan2.1-1.3b", "h200", 0.1


class PlanInputs(NamedTuple):
    """The inputs of a plan.

    Attributes:
      samples: the samples of the data set.
      source: description of the data set.
      planning: planning settings, with `m_mem` set.
      costs: the content of the cost model's file.
      costs_source: description of the cost model's source.
      seed: seed of the order of samples.
      shares: what weighted sources are of an epoch; empty without weights.
      bucketed: where policies of both layouts are compared, the samples with their lengths in
        bucketed rows, and `samples` has those in packed rows; else None.
    """

    samples: Samples
    source: str
    planning: PlanningConfig
    costs: CostFile
    costs_source: str
    seed: int
    shares: tuple[SourceShare, ...] = ()
    bucketed: Samples | None = None


class PlannedModel(NamedTuple):
    """The model of the flags.

    Attributes:
      architecture: its shape.
      name: its name, or the file of its config.
      patch_size: latents per token (frames, height, width).
      trained: which of its parameters are trained.
      remat: rematerialisation policy of the config, or those that repeat over the layers; None
        without a config.
      vae_stride: pixels per latent of the model's VAE (frames, height, width).
      condition: most condition tokens of a sample that count in its length.
    """

    architecture: Architecture
    name: str
    patch_size: tuple[int, int, int]
    trained: Trained
    remat: Remat | None
    vae_stride: tuple[int, int, int]
    condition: int


class _Base(NamedTuple):
    """Values of a training config, or the defaults.

    Attributes:
      planning: fields of `PlanningConfig`.
      patch_size: latents per token (frames, height, width).
      seed: seed of the order of samples.
      model: fields of the model's architecture; None without a config.
      remat: rematerialisation policy of the model, or those that repeat over its layers.
      packs: whether the model can train on packed rows.
      layers: the model's layers as training begins; None if all are always dense.
      trained: which parameters are trained.
      weights: of the sources of samples.
      config: the model's config; None without a config.
    """

    planning: dict[str, Any]
    patch_size: tuple[int, int, int]
    seed: int
    model: dict[str, Any] | None
    remat: Remat
    packs: bool
    layers: SparseLayers | None = None
    trained: Trained = ALL_TRAINED
    weights: tuple[SourceWeight, ...] = ()
    config: "ModelConfig | None" = None


def plan_inputs(options: argparse.Namespace) -> PlanInputs:
    """Reads the config, if given, and overrides it by the flags.

    Raises:
      InputError: a value of the config or of a flag is invalid.
    """
    base = _from_config(options.config)
    given = {f.name: getattr(options, f.name, None) for f in dataclasses.fields(PlanningConfig)}
    fields = base.planning | {k: v for k, v in given.items() if v is not None}
    fields.pop("ranks", None)
    if options.compare:
        # This policy has every setting; each case takes those of its own policy.
        fields["policy"] = AUTO_PACKED
    costs, source = _costs_with_layers(options, fields, base)
    packs = base.packs and _packs(options, costs)
    policy = fields.get("policy", AUTO)
    packed = packs if policy == AUTO else find_policy(policy).packed
    samples, data, paths = _samples(options, base, packed)
    weights = weights_of_flags(options) or (base.weights if options.manifest else ())
    samples, shares = weigh(samples, weights, paths)
    data += described(shares)
    policies = candidates(policy)
    if fields.get("m_mem") is None and any("m_mem" in each.required for each in policies):
        fields["m_mem"] = _m_mem(options, costs, int(samples.seq_len.min()))
    planning = PlanningConfig(**fields).resolved(packs)
    if options.config and base.model:
        remat = {} if base.remat == AUTO_REMAT else {"remat": base.remat}
        planning.refuse_foreign_costs(base.model | remat, None)
    seed = base.seed if options.seed is None else options.seed
    bucketed = None
    if options.compare and base.config is not None and base.config.joint_attention:
        bucketed, _ = weigh(_samples(options, base, packed=False)[0], weights, paths)
    return PlanInputs(samples, data, planning, costs, source, seed, shares, bucketed)


def _from_config(path: str | None) -> _Base:
    if path is None:
        return _Base({}, Geometry().patch_size, 0, None, "attention", True)
    # Imported here because a training config needs JAX, which takes a second to import.
    from alload_jax.config import read_config
    from alload_jax.training.plan_costs import first_layers

    config = read_config(["--config", path], prog="alload plan")
    planning = {
        f.name: getattr(config.planning, f.name) for f in dataclasses.fields(PlanningConfig)
    }
    model = config.model
    return _Base(
        planning,
        model.patch_size,
        config.run.seed,
        model.architecture(),
        model.step_fields().get("remat", AUTO_REMAT),
        packs=model.attention != "xla" and model.dtype != "float32",
        layers=first_layers(model),
        trained=_trained_of(config),
        weights=config.data.weights,
        config=model,
    )


def _trained_of(config: "Config") -> Trained:
    """The trained parameters of a config; counting them needs the model's shapes."""
    from alload_jax.models.families import abstract_model
    from alload_jax.training.state_size import trained_of

    params = abstract_model(config.model).params
    return trained_of(params, config.parameters, config.optimizer)


def architecture_of(options: argparse.Namespace) -> PlannedModel:
    """The model of the flags, without data.

    Raises:
      InputError: the config is invalid, or its model has no cost model.
    """
    base = _from_config(options.config)
    architecture, name = _architecture(options, base)
    trained, remat = _trained(options, {}, base), base.remat if options.config else None
    stride, condition = Geometry().vae_stride, 0
    if (model := base.config) is not None:
        from alload_jax.models.families import family_of

        stride = family_of(model).sampling_defaults(model).vae_stride
        if model.joint_attention:
            condition = sum(part.length for part in model.condition_parts())
    return PlannedModel(architecture, name, base.patch_size, trained, remat, stride, condition)


def _packs(options: argparse.Namespace, costs: CostFile) -> bool:
    """Whether the device runs attention on packed rows; True for unknown devices."""
    name = options.device or costs.device or _DEFAULT_DEVICE
    known = [each for short, each in DEVICES.items() if name in (short, each.name)]
    return all(device.packs for device in known)


def _costs_with_layers(
    options: argparse.Namespace, fields: dict[str, Any], base: _Base
) -> tuple[CostFile, str]:
    """As `_costs`, for layers of which some are sparse."""
    costs, source = _costs(options, fields, base)
    layers = _layers(options, base)
    if not layers:
        return costs, source
    if costs.quadratic is None:
        if layers.share:
            source += "; sparse attention does not change it"
        return costs, source
    if layers.share:
        source += f"; {layers.share:.0%} of the layers sparse, density {layers.density:g}"
    return with_layers(costs, layers), source


def _layers(options: argparse.Namespace, base: _Base) -> SparseLayers | None:
    """Layers as the config's model begins, with what the flags change."""
    if options.sparse_layers is None and options.density is None:
        return base.layers
    known = base.layers or SparseLayers()
    share = known.share if options.sparse_layers is None else options.sparse_layers
    if options.sparse_layers is None and not share:
        raise InputError(
            "alload plan: --density is given without --sparse-layers, so no layer is sparse; "
            "give both"
        )
    density = known.density if known.share else _DEFAULT_DENSITY
    density = density if options.density is None else options.density
    return dataclasses.replace(known, share=share, density=density)


def _costs(
    options: argparse.Namespace, fields: dict[str, Any], base: _Base
) -> tuple[CostFile, str]:
    """The cost model and a description of its source."""
    trained = _trained(options, fields, base)
    if fields.get("cost_model"):
        costs = read_cost_file(fields["cost_model"])
        _refuse_other_device(options, fields, costs)
        made_on = f", {costs.origin or 'given'} for {costs.device}" if costs.device else ""
        return costs, f"{fields['cost_model']}{made_on}"
    analytic = options.model or options.device or options.trained_parameters
    if fields.get("p") and not analytic:
        return CostFile(power=PowerCost(fields["p"])), f"B·S^p with p = {fields['p']:g}, no unit"
    device = device_named(options.device or _DEFAULT_DEVICE)
    architecture, model = _architecture(options, base)
    remat = _remat(options, fields, base, architecture, trained)
    costs = analytic_costs(architecture, device, remat, shards=options.shards, trained=trained)
    if base.remat == AUTO_REMAT:
        model += f", model.remat auto: {in_words(policies_of(remat))},"
    if trained.parameters:
        model += f", {trained.parameters:,} of {architecture.parameters():,} parameters trained,"
    return costs, f"analytic, not measured: {model} on {device.name}; see `alload calibrate`"


def _remat(
    options: argparse.Namespace,
    fields: dict[str, Any],
    base: _Base,
    architecture: Architecture,
    trained: Trained,
) -> Remat:
    """The config's policy; where it is auto, what the device's memory holds beside M_mem."""
    if base.remat != AUTO_REMAT:
        return base.remat
    if (m_mem := fields.get("m_mem")) is None:  # it follows from the memory
        return UNRESOLVED
    device = device_named(options.device or _DEFAULT_DEVICE)
    budget = USABLE_SHARE * device.memory
    given = base.config.memory_budget if base.config is not None else None
    given = given if options.memory_gb is None else options.memory_gb
    if given is not None:
        budget = given * 1e9
    layers = getattr(architecture, "num_layers", 1)
    shards = options.shards
    several = fields.get("micro_batches_per_step", 1) > 1
    several |= fields.get("ranks_mode") == "independent"
    trained = dataclasses.replace(trained, accumulates=several)  # as the run
    choice = choose_remat(
        architecture, layers, device, m_mem, budget, shards=shards, trained=trained
    )
    return choice.policies


def _architecture(options: argparse.Namespace, base: _Base) -> tuple[Architecture, str]:
    """The model's architecture and its name."""
    if options.model or base.model is None:
        name = options.model or _DEFAULT_MODEL
        return architecture_named(name), name
    return from_fields(base.model), options.config


def _trained(options: argparse.Namespace, fields: dict[str, Any], base: _Base) -> Trained:
    """The trained parameters of the flags, which need the analytic cost model, or the config."""
    if options.trained_parameters is None:
        if options.frozen_dtype is not None and base.trained.parameters is not None:
            return dataclasses.replace(base.trained, frozen_dtype=options.frozen_dtype)
        if options.frozen_dtype is not None:
            raise InputError(
                "alload plan: --frozen-dtype is given without --trained-parameters, so nothing is "
                "frozen; give both"
            )
        return ALL_TRAINED if options.model or fields.get("cost_model") else base.trained
    if fields.get("cost_model"):
        raise InputError(
            f"alload plan: --trained-parameters changes the analytic cost model, and "
            f"{fields['cost_model']} replaces it; leave one of them out"
        )
    return Trained(options.trained_parameters, options.frozen_dtype or "float32")


def _refuse_other_device(
    options: argparse.Namespace, fields: dict[str, Any], costs: CostFile
) -> None:
    if not options.device or not costs.device or fields.get("foreign_cost_model"):
        return
    wanted = device_named(options.device).name
    if wanted != costs.device:
        raise InputError(
            f"{fields['cost_model']}: was made for {costs.device}, not for {wanted}; run "
            "`alload calibrate` there, or give --foreign-cost-model"
        )


def _m_mem(options: argparse.Namespace, costs: CostFile, shortest: int) -> int | None:
    if options.memory_gb is not None:
        if costs.memory is None:
            raise InputError(
                "alload plan: --memory-gb needs a cost model with memory coefficients; give --m-mem"
            )
        return costs.memory.max_tokens(options.memory_gb * 1e9, options.margin, shortest)
    return costs.m_mem


_Read = tuple[Samples, str, np.ndarray | None]
"""Samples, a description of the data set, and the paths of the samples if they are recorded."""


def _samples(options: argparse.Namespace, base: _Base, packed: bool) -> _Read:
    if (options.workload is None) == (options.manifest is None):
        raise InputError("alload plan: give either --workload NAME or --manifest FILE")
    stride = options.vae_stride
    if options.manifest and _is_of_a_store(options.manifest, base):
        options.manifest = str(Path(options.manifest).parent)
    if options.manifest and holds_samples(options.manifest):
        return _source_samples(options, base, packed)
    if options.manifest:
        stride = stride or _stored_stride(options.manifest)
    geometry = Geometry(stride or Geometry().vae_stride, options.patch_size or base.patch_size)
    if options.manifest:
        samples = read_samples(options.manifest, geometry)
        paths = read_sample_paths(options.manifest)
        return samples, f"{options.manifest}, {len(samples):,} samples", paths
    samples = make_workload(options.workload, options.size, options.workload_seed, geometry)
    return samples, f"{options.workload}, {len(samples):,} samples", None


def _is_of_a_store(manifest: str, base: _Base) -> bool:
    """Whether a manifest is that of a store, whose conditions the model's lengths include."""
    joint = base.config is not None and base.config.joint_attention
    return joint and Path(manifest).name == "manifest.parquet"


def _source_samples(options: argparse.Namespace, base: _Base, packed: bool) -> _Read:
    """The samples of a folder of data, or of a file of another trainer.

    With the config of a model with joint attention, a sample's length counts its condition.
    """
    from alload_jax.data.condition import conditions_for, samples_for
    from alload_jax.data.manifest_columns import read_paths
    from alload_jax.data.sources.opening import open_source

    if options.vae_stride:
        raise InputError(
            f"alload plan: --vae-stride does not apply to the latents in {options.manifest}; leave "
            "it out, or set data.source.vae_stride in --config"
        )
    source = open_source(options.manifest, source_config(options.config, "alload plan"))
    manifest, patch_size = source.manifest, options.patch_size or base.patch_size
    samples = manifest.samples(patch_size)
    if base.config is not None and base.config.joint_attention:
        conditions = conditions_for(base.config, manifest)
        samples = samples_for(base.config, manifest, conditions, packed)
    described = f"{options.manifest}, {len(samples):,} samples"
    if base.config is None and manifest.form.parts:  # data of models with joint attention
        described += ", without the tokens of their conditions, which --config counts"
    return samples, described, read_paths(manifest)


def _stored_stride(manifest: str) -> tuple[int, int, int] | None:
    """The VAE stride in the manifest's metadata, if alload wrote the manifest."""
    from alload_jax.data.manifest import manifest_metadata

    stride = manifest_metadata(Path(manifest)).get("vae_stride")
    return tuple(stride) if stride else None
