"""Shape and arithmetic of the transformer."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from alload_jax.errors import InputError
from alload_jax.models.common.attention import AttentionImplementation
from alload_jax.models.common.remat import RematPolicy
from pallas_kernels.layernorm_modulate import implementation_names as norm_implementations

_ARITHMETIC = ("dtype", "attention", "norm", "remat", "residual_dtype")
"""Fields that no parameter depends on."""

LATER_FIELDS: dict[str, Any] = {
    "text": None,
    "image": None,
    "out_channels": None,
    "qk_norm": True,
    "cross_norm": True,
}
"""Fields that the first checkpoints did not know, and the value that they meant."""


@dataclass(frozen=True)
class TextConfig:
    """A condition of precomputed text embeddings, such as umT5-xxl's for Wan.

    Attributes:
      dim: width of the embeddings.
      length: tokens; shorter texts are filled with zeros, which are attended to as in Wan.
    """

    dim: int = 4096
    length: int = 512

    def __post_init__(self) -> None:
        for name in ("dim", "length"):
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise InputError(f"model.text.{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class ImageConfig:
    """A second condition of precomputed image embeddings, with keys and values of its own.

    Attributes:
      dim: width of the embeddings (CLIP ViT-H's 1280 for Wan 2.1's image-to-video models).
      positions: tokens that have a learned position (514 for first and last frame); null for none.
    """

    dim: int = 1280
    positions: int | None = None

    def __post_init__(self) -> None:
        for name in ("dim", "positions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"model.image.{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class WanConfig:
    """Shape and arithmetic of the transformer.

    Attributes:
      dim: width of the residual stream.
      ffn_dim: width of the feed-forward layer.
      num_heads: attention heads; `dim / num_heads` must be even.
      num_layers: transformer blocks.
      in_channels: channels of the latents that enter.
      out_channels: channels of what is predicted; null for `in_channels`.
      patch_size: latent (frames, height, width) that make one token.
      num_classes: classes of the condition; without effect where the condition is text.
      text: the condition is text embeddings; null for classes.
      image: a condition of image embeddings beside the text; null for none.
      qk_norm: RMSNorm over the full width of queries and keys.
      cross_norm: an affine LayerNorm before cross-attention.
      freq_dim: size of the timestep's sinusoid.
      eps: of every norm.
      dtype: of the computation; parameters are float32. `auto` is bfloat16 on a GPU, else float32.
      residual_dtype: of the stream between the blocks. `compute` is that of the computation, as in
        diffusers; `float32` is Wan's own code, more exact and with twice the activations to keep.
      attention: implementation of attention; `auto` is cuDNN where it can run.
      norm: implementation of the modulated norms: `triton` (our kernels, GPU only), `xla`, the
        name of one that was registered, or `auto`, whichever was measured as faster on this device.
      remat: what blocks keep for the backward pass.
    """

    dim: int = 128
    ffn_dim: int = 512
    num_heads: int = 4
    num_layers: int = 4
    in_channels: int = 1
    out_channels: int | None = None
    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_classes: int = 10
    text: TextConfig | None = None
    image: ImageConfig | None = None
    qk_norm: bool = True
    cross_norm: bool = True
    freq_dim: int = 256
    eps: float = 1e-6
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    residual_dtype: Literal["compute", "float32"] = "compute"
    attention: AttentionImplementation = "auto"
    norm: str = "auto"
    remat: RematPolicy = "none"

    def __post_init__(self) -> None:
        for name in ("dim", "ffn_dim", "num_heads", "num_layers", "in_channels", "num_classes"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if self.out_channels is not None and self.out_channels < 1:
            raise InputError(f"model.out_channels is {self.out_channels}; it must be at least 1")
        if min(self.patch_size) < 1:
            raise InputError(f"model.patch_size is {self.patch_size}; each must be at least 1")
        if self.dim % self.num_heads or self.dim // self.num_heads % 2:
            raise InputError(
                f"model.dim is {self.dim} with model.num_heads {self.num_heads}; "
                "dim / num_heads must be a whole, even number"
            )
        if self.freq_dim < 2 or self.freq_dim % 2:
            raise InputError(f"model.freq_dim is {self.freq_dim}; it must be even")
        if self.norm not in norm_implementations():
            names = ", ".join(norm_implementations())
            raise InputError(f"model.norm is {self.norm!r}; choose one of {names}")
        if self.image and not self.text:
            raise InputError("model.image is set without model.text; set both, or neither")

    def architecture(self) -> dict[str, Any]:
        """The fields that the parameters depend on, as JSON values."""
        fields = {k: v for k, v in asdict(self).items() if k not in _ARITHMETIC}
        fields = {k: v for k, v in fields.items() if k not in LATER_FIELDS or v != LATER_FIELDS[k]}
        return fields | {"patch_size": list(self.patch_size)}

    def step_fields(self) -> dict[str, Any]:
        """What a step's cost depends on, as JSON values: a cost model must agree with it."""
        fields = self.architecture() | {name: getattr(self, name) for name in _ARITHMETIC}
        return fields | {"dtype": str(self.compute_dtype)}

    @property
    def latent_channels(self) -> int:
        """Channels of what is predicted."""
        return self.in_channels if self.out_channels is None else self.out_channels

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of activations on this process's default backend."""
        if self.dtype == "auto":
            return jnp.dtype("bfloat16" if jax.default_backend() == "gpu" else "float32")
        return jnp.dtype(self.dtype)

    @property
    def stream_dtype(self) -> jnp.dtype:
        """The dtype of the residual stream."""
        return jnp.dtype("float32") if self.residual_dtype == "float32" else self.compute_dtype
