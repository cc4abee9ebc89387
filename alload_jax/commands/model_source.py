"""Sources of a model for `--checkpoint`: a run folder or weights, perhaps with adapters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jax.sharding import Mesh
from jaxtyping import PyTree

from alload_jax.commands.flags import lora_name
from alload_jax.config import Config, read_config
from alload_jax.data.manifest import fps_of
from alload_jax.diffusion.timesteps import shift_of
from alload_jax.errors import InputError, print_stderr
from alload_jax.files import read_json
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.safetensor_files import Naming
from alload_jax.models.families import SamplingDefaults, family_of, initial_variables
from alload_jax.models.lora_files import LoraFile, merge_adapters, merge_file, read_lora
from alload_jax.models.weights import load_weights, read_transformer, require_free, save_weights
from alload_jax.planning.samples import Triple
from alload_jax.sampling.config import SamplingConfig
from alload_jax.sampling.requests import family_fps
from alload_jax.training import restore
from alload_jax.training.run_files import CHECKPOINTS, run_around
from alload_jax.training.state import Weights

ScaledLora = tuple[LoraFile, float]
"""A file of adapters and the factor of what it adds."""


def note_skipped(lora: LoraFile) -> None:
    """Prints what of a file of adapters was left out, a line for each."""
    for line in lora.skipped:
        print_stderr(f"note: {lora.place}: left out: {line}")


@dataclass(frozen=True)
class Source:
    """A model with its weights: a run folder of train.py, or released weights.

    Attributes:
      folder: the run folder; or a `transformer/` folder of diffusers, or of the model's own
        repository; or one file of weights.
      config: the model's config.
      run: config of the run; None for released weights.
      step: step of the run's checkpoint.
      weights: the weights of the run to use, "ema" or "raw".
      base: where frozen parameters are that the run's checkpoints leave out; None for where they
        were in training.
      loras: files of adapters to add.
    """

    folder: Path
    config: ModelConfig
    run: Config | None = None
    step: int = 0
    weights: restore.WeightsKind = "raw"
    base: str | None = None
    loras: tuple[ScaledLora, ...] = ()

    @property
    def _defaults(self) -> SamplingDefaults:
        return family_of(self.config).sampling_defaults(self.config)

    @property
    def sampling(self) -> SamplingConfig:
        """The run's settings of samples; else diffusers' sampler and the family's guidance."""
        if self.run is not None:
            return self.run.sampling
        return SamplingConfig(sampler="unipc", guidance=self._defaults.guidance)

    def shift(self, seq_len: int) -> float:
        """The run's shift of noise levels for sequences of `seq_len` tokens.

        That of its samples, else of its training; for released weights the default of the model's
        family, for all lengths.
        """
        if self.run is None:
            return self._defaults.shift
        return self.run.sampling.shift or shift_of(self.run.objective.timesteps, seq_len)

    def values(self, mesh: Mesh) -> PyTree:
        """Reads the model's values onto the mesh, and adds the files of adapters.

        Raises:
          InputError: the checkpoint is damaged or belongs to another model; or files are missing or
            damaged, or their tensors do not match config.json.
        """
        if self.run is None:
            params = load_weights(self.folder, self.config, mesh)
            weights = Weights(params, {}, initial_variables(self.config))
        else:
            given = (self.config, self.run.parameters, mesh, self.weights, self.base)
            weights = restore.restore_weights(self.folder / CHECKPOINTS, self.step, *given)
        values = weights.merged()
        for file, scale in self.loras:
            values = merge_file(values, file, scale)
        return values

    def trained(self, mesh: Mesh) -> PyTree:
        """Reads the trained parameters of a run alone onto the mesh.

        Raises:
          InputError: the checkpoint is damaged or belongs to another model.
        """
        assert self.run is not None
        given = (self.config, self.run.parameters, mesh, self.weights)
        folder = self.folder / CHECKPOINTS
        return restore.restore_weights(folder, self.step, *given, trained_only=True).params

    def base_name(self) -> str:
        """What a run's trained parameters belong to, in words: weights, or those of this run."""
        assert self.run is not None
        base = restore.read_base(self.folder.absolute() / CHECKPOINTS / str(self.step))
        if base is not None:
            return base.weights
        begun = self.run.run.initial_weights
        merged = f", which began from {begun}" if begun else ""
        return f"the frozen weights of {self.folder}{merged} (`alload export` writes them)"

    def vae_stride(self) -> Triple | None:
        """The VAE stride from data.json; None if it is gone.

        For released weights that of the VAE with the model's number of channels.
        """
        if self.run is None:
            return self._defaults.vae_stride
        found = self._recorded().get("vae_stride")
        return tuple(found) if found else None

    def origin(self) -> dict[str, Any]:
        """Origin of the training data; empty if it is not known."""
        found = self._recorded().get("origin")
        return found if isinstance(found, dict) else {}

    def trained_with_given_frames(self) -> bool:
        """Whether the model has learnt to go on from given frames: of released weights granted."""
        if self.run is None:
            return True
        share = getattr(self.run.objective, "given_first_frame", 0.0)
        return self.config.given_channels > 0 or share > 0

    def fps(self) -> float | None:
        """Frames per second of the training data, else of the family; None if not known."""
        if self.run is None:
            return self._defaults.fps
        return fps_of(self.origin()) or family_fps(self.config, self.vae_stride())

    def trained_null(self) -> bool:
        """Whether the model was trained with zeros for its condition, as guidance needs them.

        Released weights were trained with the embeddings of an empty text.
        """
        return self.run is not None and getattr(self.run.objective, "condition_dropout", 0.0) > 0

    def noise_levels(self) -> tuple[float, float]:
        """The noise levels that the model was trained on: all, where they are not known."""
        if self.run is None:
            return 0.0, 1.0
        timesteps = self.run.objective.timesteps
        return timesteps.lowest, timesteps.highest

    def text_length(self) -> int | None:
        """Condition tokens of a sample; None if data.json is gone.

        None for released weights too: texts are padded to the model's text length.
        """
        return self._recorded().get("text_length")

    def _recorded(self) -> dict[str, Any]:
        """The content of data.json; empty for released weights, and where the file is gone."""
        if self.run is None:
            return {}
        file = self.folder / "data.json"  # facts about the data that train.py records
        if (recorded := read_json(file)) is None:
            return {}
        held = recorded if isinstance(recorded, dict) else {}
        stride, length = held.get("vae_stride"), held.get("text_length")
        parts = [*stride, length] if isinstance(stride, list) else []
        if len(parts) != 4 or not all(type(one) is int and one > 0 for one in parts):
            raise InputError(
                f"{file}: needs vae_stride, three whole numbers from 1, and text_length, one; fix "
                "it or remove it"
            )
        return recorded


