"""Prepares a data folder from media, shard by shard, in one process or several."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from alload_jax.data.prepare.interrupts import deferred_interrupts
from alload_jax.data.prepare.remote import encoding_processes
from alload_jax.data.prepare.scenes import require_detector
from alload_jax.data.prepare.settings import MediaSettings, items_digest
from alload_jax.data.prepare.sources import Item
from alload_jax.data.prepare.unit import Job, prepare_unit
from alload_jax.data.prepare.work_folder import (
    ProgressNote,
    Skipped,
    UnitReport,
    claimed,
    join_workers,
    read_progress,
    read_report,
    remove_all,
    remove_work_folder,
)
from alload_jax.data.store import finish_store, is_finished
from alload_jax.errors import InputError
from alload_jax.files import replacing

SKIPPED_NAME = "skipped.parquet"
"""The list of files that cannot be used, in the data folder."""
_SKIPPED = pa.schema({"path": pa.string(), "reason": pa.string(), "clips": pa.int64()})

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_STOP = 5.0

OnFiles = Callable[[Sequence[Item], bool], None]
"""Called with files that are finished, and whether they were before this call."""
Units = Sequence[Sequence[Item]]
"""The files of each shard."""
Finished = Callable[[int, int], None]
"""Called with a shard's number and how many of its files are finished."""
Engine = Callable[[Job, Units, Sequence[int], Finished], None]
"""Prepares the shards of these numbers, in any order."""


def prepare_media(
    items: Sequence[Item],
    out: Path,
    settings: MediaSettings,
    *,
    workers: int = 1,
    engine: Engine | None = None,
    report: Path | None = None,
    on_files: OnFiles = lambda items, before: None,
) -> UnitReport:
    """Writes the data folder `out`; goes on where an earlier call with equal arguments stopped.

    The folder has the same bytes whatever the engine and the number of workers, and wherever
    earlier calls stopped.

    Args:
      items: the input files.
      out: data folder, which must not exist.
      settings: what to make of the files.
      workers: number of processes that decode and encode.
      engine: what runs them elsewhere than in processes of this machine.
      report: file for the list of files that cannot be used; None for `skipped.parquet` in `out`.
      on_files: called as files are finished.

    Returns:
      what became of the files.

    Raises:
      InputError: the folder is another's, settings do not fit, a package is missing, the disk is
        full, or nothing can be used.
    """
    if settings.scenes:
        require_detector()
    vae, text = settings.encoders(items)
    job = Job(out, settings, vae, text, settings.given_frames())
    job.areas()
    flags = settings.flags() | job.encoder_origins()
    with claimed(out, flags | {"files": items_digest(items)}):
        units = _units(items, settings.files_per_shard)
        todo = []
        for number, unit in enumerate(units):
            if is_finished(out, number) and read_report(out, number) is not None:
                on_files(unit, True)
            else:
                todo.append(number)
        run = engine or (_here if workers == 1 else partial(_in_processes, workers))
        run(job, units, todo, _Once(units, on_files))
        return _finish(out, len(units), report)


def _units(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


class _Once:
    """Calls `OnFiles` with each file once, however often its shard is begun; see `Finished`."""

    def __init__(self, units: Units, on_files: OnFiles):
        self._units, self._on_files = units, on_files
        self._told = [0] * len(units)

    def __call__(self, number: int, files: int) -> None:
        if items := self._units[number][self._told[number] : files]:
            self._told[number] = files
            self._on_files(items, False)


def _here(job: Job, units: Units, todo: Sequence[int], finished: Finished) -> None:
    for number in todo:
        prepare_unit(job, number, units[number], finished=partial(finished, number))


def _in_processes(
    workers: int, job: Job, units: Units, todo: Sequence[int], finished: Finished
) -> None:
    """An `Engine` of that many processes of this machine."""
    # Forked processes would share locks of decoders and of JAX's threads.
    context = multiprocessing.get_context("spawn")
    with _remote_jobs(job, context) as jobs:
        _in_pool(workers, jobs, context, units, todo, finished)


@contextmanager
def _remote_jobs(job: Job, context: SpawnContext) -> Iterator[list[Job]]:
    """The job, or one for each process that encodes, where encoders have weights."""
    if not (job.vae.has_weights or job.text.has_weights):
        yield [job]
        return
    with encoding_processes(job.vae, job.text, job.given, context) as found:
        yield [replace(job, remote=remote) for remote in found]


def _in_pool(
    workers: int,
    jobs: list[Job],
    context: SpawnContext,
    units: Units,
    todo: Sequence[int],
    finished: Finished,
) -> None:
    out = jobs[0].out
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (jobs, stop))
    left, running = list(reversed(todo)), dict[Future[None], int]()
    try:
        while left or running:
            while left and len(running) < 2 * workers:
                number = left.pop()
                with deferred_interrupts():  # the first calls start processes
                    running[pool.submit(_work, number, units[number])] = number
            done, _ = wait(running, _SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
            for future in done:
                future.result()
                number = running.pop(future)
                finished(number, len(units[number]))
            for number in running.values():
                finished(number, read_progress(out, number))
    except BrokenProcessPool as error:
        shards = ", ".join(map(str, sorted(running.values())))
        raise InputError(
            f"{out}: a worker process ended at one of the shards {shards}, perhaps for lack of "
            "memory; run the same command again, with fewer --workers"
        ) from error
    finally:
        with deferred_interrupts():
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


_state: dict[str, Any] = {}
"""What a worker process keeps between units."""


def _start_worker(jobs: list[Job], stop: Any) -> None:
    _state.update(jobs=jobs, stop=stop, mark=join_workers(jobs[0].out))
    threading.Thread(target=_end_in_time, args=(stop,), daemon=True).start()


def _end_in_time(stop: Any) -> None:
    """Ends this process when the first one is killed, or soon after it says stop.

    It would wait for work forever, or an encoder would go on for minutes.
    """
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive() and not stop.is_set():
        parent.join(_SECONDS_BETWEEN_LOOKS)
    if parent is not None:
        parent.join(_SECONDS_TO_STOP)
    os._exit(1)


def _work(number: int, items: Sequence[Item]) -> None:
    jobs: list[Job] = _state["jobs"]
    job = jobs[number % len(jobs)]
    try:
        prepare_unit(job, number, items, _state["stop"].is_set, ProgressNote(job.out, number))
    except KeyboardInterrupt:
        if not _state["stop"].is_set():
            raise


def _finish(out: Path, units: int, path: Path | None) -> UnitReport:
    """Makes the data folder of the shards, writes the list of skipped files, and cleans up."""
    found = [read_report(out, number) or UnitReport() for number in range(units)]
    total = UnitReport(
        used=sum(report.used for report in found),
        without_caption=sum(report.without_caption for report in found),
        skipped=[row for report in found for row in report.skipped],
    )
    if path is not None:
        write_skipped(path, total.skipped)
    if not total.used:
        reasons = "; ".join(f"{row.path}: {row.reason}" for row in total.skipped[:2])
        remove_all(out)
        raise InputError(f"{out}: no file can be used ({reasons}, …)")
    finish_store(out, shards=units)
    if path is None:
        write_skipped(out / SKIPPED_NAME, total.skipped)
    remove_work_folder(out)
    return total


def write_skipped(path: Path, rows: Sequence[Skipped]) -> None:
    """Writes the list of files that cannot be used: path, reason, clips stored all the same."""
    table = pa.Table.from_pylist([vars(row) for row in rows], schema=_SKIPPED)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        pyarrow.parquet.write_table(table, unfinished)
