"""Reads the inputs of `alload plan` from flags and a config: samples, settings, cost model."""

import argparse
import dataclasses
from typing import NamedTuple

from alload_jax.commands.plan_base import read_base
from alload_jax.commands.plan_costs import (
    costs_with_layers,
    device_packs,
    m_mem_of,
    planned_architecture,
    planned_parameters,
)
from alload_jax.commands.plan_samples import planned_samples, repeated_samples
from alload_jax.commands.plan_weights import described, weigh, weights_of_flags
from alload_jax.data.weights import SourceShare
from alload_jax.planning.analytic import Remat, Trained
from alload_jax.planning.architectures.architecture import Architecture
from alload_jax.planning.cost import CostFile
from alload_jax.planning.geometry import Geometry
from alload_jax.planning.policies.registry import AUTO, PORTFOLIO, candidates, find_policy
from alload_jax.planning.portfolio import ONE_EPOCH, RunLength
from alload_jax.planning.remat import AUTO_REMAT
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig


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
      packs: whether the device runs packed rows.
      length: of the run.
      warning: what is odd about the data; "" for nothing.
    """

    samples: Samples
    source: str
    planning: PlanningConfig
    costs: CostFile
    costs_source: str
    seed: int
    shares: tuple[SourceShare, ...] = ()
    bucketed: Samples | None = None
    packs: bool = True
    length: RunLength = ONE_EPOCH
    warning: str = ""


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


def plan_inputs(options: argparse.Namespace) -> PlanInputs:
    """Reads the config, if given, and overrides it by the flags.

    Raises:
      InputError: a value of the config or of a flag is invalid.
    """
    base = read_base(options.config)
    given = {f.name: getattr(options, f.name, None) for f in dataclasses.fields(PlanningConfig)}
    fields = base.planning | {k: v for k, v in given.items() if v is not None}
    fields.pop("ranks", None)
    if options.compare:
        # This policy has every setting; each case takes those of its own policy.
        fields["policy"] = PORTFOLIO[0]
    trained = planned_parameters(options, fields, base)
    packs = base.packs and device_packs(options, fields)
    policy = fields.get("policy", AUTO)
    packed = policy == AUTO or find_policy(policy).packed
    samples, data, paths = planned_samples(options, base, packed)
    repeated = repeated_samples(samples, paths)
    weights = weights_of_flags(options) or (base.weights if options.manifest else ())
    samples, shares = weigh(samples, weights, paths)
    data += described(shares)
    costs, source = costs_with_layers(options, fields, base, trained, samples)
    policies = candidates(policy)
    if fields.get("m_mem") is None and any("m_mem" in each.required for each in policies):
        fields["m_mem"] = m_mem_of(options, costs, int(samples.seq_len.min()))
    planning = PlanningConfig(**fields)
    if options.config and base.model:
        remat = {} if base.remat == AUTO_REMAT else {"remat": base.remat}
        planning.refuse_foreign_costs(base.model | remat, None)
    seed = base.seed if options.seed is None else options.seed
    bucketed = None
    both = bool(options.compare) or policy == AUTO
    if both and base.config is not None and base.config.joint_attention:
        bucketed, _ = weigh(planned_samples(options, base, packed=False)[0], weights, paths)
    length = RunLength(options.epochs) if options.epochs else base.length
    return PlanInputs(
        *(samples, data, planning, costs, source, seed, shares, bucketed, packs, length, repeated)
    )


def architecture_of(options: argparse.Namespace) -> PlannedModel:
    """The model of the flags, without data.

    Raises:
      InputError: the config is invalid, or its model has no cost model.
    """
    base = read_base(options.config)
    architecture, name = planned_architecture(options, base)
    trained, remat = planned_parameters(options, {}, base), base.remat if options.config else None
    stride, condition = Geometry().vae_stride, 0
    if (model := base.config) is not None:
        from alload_jax.models.families import family_of

        stride = family_of(model).sampling_defaults(model).vae_stride
        if model.joint_attention:
            condition = sum(part.length for part in model.condition_parts())
    return PlannedModel(architecture, name, base.patch_size, trained, remat, stride, condition)
