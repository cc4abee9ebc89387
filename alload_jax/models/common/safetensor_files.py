"""The safetensors files of a checkpoint: finding them, and reading one tensor at a time."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from alload_jax.errors import InputError

STEM = "diffusion_pytorch_model"
INDEX = f"{STEM}.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_PREFIX = "model.diffusion_model."
_PICKLED = (".pth", ".pt", ".bin", ".ckpt")


class Checkpoint:
    """The tensors of a folder (or file) of safetensors, read one at a time.

    Use as a context manager. `keys` maps each name to its file's handle and its name there:
    ComfyUI writes a prefix before every one.
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
                names = handle.keys()  # a handle itself does not iterate
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
        """Of one tensor; only the header is read."""
        handle, name = self.keys[key]
        return tuple(handle.get_slice(name).get_shape())

    def dtype(self, key: str) -> str:
        """Of one tensor, as safetensors names it; only the header is read."""
        handle, name = self.keys[key]
        return handle.get_slice(name).get_dtype()

    def is_float(self, key: str) -> bool:
        """Whether its dtype is one that weights may have."""
        return self.dtype(key) in _FLOATS

    def read(self, key: str) -> np.ndarray:
        """One tensor, in the file's dtype."""
        handle, name = self.keys[key]
        return handle.get_tensor(name)

    def note(self, name: str) -> str | None:
        """What the files' metadata say under that name."""
        found = [(handle.metadata() or {}).get(name) for handle, _ in self.keys.values()]
        return next((value for value in found if value is not None), None)


def open_safetensors(file: Path) -> Any:
    """The file's handle, a context manager whose tensors are NumPy's.

    Raises:
      InputError: the file is missing, may not be read, or is not whole.
    """
    try:
        file.open("rb").close()  # safetensors calls a file missing that may not be read
        return safetensors.safe_open(file, framework="numpy")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{file}: cannot be read ({reason}); mend that or name another") from error
    except safetensors.SafetensorError as error:
        raise InputError(
            f"{file}: is no whole safetensors file ({error}); get it anew, or name another"
        ) from error


def _files(place: Path) -> list[Path]:
    """The safetensors files that a checkpoint consists of."""
    pickled = sorted(file for file in place.glob("*") if file.suffix in _PICKLED)
    if place.suffix in _PICKLED:
        pickled = [place]
    if place.is_file() and not pickled:
        return [place]
    index = place / INDEX
    if index.is_file():
        names = _indexed(index)
        if lost := [name for name in names if not (place / name).is_file()]:
            raise InputError(f"{place}: lacks {', '.join(lost)}; download it again")
        return [place / name for name in names]
    if found := sorted(place.glob("*.safetensors")):
        return found
    if pickled:
        raise InputError(
            f"{pickled[0]}: is pickled, which can run code and is not read here; convert it with "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'x.safetensors')"
        )
    raise InputError(
        f"{place}: holds no safetensors; name a folder with config.json and *.safetensors"
    )


def _indexed(index: Path) -> list[str]:
    """The files that an index names; only such as lie beside it."""
    remedy = "download it again"
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: is no index of safetensors; {remedy}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(f"{index}: names {name!r}, which is no file beside it; {remedy}")
    return names
