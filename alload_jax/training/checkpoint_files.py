"""What checkpoints consist of beside arrays: identity, checksums, what they leave out, errors."""

import json
import re
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import Array, PyTree, UInt32
from orbax.checkpoint import multihost

from alload_jax.errors import InputError, LostConnectionError, first_line, print_stderr
from alload_jax.files import Json, read_json, replacing
from alload_jax.planning.plan import LATER_FIELDS, current_identity
from alload_jax.sharding.mesh import on_device
from alload_jax.training.optimizer import NO_AVERAGE

BASE = "base"
"""The checkpoint's part that says which frozen parameters it leaves out."""


class Base(NamedTuple):
    """What a checkpoint says of the frozen parameters that it leaves out.

    Attributes:
      weights: where they are from: a folder or file, as `run.initial_weights`.
      seed: `run.seed`, which draws those that are not there.
      checksum: of their values, by `checksum`.
    """

    weights: str
    seed: int
    checksum: int

    def check(self, frozen: PyTree) -> None:
        """Checks frozen parameters that were read again.

        Raises:
          InputError: they are others than those of the checkpoint.
        """
        if checksum(frozen) != self.checksum:
            raise InputError(
                f"{self.weights}: these are other weights than those that the run was trained on; "
                "restore them, or name their folder (run.initial_weights in training, else --base)"
            )


def checksum(tree: PyTree) -> int:
    """Returns a sum of 32 bits over the bits and places of all values, whatever their sharding."""
    leaves = map(on_device, jax.tree.leaves(tree))
    return int(sum(int(_sum(leaf)) * (2 * n + 1) for n, leaf in enumerate(leaves)) % (1 << 32))


@jax.jit
def _sum(value: Array) -> UInt32[Array, ""]:
    bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
    place = jnp.zeros(value.shape, jnp.uint32)
    for axis, size in enumerate(value.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, value.shape, axis)
    mixed = (bits.astype(jnp.uint32) + jnp.uint32(0x9E3779B9)) * (2 * place + 1)
    return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)


_COMMUNICATION = re.compile(
    "Gloo|NCCL|coordination service|Connection (?:reset|closed|refused)|DEADLINE_EXCEEDED|"
    "UNAVAILABLE|Barrier timed out"
)
"""Words of errors that say nothing about files."""
_OS_REASONS = re.compile(
    "No space left on device|Disk quota exceeded|File too large|Read-only file system|"
    "Permission denied|Input/output error|Stale file handle|Transport endpoint is not connected"
)