def find_source(
    place: str | Path, weights: restore.WeightsKind | None = None, step: restore.StepChoice = None
) -> Source:
    """Finds the source at a path, without reading its parameters.

    Args:
      place: a run folder of train.py, a folder of config.json and safetensors, or a file that
        `load_weights` reads.
      weights: weights of a run to use; None for its EMA.
      step: step of a run's checkpoint, or `best`; None for the newest.

    Raises:
      InputError: the path is neither, the run lacks the checkpoint, or `weights` or `step` is given
        for a folder that is not a run.
    """
    place = Path(place)
    if (place / "config.yaml").is_file():
        return find_run(place, weights, step)
    if not place.is_file() and not (place / "config.json").is_file():
        inner = place / "transformer"
        near = inner if (inner / "config.json").is_file() else run_around(place)
        raise InputError(
            f"{place}: is neither a run folder of train.py (config.yaml) nor a transformer folder "
            "of diffusers (config.json), nor a file of weights; "
            f"{f'did you mean {near}?' if near else 'name one of them'}"
        )
    for flag, value in (("--weights", weights), ("--step", step)):
        if value is not None:
            raise InputError(
                f"{place}: is not a run folder of train.py, so {flag} {value} does not apply; "
                "leave it out"
            )
    return Source(place, described_by(place) if place.is_file() else read_transformer(place))


