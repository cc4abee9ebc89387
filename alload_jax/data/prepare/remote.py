"""Processes that encode for all workers: one for each GPU, or one on the CPU."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.context import SpawnContext
from multiprocessing.managers import BaseManager, BaseProxy
from typing import Any

import numpy as np

from alload_jax.data.prepare.encoders import Encoded, Given, GivenEncoder, TextEncoder, VaeEncoder
from alload_jax.data.prepare.interrupts import deferred_interrupts
from alload_jax.data.processes import follow_parent
from alload_jax.encoders.devices import device_count
from alload_jax.errors import InputError


class RemoteEncoders:
    """Encodes in another process; may be pickled and sent to workers.

    The calls of several workers are answered one by one. Their frames are sent while others are
    encoded.
    """

    def __init__(self, proxy: Any):
        """Takes the proxy of the process's encoders."""
        self._proxy = proxy

    def encode_frames(self, frames: np.ndarray) -> np.ndarray:
        """As `VaeEncoder.encode`.

        Raises:
          InputError: the process has ended; what the encoder raises is raised here too.
        """
        return np.asarray(self._asked("encode_frames", frames))

    def encode_caption(self, caption: str | None) -> Encoded:
        """As `TextEncoder.encode`; errors as `encode_frames`."""
        found: Encoded = self._asked("encode_caption", caption)
        return found

    def encode_given(self, first: np.ndarray, last: np.ndarray, frames: int) -> Given:
        """As `GivenEncoder.encode`; errors as `encode_frames`."""
        return Given(*self._asked("encode_given", first, last, frames))

    def _asked(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._proxy, method)(*arguments)
        except (EOFError, ConnectionError, FileNotFoundError) as error:
            raise InputError(
                "the process that encodes ended, perhaps for lack of memory; run the same command "
                "again, which goes on from here"
            ) from error


@contextmanager
def encoding_processes(
    vae: VaeEncoder, text: TextEncoder, given: GivenEncoder | None, context: SpawnContext
) -> Iterator[list[RemoteEncoders]]:
    """Starts a process for each GPU, or one where there is none; ends them at the end."""
    with ExitStack() as stack:
        found = []
        for device in _devices():
            manager = stack.enter_context(_started(context, device))
            proxy = manager.Encoders(vae, text, given)  # type: ignore[attr-defined]
            found.append(RemoteEncoders(proxy))
        yield found


def _devices() -> list[str | None]:
    """The value of CUDA_VISIBLE_DEVICES for each process."""
    count = device_count()
    if count < 2:
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(visible.split(",")[:count]) if visible else [str(number) for number in range(count)]


@contextmanager
def _started(context: SpawnContext, device: str | None) -> Iterator[BaseManager]:
    manager = _Manager(ctx=context)
    with deferred_interrupts():
        manager.start(_begin, (device,))
    try:
        yield manager
    finally:
        with deferred_interrupts():
            manager.shutdown()


def _begin(device: str | None) -> None:
    """Begins an encoding process; PyTorch is imported later and sees this GPU alone."""
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    follow_parent()


class _Encoders:
    """The encoders of an encoding process; a thread for each worker calls them."""

    def __init__(self, vae: VaeEncoder, text: TextEncoder, given: GivenEncoder | None):
        self._vae, self._text, self._given = vae, text, given
        self._lock = threading.Lock()

    def encode_frames(self, frames: np.ndarray) -> np.ndarray:
        with self._lock:
            return self._vae.encode(frames)

    def encode_caption(self, caption: str | None) -> Encoded:
        with self._lock:
            return self._text.encode(caption)

    def encode_given(self, first: np.ndarray, last: np.ndarray, frames: int) -> Given:
        assert self._given is not None
        with self._lock:
            return self._given.encode(first, last, frames)


class _Proxy(BaseProxy):
    _exposed_ = ("encode_frames", "encode_caption", "encode_given")

    def encode_frames(self, *arguments: Any) -> Any:
        return self._callmethod("encode_frames", arguments)

    def encode_caption(self, *arguments: Any) -> Any:
        return self._callmethod("encode_caption", arguments)

    def encode_given(self, *arguments: Any) -> Any:
        return self._callmethod("encode_given", arguments)


class _Manager(BaseManager):
    pass


_Manager.register("Encoders", _Encoders, _Proxy)