@contextmanager
def as_input_error(
    place: Path, remedy: str, left: Callable[[], str] | None = None
) -> Iterator[None]:
    """Converts errors of Orbax to InputErrors; Orbax also raises plain Exceptions.

    Args:
      place: folder of the checkpoint.
      remedy: what to do, for the message.
      left: says which checkpoints are whole where this one is written; None where it is read.

    Raises:
      InputError: the checkpoint cannot be read or written.
      LostConnectionError: the error says nothing about files.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = first_line(error)
        if _COMMUNICATION.search(str(error)):
            raise LostConnectionError(
                f"{place}: the processes lost each other while they {'wrote' if left else 'read'} "
                f"it ({reason}); start all processes again"
            ) from error
        problem = f"cannot be read ({reason})"
        if left is not None:
            found = _OS_REASONS.search(str(error))  # out of the lines of Orbax and TensorStore
            problem = f"cannot be written ({found[0] if found else reason[:200]}), {left()}"
        raise InputError(f"{place}: this checkpoint {problem}; {remedy}") from error


def read_part(place: Path, name: str, remedy: str) -> Json:
    """Reads a part of a checkpoint that holds JSON.

    Raises:
      InputError: it cannot be read.
    """
    with as_input_error(place, remedy):
        return dict(ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(place / name))


_DATA = "data"
"""The part of the identity that says which samples a run is trained on."""


def check_identity(
    place: Path, found: Json, identity: Json, defaults: Mapping[str, object]
) -> None:
    """Checks that a checkpoint belongs to a run.

    Args:
      place: folder of the checkpoint, for messages.
      found: what it belongs to, JSON values.
      identity: what belongs to the run; an empty part equals a missing one.
      defaults: values of missing fields, for messages.

    Raises:
      InputError: they differ; the message names the difference.
    """
    if isinstance(found.get("plan"), dict):
        found = found | {"plan": current_identity(found["plan"])}
    # Data first: other samples also change the plan, in ways that say nothing to a person.
    for name in dict.fromkeys((_DATA, *identity, *found)):
        theirs, ours = found.get(name) or {}, identity.get(name) or {}
        if name == _DATA and theirs and theirs != ours:  # old versions named no samples
            counts = [f"{each.get('samples', 0):,}" for each in (theirs, ours)]
            now = f"has {counts[1]}"
            if counts[0] == counts[1]:
                now = "has as many of other content"
            raise InputError(
                f"{place}: the run was trained on {counts[0]} samples, and data.folder now {now}; "
                "give data.folder as it was, or begin a run with another run.folder (its "
                "run.initial_weights can be an export of this one)"
            )
        if name != _DATA and theirs != ours:
            raise InputError(
                f"{place}: checkpoint of another {name}: "
                f"{difference(theirs, ours, defaults)}; {_remedy(theirs, ours)}"
            )


_OF_ANY_SAMPLES = (
    *("policy", "seed", "ranks", "mode", "micro_batches_per_step", "ranks_per_group", "m_mem"),
    "context",
)
"""Parts of a plan's identity that do not depend on the samples."""


def with_samples_of(found: Json, identity: Json) -> Json:
    """A checkpoint's identity as if it had been trained on the samples of `identity`."""
    theirs, plan = current_identity(found.get("plan") or {}), dict(identity["plan"])
    for name in _OF_ANY_SAMPLES:
        plan.pop(name, None)
    kept = {name: theirs[name] for name in _OF_ANY_SAMPLES if name in theirs}
    return found | {_DATA: identity[_DATA], "plan": plan | kept}


def difference(theirs: object, ours: object, defaults: Mapping[str, object] | None = None) -> str:
    """Describes the first difference between two JSON values."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        # What the config or the devices give comes first; the rest of a plan follows from it, and
        # digests of the data and of its order from the rest.
        first, last = dict.fromkeys(_OF_ANY_SAMPLES, -1), {"policy": -2, "samples": 1, "order": 1}
        priority = first | last
        keys = sorted(theirs.keys() | ours.keys(), key=lambda key: (priority.get(key, 0), key))
        for key in keys:
            was, now = (side.get(key, (defaults or {}).get(key)) for side in (theirs, ours))
            if isinstance(was, dict) and isinstance(now, dict) and was != now:
                return f"of {key}, {difference(was, now)}"
            if key == NO_AVERAGE:
                key, was, now = "ema_decay", *(None if each else "set" for each in (was, now))
            if was != now:
                was, now = ("null" if each is None else repr(each) for each in (was, now))
                return f"{key} was {was} and is now {now}"
    return f"it was {theirs!r} and is now {ours!r}"


_GIVEN = ("policy", "m_mem", "samples", "ranks", "context")
"""Of a plan, what no version chooses by itself."""


def _remedy(theirs: object, ours: object) -> str:
    plans = [each if isinstance(each, dict) else {} for each in (theirs, ours)]
    ranks = [each.get("ranks") for each in plans]
    unlike = {name for name, was in plans[0].items() if was != plans[1].get(name)}
    planned = all("order" in each for each in plans)
    # Fields that a config cannot add to a plan or take from it.
    of_version = (plans[0].keys() ^ plans[1].keys()) - {*LATER_FIELDS, "weights"}
    given = unlike.intersection((*_OF_ANY_SAMPLES, "samples"))
    if unlike == {"order"} or (planned and of_version and not given):
        return (
            "another version planned this run: go on with that one, or begin another run with this "
            "one as run.initial_weights"
        )
    rows = {name: plans[0].get(name) for name in ("row_tokens", "max_segments") if name in unlike}
    if rows and None not in rows.values() and not unlike.intersection(_GIVEN):
        flags = " ".join(f"--planning.{name} {value}" for name, value in rows.items())
        return f"another version chose those rows: give {flags}"
    if any(each.get("context", 1) != 1 for each in plans):
        return "restore the config, with mesh and number of devices, or choose another run.folder"
    if ranks[0] is None or ranks[0] == ranks[1]:
        return "restore the config or choose another run.folder"
    return (
        f"on a number of devices that divides {ranks[0]} give --planning.ranks {ranks[0]}; else "
        "restore the config or choose another run.folder"
    )


CHECKSUMS_NAME = "checksums.json"
CHECKSUMS_NOTE = {"checksums": "crc32"}
"""What the identity of a checkpoint says of its checksums, so that their loss is noticed."""
_LATER_FILES = (CHECKSUMS_NAME, "_CHECKPOINT_METADATA")
"""Files in a checkpoint's folder that change after the checksums are taken."""
_PIECE = 1 << 24
_THREADS = 4


