"""A family's architecture, from which costs are computed: its interface, parts and registry."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, get_args

import numpy as np
from typing_extensions import override

from alload_jax.errors import InputError
from alload_jax.registry import Registry

DEFAULT_FAMILY = "wan"
"""Family of fields that do not name one."""


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of a forward pass over one sequence of S tokens; a multiply-add counts as two.

    Attributes:
      matmul_per_token: FLOPs of matrix products per token.
      matmul_per_sequence: FLOPs of matrix products that do not depend on S, such as those on the
        tokens of the condition.
      attention_per_pair: FLOPs of attention for each of the S² pairs of tokens.
      attention_per_token: FLOPs of attention per token that do not depend on S, such as those with
        the tokens of the condition.
      attention_per_sequence: FLOPs of attention that do not depend on S.
      feed_forward_output: those of `matmul_per_token` that are the last product of feed-forward
        layers.
    """

    matmul_per_token: float
    matmul_per_sequence: float
    attention_per_pair: float
    attention_per_token: float = 0.0
    attention_per_sequence: float = 0.0
    feed_forward_output: float = 0.0

    def of(self, seq_len: int) -> float:
        """FLOPs of one sequence of `seq_len` tokens."""
        per_sequence = self.matmul_per_sequence + self.attention_per_sequence
        per_token = self.matmul_per_token + self.attention_per_token
        return per_sequence + per_token * seq_len + self.attention_per_pair * float(seq_len) ** 2


@dataclass(frozen=True)
class ActivationCounts:
    """Activations of a training step for each token of latents, in values, not bytes.

    Attributes:
      forward_traffic, backward_traffic: values read and written outside of matrix products and
        attention.
      working_set: peak of live values during the backward pass of one block.
      split_exchange: values sent between devices in one pass over a split sample.
      condition: peak of live values of each sample's condition (per sample, not per token).
      adapters: live values beside the working set where adapters are trained.
      once_traffic: of the forward traffic, what the backward pass does not repeat apart where the
        outputs of feed-forward layers are kept.
      norms_traffic: of the forward traffic, what it does not repeat where the outputs of norms are
        kept.
    """

    forward_traffic: float
    backward_traffic: float
    working_set: float
    split_exchange: float
    condition: float = 0.0
    adapters: float = 0.0
    once_traffic: float = 0.0
    norms_traffic: float = 0.0


class Architecture(Protocol):
    """The shape of a model. A frozen dataclass that names this class as its base."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The architecture that fields describe, as `fields` gives them.

        Raises:
          InputError: a field is missing or wrong, or the model has no cost model.
        """
        ...

    def fields(self) -> dict[str, Any]:
        """The architecture as JSON values; `family` names it, except for Wan's."""
        ...

    def parameters(self) -> int:
        """Parameters of the model, exactly."""
        ...

    def flops(self) -> ForwardFlops:
        """FLOPs of a forward pass."""
        ...

    def activations(self) -> ActivationCounts:
        """Activations that a step moves and keeps."""
        ...

    def kept_activations(self, remat: str) -> float:
        """Values per token that all blocks keep for the backward pass, including their inputs.

        Args:
          remat: a rematerialisation policy, as `model.remat`.
        """
        ...

    def kept_condition(self, remat: str) -> float:
        """Values of each sample's condition that all blocks keep for the backward pass.

        Args:
          remat: as in `kept_activations`.
        """
        return 0.0

    def kernels(self) -> int:
        """Approximate number of kernels of a forward pass."""
        ...

    def forward_flops(self, seq_len: int) -> float:
        """FLOPs of a forward pass on one sample of `seq_len` tokens."""
        return self.flops().of(seq_len)

    def step_flops(self, seq_len: np.ndarray) -> float:
        """FLOPs of a training step on samples of these lengths: three times those of the forward.

        Recomputation by rematerialisation does not count.

        Args:
          seq_len: [N] integers.
        """
        lengths, counts = np.unique(seq_len, return_counts=True)
        each = (self.forward_flops(int(length)) for length in lengths)
        return 3.0 * sum(n * flops for n, flops in zip(counts.tolist(), each, strict=True))


Tensors = tuple[int, int]
"""Numbers of tensors of S × dim and of S × ffn_dim."""


@dataclass(frozen=True)
class BlockTensors:
    """What a block reads, writes and keeps for each token of S, in tensors.

    Attributes:
      kernels: kernels of a block's forward pass.
      forward_traffic, backward_traffic: read and written outside matrix products and attention.
      once_traffic: of the forward's, what is not repeated apart where the outputs of feed-forward
        layers are kept.
      norms_traffic: of the forward's, what is not repeated where the outputs of norms are kept.
      working_set: peak of live ones in the backward pass of one block.
      adapters: live ones beside it where adapters are trained.
      kept: by rematerialisation policy, those that every block keeps, including its input.
      exchanged: sent between devices in one pass over a split sample.
    """

    kernels: int
    forward_traffic: Tensors
    backward_traffic: Tensors
    once_traffic: Tensors
    norms_traffic: Tensors
    working_set: Tensors
    adapters: Tensors
    kept: Mapping[str, Tensors]
    exchanged: Tensors


