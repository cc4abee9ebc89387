"""Config of Wan's transformer: shape and arithmetic."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from alload_jax.errors import InputError
from alload_jax.models.common.config import TransformerConfig


@dataclass(frozen=True)
class WanConfig(TransformerConfig):
    """Shape and arithmetic of the transformer; `TransformerConfig` has the other fields.

    Attributes:
      family: `wan`.
      qk_norm: whether queries and keys get an RMSNorm over their full width.
      cross_norm: whether an affine LayerNorm precedes cross-attention.
      freq_dim: width of the timestep's sinusoidal embedding.
      eps: epsilon of every norm.
    """

    family: Literal["wan"] = "wan"
    qk_norm: bool = True
    cross_norm: bool = True
    freq_dim: int = 256
    eps: float = 1e-6

    later_fields: ClassVar[dict[str, object]] = {
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
        if self.freq_dim < 2 or self.freq_dim % 2:
            raise InputError(f"model.freq_dim is {self.freq_dim}; it must be even")
        if self.image and not self.text:
            raise InputError("model.image is set without model.text; set both, or neither")
