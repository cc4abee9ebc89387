"""What `--checkpoint` names: a run folder of train.py, or a folder of released weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from jax.sharding import Mesh

from alload_jax.config import Config, read_config
from alload_jax.data.manifest import MANIFEST_NAME, manifest_metadata
from alload_jax.diffusion.schedules import Sampler
from alload_jax.diffusion.timesteps import shift_of
from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import SamplingDefaults, family_of, initial_variables
from alload_jax.models.weights import load_weights, read_transformer
from alload_jax.planning.geometry import Triple
from alload_jax.training.restore import WeightsKind, find_step, restore_weights
from alload_jax.training.run_files import read_json
from alload_jax.training.state import Weights

DATA_NAME = "data.json"
"""What train.py notes in its run folder about the data."""


@dataclass(frozen=True)
class RunSource:
    """A run folder of train.py.

    Attributes:
      folder: of the run.
      run: its config.
      step: of the checkpoint.
      weights: which of the two that it holds.
    """

    folder: Path
    run: Config
    step: int
    weights: WeightsKind

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.run.model

    @property
    def sampler(self) -> Sampler:
        """The one that the run draws with."""
        return self.run.sampling.sampler

    @property
    def guidance(self) -> float:
        """The one that the run draws with."""
        return self.run.sampling.guidance

    def shift(self, seq_len: int) -> float:
        """That of training, for sequences of that length."""
        return shift_of(self.run.objective.timesteps, seq_len)

    def values(self, mesh: Mesh) -> Any:
        """Reads the model's values onto the mesh.

        Raises:
          InputError: the checkpoint is damaged or of another model.
        """
        folder = self.folder / "checkpoints"
        weights = restore_weights(
            folder, self.step, self.config, self.run.parameters, mesh, self.weights
        )
        return weights.merged()

    @property
    def manifest(self) -> Path:
        """Of the data that the run learnt from; may be gone."""
        return Path(self.run.data.folder) / MANIFEST_NAME

    def vae_stride(self) -> Triple | None:
        """As data.json says, or the data's manifest; None if both are gone."""
        noted = self._noted() or manifest_metadata(self.manifest)
        found = noted.get("vae_stride")
        return tuple(found) if found else None

    def text_length(self) -> int | None:
        """Classes that each sample is trained with; None if data.json and manifest are gone."""
        if noted := self._noted():
            return noted["text_length"]
        try:
            table = pyarrow.parquet.read_table(self.manifest, columns=["text_length"])
        except (pa.ArrowException, OSError):
            return None
        return max(1, *table["text_length"].to_pylist())

    def _noted(self) -> dict[str, Any]:
        """What train.py noted about the data; empty for a run from before it did."""
        file = self.folder / DATA_NAME
        if (noted := read_json(file)) is None:
            return {}
        stride, length = (
            noted.get(key) if isinstance(noted, dict) else None
            for key in ("vae_stride", "text_length")
        )
        parts = [*stride, length] if isinstance(stride, list) else []
        if len(parts) != 4 or not all(type(one) is int and one > 0 for one in parts):
            raise InputError(
                f"{file}: needs vae_stride, three whole numbers from 1, and text_length, one; fix "
                "it or remove it"
            )
        return noted


@dataclass(frozen=True)
class FolderSource:
    """A `transformer/` folder of diffusers, or a folder of the model's own repository.

    Attributes:
      folder: of the weights.
      config: the model's.
    """

    folder: Path
    config: ModelConfig

    @property
    def _defaults(self) -> SamplingDefaults:
        return family_of(self.config).sampling_defaults(self.config)

    @property
    def sampler(self) -> Sampler:
        """The one that diffusers draws with."""
        return "unipc"

    @property
    def guidance(self) -> float:
        """The family's."""
        return self._defaults.guidance

    def shift(self, seq_len: int) -> float:
        """The family's, whatever the length."""
        return self._defaults.shift

    def values(self, mesh: Mesh) -> Any:
        """Reads the model's values onto the mesh.

        Raises:
          InputError: files are missing or damaged, or hold other tensors than config.json says.
        """
        params = load_weights(self.folder, self.config, mesh)
        return Weights(params, {}, initial_variables(self.config)).merged()

    def vae_stride(self) -> Triple:
        """That of the VAE that has so many channels."""
        return self._defaults.vae_stride

    def text_length(self) -> None:
        """Texts are padded to the model's own length."""
        return


def find_source(
    place: str | Path, weights: WeightsKind | None = None, step: int | None = None
) -> RunSource | FolderSource:
    """Looks at what a checkpoint is; its parameters are not read yet.

    Args:
      place: a run folder of train.py, or a folder of config.json and safetensors.
      weights: of a run; None for its EMA.
      step: of a run's checkpoint; None for the newest.

    Raises:
      InputError: it is neither, it holds no such checkpoint, or it is no run and weights or step
        are given.
    """
    place = Path(place)
    if (place / "config.yaml").is_file():
        return find_run(place, weights, step)
    if not (place / "config.json").is_file():
        inner = place / "transformer"
        near = f"; did you mean {inner}?" if (inner / "config.json").is_file() else ""
        raise InputError(
            f"{place}: is neither a run folder of train.py (config.yaml) nor a transformer folder "
            f"of diffusers (config.json){near or '; name one'}"
        )
    for flag, value in (("--weights", weights), ("--step", step)):
        if value is not None:
            raise InputError(
                f"{place}: is no run folder of train.py, so that {flag} {value} has no meaning; "
                "leave it out"
            )
    return FolderSource(place, read_transformer(place))


def find_run(
    place: str | Path, weights: WeightsKind | None = None, step: int | None = None
) -> RunSource:
    """`find_source` where only a run will do.

    Raises:
      InputError: it is none, or holds no such checkpoint.
    """
    place = Path(place)
    file = place / "config.yaml"
    if not file.is_file():
        raise InputError(f"{place}: is no run folder of train.py: it has no config.yaml; name one")
    config = read_config(["--config", str(file)], prog="alload")
    return RunSource(place, config, find_step(place / "checkpoints", step), weights or "ema")