@dataclass(frozen=True)
class BlockArchitecture(Architecture):
    """A transformer of equal blocks. A family's architecture adds its fields and its own counts.

    Attributes:
      dim: width of the residual stream, or of each of several.
      ffn_dim: width of the feed-forward layers.
      num_heads: attention heads.
      num_layers: transformer blocks.
      in_channels: channels of the input latents.
      out_channels: channels of the prediction; None for `in_channels`.
      patch_size: latent (frames, height, width) that make one token.
      num_classes: classes, where the condition is classes.
      tensors: counts of a block.
      family: the family's name.
      counted: fields that must be whole numbers.
      sections: sections of the model's config and their keys; the field of text's length is
        `text_length`, None where there is no text.
    """

    dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int
    in_channels: int = 16
    out_channels: int | None = None
    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_classes: int = 10

    tensors: ClassVar[BlockTensors]
    family: ClassVar[str] = DEFAULT_FAMILY
    counted: ClassVar[tuple[str, ...]] = ("dim", "ffn_dim", "num_heads", "num_layers")
    sections: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @classmethod
    @override
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """See `Architecture`; other fields, such as `remat`, are passed over."""
        given, counted = dict(fields), list(cls.counted)
        for name, keys in cls.sections.items():
            section = fields.get(name) or {}
            given |= {f"{name}_{key}": section.get(key) for key in keys}
            counted += [f"{name}_length"] if section and "length" in keys else []
        chosen: dict[str, Any] = {
            field.name: given.get(field.name)
            for field in dataclasses.fields(cls)
            if field.name in given or type(None) in get_args(field.type)
        }
        chosen["patch_size"] = tuple(fields.get("patch_size") or cls.patch_size)
        require_whole_numbers(chosen, counted)
        return cls(**chosen)

    @override
    def fields(self) -> dict[str, Any]:
        found = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        for name, keys in self.sections.items():
            section = {key: found.pop(f"{name}_{key}", None) for key in keys}
            found |= {} if section["dim"] is None else {name: section}
        found |= {} if self.family == DEFAULT_FAMILY else {"family": self.family}
        return found | {"patch_size": list(self.patch_size)}

    def condition_values(self) -> float:
        """Peak of live values of each sample's condition."""
        raise NotImplementedError

    @override
    def activations(self) -> ActivationCounts:
        return self.activations_of(self.tensors, self.num_layers)

    def activations_of(self, tensors: BlockTensors, layers: int) -> ActivationCounts:
        """Those of so many blocks."""
        return ActivationCounts(
            forward_traffic=layers * self._values(tensors.forward_traffic),
            backward_traffic=layers * self._values(tensors.backward_traffic),
            once_traffic=layers * self._values(tensors.once_traffic),
            norms_traffic=layers * self._values(tensors.norms_traffic),
            working_set=self._values(tensors.working_set),
            split_exchange=layers * self._values(tensors.exchanged),
            adapters=self._values(tensors.adapters),
            condition=self.condition_values(),
        )

    @override
    def kept_activations(self, remat: str) -> float:
        return self.num_layers * self._values(self.tensors.kept[remat])

    @override
    def kernels(self) -> int:
        return self.num_layers * self.tensors.kernels

    def _values(self, tensors: Tensors) -> int:
        """Values per token of so many tensors."""
        narrow, wide = tensors
        return narrow * self.dim + wide * self.ffn_dim


def require_whole_numbers(fields: Mapping[str, Any], names: Iterable[str]) -> None:
    """Checks that the fields of these names are whole numbers above 0.

    Raises:
      InputError: one is not.
    """
    for name in names:
        value = fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"model.{name} is {value!r}; give a whole number of at least 1")


def linear(inputs: int, outputs: int) -> int:
    """Parameters of a linear layer with biases."""
    return (inputs + 1) * outputs


_FAMILIES: Registry[type[Architecture]] = Registry(
    "model family",
    {
        "wan": "alload_jax.models.wan.costs:WanArchitecture",
        "hunyuan_video": "alload_jax.models.hunyuan_video.costs:HunyuanVideoArchitecture",
        "hunyuan_video_13b": "alload_jax.models.hunyuan_video.costs:HunyuanVideo13bArchitecture",
    },
)
_MODELS: Registry[Architecture] = Registry(
    "model",
    {
        "wan2.1-1.3b": "alload_jax.models.wan.costs:WAN_1_3B",
        "wan2.1-14b": "alload_jax.models.wan.costs:WAN_14B",
        "hunyuan-video-1.5": "alload_jax.models.hunyuan_video.costs:HUNYUAN_VIDEO_1_5",
        "hunyuan-video-13b": "alload_jax.models.hunyuan_video.costs:HUNYUAN_VIDEO_13B",
    },
)


def register_architecture(
    family: str, architecture: type[Architecture], named: Mapping[str, Architecture] | None = None
) -> None:
    """Registers a family's architecture.

    Args:
      family: the name that its `fields()` give as `family`.
      architecture: the class.
      named: models of the family that can be planned for by name.

    Raises:
      ValueError: the name of the family or of a model is registered already.
    """
    _FAMILIES.register(family, architecture)
    for name, model in (named or {}).items():
        _MODELS.register(name, model)


def from_fields(fields: Mapping[str, Any]) -> Architecture:
    """The architecture that fields describe; `family` decides which class reads them.

    Raises:
      InputError: the family is unknown, or the fields are wrong.
    """
    return _FAMILIES.get(fields.get("family", DEFAULT_FAMILY)).from_fields(fields)


def architecture_named(name: str) -> Architecture:
    """A model by its name, such as `wan2.1-1.3b`.

    Raises:
      InputError: there is no such name.
    """
    return _MODELS.get(name)


def model_names() -> tuple[str, ...]:
    """Models that can be planned for by name."""
    return _MODELS.names()
