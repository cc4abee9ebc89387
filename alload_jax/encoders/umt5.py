"""Wan's text encoder: umT5 of transformers, as diffusers' WanPipeline uses it."""

import html
import importlib.util
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from alload_jax.encoders.devices import choose_device, inference, require_packages
from alload_jax.encoders.folders import (
    find_beside,
    find_folder,
    read_config,
    weight_files,
    weights_digest,
)
from alload_jax.encoders.loading import load_model, load_tokenizer
from alload_jax.encoders.text_model import TEXT

_WANTED = "umT5 (UMT5EncoderModel, as transformers saves it)"
_TOKENIZERS = ("tokenizer.json", "spiece.model")


def clean_prompt(text: str) -> str:
    """A prompt as diffusers' Wan pipelines clean it: HTML entities and white space.

    Broken Unicode is repaired where the package ftfy is installed, as there.
    """
    if _has_ftfy():
        import ftfy

        text = ftfy.fix_text(text)
    return " ".join(html.unescape(html.unescape(text)).split())


def _has_ftfy() -> bool:
    return importlib.util.find_spec("ftfy") is not None


class Umt5Text:
    """umT5 with its tokenizer in local folders; the first call that needs weights loads them.

    Attributes:
      folder: folder of the encoder's config.json and weights.
      length: most tokens of a text, with the one that ends it; the rest is cut off.
    """

    def __init__(
        self,
        folder: str | Path,
        length: int = 512,
        *,
        device: str | None = None,
        dtype: str | None = None,
    ):
        """Reads the config.

        Args:
          folder: local folder of encoder and tokenizer, or of a pipeline with the subfolders
            `text_encoder` and `tokenizer`.
          length: most tokens of a text.
          device: PyTorch device, such as `cuda:1`; None takes a GPU if there is one.
          dtype: `bfloat16` or `float32`; None takes bfloat16 on a GPU and float32 elsewhere.

        Raises:
          InputError: the folder holds no such encoder.
          ValueError: the length is not positive.
        """
        if length < 1:
            raise ValueError(f"length is {length}; it must be at least 1")
        self.folder = find_folder(Path(folder), "text_encoder", _WANTED)
        self.length = length
        self._config = read_config(self.folder, "model_type", ["umt5"], _WANTED)
        self._tokenizer_folder = find_beside(self.folder, "tokenizer", _TOKENIZERS, "tokenizer")
        self._asked = device, dtype

    @property
    def width(self) -> int:
        """Components of an embedding."""
        return int(self._config.get("d_model", 512))

    def origin(self) -> dict[str, Any]:
        """Name, width, length and a digest of config, weights and tokenizer, as JSON values.

        Raises:
          InputError: weights are missing.
        """
        files = weight_files(self.folder, "model")
        found = (self._tokenizer_folder / name for name in _TOKENIZERS)
        files += [path for path in found if path.is_file()]
        return {
            "name": "umt5",
            "width": self.width,
            "length": self.length,
            "ftfy": _has_ftfy(),
            "weights": weights_digest(self._config, files),
        }

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes texts, each by itself, so that equal texts have equal embeddings.

        Args:
          texts: texts, which are cleaned first.

        Returns:
          for each text [L, width] float32, L the number of its tokens; Wan's models take zeros for
          the tokens from L to `length`.

        Raises:
          InputError: the weights cannot be loaded.
        """
        return [self._encode(clean_prompt(text)) for text in texts]

    def tokens(self, text: str) -> dict[str, np.ndarray]:
        """The tokens of a text by their kind, [L, width] float32; see `TextModel.tokens`."""
        (found,) = self.encode([text])
        return {TEXT: found}

    def unload(self) -> None:
        """Frees the weights; the next call of `encode` loads them again."""
        self.__dict__.pop("_model", None)

    def _encode(self, text: str) -> np.ndarray:
        model, device = self._model, self._device
        # Padded to the full length like the text that Wan was trained on.
        tokens = self._tokenizer(
            [text],
            padding="max_length",
            max_length=self.length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = tokens.attention_mask
        with inference():
            state = model(tokens.input_ids.to(device), mask.to(device)).last_hidden_state
            return np.asarray(state[0, : int(mask.sum())].float().cpu().numpy())

    @cached_property
    def _device(self) -> Any:
        return choose_device(self._asked[0])

    @cached_property
    def _tokenizer(self) -> Any:
        require_packages(_WANTED)
        return load_tokenizer(self._tokenizer_folder)

    @cached_property
    def _model(self) -> Any:
        require_packages(_WANTED)
        weight_files(self.folder, "model")
        from transformers import UMT5EncoderModel

        return load_model(UMT5EncoderModel, self.folder, self._device, self._asked[1])
