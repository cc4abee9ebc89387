"""LayerNorm-Modulate: LayerNorm(x)·(1 + scale) + shift, alone and after a gated residual sum."""

from pallas_kernels.layernorm_modulate.api import (
    Segmentation,
    layernorm_modulate,
    residual_layernorm_modulate,
    segmentation,
)
from pallas_kernels.layernorm_modulate.implementations import (
    FusedImplementation,
    implementation_names,
    register_implementation,
    unregister_implementation,
)
from pallas_kernels.layernorm_modulate.operands import NormImplementation

__all__ = [
    "FusedImplementation",
    "NormImplementation",
    "Segmentation",
    "implementation_names",
    "layernorm_modulate",
    "register_implementation",
    "residual_layernorm_modulate",
    "segmentation",
    "unregister_implementation",
]
