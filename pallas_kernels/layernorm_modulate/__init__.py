"""LayerNorm-Modulate: LayerNorm(x)·(1 + scale) + shift, alone and after a gated residual sum."""

from pallas_kernels.layernorm_modulate.api import (
    Implementation,
    layernorm_modulate,
    residual_layernorm_modulate,
)

__all__ = ["Implementation", "layernorm_modulate", "residual_layernorm_modulate"]
