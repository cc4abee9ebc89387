"""Prepares a data folder from media, shard by shard, in one process or in several."""

import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import takewhile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet

from alload_jax.data.prepare import work_folder
from alload_jax.data.prepare.settings import MediaSettings, items_digest
from alload_jax.data.prepare.sources import Item, with_copies
from alload_jax.data.prepare.unit import Job, deferred_interrupts, encoding_processes, prepare_unit
from alload_jax.data.prepare.update import Update
from alload_jax.data.prepare.videos import require_detector
from alload_jax.data.store import finish_store, is_finished
from alload_jax.data.store.files import partial_folder
from alload_jax.errors import InputError
from alload_jax.files import replacing
from alload_jax.processes import follow_parent

SKIPPED_NAME = "skipped.parquet"
"""The list of files that cannot be used, in the data folder."""
_SKIPPED = pa.schema(
    {"path": pa.string(), "reason": pa.string(), "clips": pa.int64(), "used": pa.bool_()}
)

_SECONDS_BETWEEN_LOOKS = 0.5

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
    update: bool = False,
) -> work_folder.UnitReport:
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
      update: bring a folder that may exist up to date with the files; see `Update`.

    Returns:
      what became of the files.

    Raises:
      InputError: the folder is another's, settings do not fit, a package is missing, the disk is
        full, or nothing can be used.
    """
    if settings.scenes:
        require_detector()
    items = with_copies(items)
    vae, text = settings.encoders(items)
    job = Job(out, settings, vae, text, settings.given_frames())
    for own in {item.own for item in items}:
        replace(settings, **dict(own)).areas(job.token)
    flags = settings.flags() | job.encoder_origins()
    flags |= {"update": True} if update else {"files": items_digest(items)}
    with work_folder.claimed(out, flags, update):
        size, changes, first = settings.files_per_shard, None, 0
        if update:
            try:
                changes = Update(out, items, job.origin())
            except InputError:
                if not partial_folder(out).exists():  # nothing is to go on
                    work_folder.remove_work_folder(out)
                raise
            first, items = changes.first, changes.todo
            on_files([each.item for each in changes.found if each.now], True)
        units: list[Sequence[Item]] = [()] * first
        units += [items[at : at + size] for at in range(0, len(items), size)]
        todo, reports = [], work_folder.read_reports(out)
        for number, unit in enumerate(units[first:], first):
            if is_finished(out, number) and number in reports:
                on_files(unit, True)
            else:
                todo.append(number)
        reported = [0] * len(units)

        def finished(number: int, files: int) -> None:
            """Reports each file once, however often its shard is begun."""
            if new := units[number][reported[number] : files]:
                reported[number] = files
                on_files(new, False)

        if engine is not None:
            engine(job, units, todo, finished)
        elif workers > 1:
            _in_processes(workers, job, units, todo, finished)
        else:
            for number in todo:
                prepare_unit(job, number, units[number], partial(finished, number))
        return _finish(out, len(units), report, changes)


def run_shards(
    out: Path,
    units: Units,
    todo: Sequence[int],
    finished: Finished,
    submit: Callable[[int], "Future[str | None]"],
    most: Callable[[], int],
    running: "dict[Future[str | None], int]",
) -> None:
    """Prepares shards by other processes.

    Args:
      out: data folder.
      units: the files of each shard.
      todo: numbers of the shards to prepare.
      finished: as that of an `Engine`.
      submit: hands over a shard; its result is the reason if the shard is refused.
      most: gives the number of shards to hand over at a time.
      running: takes the numbers of shards that are handed over and not finished.

    Raises:
      InputError: a shard was refused.
    """
    left = list(reversed(todo))
    while left or running:
        while left and len(running) < most():
            number = left.pop()
            running[submit(number)] = number
        for future in wait(running, _SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED).done:
            if refusal := future.result():
                raise InputError(refusal)
            number = running.pop(future)
            finished(number, len(units[number]))
        for number in running.values():
            finished(number, work_folder.read_progress(out, number))


def _in_processes(
    workers: int, job: Job, units: Units, todo: Sequence[int], finished: Finished
) -> None:
    """An `Engine` of that many processes of this machine."""
    # Forked processes would share locks of decoders and of JAX's threads.
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        jobs = [job]
        if job.has_weights:
            processes = stack.enter_context(encoding_processes(job, context))
            jobs = [replace(job, remote=each) for each in processes]
        heard, held = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(workers, context, _start_worker, (jobs, heard))
        running: dict[Future[str | None], int] = {}

        def submit(number: int) -> Future[str | None]:
            with deferred_interrupts():  # the first calls start processes
                return pool.submit(_work, number, units[number])

        try:
            run_shards(job.out, units, todo, finished, submit, lambda: 2 * workers, running)
        except BrokenProcessPool as error:
            shards = ", ".join(map(str, sorted(running.values())))
            raise InputError(
                f"{job.out}: a worker process ended at one of the shards {shards}, perhaps for "
                "lack of memory; run the same command again, with fewer --workers"
            ) from error
        finally:
            with deferred_interrupts():
                held.close()
                pool.shutdown(wait=True, cancel_futures=True)
                heard.close()


_workers: list[tuple[list[Job], IO[str]]] = []
"""Of a worker process: its jobs, and a mark, open as long as it lives."""


def _start_worker(jobs: list[Job], held: Connection) -> None:
    _workers.append((jobs, work_folder.join_workers(jobs[0].out)))
    follow_parent()  # it would wait for work forever
    threading.Thread(target=_end_with, args=(held,), daemon=True).start()


def _end_with(held: Connection) -> None:
    """Ends this process when the first one closes its side, whatever shard is in work."""
    held.poll(None)
    os._exit(1)


def _work(number: int, items: Sequence[Item]) -> None:
    jobs, _ = _workers[0]
    job = jobs[number % len(jobs)]
    prepare_unit(job, number, items, work_folder.progress_note(job.out, number))


def _finish(
    out: Path, units: int, path: Path | None, update: Update | None
) -> work_folder.UnitReport:
    """Makes the data folder of the shards, writes the list of skipped files, and cleans up."""
    if update and (changes := update.commit()):
        own = out / SKIPPED_NAME
        listed = path if path is not None and path.is_file() and path.stat().st_size else own
        total = replace(update.report(listed), changes=changes)
        write_skipped(path or own, total.skipped)
        work_folder.remove_work_folder(out)
        return total
    found = [report for number, report in work_folder.read_reports(out).items() if number < units]
    # Reports of an earlier version have none: what follows them would get other captions.
    drawn = takewhile(lambda report: report.previews or not report.used, found)
    total = work_folder.UnitReport(
        used=sum(report.used for report in found),
        without_caption=sum(report.without_caption for report in found),
        skipped=[row for report in found for row in report.skipped],
        previews=[each for report in drawn for each in report.previews][: work_folder.PREVIEWS],
    )
    if path is not None:
        write_skipped(path, total.skipped)
    if update or not total.used:
        reasons = "; ".join(f"{row.path}: {row.reason}" for row in total.skipped[:2])
        shutil.rmtree(partial_folder(out), ignore_errors=True)
        work_folder.remove_work_folder(out)
        raise InputError(f"{out}: no file can be used ({reasons}, …)")
    finish_store(out, shards=units)
    if path is None:
        write_skipped(out / SKIPPED_NAME, total.skipped)
    work_folder.remove_work_folder(out)
    return total


def is_skipped_list(path: Path) -> bool:
    """Whether a file is a list of skipped files, which may be replaced."""
    try:
        names = set(pyarrow.parquet.read_schema(path).names)
    except (OSError, pa.ArrowException):
        return False
    return {"path", "reason", "clips"} <= names <= set(_SKIPPED.names)  # earlier lists lack used


def write_skipped(path: Path, rows: Sequence[work_folder.Skipped]) -> None:
    """Writes the list of files that cannot be used or were changed, by the fields of `Skipped`."""
    table = pa.Table.from_pylist([vars(row) for row in rows], schema=_SKIPPED)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        pyarrow.parquet.write_table(table, unfinished)
