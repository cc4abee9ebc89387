"""Finds the safetensors files of a checkpoint and reads one tensor at a time."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import safetensors.numpy

from alload_jax.errors import InputError, refuse_special

TEXT_LENGTH = "alload_text_length"
"""Metadata key of exports: the number of tokens to which training padded the texts."""

WeightsDtype = Literal["float32", "bfloat16"]
"""Dtypes in which weights are written."""

STEM = "diffusion_pytorch_model"
INDEX = f"{STEM}.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights in safetensors."""
_PREFIX = "model.diffusion_model."
_PICKLED = (".pth", ".pt", ".bin", ".ckpt")


class Checkpoint:
    """The tensors of a folder (or file) of safetensors, read one at a time.

    Use as a context manager. `keys` maps each name to the handle of its file and its name in the
    file, which differs because ComfyUI adds a prefix to every name.
    """

    def __init__(self, place: str | Path):
        self.place = Path(place)
        self.files = _files(self.place)
        self.keys: dict[str, tuple[Any, str]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Checkpoint":
        with self._stack:
            owner: dict[str, Path] = {}
            for file in self.files:
                handle = self._stack.enter_context(open_safetensors(file))
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
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a tensor; reads only the header."""
        handle, name = self.keys[key]
        return tuple(handle.get_slice(name).get_shape())

    def dtype(self, key: str) -> str:
        """Returns the dtype of a tensor as safetensors names it; reads only the header."""
        handle, name = self.keys[key]
        return handle.get_slice(name).get_dtype()

    def is_float(self, key: str) -> bool:
        """Returns whether the dtype of a tensor is a floating-point dtype that weights may have."""
        return self.dtype(key) in FLOATS

    def read(self, key: str) -> np.ndarray:
        """Reads a tensor in the file's dtype."""
        handle, name = self.keys[key]
        return handle.get_tensor(name)

    def note(self, name: str) -> str | None:
        """Returns the value of that name in the files' metadata; None if there is none."""
        found = [(handle.metadata() or {}).get(name) for handle, _ in self.keys.values()]
        return next((value for value in found if value is not None), None)


def open_safetensors(file: Path) -> Any:
    """Opens a file; the handle is a context manager that returns NumPy arrays.

    Raises:
      InputError: the file is missing, unreadable or incomplete.
    """
    try:
        refuse_special(file)
        file.open("rb").close()  # safetensors reports an unreadable file as missing
        return safetensors.safe_open(file, framework="numpy")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{file}: cannot be read ({reason}); fix that or name another") from error
    except safetensors.SafetensorError as error:
        raise InputError(
            f"{file}: is not a valid safetensors file ({error}); download it again or name another"
        ) from error


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
        names = _read_index(index)
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


def _read_index(index: Path) -> list[str]:
    """Returns the files that an index lists; all must be in the folder of the index."""
    remedy = "download it again"
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: is not a valid safetensors index; {remedy}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"{index}: names {name!r}, which is not a file in its folder; {remedy}"
            )
    return names
