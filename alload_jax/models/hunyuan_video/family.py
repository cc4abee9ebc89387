"""HunyuanVideo as a model family."""

from typing import Any

from flax import nnx

from alload_jax.errors import InputError
from alload_jax.models.common.named_tensors import Naming, Tensor
from alload_jax.models.families import SamplingDefaults
from alload_jax.models.hunyuan_video import conversion, weight_table
from alload_jax.models.hunyuan_video.config import HunyuanVideoConfig
from alload_jax.models.hunyuan_video.partition import PARTITION_RULES
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoTransformer
from alload_jax.models.transformer_family import TransformerFamily


class HunyuanVideoFamily(TransformerFamily):
    """HunyuanVideo 1.5's models for text and images to video; see `Family`."""

    name = "hunyuan_video"
    config = HunyuanVideoConfig
    partition_rules = PARTITION_RULES
    folder_classes = (conversion.DIFFUSERS_CLASS,)
    namings = ("diffusers",)
    lora_targets = (r"^blocks/(video|condition)/(query|key|value|out|feed_forward)(/|$)",)

    def build(self, config: HunyuanVideoConfig, rngs: nnx.Rngs) -> HunyuanVideoTransformer:
        """See `Family.build`."""
        return HunyuanVideoTransformer(config, rngs=rngs)

    def sampling_defaults(self, config: HunyuanVideoConfig) -> SamplingDefaults:
        """See `Family.sampling_defaults`; guidance and shift are those of the 720p models."""
        if config.latent_channels in (1, 3):
            return SamplingDefaults(6.0, 1.0, (1, 1, 1))
        return SamplingDefaults(6.0, 9.0, (4, 16, 16), 24.0)

    def tensors(self, config: HunyuanVideoConfig, naming: Naming) -> list[Tensor]:
        """See `Family.tensors`; only diffusers' names are known."""
        if naming != "diffusers":
            raise InputError(
                "the names of HunyuanVideo's own repository are not known; choose diffusers'"
            )
        return weight_table.tensors(config)

    def read_fields(self, fields: dict[str, Any]) -> HunyuanVideoConfig:
        """See `Family.read_fields`."""
        return conversion.read_fields(fields)

    def export_fields(self, config: HunyuanVideoConfig) -> dict[str, Any]:
        """See `Family.export_fields`."""
        return conversion.export_fields(config)


FAMILY = HunyuanVideoFamily()
