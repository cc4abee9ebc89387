"""A model family of another architecture than Wan's, as somebody outside would write it.

Its layers mix tokens by the mean over their sample, in place of attention. Each layer predicts that
mean from the timestep, with a loss of its own that reaches nothing but the predictor, and keeps a
running mean square.
"""

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.parts import Output, by_sample, patchify, unpatchify
from alload_jax.models.common.safetensor_files import Tensor
from alload_jax.models.families import Family
from alload_jax.planning.architecture import ActivationCounts, Architecture, ForwardFlops

STATISTIC, LOSS = "mean_square", "predictor_loss"


@dataclass(frozen=True)
class PoolingConfig(ModelConfig):
    """Width and number of layers."""

    family: Literal["pooling"] = "pooling"
    width: int = 16
    num_layers: int = 2
    residual: Literal["compute", "float32"] = "compute"

    arithmetic_fields: ClassVar = (*ModelConfig.arithmetic_fields, "residual")


class Statistic(nnx.Variable):
    """A variable that is not trained."""


class Layer(nnx.Module):
    """x + MLP(x + mean of x over the sample)."""

    def __init__(self, width, *, rngs):
        self.hidden = nnx.Linear(width, 2 * width, rngs=rngs)
        self.out = nnx.Linear(2 * width, width, rngs=rngs)
        self.predictor = nnx.Linear(width, width, rngs=rngs)
        self.mean_square = Statistic(jnp.zeros(()))

    def __call__(self, x, time, pool, spread):
        mean = pool(x)
        guess = self.predictor(jax.lax.stop_gradient(time))
        error = jnp.square(guess - jax.lax.stop_gradient(mean)).mean(-1)
        square = jnp.square(jax.lax.stop_gradient(mean)).mean(-1)
        x = x + self.out(nnx.gelu(self.hidden(x + spread(mean))))
        return x, {LOSS: error, STATISTIC: square}


class PoolingModel(nnx.Module):
    """Tokens through `num_layers` layers."""

    def __init__(self, config, *, rngs):
        self.config, width = config, config.width
        patch = math.prod(config.patch_size)
        self.inner = nnx.Linear(patch * config.in_channels, width, rngs=rngs)
        self.time = nnx.Linear(1, width, rngs=rngs)
        self.classes = nnx.Embed(config.num_classes + 1, width, rngs=rngs)
        self.blocks = nnx.vmap(lambda keys: Layer(width, rngs=keys))(rngs.split(config.num_layers))
        self.outer = nnx.Linear(width, patch * config.latent_channels, rngs=rngs)

    def forward(self, latents, timestep, condition, image=None, sharding=None):
        tokens = patchify(latents, self.config.patch_size)
        told = self.classes(condition).mean(1)
        velocity, auxiliary = self._transform(
            tokens, timestep, told, lambda x: x.mean(1), lambda mean: mean[:, None], 1
        )
        shape = (*latents.shape[:-1], self.config.latent_channels)
        return Output(unpatchify(velocity, shape, self.config.patch_size), auxiliary)

    def forward_packed(self, tokens, positions, metadata, timestep, condition, sharding=None):
        slots = jnp.arange(timestep.shape[1])
        member = (metadata.tokens.ids[..., None] == slots).astype(jnp.float32)
        of_condition = (metadata.condition.ids[..., None] == slots).astype(jnp.float32)

        def mean(x, member):
            total = jnp.einsum("rtm,rtd->rmd", member, x)
            return total / jnp.maximum(member.sum(1), 1)[..., None]

        told = mean(self.classes(condition), of_condition)
        pool, spread = (lambda x: mean(x, member)), partial(jnp.einsum, "rtm,rmd->rtd", member)
        return Output(*self._transform(tokens, timestep, told, pool, spread, 2))

    def _transform(self, tokens, timestep, told, pool, spread, sample_axes):
        time = self.time(timestep[..., None] / 1000) + told
        x = self.inner(tokens) + spread(time)
        graph, layers = nnx.split(self.blocks)

        def apply_layer(x, layer):
            return nnx.merge(graph, layer)(x, time, pool, spread)

        x, stacked = jax.lax.scan(apply_layer, x, layers)
        return self.outer(x).astype(jnp.float32), by_sample(stacked, sample_axes)


class PoolingFamily(Family):
    """See `Family`."""

    name = "pooling"
    config = PoolingConfig
    partition_rules = ((r"kernel$", PartitionSpec()), (r".", PartitionSpec()))
    folder_classes = ("PoolingModel",)

    def build(self, config, rngs):
        return PoolingModel(config, rngs=rngs)

    def update_variables(self, config, variables, auxiliary):
        before = variables["blocks"]["mean_square"]
        return {"blocks": {"mean_square": before + 0.5 * (auxiliary[STATISTIC] - before)}}

    def tensors(self, config, naming):
        patch = math.prod(config.patch_size)
        width = config.width
        found = [
            Tensor("classes", (config.num_classes + 1, width), "classes/embedding", None, "same")
        ]
        found += linear("inner", patch * config.in_channels, width)
        found += linear("time", 1, width)
        found += linear("outer", width, patch * config.latent_channels)
        for layer in range(config.num_layers):
            found += linear("hidden", width, 2 * width, layer)
            found += linear("out", 2 * width, width, layer)
            found += linear("predictor", width, width, layer)
        return found

    def export_fields(self, config):
        names = ("width", "num_layers", "num_classes")
        fields = {name: getattr(config, name) for name in names}
        return {"_class_name": "PoolingModel", "patch_size": list(config.patch_size), **fields}

    def read_fields(self, fields):
        values = {k: v for k, v in fields.items() if not k.startswith("_")}
        return PoolingConfig(**values | {"patch_size": tuple(fields["patch_size"])})


def linear(name, inputs, outputs, layer=None):
    """The two tensors of a linear layer."""
    path = name if layer is None else f"blocks/{name}"
    key = name if layer is None else f"blocks.{layer}.{name}"
    return [
        Tensor(f"{key}.weight", (outputs, inputs), f"{path}/kernel", layer, "matrix"),
        Tensor(f"{key}.bias", (outputs,), f"{path}/bias", layer, "same"),
    ]


@dataclass(frozen=True)
class PoolingArchitecture(Architecture):
    """What the family computes and holds, for planning."""

    width: int
    num_layers: int
    patch_size: tuple[int, int, int] = (1, 2, 2)

    @classmethod
    def from_fields(cls, fields):
        return cls(fields["width"], fields["num_layers"], tuple(fields["patch_size"]))

    def fields(self):
        return asdict(self) | {"family": "pooling"}

    def parameters(self):
        return self.num_layers * (5 * self.width**2 + 4 * self.width)

    def flops(self):
        products = self.num_layers * self.width**2
        return ForwardFlops(8.0 * products, 2.0 * products, attention_per_pair=0.0)

    def activations(self):
        return ActivationCounts(8.0, 16.0, 4.0 * self.width, 0.0)

    def kept_activations(self, remat):
        return float(6 * self.num_layers * self.width)

    def kernels(self):
        return 6 * self.num_layers


SMALL = PoolingArchitecture(16, 2)
