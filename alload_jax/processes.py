"""What programs and the processes that they start have in common.

Imports, Ctrl-C, CPUs and files, their output and end, and what a thread waits for, by the functions
that it is in.
"""

import io
import itertools
import math
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from types import CodeType, FrameType, FunctionType
from typing import Any, TextIO, TypeVar

from typing_extensions import override


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Leaves SIGINT to the system while open, which ends the process; shells report status 130.

    Python's own handler raises KeyboardInterrupt inside of whatever module is being imported. A
    SIGINT that is ignored stays so.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_QUOTAS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""Time and period of a group, or `max` or -1 for no limit; in the second and first version."""


def control_groups(controller: str) -> Iterator[Path]:
    """Folders of the control groups whose limits hold for this process: its own, those around it.

    Some do not exist. A container may show its own group as the root, under any name.

    Args:
      controller: its name in the first version, such as `memory`.
    """
    lines = _GROUPS.read_text().splitlines() if _GROUPS.exists() else []
    for _, names, path in (line.split(":", 2) for line in lines):
        root = _MOUNT / controller if names else _MOUNT
        own = root if ".." in path else root / path.strip("/")  # "/..": a group out of sight
        if not names or controller in names.split(","):
            yield from (own, *own.parents)


def cpus() -> int:
    """CPUs that this process may use: of its host, or of its control groups, as a container has."""
    on_linux = hasattr(os, "sched_getaffinity")
    count: float = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    for group, names in itertools.product(control_groups("cpu"), _QUOTAS):
        if all((group / name).exists() for name in names):
            share, period = " ".join((group / name).read_text() for name in names).split()
            if share not in ("max", "-1"):
                count = min(count, int(share) / int(period))
    return max(1, round(count))


def threads_left() -> float:
    """How many more threads and processes the control groups allow; infinite without a limit."""
    left = math.inf
    for most in (group / "pids.max" for group in control_groups("pids")):
        if most.exists() and (limit := most.read_text().strip()) != "max":
            left = min(left, int(limit) - int(most.with_name("pids.current").read_text()))
    return left


def most_open_files() -> int:
    """Files that this process may have open, once its limit is raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS names more than it gives
        return soft
    return hard


def process_name() -> str:
    """Tells this process from all others, also of other hosts; "" where no /proc shows it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space, number = os.readlink("/proc/self/ns/pid"), os.getpid()
        if os.readlink("/proc/self") != str(number):  # it is of another PID namespace
            return ""
        return f"{boot} {space} {number} {_state_and_start(number)[1]}"
    except OSError:
        return ""


def has_ended(name: str, own: str) -> bool:
    """Whether a process of this kernel and PID namespace has ended; False of any other.

    Args:
      name, own: `process_name` of the process, and of this one.
    """
    place, now = name.split(), own.split()
    if not place or place[:2] != now[:2]:
        return False
    try:
        os.kill(int(place[2]), 0)
        state, start = _state_and_start(int(place[2]))
    except (ProcessLookupError, FileNotFoundError):
        return True
    except OSError:  # not for this user to see
        return False
    return state in "ZX" or start != place[3]  # dead, or a later process of the same number


def _state_and_start(number: int) -> tuple[str, str]:
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


class _LastingFile(io.FileIO):
    @override
    def write(self, data: Any) -> int:
        with suppress(OSError):  # the pipe has no reader, the terminal is closed, the disk is full
            if (written := super().write(data)) is not None:  # None: it is full and does not wait
                return written
        return memoryview(data).nbytes


def lasting(descriptor: int, encoding: str) -> TextIO:
    """A text stream to a descriptor that drops what cannot be written there, rather than to fail.

    Ctrl-C reaches `tee` behind a run as well, which then has no reader while it saves. Characters
    that the encoding lacks are escaped.
    """
    file = io.BufferedWriter(_LastingFile(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True)


def outlive_output() -> None:
    """Makes what this process prints `lasting`, and drops what it prints to a stream it lacks.

    A stream that is not Python's own, such as a notebook's, stays.
    """
    for name in ("stdout", "stderr"):
        given: TextIO | None = getattr(sys, name)
        if given is not getattr(sys, f"__{name}__"):
            continue
        descriptor = given.fileno() if given else os.open(os.devnull, os.O_WRONLY)
        stream = lasting(descriptor, given.encoding if given else "utf-8")
        for place in (name, f"__{name}__"):
            setattr(sys, place, stream)


def allow_workers() -> None:
    """Lets Grain start processes. To call before the first one.

    They need absl's flags, which nothing else parses. Python's helper, which gets the options for
    warnings, is kept from printing that it cleans up after a run that ended at once.
    """
    from absl import flags  # where it is needed: every command imports this file

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    option = "ignore:resource_tracker:UserWarning"
    if option not in sys.warnoptions:
        sys.warnoptions.append(option)


def follow_parent() -> None:
    """Leaves Ctrl-C and a closed terminal to the first process; ends when that one is killed."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


FOR_OTHERS = "for the other processes"
_WORDS: dict[CodeType, str] = {}
"""By the code of a function."""

T = TypeVar("T", bound=Callable[..., Any])


def waits(words: str) -> Callable[[T], T]:
    """Marks a function, or all methods of a class, by what a thread waits for that stands there.

    To use directly above the `def`: what other decorators make of a function is another one.

    Args:
      words: such as `for a checkpoint to be written`.
    """

    def mark(what: T) -> T:
        for each in vars(what).values() if isinstance(what, type) else [what]:
            function = getattr(each, "fget", None) or getattr(each, "__func__", each)
            if isinstance(function, FunctionType):
                _WORDS[function.__code__] = words
        return what

    return mark


def waiting_for(frame: FrameType | None) -> str:
    """What a thread waits for, by the innermost function that is marked, or else where it is.

    Args:
      frame: the innermost frame of the thread.
    """
    place = ""
    while frame is not None:
        if words := _WORDS.get(frame.f_code):
            return words
        path = PurePath(frame.f_code.co_filename).as_posix()
        if not place or ("/alload_jax/" in path and "/alload_jax/" not in place):
            place = f"{path}:{frame.f_code.co_name}"
        frame = frame.f_back
    return f"in {place}"
