"""GPU kernels that diffusion transformers need beside XLA's own fusions."""

from pallas_kernels.bias_gelu import bias_gelu, bias_gelu_then
from pallas_kernels.block_sparse_attention import BlockLists, block_sparse_attention
from pallas_kernels.layernorm_modulate import (
    Segmentation,
    layernorm_modulate,
    residual_layernorm_modulate,
    segmentation,
)
from pallas_kernels.rms_norm_rotary import rms_norm_rotary
from pallas_kernels.row_choice import choose_rows

__all__ = [
    "BlockLists",
    "Segmentation",
    "bias_gelu",
    "bias_gelu_then",
    "block_sparse_attention",
    "choose_rows",
    "layernorm_modulate",
    "residual_layernorm_modulate",
    "rms_norm_rotary",
    "segmentation",
]
