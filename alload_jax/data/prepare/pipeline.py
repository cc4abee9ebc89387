"""Prepares a data folder from media, shard by shard, in one process or several."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from alload_jax.data.prepare.processes import follow_parent
from alload_jax.data.prepare.remote import encoding_processes
from alload_jax.data.prepare.settings import MediaSettings, items_digest
from alload_jax.data.prepare.sources import Item
from alload_jax.data.prepare.unit import Job, prepare_unit
from alload_jax.data.prepare.work_folder import (
    Skipped,
    UnitReport,
    claimed,
    read_report,
    remove_all,
    remove_work_folder,
)
from alload_jax.data.store import finish_store, is_finished
from alload_jax.errors import InputError

SKIPPED_NAME = "skipped.parquet"
"""The list of files that cannot be used, in the data folder."""
_SKIPPED = pa.schema({"path": pa.string(), "reason": pa.string(), "clips": pa.int64()})

OnUnit = Callable[[Sequence[Item], bool], None]
"""Called with the files of a shard that is finished, and whether it was before this call."""


def prepare_media(
    items: Sequence[Item],
    out: Path,
    settings: MediaSettings,
    *,
    workers: int = 1,
    report: Path | None = None,
    on_unit: OnUnit = lambda items, before: None,
) -> UnitReport:
    """Writes the data folder `out`; goes on where an earlier call with equal arguments stopped.

    The folder has the same bytes whatever the number of workers and wherever earlier calls stopped.

    Args:
      items: the input files.
      out: data folder, which must not exist.
      settings: what to make of the files.
      workers: number of processes that decode and encode.
      report: file for the list of files that cannot be used; None for `skipped.parquet` in `out`.
      on_unit: called after each shard.

    Returns:
      what became of the files.

    Raises:
      InputError: the folder is another's, settings do not fit, the disk is full, or nothing can
        be used.
    """
    vae, text = settings.encoders(items)
    job = Job(out, settings, vae, text, settings.given_frames())
    job.areas()
    flags = settings.flags() | job.encoder_origins()
    with claimed(out, flags | {"files": items_digest(items)}):
        units = _units(items, settings.files_per_shard)
        todo = []
        for number, unit in enumerate(units):
            if is_finished(out, number) and read_report(out, number) is not None:
                on_unit(unit, True)
            else:
                todo.append(number)
        run = _here if workers == 1 else _in_processes
        for number in run(job, units, todo, workers):
            on_unit(units[number], False)
        return _finish(out, len(units), report)


def _units(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


def _here(job: Job, units: list[Sequence[Item]], todo: list[int], _: int) -> Iterator[int]:
    for number in todo:
        prepare_unit(job, number, units[number])
        yield number


def _in_processes(
    job: Job, units: list[Sequence[Item]], todo: list[int], workers: int
) -> Iterator[int]:
    """Yields numbers of shards as processes finish them."""
    # Forked processes would share locks of decoders and of JAX's threads.
    context = multiprocessing.get_context("spawn")
    with _remote_jobs(job, context) as jobs:
        yield from _in_pool(jobs, context, units, todo, workers)


@contextmanager
def _remote_jobs(job: Job, context: SpawnContext) -> Iterator[list[Job]]:
    """The job, or one for each process that encodes, where encoders have weights."""
    if not (job.vae.has_weights or job.text.has_weights):
        yield [job]
        return
    with encoding_processes(job.vae, job.text, job.given, context) as found:
        yield [replace(job, remote=remote) for remote in found]


def _in_pool(
    jobs: list[Job],
    context: SpawnContext,
    units: list[Sequence[Item]],
    todo: list[int],
    workers: int,
) -> Iterator[int]:
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (jobs, stop))
    left, running = list(reversed(todo)), dict[Future[None], int]()
    try:
        while left or running:
            while left and len(running) < 2 * workers:
                number = left.pop()
                running[pool.submit(_work, number, units[number])] = number
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
                yield running.pop(future)
    except BrokenProcessPool as error:
        shards = ", ".join(map(str, sorted(running.values())))
        raise InputError(
            f"{jobs[0].out}: a worker process ended at one of the shards {shards}, perhaps for "
            "lack of memory; run the same command again, with fewer --workers"
        ) from error
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


_state: dict[str, Any] = {}
"""What a worker process keeps between units."""


def _start_worker(jobs: list[Job], stop: Any) -> None:
    _state.update(jobs=jobs, stop=stop)
    follow_parent()


def _work(number: int, items: Sequence[Item]) -> None:
    try:
        jobs = _state["jobs"]
        prepare_unit(jobs[number % len(jobs)], number, items, _state["stop"].is_set)
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
    partial = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
