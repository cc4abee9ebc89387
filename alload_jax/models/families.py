"""Model families: what the rest of the project asks of a model, and the families by name.

No module outside a family's folder imports its config or its transformer. To add a family, write a
folder that has a `Family`, add its line to `FAMILIES` and its costs to `planning/architectures`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
from flax import nnx
from jax.sharding import NamedSharding

from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, ModelConfig, TextConfig
from alload_jax.models.common.named_tensors import Naming, Tensor
from alload_jax.models.common.output import Output
from alload_jax.models.common.segments import PackedMetadata
from alload_jax.planning.geometry import Triple
from alload_jax.registry import Registry
from alload_jax.sharding.rules import Rules


class Model(Protocol):
    """A transformer, an `nnx.Module`. Both ways of calling it are the same function of a sample."""

    config: Any

    def forward(
        self,
        latents: jax.Array,
        timestep: jax.Array,
        condition: jax.Array,
        image: jax.Array | None = None,
        sharding: NamedSharding | None = None,
    ) -> Output:
        """Predicts the velocity of the flow on samples of one shape.

        Args:
          latents: [B, frames, height, width, in_channels], sizes multiples of the patch's.
          timestep: [B] float32, 0 (data) to 1000 (noise).
          condition: [B, L] int32 classes, `num_classes` standing for none; or [B, L, text.dim]
            text embeddings where the config has `text`.
          image: [B, N, image.dim] image embeddings, where the config has `image`.
          sharding: how rows are split over a mesh of Auto axes; kernels need to know.

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
        condition: jax.Array,
        sharding: NamedSharding | None = None,
    ) -> Output:
        """Predicts the velocity of many samples in packed rows.

        Args:
          tokens: [R, T, patch_dim], samples' patches (`patchify`) one after another.
          positions: [R, T, 3] int32, the (t, h, w) of each token within its sample.
          metadata: where samples lie among tokens, [R, M] of T, and among condition tokens.
          timestep: [R, M] float32.
          condition: [R, C] int32 classes or [R, C, text.dim] text embeddings.
          sharding: how rows are split over a mesh of Auto axes.

        Returns:
          velocity [R, T, patch_dim of the output] float32; auxiliary values [R, M, ...].

        Raises:
          NotImplementedError: the model or this device cannot run packed rows.
        """
        ...


class SamplingDefaults(NamedTuple):
    """How released weights of a family are drawn with, where the user does not say.

    Attributes:
      guidance: classifier-free.
      shift: of the noise levels.
      vae_stride: pixels per latent, (frames, height, width).
    """

    guidance: float
    shift: float
    vae_stride: Triple


class Family(Protocol):
    """What a model family provides. Subclass it; what has a body here may be left as it is.

    Attributes:
      name: of the family, as in `model.family`.
      config: the dataclass of its config, a `ModelConfig`.
      partition_rules: (pattern, rule) pairs for its parameters; the first match decides.
      folder_classes: `_class_name`s of config.json whose folders the family reads.
      ignored_tensors: parts of tensor names that checkpoints hold and the model does not use.
    """

    name: str
    config: type[ModelConfig]
    partition_rules: Rules
    folder_classes: tuple[str, ...] = ()
    ignored_tensors: tuple[str, ...] = ()

    def build(self, config: Any, rngs: nnx.Rngs) -> Any:
        """The model, a `Model`, with parameters drawn from `rngs`: float32 `nnx.Param`s.

        Variables of other kinds, such as running statistics, travel with the training state.
        """
        ...

    def packing_unsupported_reason(self, config: Any) -> str:
        """Why the model had better not train on packed rows here; empty when it can."""
        return ""

    def update_variables(self, config: Any, variables: Any, auxiliary: dict[str, Any]) -> Any:
        """The variables that are not trained, after an optimizer step.

        Called within the jitted update, so that they do not depend on how samples were grouped.

        Args:
          config: of the model.
          variables: nested dict of arrays.
          auxiliary: the step's mean of each auxiliary value, over all its samples.
        """
        return variables

    def sampling_defaults(self, config: Any) -> SamplingDefaults:
        """How a model is drawn with; models of pixels have a stride of 1."""
        return SamplingDefaults(1.0, 1.0, (1, 1, 1))

    def tensors(self, config: Any, naming: Naming) -> list[Tensor]:
        """Every tensor of a published checkpoint and its place among the parameters.

        Raises:
          InputError: the family has no such checkpoints.
        """
        raise InputError(f"model.family {self.name} has no published checkpoints to load or export")

    def naming_of(self, keys: set[str]) -> Naming:
        """Whose names a checkpoint's keys are."""
        return "diffusers"

    def read_fields(self, fields: dict[str, Any]) -> ModelConfig:
        """The config that the fields of a config.json describe.

        Raises:
          InputError: they describe another kind of model.
          KeyError: a field is missing.
        """
        raise InputError(f"model.family {self.name} has no published checkpoints to read")

    def export_fields(self, config: Any) -> dict[str, Any]:
        """The config.json with which diffusers loads such a model.

        Raises:
          InputError: diffusers has no such model.
        """
        raise InputError(
            f"model.family {self.name} cannot be exported: diffusers has no such model"
        )


FAMILIES: Registry[Family] = Registry(
    "model.family", {"wan": "alload_jax.models.wan.family:FAMILY"}
)
DEFAULT_FAMILY = "wan"


def family_of(config: ModelConfig) -> Family:
    """The family of a model's config."""
    return FAMILIES.get(config.family)


def build_model(config: ModelConfig, rngs: nnx.Rngs) -> Any:
    """The model of a config, a `Model`."""
    return family_of(config).build(config, rngs)


class ModelParts(NamedTuple):
    """A model taken apart.

    Attributes:
      graph: `nnx.merge(graph, values)` gives the model, `values` being parameters and variables.
      params: the parameters, or their shapes and dtypes, as a nested dict.
      variables: all other variables, likewise.
    """

    graph: nnx.GraphDef
    params: Any
    variables: Any


def abstract_model(config: ModelConfig) -> ModelParts:
    """A model's structure, with shapes and dtypes in place of values; nothing is computed."""
    return split_model(nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0))))


def split_model(model: Any) -> ModelParts:
    """Takes a model apart into its structure, its parameters and its other variables."""
    graph, params, *others = nnx.split(model, nnx.Param, ...)
    return ModelParts(graph, nnx.to_pure_dict(params), nnx.to_pure_dict(others[0]))


def initial_variables(config: ModelConfig) -> Any:
    """The variables that are not parameters, as a new model has them; nested dict of arrays."""
    return jax.jit(lambda: split_model(build_model(config, nnx.Rngs(0))).variables)()


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_model(config).params))


def config_from_fields(fields: Mapping[str, Any]) -> ModelConfig:
    """A model's config from JSON values, as benchmarks pass them between processes.

    Raises:
      InputError: the family is unknown, or a value is out of range.
      TypeError: a field is unknown.
    """
    config = FAMILIES.get(fields.get("family", DEFAULT_FAMILY)).config
    values = dict(fields)
    for name, kind in (("text", TextConfig), ("image", ImageConfig)):
        if values.get(name):
            values[name] = kind(**values[name])
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return config(**values | lists)


def read_model_config(path: Path) -> ModelConfig:
    """The model that a config.json describes, of whichever family.

    Raises:
      InputError: the file is missing, not JSON, or describes a model of no family.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; name a folder with config.json and safetensors")
    try:
        fields = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: is not valid JSON ({error}); download it again") from error
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
    raise InputError(f"{path}: _class_name is {name}; this reads {known}")
