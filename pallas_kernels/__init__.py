"""GPU kernels that diffusion transformers need beside XLA's own fusions."""

from pallas_kernels.layernorm_modulate import (
    Segmentation,
    layernorm_modulate,
    residual_layernorm_modulate,
    segmentation,
)

__all__ = ["Segmentation", "layernorm_modulate", "residual_layernorm_modulate", "segmentation"]
