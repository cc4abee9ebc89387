"""Model families: the interface between models and the rest of the project, and a registry.

No module outside a family's folder imports its config or its transformer. To add a family, write a
folder with a `Family`, add its line to `FAMILIES` and those of its costs to
`planning/architecture.py`.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, get_args, get_type_hints

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree
from typing_extensions import override

from alload_jax.errors import InputError
from alload_jax.files import read_json
from alload_jax.models.common import float8
from alload_jax.models.common.attention import packing_unsupported_reason
from alload_jax.models.common.config import ModelConfig, TransformerConfig
from alload_jax.models.common.lora import DropoutKey, add_lora
from alload_jax.models.common.parts import Auxiliary, Output
from alload_jax.models.common.safetensor_files import Naming, Tensor
from alload_jax.models.common.segments import PackedMetadata
from alload_jax.models.common.sparse_attention import config as switching
from alload_jax.models.common.stored import narrow_linears
from alload_jax.planning.remat import OFFLOADED
from alload_jax.planning.samples import Triple
from alload_jax.registry import Registry
from alload_jax.sharding.mesh import Rules


class Model(Protocol):
    """A transformer, an `nnx.Module`. Both forward methods compute the same for a sample.

    Arguments that may be None are given by name, and only to models that have a use for them.
    """

    config: ModelConfig

    def forward(
        self,
        latents: jax.Array,
        timestep: jax.Array,
        condition: PyTree,
        image: jax.Array | None = None,
        sharding: NamedSharding | None = None,
        first_frame_timestep: jax.Array | None = None,
    ) -> Output:
        """Predicts the velocity of the flow for samples of one shape.

        Args:
          latents: [B, frames, height, width, in_channels], multiples of the patch size.
          timestep: [B] float32, 0 (data) to 1000 (noise).
          condition: [B, L] int32 classes, `num_classes` for the null class; text embeddings
            [B, L, text.dim] if the config has `text`; or the config's `condition_parts`, each
            `ConditionTokens` by its name.
          image: [B, N, image.dim] image embeddings, if the config has `image`.
          sharding: sharding of rows over a mesh of Auto axes, which kernels need.
          first_frame_timestep: [B] float32, timestep of the first latent frame if it differs; only
            families with `has_first_frame_timestep` get one.

        Returns:
          velocity [B, frames, height, width, latent_channels] float32; auxiliary values [B, ...].
        """
        ...

    def forward_packed(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        metadata: PackedMetadata,
        timestep: jax.Array,
        condition: PyTree,
        image: jax.Array | None = None,
        sharding: NamedSharding | None = None,
        first_frame_timestep: jax.Array | None = None,
    ) -> Output:
        """Predicts the velocity of the flow for samples in packed rows.

        Args:
          tokens: [R, T, patch_dim], patches of the samples (`patchify`), one after another.
          positions: [R, T, 3] int32, the (t, h, w) of each token within its sample.
          metadata: positions of the samples in tokens, [R, M] of T, and in condition tokens.
          timestep: [R, M] float32.
          condition: [R, C] int32 classes or [R, C, text.dim] text embeddings; or `ConditionTokens`
            by name, for a config with `condition_parts`.
          image: [R, M, N, image.dim] image embeddings, if the config has `image`.
          sharding: sharding of rows over a mesh of Auto axes.
          first_frame_timestep: [R, M] float32, as for `forward`.

        Returns:
            velocity [R, T, output patch_dim] float32; auxiliary values [R, M, ...].

        Raises:
          NotImplementedError: the model or this device cannot run packed rows.
        """
        ...


class SamplingDefaults(NamedTuple):
    """Sampling settings for released weights of a family, used unless the user sets them.

    Attributes:
      guidance: scale of classifier-free guidance.
      shift: shift of the noise levels.
      vae_stride: pixels per latent, (frames, height, width).
      fps: frames per second of videos; None for pictures that no data describe.
    """

    guidance: float
    shift: float
    vae_stride: Triple
    fps: float | None = None


FamilyConfig = Any
"""The config of a family, of its own class: its methods are given no other."""


class Family(Protocol):
    """Interface of a model family. Subclass it; methods with a body here are optional.

    Attributes:
      name: name of the family, as in `model.family`.
      config: dataclass of the family's config, a `ModelConfig`.
      partition_rules: (pattern, rule) pairs for the parameters; the first match applies.
      folder_classes: values of `_class_name` in config.json that the family can read.
      ignored_tensors: substrings of the names of checkpoint tensors that the model does not use.
      namings: naming schemes of checkpoints that `tensors` knows.
      has_first_frame_timestep: whether the first latent frame may have a timestep of its own.
      lora_targets: patterns for the names of linear layers that adapters have by default.
    """

    name: str
    config: type[ModelConfig]
    partition_rules: Rules
    folder_classes: tuple[str, ...] = ()
    ignored_tensors: tuple[str, ...] = ()
    namings: tuple[Naming, ...] = ("diffusers", "original")
    has_first_frame_timestep: bool = False
    lora_targets: tuple[str, ...] = ("^blocks/",)

    def build(self, config: FamilyConfig, rngs: nnx.Rngs) -> nnx.Module:
        """Builds the model, a `Model`, with parameters drawn from `rngs` as float32 `nnx.Param`s.

        The training state also holds variables of other kinds, such as running statistics.
        """
        ...

    def packing_unsupported_reason(self, config: FamilyConfig) -> str:
        """Returns why the model should not train on packed rows on this device; empty if it can.

        planning.policy auto packs rows only where a family says that it can.
        """
        return f"model.family {self.name} does not say that it can"

    def update_variables(
        self, config: FamilyConfig, variables: PyTree, auxiliary: Auxiliary
    ) -> PyTree:
        """Returns the variables that are not trained after an optimizer step.

        The jitted update calls it, so that the result does not depend on how samples are grouped.

        Args:
          config: the model's config.
          variables: nested dict of arrays.
          auxiliary: mean of each auxiliary value over all samples of the step.
        """
        return variables

    def resumed_variables(self, config: FamilyConfig, variables: PyTree) -> PyTree:
        """Returns a checkpoint's variables as a run with this config continues from them."""
        return variables

    def step_metrics(
        self, config: FamilyConfig, variables: PyTree, auxiliary: Auxiliary
    ) -> Auxiliary:
        """Returns the scalars to log of a step, by default the mean of each auxiliary value.

        Args:
          config: the model's config.
          variables: after the step.
          auxiliary: mean of each auxiliary value over all samples of the step.
        """
        return {name: jnp.mean(value) for name, value in auxiliary.items()}

    def layer_records(self, config: FamilyConfig, variables: PyTree) -> Auxiliary:
        """Returns values [layers, ...] that a run records as they change; empty for none."""
        return {}

    def sampling_defaults(self, config: FamilyConfig) -> SamplingDefaults:
        """Returns the default sampling settings; models of pixels have a stride of 1."""
        return SamplingDefaults(1.0, 1.0, (1, 1, 1))

    def tensors(self, config: FamilyConfig, naming: Naming) -> list[Tensor]:
        """Lists the tensors of a released checkpoint and the parameters that they fill.

        Raises:
          InputError: the family has no released checkpoints, or not with this naming.
        """
        raise InputError(f"model.family {self.name} has no released checkpoints to load or export")

    def naming_of(self, keys: set[str]) -> Naming:
        """Returns the naming scheme of a checkpoint's keys."""
        return "diffusers"

    def config_of_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig | None:
        """Returns the config that shapes of tensors tell, of a file without a config.json.

        None if they are not those of a model of this family, or do not tell it.
        """
        return None

    def read_fields(self, fields: dict[str, Any]) -> ModelConfig:
        """Returns the config that the fields of a config.json describe.

        Raises:
          InputError: the fields describe another kind of model.
          KeyError: a field is missing.
        """
        raise InputError(f"model.family {self.name} has no released checkpoints to read")

    def export_fields(self, config: FamilyConfig) -> dict[str, Any]:
        """Returns the fields of the config.json with which diffusers loads such a model.

        Raises:
          InputError: diffusers does not support such a model.
        """
        raise InputError(
            f"model.family {self.name} cannot be exported: diffusers does not support it"
        )