def write_checksums(folder: Path) -> None:
    """Writes the size and CRC-32 of every file of a checkpoint into its folder."""
    files = sorted(_files(folder))
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = list(pool.map(lambda name: _checksum(folder / name), files))
    content = {name: list(each) for name, each in zip(files, sums, strict=True)}
    with replacing(folder / CHECKSUMS_NAME) as unfinished:
        unfinished.write_text(json.dumps({"files": content}) + "\n")


def damage(folder: Path) -> str:
    """What differs from the checksums of a checkpoint; "" if nothing.

    Old versions wrote none and did not note any: a line warns that damage would not be seen.
    """
    if what := not_regular(folder):
        return what
    if not (folder / CHECKSUMS_NAME).exists():
        with suppress(OSError, ValueError, AttributeError):  # which reading it will report
            if CHECKSUMS_NOTE.items() <= read_json(folder / "identity" / "metadata").items():
                return f"{CHECKSUMS_NAME} is missing"
        print_stderr(
            f"warning: {folder}: has no checksums, as an old version wrote it; damage is not seen"
        )
        return ""
    try:
        files = read_json(folder / CHECKSUMS_NAME)["files"]
        known = {str(name): (int(size), int(crc)) for name, (size, crc) in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{CHECKSUMS_NAME} is damaged"
    if missing := sorted(known.keys() - set(_files(folder))):
        return f"{missing[0]} is missing"
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda name: _checksum(folder / name), known)
        wrong = [name for name, each in zip(known, found, strict=True) if each != known[name]]
    return f"{wrong[0]} is damaged" if wrong else ""


def not_regular(folder: Path) -> str:
    """What in a checkpoint is neither a file nor a folder; "" if nothing is."""
    for path in folder.rglob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            return f"{path.relative_to(folder)} is not a regular file"
    return ""


def _files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in _LATER_FILES:
            yield str(path.relative_to(folder))


def _checksum(path: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return size, crc


def commit_barrier() -> Callable[..., None]:
    """Orbax's barrier, at which a background thread that has failed does not wait.

    Where writing fails in one process, Orbax's thread waits for those of the others before the main
    thread learns of it, and they wait for the files of this process: all for the time-out of twenty
    minutes. At this barrier the failure goes on to the main thread, which ends the run.

    Returns:
      a function for `AsyncOptions.barrier_sync_fn`.
    """
    wait = multihost.get_barrier_sync_fn()

    def barrier(*, key: str, timeout_ms: int) -> None:
        failure = sys.exc_info()[1]
        if failure is not None and threading.current_thread() is not threading.main_thread():
            raise failure
        wait(key=key, timeout_ms=timeout_ms)

    return barrier
