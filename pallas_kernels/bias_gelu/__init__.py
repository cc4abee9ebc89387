"""A bias and GELU, in one pass over memory; backward with the bias's gradient in the same pass."""

from pallas_kernels.bias_gelu.api import bias_gelu, bias_gelu_then

__all__ = ["bias_gelu", "bias_gelu_then"]
