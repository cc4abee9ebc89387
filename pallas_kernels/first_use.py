"""Compares a kernel with XLA's fusion where it is first used on a kind of GPU without a table.

What is measured stays in `$XDG_CACHE_HOME/pallas_kernels/first_use`, by default under `~/.cache`,
in a file for each kind of device and version of JAX. Processes of one run must choose alike, so
that nothing is measured or read where there are several, unless one of them shares what it knows:
`Comparisons.use`.
"""

import json
import os
import re
import statistics
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import jax
from jaxtyping import PyTree

from pallas_kernels import devices

ELEMENTS = 1 << 25
"""Of the largest operand of a comparison: more than caches hold."""
_FORMAT = "pallas-kernels-first-use-1"
_ROUNDS, _CALLS = 5, 10
_CLEARLY = 1.02
"""Ratio from which on a kernel is taken."""
_SWITCH = "PALLAS_KERNELS_FIRST_USE"
"""A variable of the environment: 0 measures nothing."""
_DAMAGE = (
    *(OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError),
)
"""What reading a file of another content may raise."""

Times = Callable[[], tuple[float, float]]
"""Measures the seconds of the reference and of the kernel."""


class Comparisons:
    """How many times as fast as the reference kernels are, by kind of device and case."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._ratios: dict[str, dict[str, float]] = {}
        self._measures: bool | None = None

    def ratio(self, case: str, times: Times) -> float:
        """The ratio of a case on the device to run on; 1 where it cannot be known.

        Args:
          case: kernel and what its speed depends on, such as "bias_gelu 8960 bfloat16".
          times: measures it. It runs outside of any trace.
        """
        kind = devices.device_kind()
        with self._lock:
            known = self._known(kind)
            if case in known:
                return known[case]
            if not self._may_measure():
                return 1.0
            ratio = known[case] = _measured(case, times)
            if ratio != 1.0:
                # With what other processes have measured meanwhile.
                known |= {**_read(kind), case: ratio}
                _write(kind, known)
            return ratio

    def faster(self, case: str, times: Times) -> bool:
        """Whether a kernel is faster by more than measurements differ; arguments as `ratio`."""
        return self.ratio(case, times) > _CLEARLY

    def known(self) -> dict[str, float]:
        """Ratios of this process's kind of device by case."""
        with self._lock:
            return dict(self._known(devices.device_kind()))

    def use(self, ratios: Mapping[str, float] | None) -> None:
        """Takes these ratios for this process's device, and measures no others from now on.

        Args:
          ratios: by case, from `known`; None to measure in this process though there are others.
        """
        with self._lock:
            self._measures = ratios is None
            self._ratios.pop(devices.device_kind(), None)
            if ratios is not None:
                self._ratios[devices.device_kind()] = dict(ratios)

    def clear(self) -> None:
        """Forgets what this process knows; files stay."""
        with self._lock:
            self._ratios.clear()
            self._measures = None

    def _known(self, kind: str) -> dict[str, float]:
        if kind not in self._ratios:
            self._ratios[kind] = _read(kind) if self._may_measure() else {}
        return self._ratios[kind]

    def _may_measure(self) -> bool:
        if self._measures is None:
            return os.environ.get(_SWITCH) != "0" and jax.process_count() == 1
        return self._measures


COMPARISONS = Comparisons()
"""Those of this process."""


def seconds_of(
    functions: Sequence[Callable[..., PyTree]], arguments: tuple[jax.Array, ...]
) -> list[float]:
    """Seconds of a forward and a backward of each function, as medians of rounds in turn.

    Args:
      functions: of all arguments, differentiable in them.
      arguments: floats.
    """

    def both(function: Callable[..., PyTree], gradients: PyTree, *arguments: jax.Array) -> PyTree:
        out, pull = jax.vjp(function, *arguments)
        return out, pull(gradients)

    # An argument: of a constant, XLA computes parts of the backward while it compiles.
    out = jax.eval_shape(functions[0], *arguments)
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape, x.dtype), out)
    programs = [
        jax.jit(both, static_argnums=0).lower(each, gradients, *arguments).compile()
        for each in functions
    ]
    rounds: list[list[float]] = [[] for _ in programs]
    for program, seconds in (*zip(programs, rounds, strict=True),) * (_ROUNDS + 1):
        begin = time.perf_counter()
        for _ in range(_CALLS):
            result = program(gradients, *arguments)
        jax.block_until_ready(result)
        seconds.append((time.perf_counter() - begin) / _CALLS)
    return [statistics.median(seconds[1:]) for seconds in rounds]


