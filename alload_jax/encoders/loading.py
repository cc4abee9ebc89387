"""Loads models of diffusers and transformers from local folders, onto the devices they share."""

import gc
import hashlib
import importlib.util
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
from safetensors import SafetensorError

from alload_jax.errors import InputError, first_line
from alload_jax.files import Json, read_json
from alload_jax.planning.samples import Triple
from alload_jax.processes import cpus

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "diffusers", "transformers")


def require_packages(user: str) -> None:
    """Checks that PyTorch and its libraries are installed, without importing them.

    Args:
      user: what needs them, for the message.

    Raises:
      InputError: one is missing.
    """
    if any(importlib.util.find_spec(name) is None for name in _PACKAGES):
        raise InputError(
            f"{user} needs torch, diffusers and transformers; install alload-jax[prepare]"
        )


def device_count() -> int:
    """Number of GPUs that PyTorch sees; 0 without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return int(torch.cuda.device_count())


@contextmanager
def inference() -> Iterator[None]:
    """Computes without gradients and with algorithms that repeat their results."""
    import torch

    flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True)
    with torch.inference_mode(), flags:
        yield


def share_memory() -> None:
    """Leaves GPU memory to encoders that JAX would take at its start; call it before JAX starts."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def release_memory() -> None:
    """Gives the GPU memory of encoders that are no longer used back, for JAX to take."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


CONFIG_NAME = "config.json"


def find_folder(folder: Path, subfolder: str, wanted: str) -> Path:
    """The folder itself, or its subfolder where a whole pipeline's folder is given.

    Args:
      folder: a local folder.
      subfolder: name of the part in a pipeline's folder, such as `vae`.
      wanted: what is looked for, for messages.

    Raises:
      InputError: neither has a config.json.
    """
    for place in (folder, folder / subfolder):
        if (place / CONFIG_NAME).is_file():
            return place
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give the local folder of {wanted}")
    raise InputError(
        f"{folder}: has no {CONFIG_NAME} and no {subfolder}/{CONFIG_NAME}; give the folder of "
        f"{wanted}"
    )


def find_beside(
    folder: Path, subfolder: str, names: Sequence[str], wanted: str = "tokenizer"
) -> Path:
    """The folder of a part that lies in the folder of a model or beside it.

    Args:
      folder: the model's folder.
      subfolder: name of the part in a pipeline's folder, such as `tokenizer`.
      names: files of which the part has one at least.
      wanted: what is looked for, for messages.

    Raises:
      InputError: it is in neither.
    """
    places = (folder, folder / subfolder, folder.parent / subfolder)
    for place in places:
        if any((place / name).is_file() for name in names):
            return place
    raise InputError(
        f"{folder}: no {wanted} ({' or '.join(names)}) in it or in {places[-1]}; copy it there"
    )


def read_config(folder: Path, key: str, known: Sequence[str], wanted: str) -> dict[str, Any]:
    """The values of config.json, which must be that of a known model.

    Args:
      folder: the model's folder.
      key: name of the value that says what it is.
      known: what it may say.
      wanted: what is looked for, for messages.

    Raises:
      InputError: it is not JSON, or another model's.
    """
    path = folder / CONFIG_NAME
    found = read_json(path, "copy it again")
    name = found.get(key) if isinstance(found, dict) else None
    if name not in known:
        names = " or ".join(known)
        raise InputError(f"{path}: {key} is {name}, not {names}; give the folder of {wanted}")
    return dict(found)


def weight_files(folder: Path, stem: str) -> list[Path]:
    """The safetensors files of a model: one, or those that its index names.

    Args:
      folder: the model's folder.
      stem: file name without suffixes.

    Raises:
      InputError: a file is missing, or the index is not valid.
    """
    index = folder / f"{stem}.safetensors.index.json"
    names = {f"{stem}.safetensors"}
    if index.is_file():
        try:
            names = set(read_json(index)["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(f"{index}: is not a valid index of weights; copy it again") from error
    paths = [folder / str(name) for name in sorted(names)]
    for path in paths:
        if not path.is_file():
            raise InputError(f"{path}: no such file; weights are read from safetensors files")
    return paths


def weights_digest(config: Mapping[str, object], files: Sequence[Path]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a model.

    Names of files do not count, nor do values of the config that describe its writer.

    Args:
      config: values of config.json.
      files: weights, and other files that determine what the model computes.
    """
    writer = ("transformers_version", "torch_dtype", "dtype")
    kept = {k: v for k, v in config.items() if not k.startswith("_") and k not in writer}
    found = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    stamps = [(stat.st_size, stat.st_mtime_ns) for stat in map(Path.stat, files)]
    with ThreadPoolExecutor() as threads:  # hashing does not hold Python's lock
        for digest in threads.map(_file_digest, files, stamps):
            found.update(digest)
    return found.hexdigest()[:16]


