"""The cost model of `alload plan`, from flags and a config."""

import argparse
import dataclasses
from typing import Any

from alload_jax.commands.plan_base import PlanBase
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
from alload_jax.planning.remat import AUTO_REMAT, UNRESOLVED, choose_remat, in_words
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.sparse_cost import SparseLayers, with_layers

_DEFAULT_MODEL, _DEFAULT_DEVICE, _DEFAULT_DENSITY = "wan2.1-1.3b", "h200", 0.1


def device_packs(options: argparse.Namespace, fields: dict[str, Any]) -> bool:
    """Whether the device runs attention on packed rows; True for unknown devices."""
    name = options.device
    if name is None and fields.get("cost_model"):
        name = read_cost_file(fields["cost_model"]).device
    name = name or _DEFAULT_DEVICE
    known = [each for short, each in DEVICES.items() if name in (short, each.name)]
    return all(device.packs for device in known)


def costs_with_layers(
    options: argparse.Namespace,
    fields: dict[str, Any],
    base: PlanBase,
    trained: Trained,
    samples: Samples,
) -> tuple[CostFile, str]:
    """The cost model for layers of which some are sparse, and a description of its source.

    Args:
      options: the flags.
      fields: of `PlanningConfig`, as far as they are known.
      base: the config.
      trained: its trained parameters, see `planned_parameters`.
      samples: the data set.
    """
    costs, source = _costs(options, fields, base, trained, samples)
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


def _layers(options: argparse.Namespace, base: PlanBase) -> SparseLayers | None:
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
    options: argparse.Namespace,
    fields: dict[str, Any],
    base: PlanBase,
    trained: Trained,
    samples: Samples,
) -> tuple[CostFile, str]:
    """As `costs_with_layers`, without sparse layers."""
    if fields.get("cost_model"):
        costs = read_cost_file(fields["cost_model"])
        _refuse_other_device(options, fields, costs)
        made_on = f", {costs.origin or 'given'} for {costs.device}" if costs.device else ""
        return costs, f"{fields['cost_model']}{made_on}"
    analytic = options.model or options.device or options.trained_parameters
    if fields.get("p") and not analytic:
        return CostFile(power=PowerCost(fields["p"])), f"B·S^p with p = {fields['p']:g}, no unit"
    device = device_named(options.device or _DEFAULT_DEVICE)
    architecture, model = planned_architecture(options, base)
    remat = _remat(options, fields, base, architecture, trained, samples)
    costs = analytic_costs(architecture, device, remat, shards=options.shards, trained=trained)
    if base.remat == AUTO_REMAT:
        model += f", model.remat auto: {in_words(policies_of(remat))},"
    if trained.parameters:
        model += f", {trained.parameters:,} of {architecture.parameters():,} parameters trained,"
    return costs, f"analytic, not measured: {model} on {device.name}; see `alload calibrate`"


def _remat(
    options: argparse.Namespace,
    fields: dict[str, Any],
    base: PlanBase,
    architecture: Architecture,
    trained: Trained,
    samples: Samples,
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
    if PlanningConfig(**fields).single_gradient:
        of_config = trained is base.trained
        trained = base.single if of_config else dataclasses.replace(trained, accumulates=False)
    rows = samples.most_within(m_mem)
    if (most := fields.get("max_segments")) is not None:
        rows = min(rows, most)
    choice = choose_remat(
        architecture,
        layers,
        device,
        m_mem,
        budget,
        shards=options.shards,
        rows=rows,
        trained=trained,
    )
    return choice.policies


def planned_architecture(options: argparse.Namespace, base: PlanBase) -> tuple[Architecture, str]:
    """The model's architecture and its name."""
    if options.model or base.model is None:
        name = options.model or _DEFAULT_MODEL
        return architecture_named(name), name
    return from_fields(base.model), options.config


def planned_parameters(
    options: argparse.Namespace, fields: dict[str, Any], base: PlanBase
) -> Trained:
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


def m_mem_of(options: argparse.Namespace, costs: CostFile, shortest: int) -> int | None:
    """M_mem in tokens: what --memory-gb holds of sequences of `shortest` tokens, or the costs'."""
    if options.memory_gb is not None:
        if costs.memory is None:
            raise InputError(
                "alload plan: --memory-gb needs a cost model with memory coefficients; give --m-mem"
            )
        return costs.memory.max_tokens(options.memory_gb * 1e9, options.margin, shortest)
    return costs.m_mem
