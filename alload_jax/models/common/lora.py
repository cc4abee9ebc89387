"""Low-rank adapters of linear layers (LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353)."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree
from typing_extensions import override

from alload_jax.errors import InputError, require_fields, require_positive
from alload_jax.models.common.parts import Linear

DOWN, UP, MAGNITUDE = "lora_down", "lora_up", "lora_magnitude"
"""Names of an adapter's arrays, beside the layer's `kernel`: [in, rank], [rank, out] and [out]."""
ADAPTER = (DOWN, UP, MAGNITUDE)
LORA_PATTERN = f"/({'|'.join(ADAPTER)})$"
"""Matches the parameters of adapters of every family."""


@dataclass(frozen=True)
class LoraGroup:
    """Rank and scale of the adapters of some of the layers.

    Attributes:
      targets: as of `LoraConfig`; a layer belongs to the first group of which one matches.
      rank, alpha: as of `LoraConfig`; null is the rank of the group.
    """

    targets: tuple[str, ...]
    rank: int
    alpha: float | None = None

    def __post_init__(self) -> None:
        if not self.targets:
            raise InputError("model.lora.groups: targets is empty; give at least one pattern")
        _check("model.lora.groups: ", self)


@dataclass(frozen=True)
class LoraConfig:
    """Adapters: y = x·kernel + bias + (alpha / rank)·dropout(x)·lora_down·lora_up.

    Attributes:
      rank: rank of the adapters.
      alpha: scale of the adapters, divided by the rank; null for the rank.
      targets: regular expressions for names of linear layers, such as `self_attention/`; empty for
        the family's default, all in attention and feed-forward of the blocks.
      dropout: share of the adapters' inputs that is zero in training; the rest is scaled up.
      groups: layers with a rank and scale of their own.
      dora: whether each output of the sum of kernel and adapter is scaled to a trained length,
        lora_magnitude, which begins as that of the kernel.
    """

    rank: int = 16
    alpha: float | None = None
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    groups: tuple[LoraGroup, ...] = ()
    dora: bool = False

    def __post_init__(self) -> None:
        _check("model.lora.", self)
        wanted = "from 0 to below 1"
        require_fields("model.lora.", self, "dropout", lambda value: 0 <= value < 1, wanted)

    def identity(self) -> dict[str, object]:
        """Returns the fields that determine the parameters and their meaning, as JSON values."""
        fields: dict[str, object] = {"rank": self.rank, "alpha": self.alpha}
        fields["targets"] = list(self.targets)
        groups = [asdict(group) | {"targets": list(group.targets)} for group in self.groups]
        fields |= {"groups": groups} if groups else {}
        return fields | ({"dora": True} if self.dora else {})

    def of_layer(self, name: str) -> "LoraConfig":
        """The settings of the layer of a name, such as `blocks/self_attention/query`."""
        for group in self.groups:
            if any(re.search(pattern, name) for pattern in group.targets):
                return replace(self, rank=group.rank, alpha=group.alpha, groups=())
        return self

    @property
    def scale(self) -> float:
        """The factor of lora_down·lora_up, alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


def _check(prefix: str, config: LoraConfig | LoraGroup) -> None:
    require_positive(prefix, config, "rank")
    require_fields(prefix, config, "alpha", lambda v: 0 < v < math.inf, "above 0, or null")
    check_patterns(f"{prefix}targets", config.targets)


def check_patterns(place: str, patterns: Sequence[str]) -> None:
    """Raises InputError if a pattern is not a regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise InputError(
                f"{place}: {pattern!r} is not a regular expression ({error}); fix it"
            ) from error


class DropoutKey(nnx.Variable):
    """Key data of an adapter's dropout, [2] uint32; every step of training sets it."""