def described_by(place: Path) -> ModelConfig:
    """The model of a file of weights.

    Raises:
      InputError: it is that of no model.
    """
    if (config := restore.described_model(place)) is None:
        raise InputError(
            f"{place}: holds no weights of a known model; name a transformer folder of diffusers, "
            "or a file of all of a model's weights"
        )
    return config


def find_run(
    place: str | Path, weights: restore.WeightsKind | None = None, step: restore.StepChoice = None
) -> Source:
    """Finds a run folder of train.py; arguments as `find_source`.

    Raises:
      InputError: the path is not a run folder, or the run lacks the checkpoint.
    """
    place = Path(place)
    file = place / "config.yaml"
    if not file.is_file():
        raise InputError(f"{place}: is not a run folder of train.py (no config.yaml); name one")
    config = read_config(["--config", str(file)], prog="alload")
    averaged = config.optimizer.ema_decay is not None
    if weights == "ema" and not averaged:
        raise InputError(
            f"{place}: the run keeps no moving average (optimizer.ema_decay is null), so --weights "
            "ema does not apply; leave it out"
        )
    kind: restore.WeightsKind = weights or ("ema" if averaged else "raw")
    found = restore.find_step(place / CHECKPOINTS, step)
    return Source(place, config.model, config, found, kind)


def completed(
    source: Source, base: str | None, flag: str, names: Sequence[str], skip_unknown: bool
) -> Source:
    """Returns a source with the place of its frozen parameters and with files of adapters.

    Args:
      source: the source.
      base: place of the frozen parameters; None for where they were in training.
      flag: that gives the files of adapters.
      names: of these, `FILE` or `FILE:SCALE` each; see `read_lora`.
      skip_unknown: whether they may have more than the model.

    Raises:
      InputError: a file cannot be read, or does not fit the model, or `base` is given for a folder
        that is not a run.
    """
    loras: tuple[ScaledLora, ...] = ()
    for place, scale in map(lora_name, names):
        if not Path(place).exists():
            raise InputError(f"{flag} {place}: no such file; name a LoRA file")
        lora = read_lora(place, source.config, skip_unknown)
        note_skipped(lora)
        loras += ((lora, scale),)
    if source.run is not None:
        return replace(source, base=base, loras=loras)
    if base is not None:
        raise InputError(
            f"{source.folder}: is not a run folder of train.py, so --base {base} does not apply; "
            "leave it out"
        )
    # Texts are padded as in the training of the adapters, where they agree.
    lengths = {file.text_length for file, _ in loras if file.text_length is not None}
    text = source.config.text
    if text is None or len(lengths) != 1 or lengths == {text.length}:
        return replace(source, loras=loras)
    (length,) = lengths
    print_stderr(f"note: texts are padded to {length} tokens, as in the training of the adapters")
    config = replace(source.config, text=replace(text, length=length))
    return replace(source, loras=loras, config=config)


def save_transformer(
    source: Source, out: str, dtype: Literal["float32", "bfloat16"], keys: Naming = "diffusers"
) -> str:
    """Writes a model, with its adapters merged, as a transformer folder of diffusers.

    Args:
      source: the model.
      out: folder to write.
      dtype: of the weights.
      keys: whose keys.

    Returns:
      How diffusers loads it, or which file other programs do.

    Raises:
      InputError: diffusers has no such model, the folder is not empty, or weights cannot be read.
    """
    fields = family_of(source.config).export_fields(source.config)
    require_free(Path(out))
    values = source.values(restore.one_device_mesh())
    if source.config.lora is not None:
        values = merge_adapters(values, source.config.lora)
    [file, *_] = save_weights(out, values, source.config, dtype, naming=keys)
    if keys != "diffusers":
        return f"a program that takes {keys} keys, from {file}"
    return f"{fields['_class_name']}.from_pretrained({out!r})"
