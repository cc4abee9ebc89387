"""The config fields that all model families share."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from typing_extensions import override

from alload_jax.errors import InputError, require_positive
from alload_jax.models.common.attention import AttentionImplementation
from alload_jax.models.common.lora import LoraConfig
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.planning.remat import AUTO_REMAT, UNRESOLVED, RematChoice, RematPolicy
from pallas_kernels.layernorm_modulate import implementation_names as norm_implementations

_LARGEST = 2**20
"""Of a width or a number of anything of a model."""


@dataclass(frozen=True)
class TextConfig:
    """Condition of precomputed text embeddings, such as umT5-xxl's for Wan.

    Attributes:
      dim: width of the embeddings.
      length: number of tokens; shorter texts are padded with zeros, and attention includes the
        padding, as in Wan.
    """

    dim: int = 4096
    length: int = 512

    def __post_init__(self) -> None:
        require_positive("model.text.", self, "dim", "length")


@dataclass(frozen=True)
class ImageConfig:
    """Second condition of precomputed image embeddings, with separate keys and values.

    Attributes:
      dim: width of the embeddings (CLIP ViT-H's 1280 for Wan 2.1's image-to-video models).
      positions: number of tokens with a learned position (514 for first and last frame); null for
        none.
    """

    dim: int = 1280
    positions: int | None = None

    def __post_init__(self) -> None:
        require_positive("model.image.", self, "dim", "positions")


class ConditionPart(NamedTuple):
    """One kind of condition tokens of which samples have different numbers.

    Attributes:
      name: in batches, in records and in files of embeddings; `text` and `image` are those of the
        config.
      width: width of the embeddings.
      length: maximum number of tokens of a sample; a sample may have none.
      dropped: whether the null condition has none of these tokens; else it keeps them.
      required: whether all data must have them.
    """

    name: str
    width: int
    length: int
    dropped: bool = True
    required: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """The fields that the config of every family has; each family's config adds more, all hashable.

    Attributes:
      family: name of the model family.
      in_channels: number of channels of the input: noisy latents, and behind them what an
        image-to-video model is given.
      out_channels: number of channels of the latents and of the prediction; null for `in_channels`.
      patch_size: (frames, height, width) of the latents in one token.
      num_classes: number of classes of the condition; ignored if the condition is text.
      text: condition of text embeddings; null for classes.
      image: condition of image embeddings beside the text; null for none.
      dtype: dtype of the computation; parameters are float32. `auto` is bfloat16 on a GPU, else
        float32.
      matmul: what linear layers of blocks multiply, where the computation is in bfloat16: `float8`
        rounds both sides of each product (NVIDIA GPUs from Ada on), `dtype` neither; `auto` is
        float8 in layers where it was measured as faster.
      attention: implementation of attention; `auto` is cuDNN where it can run, and Triton for
        packed rows before NVIDIA Hopper.
      remat: activations that blocks keep for the backward pass. `auto` chooses for each of them
        what fits the memory of a device.
      remat_layers: policies that repeat over the blocks, in place of `remat`, which is then left
        out; their number divides that of the blocks. Empty for the same in all.
      memory_budget: GB of a device's memory that a step may take: `remat: auto` fills it, and what
        cannot fit is refused; null for what JAX may use.
      sparse_attention: self-attention that becomes sparse; null for dense.
      lora: adapters, which are then what is trained unless `parameters` says otherwise; null for
        none.
    """

    family: str = ""
    in_channels: int = 1
    out_channels: int | None = None
    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_classes: int = 10
    text: TextConfig | None = None
    image: ImageConfig | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    matmul: Literal["dtype", "float8", "auto"] = "dtype"
    attention: AttentionImplementation = "auto"
    remat: RematChoice = "none"
    remat_layers: tuple[RematPolicy, ...] = ()
    memory_budget: float | None = None
    sparse_attention: SparseAttentionConfig | None = None
    lora: LoraConfig | None = None

    arithmetic_fields: ClassVar[tuple[str, ...]] = (
        "dtype",
        "matmul",
        "attention",
        "remat",
        "remat_layers",
        "memory_budget",
    )
    """Fields that do not affect the parameters."""

    later_fields: ClassVar[dict[str, object]] = {}
    """Fields that the family's first checkpoints lack, and the values that they imply."""

    joint_attention: ClassVar[bool] = False
    """Whether the condition's tokens stand in the rows beside those of the latents. A sample's
    length in tokens then includes both."""

    stacks: ClassVar[tuple[str, ...]] = ("num_layers",)
    """Fields that count blocks, of families which have any."""

    given_optional: ClassVar[bool] = False
    """Whether data may lack given frames and embeddings of images; they are then zeros and none."""

    def __post_init__(self) -> None:
        self._require_positive("in_channels", "num_classes")
        require_positive("model.", self, "out_channels")
        if min(self.patch_size) < 1:
            raise InputError(f"model.patch_size is {self.patch_size}; each must be at least 1")
        if self.remat_layers and self.remat != "none":
            raise InputError(
                f"model.remat is {self.remat} and model.remat_layers {list(self.remat_layers)}; "
                "give one: set model.remat to none, or model.remat_layers to []"
            )
        if self.memory_budget is not None and not 0 < self.memory_budget < math.inf:
            raise InputError(f"model.memory_budget is {self.memory_budget} GB; it must be above 0")

    def _require_positive(self, *names: str) -> None:
        require_positive("model.", self, *names, most=_LARGEST)

    def require_divisible(self, tensor: int) -> None:
        """Checks that so many devices (of `mesh.tensor`) can share the work of one rank.

        Families that split heads or width over devices override this method.

        Raises:
          InputError: the devices cannot share the work.
        """

    def condition_parts(self) -> tuple[ConditionPart, ...]:
        """Returns the kinds of condition tokens of a model whose samples differ in their number.

        Such a model gets `ConditionTokens` by name as its condition. Empty, as by default: samples
        have equal numbers of condition tokens, in one array.
        """
        return ()

    def with_layers(self, layers: int) -> Self:
        """Returns the config with so many blocks of the first of `stacks`, others in proportion."""
        counts = {name: getattr(self, name) for name in self.stacks}
        first = counts[self.stacks[0]]
        fewer: dict[str, Any] = {k: max(1, n * layers // first) for k, n in counts.items()}
        return replace(self, **fewer)

    def with_guidance(self, guidance: float) -> Self:
        """Returns the config with which models draw that take a scale of guidance as an input."""
        return self

    def architecture(self) -> dict[str, Any]:
        """Returns the fields that determine the parameters, as JSON values."""
        fields = {k: v for k, v in asdict(self).items() if k not in self.arithmetic_fields}
        if self.sparse_attention is not None:
            fields["sparse_attention"] = self.sparse_attention.identity()
        if fields.pop("lora") is not None and self.lora is not None:
            fields["lora"] = self.lora.identity()
        later = self.later_fields
        fields = {k: v for k, v in fields.items() if k not in later or v != later[k]}
        return fields | {"patch_size": list(self.patch_size)}

    def step_fields(self) -> dict[str, Any]:
        """Returns the fields that determine the cost of a step, as JSON values.

        A cost model is valid only for equal fields.
        """
        alone = {"remat", "remat_layers", "memory_budget"}
        others = (name for name in self.arithmetic_fields if name not in alone)
        fields = self.architecture() | {name: getattr(self, name) for name in others}
        # Policies that are chosen for a device's memory may differ from those that were measured.
        if self.remat != AUTO_REMAT:
            remat = self.policies
            fields["remat"] = remat[0] if len(remat) == 1 else list(remat)
        return fields | {"dtype": str(self.compute_dtype)}

    @property
    def policies(self) -> tuple[RematPolicy, ...]:
        """The rematerialisation policies that repeat over the blocks."""
        if self.remat_layers:
            return self.remat_layers
        return (UNRESOLVED if self.remat == AUTO_REMAT else self.remat,)

    @property
    def latent_channels(self) -> int:
        """Number of channels of the prediction."""
        return self.in_channels if self.out_channels is None else self.out_channels

    @property
    def given_channels(self) -> int:
        """Number of input channels behind the noisy latents; 0 but for image-to-video models."""
        return max(0, self.in_channels - self.latent_channels)

    @property
    def predicts_velocity(self) -> bool:
        """Whether zeros from the last layer are a velocity of zero."""
        return True

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of activations on this process's default backend."""
        if self.dtype == "auto":
            return jnp.dtype("bfloat16" if jax.default_backend() == "gpu" else "float32")
        return jnp.dtype(self.dtype)


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """The fields of families whose model is a stack of equal blocks with modulated norms.

    Attributes:
      dim: width of the residual streams.
      ffn_dim: width of the feed-forward layers.
      num_heads: number of attention heads; `dim / num_heads` must be even.
      num_layers: number of transformer blocks.
      residual_dtype: dtype of the residual streams. `compute` is the dtype of the computation, as
        in diffusers; `float32`, as in Wan's repository, is more exact and doubles activation
        memory.
      norm: implementation of the modulated norms: `triton` (our kernels, GPU only), `mosaic` (with
        another backward, Hopper GPUs only), `xla`, the name of a registered one, or `auto`, the
        one that was measured as faster here. RMSNorm of
        queries and keys with their rotation, and GELU with the bias before it, are XLA's with
        `xla`, and `auto` otherwise.
      scan_layers: whether the blocks are compiled as one loop. Without one a step copies less and
        takes longer to compile.
    """

    dim: int = 128
    ffn_dim: int = 512
    num_heads: int = 4
    num_layers: int = 4
    residual_dtype: Literal["compute", "float32"] = "compute"
    norm: str = "auto"
    scan_layers: bool = True

    arithmetic_fields: ClassVar[tuple[str, ...]] = (
        *ModelConfig.arithmetic_fields,
        "norm",
        "residual_dtype",
        "scan_layers",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("dim", "ffn_dim", "num_heads", *self.stacks)
        if self.dim % self.num_heads or self.head_dim % 2:
            raise InputError(
                f"model.dim is {self.dim} with model.num_heads {self.num_heads}; "
                "dim / num_heads must be a whole, even number"
            )
        if self.norm not in norm_implementations():
            names = ", ".join(norm_implementations())
            raise InputError(f"model.norm is {self.norm!r}; choose one of {names}")
        for name in self.stacks if self.remat_layers else ():
            if getattr(self, name) % len(self.remat_layers):
                raise InputError(
                    f"model.remat_layers has {len(self.remat_layers)} policies, which does not "
                    f"divide model.{name} {getattr(self, name)}; give a number that does"
                )
        sparse = self.sparse_attention
        if sparse and sparse.forced is not None and len(sparse.forced) != self.num_layers:
            raise InputError(
                f"model.sparse_attention.forced is {len(sparse.forced)} densities; give "
                f"{self.num_layers}, one for each of model.num_layers"
            )

    @override
    def require_divisible(self, tensor: int) -> None:
        """These families split their heads."""
        if self.num_heads % tensor:
            raise InputError(
                f"mesh.tensor is {tensor}, which does not divide model.num_heads "
                f"{self.num_heads}; choose a divisor"
            )

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.dim // self.num_heads

    @property
    def stream_dtype(self) -> jnp.dtype:
        """The dtype of the residual streams."""
        return jnp.dtype("float32") if self.residual_dtype == "float32" else self.compute_dtype
