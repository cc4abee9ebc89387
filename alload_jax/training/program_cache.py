"""Lets shape groups share compiled programs."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextmanager
def shared_programs() -> Iterator[None]:
    """Keeps compiled programs on disk meanwhile, so that one compilation serves several devices.

    A program is bound to its devices, but on GPUs the key of JAX's compilation cache is not: a
    second group that compiles the same program loads it from there. Does nothing if the run has a
    cache of its own, or on other platforms, whose keys name the devices.
    """
    if jax.config.values["jax_compilation_cache_dir"] or jax.default_backend() != "gpu":
        yield
        return
    least = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    with tempfile.TemporaryDirectory(prefix="alload-programs-") as folder:
        _use(folder, 0.0)
        try:
            yield
        finally:
            _use(None, least)


def _use(folder: str | None, least_seconds: float) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)
    compilation_cache.reset_cache()
