"""GPU kernels that diffusion transformers need beside XLA's own fusions."""

from pallas_kernels.layernorm_modulate import layernorm_modulate, residual_layernorm_modulate

__all__ = ["layernorm_modulate", "residual_layernorm_modulate"]