_FIELD_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "count": (lambda v: type(v) is int and 0 < v < 1 << 31, "a whole number above 0"),
    "positive": (lambda v: isinstance(v, int | float) and v > 0, "a number above 0"),
    "number": (lambda value: isinstance(value, int | float), "a number"),
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "triple": (
        lambda v: isinstance(v, list) and [type(part) for part in v] == [int] * 3,
        "three whole numbers",
    ),
}
"""Kinds of fields of a config.json: what they must be, as a function and in words."""


def require_fields(fields: Mapping[str, object], names: Iterable[str], kind: str) -> None:
    """Checks that fields of a config.json are of a kind of `_FIELD_KINDS`.

    Raises:
      InputError: one has the wrong type.
      KeyError: one is missing.
    """
    is_good, wanted = _FIELD_KINDS[kind]
    for name in names:
        if not is_good(fields[name]):
            raise InputError(
                f"{name} is {fields[name]!r}; it must be {wanted}: download the file again"
            )


FAMILIES: Registry[Family] = Registry(
    "model.family",
    {
        "wan": "alload_jax.models.wan.family:FAMILY",
        "hunyuan_video": "alload_jax.models.hunyuan_video.family:FAMILY",
        "hunyuan_video_13b": "alload_jax.models.hunyuan_video.family:FAMILY_13B",
    },
)
DEFAULT_FAMILY = "wan"