def compared(
    runs: Sequence[Callable[..., PyTree]],
    operands_of: Callable[..., PyTree],
    call: Hashable,
    arguments: Sequence[jax.ShapeDtypeStruct],
) -> tuple[float, float]:
    """`seconds_of` the reference and the kernel, with random arguments.

    Args:
      runs: functions of operands and the call: the reference's, and the kernel's.
      operands_of: the operands that arguments make.
      call: of the function.
      arguments: shapes of floats, in which the functions are differentiated.
    """

    def of(run: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return lambda *arguments: run(operands_of(*arguments), call)

    keys = jax.random.split(jax.random.key(0), len(arguments))
    drawn = (
        jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, arguments, strict=True)
    )
    reference, kernel = seconds_of([of(run) for run in runs], tuple(drawn))
    return reference, kernel


def _measured(case: str, times: Times) -> float:
    device = devices.current_device()

    def run() -> tuple[float, float]:
        with jax.default_device(device):
            return times()

    # A thread of its own: in this one, a trace may be under way.
    try:
        with ThreadPoolExecutor(1) as pool:
            reference, kernel = pool.submit(run).result()
    except Exception as error:  # whatever a compiler says of a GPU that it does not know
        reason = " ".join(str(error).split())[:200]
        warnings.warn(
            f"{case} could not be measured on {device.device_kind} ({reason}); XLA's is used",
            stacklevel=2,
        )
        return 1.0
    return reference / kernel


def comparisons_path(device_kind: str) -> Path:
    """The file of a kind of device."""
    return path_of("first_use", f"{device_kind}_jax_{jax.__version__}")


def _read(device_kind: str) -> dict[str, float]:
    path = comparisons_path(device_kind)
    return read_file(path, _FORMAT, device_kind, _parsed, "it holds no comparisons") or {}


def _parsed(content: Mapping[str, PyTree]) -> dict[str, float]:
    return {str(case): float(ratio) for case, ratio in content["times_xla"].items()}


def _write(device_kind: str, ratios: Mapping[str, float]) -> None:
    path = comparisons_path(device_kind)
    content = {"format": _FORMAT, "device": device_kind, "times_xla": dict(ratios)}
    try:
        write_file(path, content)
    except OSError as error:
        warnings.warn(f"{path} cannot be written ({error}); it is measured again", stacklevel=2)


# ---------------------------------------------------------------- files of what was measured

T = TypeVar("T")


def path_of(folder: str, name: str) -> Path:
    """A file of the user's cache.

    Args:
      folder: of `pallas_kernels` there.
      name: of what it is about, such as a kind of device.
    """
    if not (cache := os.environ.get("XDG_CACHE_HOME")):
        home = os.path.expanduser("~")  # unchanged for a user without one, as in a container
        cache = f"{os.devnull if home == '~' else home}/.cache"
    plain = re.sub(r"\W+", "_", name).strip("_").lower()
    return Path(cache, "pallas_kernels", folder, f"{plain}.json")


def read_file(
    path: Path,
    form: str,
    device_kind: str,
    parse: Callable[[Mapping[str, PyTree]], T],
    otherwise: str,
) -> T | None:
    """What a file says; None without one, or with a warning where it holds something else.

    Args:
      path: of the file.
      form: its format's name.
      device_kind: that it must be about.
      parse: of its content.
      otherwise: what the warning says of it.
    """
    try:
        content = json.loads(path.read_text())
        if (content["format"], content["device"]) != (form, device_kind):
            raise ValueError(f"it is of {content['format']!r}, {content['device']!r}")
        return parse(content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except _DAMAGE as error:
        why = (
            f"{otherwise} for {device_kind} ({type(error).__name__}: {error}); delete it, or "
            "measure again"
        )
        if isinstance(error, PermissionError):  # a home of somebody else
            why = "it may not be read; set XDG_CACHE_HOME to a folder of your own"
        warnings.warn(f"{path} is passed over: {why}", stacklevel=2)
        return None


def write_file(path: Path, content: Mapping[str, object]) -> None:
    """Writes a file that `read_file` reads.

    Raises:
      OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed, so that no process reads half a file; those of containers often have one number.
    new = path.with_suffix(f".{uuid.uuid4().hex}")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(path)
