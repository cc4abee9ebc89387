"""Reads one tensor of a checkpoint at a time by its name there, and writes exports.

ComfyUI's files of scaled float8 have a scale beside each weight (`.scale_weight`, or since 2025
`.weight_scale`). GGUF files, as ComfyUI reads them, have the names of the original repository; the
shapes of tensors with more than four axes are in their metadata.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, Literal

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from alload_jax.errors import InputError
from alload_jax.files import read_json, require_regular

TEXT_LENGTH = "alload_text_length"
"""Metadata key of exports: the number of tokens to which training padded the texts."""

SHA256 = "alload_sha256"
"""Metadata key of exports: SHA-256 of the file's bytes, with zeros for these 64 digits."""

CONFIG_SHA256 = "alload_config_sha256"
"""Metadata key of exports: SHA-256 of the config.json beside the file."""

WeightsDtype = Literal["float32", "bfloat16"]
"""Dtypes in which weights are written."""

STEM = "diffusion_pytorch_model"
INDEX = f"{STEM}.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights in safetensors."""
_FLOAT8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
WEIGHTS = (*FLOATS, *_FLOAT8)
"""Dtypes of weights that a `Checkpoint` reads."""
_SCALES = (".scale_weight", ".weight_scale")
_OF_ACTIVATIONS = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")
_PREFIX = "model.diffusion_model."
_PICKLED = (".pth", ".pt", ".bin", ".ckpt")
_DIGITS = re.compile(rb'(?<="alload_sha256":")[^"]*')
_NO_DIGITS = "0" * 64
_PIECE = 1 << 24
_THREADS = 4


class Checkpoint:
    """The tensors of a folder (or file) of safetensors, read one at a time.

    Use as a context manager. `keys` maps each name to the handle of its file and its name in the
    file, which differs because ComfyUI adds a prefix to every name.
    """

    def __init__(self, place: str | Path):
        self.place = Path(place)
        self.files = _files(self.place)
        self.keys: dict[str, tuple[Any, str]] = {}
        self._owner: dict[str, Path] = {}
        self._scales: dict[str, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Checkpoint":
        with self._stack:
            owner = self._owner
            for file in self.files:
                opened = _Gguf(file) if file.suffix.lower() == _GGUF else open_safetensors(file)
                handle: Any = self._stack.enter_context(opened)
                names = handle.keys()  # a handle is not iterable
                for key in names:
                    if key in owner:
                        raise InputError(
                            f"{self.place}: {key} is in both {owner[key].name} and {file.name}; "
                            "move one of them away, or name the file"
                        )
                    owner[key], self.keys[key] = file, (handle, key)
            self._stack = self._stack.pop_all()
        if all(key.startswith(_PREFIX) for key in self.keys):
            self.keys = {key.removeprefix(_PREFIX): found for key, found in self.keys.items()}
        # Scales, of weights and of activations, are no keys of their own.
        for key in list(self.keys):
            layer, dot, _ = key.rpartition(".")
            weight = f"{layer}{dot}weight"
            if key.endswith(_SCALES) and weight in self.keys:
                _, self._scales[weight] = self.keys.pop(key)
            elif key.endswith(_OF_ACTIVATIONS):
                del self.keys[key]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def header_of(self, key: str) -> tuple[tuple[int, ...], str]:
        """Returns the shape of a tensor, and its dtype as safetensors names it."""
        handle, name = self.keys[key]
        header = handle.get_slice(name)
        return tuple(header.get_shape()), header.get_dtype()

    def read(self, key: str) -> np.ndarray:
        """Reads a tensor in the file's dtype; float8, quantised or scaled as float32.

        Raises:
          InputError: the scales of a weight are not those of the whole or of its outputs.
        """
        handle, name = self.keys[key]
        shape, dtype = self.header_of(key)
        scale_name = self._scales.get(key)
        if dtype in _FLOAT8:  # which safetensors does not read into NumPy arrays
            with self._owner[name].open("rb") as content:
                header = _header(content)
                first, end = json.loads(header[8:])[name]["data_offsets"]
                content.seek(len(header) + first)
                value = np.frombuffer(content.read(end - first), _FLOAT8[dtype])
            value = value.reshape(shape).astype(np.float32)
        else:
            value = handle.get_tensor(name)
        if scale_name is None:
            return value
        found = handle.get_slice(scale_name)
        count = int(np.prod(found.get_shape()))
        if found.get_dtype() not in FLOATS or count not in (1, shape[0]):
            raise InputError(
                f"{self.place}: {scale_name} is {found.get_dtype()} of shape "
                f"{found.get_shape()}, but a weight of shape {shape} needs one scale, or one for "
                "each output; name another file of the model"
            )
        scale = handle.get_tensor(scale_name).astype(np.float32)
        return value.astype(np.float32) * scale.reshape(count, *(1 for _ in shape[1:]))

    def check_sums(self) -> None:
        """Reads all files that carry a SHA-256, as exports do, and compares it.

        Raises:
          InputError: a file, or the config.json beside it, is not as it was written.
        """
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(check_sum, (file for file in self.files if file.suffix.lower() != _GGUF)))

    def note(self, name: str) -> str | None:
        """Returns the value of that name in the files' metadata; None if there is none."""
        found = [(handle.metadata() or {}).get(name) for handle, _ in self.keys.values()]
        return next((value for value in found if value is not None), None)


