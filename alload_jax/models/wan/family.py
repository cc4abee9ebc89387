"""Wan as a model family."""

from typing import Any

from flax import nnx

from alload_jax.models.common.named_tensors import Naming, Tensor
from alload_jax.models.families import SamplingDefaults
from alload_jax.models.transformer_family import TransformerFamily
from alload_jax.models.wan import conversion, weight_table
from alload_jax.models.wan.config import WanConfig
from alload_jax.models.wan.partition import PARTITION_RULES
from alload_jax.models.wan.transformer import WanTransformer

_VAE_STRIDES = {1: (1, 1, 1), 3: (1, 1, 1), 48: (4, 16, 16)}
"""VAE strides by number of channels: pixels, and Wan 2.2's VAE; others are of Wan 2.1's VAE."""
_FPS = {48: 24.0}
"""Frames per second of Wan 2.2's 5B model by its number of channels; of the others of latents it is
16."""


class WanFamily(TransformerFamily):
    """Wan 2.1's models, and Wan 2.2's 5B model; see `Family`."""

    name = "wan"
    config = WanConfig
    partition_rules = PARTITION_RULES
    folder_classes = (conversion.DIFFUSERS_CLASS, conversion.ORIGINAL_CLASS)
    # Some released files contain this tensor, which no model uses; diffusers ignores it too.
    ignored_tensors = ("norm_added_q",)
    has_first_frame_timestep = True
    lora_targets = ("^blocks/(self_attention|cross_attention|feed_forward)/",)

    def build(self, config: WanConfig, rngs: nnx.Rngs) -> WanTransformer:
        """See `Family.build`."""
        return WanTransformer(config, rngs=rngs)

    def sampling_defaults(self, config: WanConfig) -> SamplingDefaults:
        """See `Family.sampling_defaults`; guidance and shift are those recommended for 720p."""
        stride = _VAE_STRIDES.get(config.latent_channels, (4, 8, 8))
        fps = None if stride == (1, 1, 1) else _FPS.get(config.latent_channels, 16.0)
        return SamplingDefaults(5.0, 5.0, stride, fps)

    def tensors(self, config: WanConfig, naming: Naming) -> list[Tensor]:
        """See `Family.tensors`."""
        return weight_table.tensors(config, naming)

    def naming_of(self, keys: set[str]) -> Naming:
        """See `Family.naming_of`."""
        return weight_table.naming_of(keys)

    def read_fields(self, fields: dict[str, Any]) -> WanConfig:
        """See `Family.read_fields`."""
        return conversion.read_fields(fields)

    def export_fields(self, config: WanConfig) -> dict[str, Any]:
        """See `Family.export_fields`."""
        return conversion.export_fields(config)


FAMILY = WanFamily()
