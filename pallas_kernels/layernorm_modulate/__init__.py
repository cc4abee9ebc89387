"""LayerNorm-Modulate: y = LayerNorm(x)·(1 + scale) + shift."""

from pallas_kernels.layernorm_modulate.api import layernorm_modulate

__all__ = ["layernorm_modulate"]