def family_of(config: ModelConfig) -> Family:
    """Returns the family of a model's config."""
    return FAMILIES.get(config.family)


def build_model(config: ModelConfig, rngs: nnx.Rngs, *, training: bool = False) -> Any:
    """Builds the model of a config, a `Model`, with its adapters.

    Args:
      config: the model's config.
      rngs: draws the parameters; those of a model with adapters are the same as without.
      training: whether the model has `DropoutKey`s, which a step of training has to set.
    """
    family = family_of(config)
    model = family.build(config, rngs)
    if config.lora is not None:
        add_lora(model, config.lora, family.lora_targets, training=training, rngs=rngs)
    if config.matmul != "dtype":
        float8.use_float8(model, where_faster=config.matmul == "auto")
    return model


class ModelParts(NamedTuple):
    """A model split into structure, parameters and other variables.

    Attributes:
      graph: structure; `nnx.merge(graph, values)` returns the model, where `values` holds
        parameters and variables.
      params: parameters, or their shapes and dtypes, as a nested dict.
      variables: all other variables, or their shapes and dtypes, as a nested dict.
    """

    graph: nnx.GraphDef
    params: PyTree
    variables: PyTree


@cache
def abstract_model(config: ModelConfig) -> ModelParts:
    """Returns a model's structure with shapes and dtypes in place of values, once for a config."""
    return split_model(nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0))))


@cache
def training_graph(config: ModelConfig) -> tuple[nnx.GraphDef, PyTree]:
    """Returns the structure of a model in training, and the shapes of its `DropoutKey`s.

    Returns:
      `nnx.merge(graph, values)` returns the model, where `values` holds parameters, variables and
      keys; the shapes are a nested dict, empty where nothing is dropped.

    Raises:
      InputError: the model is to multiply in float8, which this GPU cannot.
    """
    if config.matmul == "float8":
        float8.require_device()
    model = nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0), training=True))
    graph, *states = nnx.split(model, DropoutKey, ...)
    return graph, nnx.to_pure_dict(states[0])


def float8_unused(config: ModelConfig, tokens: int) -> str:
    """Why training over so many tokens multiplies nothing in float8; "" if it does."""
    model = nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0)))
    return float8.unused(model, tokens)


def compiler_options(config: ModelConfig, *, weights_on_host: bool) -> dict[str, Any] | None:
    """XLA's options for a program with the gradient of a model; None for the usual ones."""
    if not weights_on_host and not set(config.policies) & set(OFFLOADED):
        return None
    from alload_jax.models.common.host_loop import COMPILER_OPTIONS

    return COMPILER_OPTIONS


@cache
def gradient_dtypes(config: ModelConfig) -> dict[str, jnp.dtype]:
    """The kernels whose gradient is computed in 16 bits, with its dtype; see `SlottedKernel`."""
    model = nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0)))
    return {
        "/".join(map(str, (*path, "kernel"))): dtype for path, _, dtype in narrow_linears(model)
    }


def split_model(model: nnx.Module) -> ModelParts:
    """Splits a model into its structure, its parameters and its other variables."""
    graph, params, *others = nnx.split(model, nnx.Param, ...)
    return ModelParts(graph, nnx.to_pure_dict(params), nnx.to_pure_dict(others[0]))


def initial_variables(config: ModelConfig) -> PyTree:
    """Returns a new model's variables that are not parameters, as a nested dict of arrays."""
    return jax.jit(lambda: split_model(build_model(config, nnx.Rngs(0))).variables)()


