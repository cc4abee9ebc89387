"""Sources of a model with the place of their base and with files of adapters."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from alload_jax.commands.lora_flags import ScaledLora
from alload_jax.commands.model_source import FolderSource, RunSource
from alload_jax.errors import InputError
from alload_jax.models.common.config import ModelConfig


def completed(
    source: RunSource | FolderSource, base: str | None, loras: tuple[ScaledLora, ...]
) -> RunSource | FolderSource:
    """Returns a source with the place of its frozen parameters and with files of adapters.

    Raises:
      InputError: `base` is given for a folder that is not a run.
    """
    if isinstance(source, RunSource):
        return replace(source, base=base, loras=loras)
    if base is not None:
        raise InputError(
            f"{source.folder}: is not a run folder of train.py, so --base {base} does not apply; "
            "leave it out"
        )
    return replace(source, loras=loras, config=_padded_as(loras, source.config))


def _padded_as(loras: Sequence[ScaledLora], config: ModelConfig) -> ModelConfig:
    """Pads texts as the training of the adapters did, where they agree."""
    lengths = {length for lora in loras if (length := lora.file.text_length) is not None}
    if config.text is None or len(lengths) != 1 or lengths == {config.text.length}:
        return config
    (length,) = lengths
    print(f"note: texts are padded to {length} tokens, as in the training of the adapters",
          file=sys.stderr)  # fmt: skip
    return replace(config, text=replace(config.text, length=length))