@cache
def _file_digest(path: Path, stamp: tuple[int, int]) -> bytes:
    """SHA-256 of a file's bytes; size and time of change tell cached digests apart."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a local folder, of the class that its config names.

    Raises:
      InputError: it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise InputError(
            f"{folder}: the tokenizer cannot be read ({_reason(error)}); copy the model's "
            "tokenizer folder again"
        ) from error


def _reason(error: Exception) -> str:
    """The first line of a library's error, cut between words where it is long."""
    return shorten(first_line(error), 200, placeholder=" …")


@contextmanager
def _quiet() -> Iterator[None]:
    """Turns off progress bars of the libraries, which would cross our own."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    shown = [log for log in (of_diffusers, of_transformers) if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()


LONGEST_TEXT = 2**16
"""Most tokens of a condition that may be asked for."""


@dataclass(frozen=True)
class EncoderOptions:
    """What encoders are made from for preparation.

    Attributes:
      folder: local folder with the encoder's weights; None for an encoder without.
      text_length: most tokens of a condition.
      captions: captions of all files, cleaned; the same in every process.
      frames_per_latent: frames that a latent of pixels holds.
    """

    folder: Path | None = None
    text_length: int = 256
    captions: Sequence[str] = ()
    frames_per_latent: int = 1


Encoded = np.ndarray | dict[str, np.ndarray]
"""What a `TextEncoder` makes of a caption."""


class MediaEncoder(Protocol):
    """What preparation makes arrays by: a `VaeEncoder` or a `TextEncoder`.

    It is pickled and sent to other processes. What is large, such as weights, is loaded by the
    first call of `encode`, not when the encoder is made.

    Attributes:
      has_weights: whether it is made from a folder of weights. Then one process per GPU encodes for
        all workers; otherwise every worker encodes by itself.
    """

    has_weights: ClassVar[bool] = False

    @classmethod
    def make(cls, options: EncoderOptions) -> Self:
        """Makes the encoder.

        Raises:
          InputError: the options or the captions do not fit it.
        """

    def origin(self) -> Json:
        """Its name and what else determines the arrays (a digest of weights), as JSON values."""


class VaeEncoder(MediaEncoder, Protocol):
    """Turns frames into latents.

    Attributes:
      patch_size: latents per token of models that train on these latents, for the sides of buckets.
    """

    patch_size: ClassVar[Triple]

    @property
    def stride(self) -> Triple:
        """Pixels per latent along (frames, height, width)."""

    def encode(self, frames: np.ndarray) -> np.ndarray:
        """Encodes a clip; equal clips give equal latents.

        Args:
          frames: [T, H, W, 3] uint8; T is 4n + 1.

        Returns:
          [t, h, w, channels] floats, normalised as models train on them.
        """


class TextEncoder(MediaEncoder, Protocol):
    """Turns captions into conditions.

    Attributes:
      default_length: most tokens of a condition where none is asked for.
    """

    default_length: ClassVar[int]

    def encode(self, caption: str | None) -> Encoded:
        """Encodes a cleaned caption; None for a file without one.

        Returns:
          [L, width] floats, or [L] int32 classes. For models that take several kinds of tokens,
          those kinds by name: `text`, and the others of the models' `condition_parts`.

        Raises:
          UnusableError: a file with this caption, or without one, cannot be used.
        """

    def surplus_tokens(self, caption: str) -> int:
        """How many tokens of a cleaned caption `encode` cuts off."""
        return 0


def as_float16(values: np.ndarray) -> np.ndarray:
    """Rounds to float16, without a warning about what is too large for it and becomes infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