class LoraLinear(Linear):
    """A linear layer with an adapter; see `LoraConfig`."""

    def __init__(self, base: nnx.Linear, config: LoraConfig, *, training: bool, rngs: nnx.Rngs):
        """Takes over `base`, whose parameters may be stacked over layers, [..., in, out].

        The adapter begins as in PEFT: lora_down uniform in ±1/√in, lora_up zero.
        """
        super().__init__(
            base.in_features,
            base.out_features,
            use_bias=base.use_bias,
            dtype=base.dtype,
            rngs=nnx.Rngs(0),
        )
        self.kernel, self.bias = base.kernel, base.bias
        *layers, inputs, outputs = base.kernel.shape
        bound = 1 / math.sqrt(inputs)
        shape = (*layers, inputs, config.rank)
        down = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
        self.lora_down = nnx.Param(down)
        self.lora_up = nnx.Param(jnp.zeros((*layers, config.rank, outputs), jnp.float32))
        self.lora_magnitude = (
            nnx.Param(output_lengths(base.kernel[...])) if config.dora else nnx.data(None)
        )
        self.scale, self.rate = config.scale, config.dropout
        with_dropout = training and config.dropout > 0
        self.dropout_key = (
            DropoutKey(jnp.zeros((*layers, 2), jnp.uint32)) if with_dropout else nnx.data(None)
        )

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """[..., in] → [..., out]."""
        if self.lora_magnitude is None:
            return super().__call__(inputs, out_sharding) + self._adapted(inputs)
        product = self.product(inputs)
        return product if self.bias is None else product + self.bias_of(product)

    @override
    def product(self, inputs: jax.Array) -> jax.Array:
        product = super().product(inputs) + self._adapted(inputs)
        if self.lora_magnitude is None:
            return product
        # The gain is the trained length of each output over that of kernel and adapter. As in the
        # paper (§4.3), the latter has no gradient. It is computed without their sum, which is as
        # large as the kernel.
        with jax.default_matmul_precision("highest"):
            kernel = jnp.asarray(self.kernel[...], jnp.float32)
            down, up = self.lora_down[...], self.scale * self.lora_up[...]
            square = jnp.sum(jnp.square(kernel), axis=0)
            square += jnp.sum((2 * down.T @ kernel + (down.T @ down) @ up) * up, axis=0)
        length = jax.lax.stop_gradient(jnp.sqrt(jnp.maximum(square, _LEAST_SQUARE)))
        return product * (self.lora_magnitude[...] / length).astype(product.dtype)

    def _adapted(self, inputs: jax.Array) -> jax.Array:
        """What the adapter adds, [..., in] → [..., out]."""
        down, up = self.lora_down[...], self.lora_up[...]
        x, down, up = self.promote_dtype((inputs, down, up), dtype=self.dtype)
        if self.dropout_key is not None:
            key = jax.random.wrap_key_data(self.dropout_key[...])
            kept = jax.random.bernoulli(key, 1 - self.rate, x.shape)
            x = jnp.where(kept, x / (1 - self.rate), 0)
        return (x @ down) @ (self.scale * up)


_LEAST_SQUARE = 1e-24


def output_lengths(kernel: jax.Array) -> jax.Array:
    """The length of each output of a kernel [..., in, out], [..., out] float32."""
    square = jnp.sum(jnp.square(jnp.asarray(kernel, jnp.float32)), axis=-2)
    return jnp.sqrt(jnp.maximum(square, _LEAST_SQUARE))


def add_lora(
    model: nnx.Module,
    config: LoraConfig,
    default_targets: tuple[str, ...],
    *,
    training: bool,
    rngs: nnx.Rngs,
) -> None:
    """Gives adapters to the linear layers of a model that the config targets.

    Args:
      model: any model; its layers may be stacked.
      config: the adapters.
      default_targets: what an empty `config.targets` means.
      training: whether the model is trained, which dropout needs to know.
      rngs: draws the adapters.

    Raises:
      InputError: a pattern matches no linear layer.
    """
    linears = {
        "/".join(map(str, path)): path
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.Linear)
    }
    chosen: set[str] = set()
    for pattern in config.targets or default_targets:
        found = {name for name in linears if re.search(pattern, name)}
        if not found:
            examples = ", ".join(sorted(linears)[:3])
            raise InputError(
                f"model.lora.targets: {pattern!r} matches no linear layer; names are, for example, "
                f"{examples} (`alload parameters --config FILE` lists them all as NAME/kernel)"
            )
        chosen |= found
    for pattern in (each for group in config.groups for each in group.targets):
        if not any(re.search(pattern, name) for name in chosen):
            raise InputError(
                f"model.lora.groups: {pattern!r} matches no layer that has an adapter, such as "
                f"{min(chosen)}; fix it, or add the layers to model.lora.targets"
            )
    for name in sorted(chosen):
        *parents, last = linears[name]
        parent: PyTree = reduce(_part, parents, model)
        adapted = LoraLinear(
            _part(parent, last), config.of_layer(name), training=training, rngs=rngs
        )
        if isinstance(last, int):
            parent[last] = adapted
        else:
            setattr(parent, str(last), adapted)


def _part(module: PyTree, name: PyTree) -> PyTree:
    """The part of a module, or of a list of modules by its number."""
    return module[name] if isinstance(name, int) else getattr(module, name)


def dropout_keys(shapes: PyTree, key: jax.Array) -> PyTree:
    """Draws the key of every adapter's dropout.

    Args:
      shapes: nested dict of the shapes of a model's `DropoutKey`s, each [..., 2] uint32.
      key: a random key, different for every micro-batch.

    Returns:
      Nested dict of arrays like `shapes`.
    """
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(key, len(leaves))
    drawn = [
        jax.random.key_data(jax.random.split(one, leaf.shape[:-1]))
        for one, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, drawn)
