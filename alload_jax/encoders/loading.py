"""Loads models of diffusers and transformers from local folders."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

from safetensors import SafetensorError

from alload_jax.encoders.devices import choose_dtype
from alload_jax.errors import InputError

_LONGEST_REASON = 200


def load_model(kind: Any, folder: Path, device: Any, dtype: str | None) -> Any:
    """A model for inference.

    Args:
      kind: class with `from_pretrained`.
      folder: local folder of config.json and safetensors files.
      device: `torch.device` of the model.
      dtype: as `choose_dtype`.

    Raises:
      InputError: files are damaged, tensors are missing or have another shape, or the weights do
        not fit the device.
    """
    try:
        with _quiet():
            model, info = kind.from_pretrained(
                folder,
                dtype=choose_dtype(dtype, device),
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"{folder}: its weights cannot be read ({_reason(error)}); copy the folder again"
        ) from error
    for keys in ("missing_keys", "mismatched_keys"):
        if found := sorted(map(str, info.get(keys) or ())):
            raise InputError(
                f"{folder}: {len(found)} tensors are missing or have another shape, such as "
                f"{found[0]}; copy the folder again"
            )
    return _moved(model, folder, device).eval().requires_grad_(False)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a local folder, of the class that its config names.

    Raises:
      InputError: it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise InputError(
            f"{folder}: the tokenizer cannot be read ({_reason(error)}); copy the model's "
            "tokenizer folder again"
        ) from error


def _reason(error: Exception) -> str:
    """The first line of a library's error, cut between words where it is long."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return shorten(lines[0], _LONGEST_REASON, placeholder=" …")


def _moved(model: Any, folder: Path, device: Any) -> Any:
    import torch

    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"{folder}: its weights do not fit the free memory of {device}; free memory there"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Turns off progress bars of the libraries, which would cross our own."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    shown = [log for log in (of_diffusers, of_transformers) if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()