class Encoder(ABC):
    """A model in a local folder whose weights are loaded when they are first used.

    Attributes:
      described: what it is, for messages.
      subfolder: its folder in that of a pipeline.
      key: name of the value in config.json that says which model it is; the attribute of that name
        is the value, such as `model_type`.
      stem: file name of the weights without suffixes.
      library_class: its class in a library, such as `transformers.CLIPVisionModel`.
      dtype: of the weights, `bfloat16` or `float32`; None for bfloat16 on a GPU, float32 elsewhere.
      has_weights: that it is made from a folder, for preparation.
      folder: folder of config.json and weights.
    """

    described: ClassVar[str]
    subfolder: ClassVar[str]
    key: ClassVar[str] = "model_type"
    stem: ClassVar[str] = "model"
    library_class: ClassVar[str]
    dtype: ClassVar[str | None] = None
    has_weights: ClassVar[bool] = True
    _origin: dict[str, object] | None = None

    def __init__(self, folder: str | Path):
        """Reads the config.

        Args:
          folder: local folder of the model, or of a pipeline that has it in `subfolder`.

        Raises:
          InputError: the folder holds no such model.
        """
        self.folder = find_folder(Path(folder), self.subfolder, self.described)
        self._config = read_config(self.folder, self.key, [self.kind()], self.described)

    @classmethod
    def kind(cls) -> str:
        """What its config.json says under `key`."""
        return str(getattr(cls, cls.key.removeprefix("_")))

    def origin(self) -> Json:
        """Name, sizes and a digest of weights and other files, as JSON values; read once.

        Raises:
          InputError: weights are missing.
        """
        if self._origin is None:
            self._origin = self._read_origin()
        return dict(self._origin)

    @abstractmethod
    def _read_origin(self) -> dict[str, object]:
        """What `origin` returns."""

    def __getstate__(self) -> dict[str, object]:
        """What is pickled: all but what is loaded when it is first used."""
        kind, values = type(self), vars(self).items()
        is_loaded = {n for n, _ in values if isinstance(getattr(kind, n, None), cached_property)}
        return {name: value for name, value in values if name not in is_loaded}

    def unload(self) -> None:
        """Frees the weights; the next use loads them again."""
        self.__dict__.pop("_model", None)

    @cached_property
    def _device(self) -> "torch.device":
        """A GPU if there is one; on the CPU, PyTorch gets as many threads as this process cores."""
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu":
            torch.set_num_threads(min(torch.get_num_threads(), cpus()))
        return device

    @cached_property
    def _model(self) -> Any:
        require_packages(self.described)
        return self._load()

    def _load(self) -> Any:
        """What `_model` holds, with its weights, on the device."""
        return self._read(self.library_class, self.folder)

    def _read(self, library_class: str, folder: Path) -> Any:
        """A model of a library for inference.

        Args:
          library_class: its class, which has `from_pretrained`.
          folder: local folder of config.json and safetensors files.

        Raises:
          InputError: files are damaged, tensors are missing or have another shape, or the weights
            do not fit the device.
        """
        import torch

        weight_files(folder, self.stem)
        library, _, name = library_class.partition(".")
        kind = getattr(import_module(library), name)
        usual = "bfloat16" if self._device.type == "cuda" else "float32"
        without = library == "diffusers" and importlib.util.find_spec("accelerate") is None
        options = {"low_cpu_mem_usage": False} if without else {}  # else it says to install it
        try:
            with _quiet():
                model, info = kind.from_pretrained(
                    folder,
                    dtype=getattr(torch, self.dtype or usual),
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                    **options,
                )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise InputError(
                f"{folder}: its weights cannot be read ({_reason(error)}); copy the folder again"
            ) from error
        for keys in ("missing_keys", "mismatched_keys"):
            if found := sorted(map(str, info.get(keys) or ())):
                raise InputError(
                    f"{folder}: {len(found)} tensors are missing or have another shape, such as "
                    f"{found[0]}; copy the folder again"
                )
        try:
            return model.to(self._device).eval().requires_grad_(False)
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"{folder}: its weights do not fit the free memory of {self._device}; free memory "
                "there"
            ) from error


def to_host(states: "torch.Tensor") -> np.ndarray:
    """A tensor as float32 in host memory."""
    return np.asarray(states.float().cpu().numpy())