def parameter_count(config: ModelConfig) -> int:
    """Counts the parameters of the model."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_model(config).params))


def config_from_fields(fields: Mapping[str, Any]) -> ModelConfig:
    """Builds a model's config from JSON values, which benchmarks pass between processes.

    Raises:
      InputError: the family is unknown, or a value is out of range.
      TypeError: a field is unknown.
    """
    return _built(FAMILIES.get(fields.get("family", DEFAULT_FAMILY)).config, fields)


def _built(kind: Any, fields: Mapping[str, Any]) -> Any:
    """An object of a dataclass from JSON values, whose lists become tuples."""
    hints = get_type_hints(kind)

    def value_of(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(value_of(name, each) for each in value)
        if isinstance(value, Mapping) and name in hints:
            return _built(next(filter(is_dataclass, get_args(hints[name]))), value)
        return value

    return kind(**{name: value_of(name, value) for name, value in fields.items()})


def read_model_config(path: Path) -> ModelConfig:
    """Reads the config of the model that a config.json describes, of any family.

    Raises:
      InputError: the file is missing, not JSON, or describes a model of an unknown family.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; name a folder with config.json and safetensors")
    fields = read_json(path, "download it again")
    if not isinstance(fields, dict):
        raise InputError(f"{path}: holds {type(fields).__name__}, not an object; download it again")
    name = fields.get("_class_name", "none")
    families = [FAMILIES.get(each) for each in FAMILIES.names()]
    for family in families:
        if name not in family.folder_classes:
            continue
        try:
            return family.read_fields(fields)
        except KeyError as error:
            raise InputError(f"{path}: lacks {error}; download it again") from error
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
    known = " and ".join(each for family in families for each in family.folder_classes)
    raise InputError(f"{path}: _class_name is {name}; supported are {known}")


_COLUMN_PARALLEL = r"blocks/.*(query|key|value|feed_forward/hidden)"


