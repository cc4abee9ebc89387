"""Processes that encode for all workers: one for each GPU, or one on the CPU."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.context import SpawnContext
from multiprocessing.managers import BaseManager, BaseProxy
from typing import Any

import numpy as np

from alload_jax.data.prepare.encoders import TextEncoder, VaeEncoder
from alload_jax.data.prepare.processes import follow_parent
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

    def encode_caption(self, caption: str | None) -> np.ndarray:
        """As `TextEncoder.encode`; errors as `encode_frames`."""
        return np.asarray(self._asked("encode_caption", caption))

    def _asked(self, method: str, argument: Any) -> Any:
        try:
            return getattr(self._proxy, method)(argument)
        except (EOFError, ConnectionError, FileNotFoundError) as error:
            raise InputError(
                "the process that encodes ended, perhaps for lack of memory; run the same command "
                "again, which goes on from here"
            ) from error


@contextmanager
def encoding_processes(
    vae: VaeEncoder, text: TextEncoder, context: SpawnContext
) -> Iterator[list[RemoteEncoders]]:
    """Starts a process for each GPU, or one where there is none; ends them at the end."""
    with ExitStack() as stack:
        found = []
        for device in _devices():
            manager = stack.enter_context(_started(context, device))
            found.append(RemoteEncoders(manager.Encoders(vae, text)))  # type: ignore[attr-defined]
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
    manager.start(_begin, (device,))
    try:
        yield manager
    finally:
        manager.shutdown()


def _begin(device: str | None) -> None:
    """Begins an encoding process; PyTorch is imported later and sees this GPU alone."""
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    follow_parent()


class _Encoders:
    """The encoders of an encoding process; a thread for each worker calls them."""

    def __init__(self, vae: VaeEncoder, text: TextEncoder):
        self._vae, self._text = vae, text
        self._lock = threading.Lock()

    def encode_frames(self, frames: np.ndarray) -> np.ndarray:
        with self._lock:
            return self._vae.encode(frames)

    def encode_caption(self, caption: str | None) -> np.ndarray:
        with self._lock:
            return self._text.encode(caption)


class _Proxy(BaseProxy):
    _exposed_ = ("encode_frames", "encode_caption")

    def encode_frames(self, frames: np.ndarray) -> Any:
        return self._callmethod("encode_frames", (frames,))

    def encode_caption(self, caption: str | None) -> Any:
        return self._callmethod("encode_caption", (caption,))


class _Manager(BaseManager):
    pass


_Manager.register("Encoders", _Encoders, _Proxy)
