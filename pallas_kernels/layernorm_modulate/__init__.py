"""LayerNorm-Modulate: LayerNorm(x)·(1 + scale) + shift, alone and after a gated residual sum."""

from pallas_kernels.layernorm_modulate.api import layernorm_modulate, residual_layernorm_modulate
from pallas_kernels.layernorm_modulate.differentiable import FusedImplementation
from pallas_kernels.layernorm_modulate.implementation import Implementation
from pallas_kernels.layernorm_modulate.implementations import (
    implementation_names,
    register_implementation,
    unregister_implementation,
)
from pallas_kernels.layernorm_modulate.segmentation import Segmentation, segmentation

__all__ = [
    "FusedImplementation",
    "Implementation",
    "Segmentation",
    "implementation_names",
    "layernorm_modulate",
    "register_implementation",
    "residual_layernorm_modulate",
    "segmentation",
    "unregister_implementation",
]