class TransformerFamily(Family):
    """A family whose config is a `TransformerConfig`; see `Family`.

    The sparse attention of its blocks is their module `sparse_attention`. Blocks have a leading
    layer axis. `tensor` splits heads and the hidden width as in Megatron-LM (arXiv 1909.08053).
    `fsdp` splits inputs: outputs vary fastest in memory, and to gather and scatter along them XLA
    copies the kernels and the gradients of all layers.

    Attributes:
      model: the class of the model, made of config and `rngs`.
      tensor_names: by naming, our layers, and parameters that belong to none, such as
        `blocks/self_attention/query`, and their names in checkpoints, in the order of these; {}
        stands for the number of the block. Layers of one name are one there, its outputs in the
        order of the table; a name ends in `SWAPPED` where the halves of the outputs are the other
        way round. A model need not have all of them.
    """

    tensor_names: ClassVar[Mapping[Naming, Mapping[str, str]]]
    model: ClassVar[Callable[..., nnx.Module]]

    partition_rules = (
        (r"head/out/kernel$", PartitionSpec("fsdp", None)),
        (rf"{_COLUMN_PARALLEL}/kernel$", PartitionSpec(None, "fsdp", "tensor")),
        (r"blocks/.*/out/kernel$", PartitionSpec(None, ("tensor", "fsdp"))),
        (rf"{_COLUMN_PARALLEL}/bias$", PartitionSpec(None, "tensor")),
        (r"blocks/.*kernel$", PartitionSpec(None, "fsdp")),
        (r"kernel$|embedding$", PartitionSpec(None, "fsdp")),
        (r".", PartitionSpec()),
    )

    @override
    def build(self, config: TransformerConfig, rngs: nnx.Rngs) -> nnx.Module:
        return type(self).model(config, rngs=rngs)

    @override
    def tensors(self, config: TransformerConfig, naming: Naming) -> list[Tensor]:
        """Tensors of the parameters that have names, block by block."""
        if naming == "comfyui" and naming not in self.tensor_names:
            naming = "original"
        if naming not in self.tensor_names:
            raise InputError(
                f"model.family {self.name}: the names of its own repository are not known; "
                "choose diffusers'"
            )
        shapes = flatten_dict(abstract_model(config).params, sep="/")
        found: list[Tensor] = []
        for _, names in groupby(
            self.tensor_names[naming].items(), key=lambda names: names[1].partition("{}")[:2]
        ):
            parts = [
                (path, theirs)
                for ours, theirs in names
                for path in (ours, *(f"{ours}/{leaf}" for leaf in _ENDINGS))
                if path in shapes
            ]
            stacked = parts and "{}" in parts[0][1]
            for layer in range(shapes[parts[0][0]].shape[0]) if stacked else [None]:
                for path, theirs in parts:
                    shape = shapes[path].shape[0 if layer is None else 1 :]
                    key = theirs.format(layer)
                    found.append(_tensor(key, shape, path, layer, config.patch_size))
        # Those of one key are parts of its outputs, in their order.
        ends: dict[str, int] = {}
        begins = []
        for tensor in found:
            begins.append(ends.get(tensor.key, 0))
            ends[tensor.key] = begins[-1] + tensor.shape[0]
        return [
            replace(tensor, outputs=ends[tensor.key], begin=begin)
            if tensor.swapped or tensor.shape[0] < ends[tensor.key]
            else tensor
            for tensor, begin in zip(found, begins, strict=True)
        ]

    @override
    def naming_of(self, keys: set[str]) -> Naming:
        """That which knows most of the keys."""
        found = {_stem(key.rpartition(".")[0]) for key in keys}

        def known(naming: Naming) -> int:
            return len(found & {*map(_stem, self.tensor_names[naming].values())})

        return max(self.tensor_names, key=known)

    @override
    def packing_unsupported_reason(self, config: TransformerConfig) -> str:
        return packing_unsupported_reason(config.attention, config.head_dim, config.compute_dtype)

    @override
    def update_variables(
        self, config: TransformerConfig, variables: PyTree, auxiliary: Auxiliary
    ) -> PyTree:
        """Layers switch between dense and sparse attention."""
        if config.sparse_attention is None:
            return variables
        state = switching.update_switches(config.sparse_attention, _switches(variables), auxiliary)
        return _with_switches(variables, state)

    @override
    def resumed_variables(self, config: TransformerConfig, variables: PyTree) -> PyTree:
        """Forced densities are those of the config."""
        if config.sparse_attention is None:
            return variables
        state = switching.forced_state(config.sparse_attention, _switches(variables))
        return _with_switches(variables, state)

    @override
    def step_metrics(
        self, config: TransformerConfig, variables: PyTree, auxiliary: Auxiliary
    ) -> Auxiliary:
        if config.sparse_attention is None:
            return super().step_metrics(config, variables, auxiliary)
        return switching.switch_metrics(config.sparse_attention, _switches(variables), auxiliary)

    @override
    def layer_records(self, config: TransformerConfig, variables: PyTree) -> Auxiliary:
        if config.sparse_attention is None:
            return {}
        return switching.switch_records(config.sparse_attention, _switches(variables))


_ENDINGS = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}
"""Names of a layer's parameters, ours and PyTorch's."""


def _stem(name: str) -> str:
    """A layer's name in checkpoints without numbers."""
    return re.sub(rf"\d+|{{}}|{SWAPPED}$", "", name)


SWAPPED = "~"
"""Ends the name of a layer in checkpoints which have the second half of our outputs first."""


def _tensor(
    key: str, shape: tuple[int, ...], path: str, layer: int | None, patch: Triple
) -> Tensor:
    """The tensor of a parameter of this shape, of one layer; `key` is the layer's name there."""
    leaf = path.rpartition("/")[2]
    if leaf not in _ENDINGS:
        return Tensor(key, (1, *shape), path, layer, "leading")
    swapped = key.endswith(SWAPPED)
    key = f"{key.removesuffix(SWAPPED)}.{_ENDINGS[leaf]}"
    if path == "patch_embedding/kernel":
        inputs, width = shape
        return Tensor(key, (width, inputs // math.prod(patch), *patch), path, layer, "patch")
    if leaf == "kernel":
        return Tensor(key, shape[::-1], path, layer, "matrix", swapped=swapped)
    return Tensor(key, shape, path, layer, "same", swapped=swapped)


def _switches(variables: PyTree) -> Auxiliary:
    """The state of all layers' switches."""
    return variables["blocks"]["sparse_attention"]["switch"]


def _with_switches(variables: PyTree, state: Auxiliary) -> PyTree:
    """Variables with another state of the layers' switches."""
    blocks = variables["blocks"]
    sparse = blocks["sparse_attention"] | {"switch": state}
    return variables | {"blocks": blocks | {"sparse_attention": sparse}}
