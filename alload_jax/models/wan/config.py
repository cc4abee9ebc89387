"""Config of Wan's transformer: shape and arithmetic."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from pallas_kernels.layernorm_modulate import implementation_names as norm_implementations


@dataclass(frozen=True)
class WanConfig(ModelConfig):
    """Shape and arithmetic of the transformer; `ModelConfig` has the fields of all families.

    Attributes:
      family: `wan`.
      dim: width of the residual stream.
      ffn_dim: width of the feed-forward layer.
      num_heads: number of attention heads; `dim / num_heads` must be even.
      num_layers: number of transformer blocks.
      qk_norm: whether queries and keys get an RMSNorm over their full width.
      cross_norm: whether an affine LayerNorm precedes cross-attention.
      freq_dim: width of the timestep's sinusoidal embedding.
      eps: epsilon of every norm.
      residual_dtype: dtype of the residual stream. `compute` is the dtype of the computation, as in
         diffusers; `float32`, as in Wan's repository, is more exact and doubles activation memory.
      norm: implementation of the modulated norms: `triton` (our kernels, GPU only), `xla`, the
        name of a registered one, or `auto`, the one that was measured as faster here.
    """

    family: Literal["wan"] = "wan"
    dim: int = 128
    ffn_dim: int = 512
    num_heads: int = 4
    num_layers: int = 4
    qk_norm: bool = True
    cross_norm: bool = True
    freq_dim: int = 256
    eps: float = 1e-6
    residual_dtype: Literal["compute", "float32"] = "compute"
    norm: str = "auto"

    arithmetic_fields: ClassVar[tuple[str, ...]] = (
        *("dtype", "attention", "norm", "remat", "residual_dtype"),
    )
    later_fields: ClassVar[dict[str, Any]] = {
        "family": "wan",
        "text": None,
        "image": None,
        "out_channels": None,
        "qk_norm": True,
        "cross_norm": True,
        "sparse_attention": None,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dim", "ffn_dim", "num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if self.dim % self.num_heads or self.dim // self.num_heads % 2:
            raise InputError(
                f"model.dim is {self.dim} with model.num_heads {self.num_heads}; "
                "dim / num_heads must be a whole, even number"
            )
        if self.norm not in norm_implementations():
            names = ", ".join(norm_implementations())
            raise InputError(f"model.norm is {self.norm!r}; choose one of {names}")
        if self.freq_dim < 2 or self.freq_dim % 2:
            raise InputError(f"model.freq_dim is {self.freq_dim}; it must be even")
        if self.sparse_attention is not None:
            self.sparse_attention.check_layers(self.num_layers)
        if self.image and not self.text:
            raise InputError("model.image is set without model.text; set both, or neither")

    def require_divisible(self, shards: int) -> None:
        """See `ModelConfig.require_divisible`; this family splits its heads."""
        if self.num_heads % shards:
            raise InputError(
                f"mesh.context·mesh.tensor is {shards}, which does not divide model.num_heads "
                f"{self.num_heads}; choose a divisor"
            )

    @property
    def stream_dtype(self) -> jnp.dtype:
        """The dtype of the residual stream."""
        return jnp.dtype("float32") if self.residual_dtype == "float32" else self.compute_dtype
