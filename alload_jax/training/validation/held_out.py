"""The samples that a run trains on, and those that it is validated on."""

from typing import NamedTuple

import numpy as np

from alload_jax.data.condition import Conditions, conditions_for
from alload_jax.data.held_out import is_held_out
from alload_jax.data.manifest import Manifest
from alload_jax.data.sources.opening import open_source
from alload_jax.data.sources.source import SampleSource, SourceConfig, Subset
from alload_jax.distributed.cluster import first_process
from alload_jax.errors import InputError, print_stderr
from alload_jax.models.common.config import ModelConfig
from alload_jax.training.validation.config import ValidationConfig


class HeldOut(NamedTuple):
    """Held-out samples as a model takes them.

    Attributes:
      source: the samples.
      conditions: shape and dtype of their conditions, padded as those of training if attention
        includes the padding.
    """

    source: SampleSource
    conditions: Conditions

    @classmethod
    def of(
        cls, source: SampleSource, model: ModelConfig, trained: Conditions, data: Manifest
    ) -> "HeldOut":
        """Checks that held-out samples are of the kind of those of training.

        Args:
          source: the held-out samples.
          model: config of the model.
          trained: conditions of training.
          data: the samples of `data.folder`.

        Raises:
          InputError: they do not fit the model, or differ in kind.
        """
        held_out = source.manifest
        held_out.require(model.latent_channels, model.patch_size)
        if held_out.vae_stride != data.vae_stride:
            raise InputError(
                f"{held_out.path}: the latents have a stride of {held_out.vae_stride}, but those "
                f"of data.folder {data.vae_stride}; prepare both with one VAE"
            )
        found = conditions_for(model, held_out)
        if found.parts:  # whose padding no sample sees
            return cls(source, found)
        if found.length > trained.length:
            raise InputError(
                f"{held_out.path}: a sample has {found.length} classes, but samples of "
                f"data.folder have at most {trained.length}; leave it out of validation.folder"
            )
        if found.image_shape != trained.image_shape:
            raise InputError(
                f"{held_out.path}: image embeddings are {found.image_shape}, but those of "
                f"data.folder {trained.image_shape}; prepare both alike"
            )
        return cls(source, trained)

    def identity(self) -> dict[str, str]:
        """What tells these samples from others, as JSON values."""
        return {"validation": self.source.manifest.digest()}


def split_data(
    config: ValidationConfig,
    source: SampleSource,
    read_by: SourceConfig | None,
    excluded: frozenset[int],
) -> tuple[SampleSource, SampleSource | None, frozenset[int]]:
    """Holds out samples of the training data, or opens those of another folder.

    Args:
      config: which samples are held out.
      source: the samples of `data.folder`.
      read_by: `data.source`.
      excluded: numbers of the samples of `data.folder` to leave out, on both sides.

    Returns:
      The samples of the plan, those of the validation (None without one), and the numbers of the
      samples of the plan that are left out.

    Raises:
      InputError: no samples are left on a side, or the other folder cannot be read.
    """
    if config.folder is not None:
        held_out_source = _opened(config, read_by)
        _warn_of_overlap(source.manifest, held_out_source.manifest)
        return source, held_out_source, excluded
    if config.share is None:
        return source, None, excluded
    held_out = is_held_out(source.manifest, config.share)
    left_out = np.zeros_like(held_out)
    left_out[list(excluded)] = True
    training, kept = np.flatnonzero(~held_out), np.flatnonzero(held_out & ~left_out)
    sides = {"to train on": training[~left_out[training]], "to validate on": kept}
    for purpose, numbers in sides.items():
        if not len(numbers):
            raise InputError(
                f"data.exclude leaves no sample {purpose} with validation.share {config.share}; "
                "remove some of its lines, change the share, or give validation.folder"
            )
    among_training = np.flatnonzero(left_out[training]).tolist()
    return Subset(source, training), Subset(source, kept), frozenset(map(int, among_training))


def _warn_of_overlap(training: Manifest, held_out: Manifest) -> None:
    """Says how many samples of the validation have the content of samples to train on."""
    if not (training.tells_content and held_out.tells_content):
        return
    same = np.isin(held_out.checksum, training.checksum)
    if (count := int(same.sum())) and first_process():
        print_stderr(
            f"warning: {count:,} of {len(held_out):,} samples of validation.folder are also "
            "trained on; leave them out of one of the folders"
        )


def _opened(config: ValidationConfig, read_by: SourceConfig | None) -> SampleSource:
    assert config.folder is not None
    try:
        source = open_source(config.folder, config.source or read_by)
        source.require_settings()
    except InputError as error:
        words = str(error).replace("data.folder", "validation.folder")
        raise InputError(f"validation.folder: {words}") from error
    return source
