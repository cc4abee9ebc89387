"""RMSNorm of queries or keys with their rotary embedding, in one pass over memory."""

from pallas_kernels.rms_norm_rotary.api import rms_norm_rotary

__all__ = ["rms_norm_rotary"]
