"""`--engine ray`: the shards of a preparation as tasks of Ray, on this machine or a cluster.

A task decodes on a CPU and writes its shard; an actor on each GPU encodes for all of them. A data
set of Ray would bring the clips of a shard together only after all are encoded, or in one process.
"""

import itertools
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import ray

from alload_jax.data.prepare import unit
from alload_jax.data.prepare.pipeline import Finished, Units, run_shards
from alload_jax.data.prepare.sources import Item, short
from alload_jax.data.prepare.work_folder import progress_note, work_folder
from alload_jax.errors import InputError
from alload_jax.files import Json

_SECONDS_TO_CONNECT = 10.0
_OBJECT_STORE_BYTES = 10**8  # tasks without encoders of weights hand over names, not media
_GPU_SECONDS = 60.0
_RETRIES = 3
_TOKEN = "token"
_LOST = "a worker of Ray was lost (REASON); run the same command again, which goes on from here"


@dataclass(frozen=True)
class RayEngine:
    """An `Engine` that runs every shard as a task of Ray, which starts again on a lost worker.

    A Ray that is started already is used; otherwise one is started, or joined, for the call.

    Attributes:
      address: address of a cluster, as `ray.init` takes it; None for the environment variable
        RAY_ADDRESS, and without that a Ray of this machine.
      workers: most tasks at a time; None for one for each CPU of the cluster.
    """

    address: str | None = None
    workers: int | None = None

    def __call__(
        self, job: unit.Job, units: Units, todo: Sequence[int], finished: Finished
    ) -> None:
        """Prepares shards.

        Raises:
          InputError: there is no such cluster, workers are lost again and again, a worker does not
            see the files that this process sees, or a shard cannot be written.
        """
        if not todo:
            return
        start = _started(self.address, self.workers, job.has_weights)
        with start, _losses_named(f"{job.out}: {_LOST}"), _encoders(job) as encoders:
            token = secrets.token_hex(8)
            (work_folder(job.out) / _TOKEN).write_text(token, encoding="ascii")
            shared = ray.put((job, encoders))

            def most() -> int:
                return self.workers or 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))

            def submit(number: int) -> Future[str | None]:
                paths = (item.source.path for item in units[number] if item.source)
                seen = next((path for path in paths if path.exists()), None)
                task = _prepare.remote([shared], token, number, units[number], seen)
                return cast(Future[str | None], task.future())

            run_shards(job.out, units, todo, finished, submit, most, {})


@contextmanager
def _losses_named(words: str) -> Iterator[None]:
    """Raises what was raised in a task; for other errors of Ray, which are losses, these words."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise InputError(words.replace("REASON", short(error))) from error


@contextmanager
def _started(address: str | None, workers: int | None, encoders: bool) -> Iterator[None]:
    """Starts Ray, or joins a cluster, without its logs."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options: Json = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if address == "local":
        options |= {"num_cpus": workers, "include_dashboard": False}
        options |= {} if encoders else {"object_store_memory": _OBJECT_STORE_BYTES}
    host, _, port = address.rpartition(":")
    try:
        try:
            if host and "/" not in host and port.isdecimal():
                # Where nothing listens, Ray would wait for minutes.
                socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
            with unit.deferred_interrupts():
                ray.init(address, **options)
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(
                f"--ray-address {address}: no Ray can be reached there ({short(error)}); start one "
                "with `ray start --head`, or leave the address out"
            ) from error
        yield
    finally:
        with unit.deferred_interrupts():
            ray.shutdown()


@ray.remote(num_cpus=0, num_gpus=1, max_restarts=-1, max_task_retries=_RETRIES)
class _GpuEncoders(unit.Encoders):
    """Encoders that have a GPU of the cluster."""

    def node(self) -> str:
        """The node that they are on."""
        return str(ray.get_runtime_context().get_node_id())


class _RayEncoders(NamedTuple):
    """Has the method of `Encoders`, by an actor."""

    actor: Any

    def encode(self, name: str, method: str, *arguments: Any) -> Any:
        with _losses_named(unit.ENCODING_ENDED):
            return ray.get(self.actor.encode.remote(name, method, *arguments))


@contextmanager
def _encoders(job: unit.Job) -> Iterator[dict[str, list[_RayEncoders]]]:
    """Starts encoders on each GPU that is free, and ends them at the end.

    They are given by node. There are none in a cluster without GPUs, and for encoders without
    weights: then each task encodes.

    Raises:
      InputError: the cluster has GPUs, and none is free.
    """
    gpus = int(ray.cluster_resources().get("GPU", 0)) if job.has_weights else 0
    actors = [cast(Any, _GpuEncoders).remote(job) for _ in range(gpus)]
    try:
        nodes = {actor.node.remote(): actor for actor in actors}
        ready = ray.wait(list(nodes), num_returns=gpus, timeout=_GPU_SECONDS)[0] if gpus else []
        if gpus and not ready:
            raise InputError(
                f"--engine ray: all {gpus} GPUs of the cluster are in use; wait until one is free"
            )
        found: dict[str, list[_RayEncoders]] = {}
        for node in ready:
            found.setdefault(ray.get(node), []).append(_RayEncoders(nodes[node]))
        yield found
    finally:
        for actor in actors:
            ray.kill(actor)


_jobs: dict[str, tuple[unit.Job, dict[str, list[_RayEncoders]]]] = {}
"""The job of a worker process by its token, because encoders keep what they have loaded."""


@ray.remote(num_cpus=1, max_retries=_RETRIES)
def _prepare(
    shared: "list[ray.ObjectRef]", token: str, number: int, items: Sequence[Item], seen: Path | None
) -> str:
    """Prepares a shard; returns the reason if that is refused, else nothing."""
    if token not in _jobs:
        _jobs.clear()
        _jobs[token] = ray.get(shared[0])
    job, encoders = _jobs[token]
    if encoders:  # those of this node, or of all
        here = encoders.get(ray.get_runtime_context().get_node_id())
        here = here or list(itertools.chain(*encoders.values()))
        job = replace(job, remote=here[number % len(here)])
    try:
        _require_shared(job.out, token, seen)
        unit.prepare_unit(job, number, items, progress_note(job.out, number))
    except InputError as error:
        return str(error)
    return ""


def _require_shared(out: Path, token: str, seen: Path | None) -> None:
    """Checks that this process sees the folder and the files of the one that started it."""
    place, node = work_folder(out) / _TOKEN, socket.gethostname()
    if not place.is_file() or place.read_text(encoding="ascii") != token:
        raise InputError(
            f"{out}: is another folder on node {node}; name one that all nodes of the cluster share"
        )
    if seen is not None and not seen.exists():
        raise InputError(f"{seen}: is missing on node {node}; put the input where all nodes see it")
