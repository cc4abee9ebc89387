"""The samples of `alload plan`, from a workload, a manifest or a source of data."""

import argparse
from pathlib import Path

import numpy as np

from alload_jax.commands.plan_base import PlanBase
from alload_jax.commands.source_config import holds_samples, source_config
from alload_jax.errors import InputError
from alload_jax.planning.geometry import Geometry
from alload_jax.planning.samples import Samples, read_sample_paths, read_samples
from alload_jax.planning.workloads import make_workload

ReadSamples = tuple[Samples, str, np.ndarray | None]
"""Samples, a description of the data set, and the paths of the samples if they are recorded."""


def planned_samples(options: argparse.Namespace, base: PlanBase, packed: bool) -> ReadSamples:
    """Reads or makes the samples; `packed` says whether the policy packs rows.

    Raises:
      InputError: not one of --workload and --manifest is given, or the data cannot be read.
    """
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


def repeated_samples(samples: Samples, paths: np.ndarray | None) -> str:
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
        f"{first[keys[row]]} ({paths[row]}); each is planned. Remove what is there twice"
    )


def _is_of_a_store(manifest: str, base: PlanBase) -> bool:
    """Whether a manifest is that of a store, whose conditions the model's lengths include."""
    joint = base.config is not None and base.config.joint_attention
    return joint and Path(manifest).name == "manifest.parquet"


def _source_samples(options: argparse.Namespace, base: PlanBase, packed: bool) -> ReadSamples:
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
