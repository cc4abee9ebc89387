"""LayerNorm-Modulate: LayerNorm(x)·(1 + scale) + shift, alone and after a gated residual sum."""

from pallas_kernels.layernorm_modulate.api import (
    Implementation,
    layernorm_modulate,
    residual_layernorm_modulate,
)
from pallas_kernels.layernorm_modulate.pieces import Segmentation, segmentation

__all__ = [
    "Implementation",
    "Segmentation",
    "layernorm_modulate",
    "residual_layernorm_modulate",
    "segmentation",
]
