"""Mosaic GPU kernels that are lowered once, however many programs they stand in.

Python finds a kernel's layouts in half a second or more, in one thread at a time. A training step
has twenty kernels, of which half are unlike, and a run compiles several programs at every start.
`jax.export` keeps what was found as StableHLO, which other programs take in as it is: in memory,
and on disk where JAX keeps compiled programs (`jax_compilation_cache_dir`).
"""

import hashlib
import importlib.util
import os
import threading
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import jax
import jaxlib
from jax import export
from jax.custom_batching import sequential_vmap

from pallas_kernels import devices

_PLATFORM = "cuda"
_FOLDER = "pallas_kernels"
"""Beside JAX's compiled programs."""
_KERNELS: dict[str, export.Exported] = {}
_LOCKS: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
"""Of each kernel: programs that are lowered in several threads wait for it."""


def lowered_once(
    name: str,
    static: str,
    kernel: Callable[..., Sequence[jax.Array]],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """A kernel's results for arrays of one device.

    Args:
      name: of the kernel, as profilers and lowered modules show it.
      static: says all else that it depends on, beside the shapes and dtypes of the arrays, in words
        that are the same in every process.
      kernel: arrays → results.
      arrays: its operands.
    """
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays]
    device = devices.current_device()
    capability = getattr(device, "compute_capability", "")
    key = f"{name} {static} {shapes} {device.device_kind} {capability} {devices.core_count()}"
    with _LOCKS[key]:
        if key not in _KERNELS:
            path = _path(name, key)
            found = _read(path) if path else None
            if found is None:
                found = _export(name, kernel, shapes)
                if path:
                    _write(path, bytes(found.serialize()))
                    # What another process has written first: Mosaic numbers a process's kernels,
                    # and unlike numbers would make unlike programs.
                    found = _read(path) or found
            _KERNELS[key] = found
    # One at a time, as what is exported cannot be batched.
    return list(sequential_vmap(_KERNELS[key].call)(*arrays))


def _export(
    name: str, kernel: Callable[..., Sequence[jax.Array]], shapes: Sequence[jax.ShapeDtypeStruct]
) -> export.Exported:
    def run(*operands: jax.Array) -> list[jax.Array]:
        return list(kernel(*operands))

    run.__name__ = name
    exported = export.export(jax.jit(run), platforms=(_PLATFORM,))
    # In a thread of its own: what is written must not tell of the program that it was first met in,
    # its mesh and its stack, or programs of processes that are alike would differ.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(exported, *shapes).result()


# ---------------------------------------------------------------- on disk


def _path(name: str, key: str) -> Path | None:
    """Its file; None where JAX keeps no programs in a folder, or cannot write what it exports."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    writes = importlib.util.find_spec("flatbuffers") is not None
    if not folder or not writes or "://" in folder or not Path(folder).is_dir():
        return None
    digest = hashlib.sha256(f"{key} {versions()}".encode()).hexdigest()
    return Path(folder, _FOLDER, f"{name}-{digest[:32]}")


@cache
def versions(*folders: Path) -> str:
    """Of JAX, of the kernels' code, and of that in other folders."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, *folders):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return f"{jax.__version__} {jaxlib.__version__} {digest.hexdigest()}"


def _read(path: Path) -> export.Exported | None:
    """What was written; None if that is damaged, or cannot be read."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, exported = content[:32], content[32:]
    if hashlib.sha256(exported).digest() != digest:
        return None
    return export.deserialize(bytearray(exported))


def _write(path: Path, exported: bytes) -> None:
    """Writes a file, all of it at once, if no other process has done so."""
    # Processes of several containers, which share a folder, often have one number.
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(exist_ok=True)
        try:
            new.write_bytes(hashlib.sha256(exported).digest() + exported)
            if path.exists() and _read(path) is None:  # it is damaged
                path.unlink(missing_ok=True)
            _link(new, path)
        finally:
            new.unlink(missing_ok=True)
    except FileNotFoundError:  # the folder of compiled programs has been removed meanwhile
        return
    except OSError as error:
        warnings.warn(f"{path} cannot be written ({error}); it is lowered again", stacklevel=2)


def _link(new: Path, path: Path) -> None:
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        if not path.exists():
            new.replace(path)