_GGUF = ".gguf"


class _Gguf:
    """A GGUF file with the methods of a handle of safetensors that a `Checkpoint` calls."""

    def __init__(self, file: Path):
        require_regular(file)
        try:
            import gguf

            self._dequantize = gguf.quants.dequantize
            self._reader = gguf.GGUFReader(file)
        except ImportError as error:
            raise InputError(
                f"{file}: needs the package gguf; run: pip install -c constraints.txt -e '.[gguf]'"
            ) from error
        except (ValueError, IndexError, OSError) as error:
            raise InputError(
                f"{file}: the package gguf cannot read it ({error}): it is damaged, or of a type "
                "that the package does not know; download it again, or name another"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def __enter__(self) -> "_Gguf":
        return self

    def __exit__(self, *_: object) -> None:
        pass  # the mapping of the file ends with the arrays

    def keys(self) -> list[str]:
        return list(self._tensors)

    def metadata(self) -> dict[str, str]:
        return {}

    def get_slice(self, name: str) -> SimpleNamespace:
        field = self._reader.get_field(f"comfy.gguf.orig_shape.{name}")
        shape = self._tensors[name].shape[::-1] if field is None else field.contents()
        return SimpleNamespace(get_shape=lambda: [*map(int, shape)], get_dtype=lambda: FLOATS[1])

    def get_tensor(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            value = self._dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise InputError(f"{name}: {error}; name a file of another quantisation") from error
        return value.reshape(self.get_slice(name).get_shape())


def open_safetensors(file: Path) -> safetensors.safe_open:
    """Opens a file; the handle is a context manager that returns NumPy arrays.

    Raises:
      InputError: the file is missing, unreadable or incomplete.
    """
    require_regular(file)
    try:
        file.open("rb").close()  # safetensors reports an unreadable file as missing
        return safetensors.safe_open(file, framework="numpy")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{file}: cannot be read ({reason}); fix that or name another") from error
    except safetensors.SafetensorError as error:
        raise InputError(
            f"{file}: is not a valid safetensors file ({error}); download it again or name another"
        ) from error


def check_sum(file: Path) -> None:
    """Compares a file with the SHA-256 in its metadata, if there is one.

    Raises:
      InputError: the file, or the config.json that it was written with, has changed.
    """
    with open_safetensors(file) as handle:
        notes = handle.metadata() or {}
    config = file.with_name("config.json")
    wrong = [file] if SHA256 in notes and notes[SHA256] != _sha256(file) else []
    if CONFIG_SHA256 in notes and config.is_file() and not wrong:
        same = notes[CONFIG_SHA256] == hashlib.sha256(config.read_bytes()).hexdigest()
        wrong = [] if same else [config]
    if wrong:
        raise InputError(
            f"{wrong[0]}: is damaged or was changed: its SHA-256 is not the one in the metadata of "
            f"{file.name}; restore it, or export it again"
        )


def write_safetensors(
    file: Path, content: Mapping[str, np.ndarray], notes: Mapping[str, str]
) -> None:
    """Writes tensors with metadata, among them the file's SHA-256; see `check_sum`.

    Raises:
      OSError, SafetensorError: the file cannot be written.
    """
    notes = {"format": "pt", **notes, SHA256: _NO_DIGITS}
    safetensors.numpy.save_file(dict(content), file, metadata=notes)
    file.chmod(0o644)  # safetensors writes files that only their owner can read
    digits = _sha256(file).encode()
    with file.open("r+b") as patched:
        found = _DIGITS.search(_header(patched))
        assert found is not None
        patched.seek(found.start())
        patched.write(digits)


def _sha256(file: Path) -> str:
    """SHA-256 of a file, with zeros for the digits of its own."""
    with file.open("rb") as content:
        found = hashlib.sha256(_DIGITS.sub(_NO_DIGITS.encode(), _header(content), count=1))
        while piece := content.read(_PIECE):
            found.update(piece)
    return found.hexdigest()


def _header(content: BinaryIO) -> bytes:
    """The first bytes of an open file: the size of its header, and the header."""
    size = content.read(8)
    return size + content.read(int.from_bytes(size, "little"))


def _files(place: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint."""
    if not place.exists():
        raise InputError(f"{place}: no such file or folder; name one that holds safetensors")
    pickled = sorted(file for file in place.glob("*") if file.suffix in _PICKLED)
    if place.suffix in _PICKLED:
        pickled = [place]
    if place.is_file() and not pickled:
        return [place]
    index = place / INDEX
    if index.is_file():
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{index}: is not a valid safetensors index; download it again"
            ) from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise InputError(
                    f"{index}: names {name!r}, which is not a file in its folder; download it again"
                )
        if lost := [name for name in names if not (place / name).is_file()]:
            raise InputError(f"{place}: lacks {', '.join(lost)}; download it again")
        return [place / name for name in names]
    if found := sorted(place.glob("*.safetensors")):
        return found
    if pickled:
        raise InputError(
            f"{pickled[0]}: is a pickle file, which can run code and is not read; convert it with "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'x.safetensors')"
        )
    raise InputError(
        f"{place}: holds no safetensors files; name a folder with config.json and *.safetensors"
    )


Naming = Literal["diffusers", "original", "comfyui"]
"""Naming scheme of a checkpoint: that of diffusers, of the model's original repository, or of
ComfyUI, which a family names where it differs from the original one."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint and the parameter that it fills.

    Attributes:
      key: name in the checkpoint.
      shape: shape in the checkpoint, of our part of its outputs.
      path: path of our parameter, such as `blocks/self_attention/query/kernel`.
      layer: index along the first axis of our parameter; None if layers are not stacked.
      kind: difference between the layouts: `same`; `matrix` is transposed; `patch` is a
        convolution; `leading` has a first axis of size 1.
      outputs: outputs of the checkpoint's tensor where ours are some of them, or are in another
        order; 0 where both are the same.
      begin: the first of ours among them.
      swapped: whether the halves of ours are the other way round there.
    """

    key: str
    shape: tuple[int, ...]
    path: str
    layer: int | None
    kind: Literal["same", "matrix", "patch", "leading"]
    outputs: int = 0
    begin: int = 0
    swapped: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor, of which ours may be a part."""
        return (self.outputs or self.shape[0], *self.shape[1:])

    @property
    def rows(self) -> np.ndarray:
        """Where our outputs are among the checkpoint's, [shape[0]] integers."""
        rows = self.begin + np.arange(self.shape[0])
        return np.roll(rows, len(rows) // 2) if self.swapped else rows

    def to_ours(self, value: np.ndarray) -> np.ndarray:
        """Converts one layer from the checkpoint's layout to ours; a view where possible."""
        if self.kind == "matrix":
            return value.T
        if self.kind == "patch":  # a convolution with stride equal to its kernel size
            return value.transpose(2, 3, 4, 1, 0).reshape(-1, value.shape[0])
        return value[0] if self.kind == "leading" else value

    def to_theirs(self, value: np.ndarray) -> np.ndarray:
        """Inverts `to_ours`; the result is contiguous."""
        if self.kind == "matrix":
            return np.ascontiguousarray(value.T)
        if self.kind == "patch":
            width, channels, *patch = self.shape
            split = value.reshape(*patch, channels, width)
            return np.ascontiguousarray(split.transpose(4, 3, 0, 1, 2))
        return np.ascontiguousarray(value).reshape(self.shape)
