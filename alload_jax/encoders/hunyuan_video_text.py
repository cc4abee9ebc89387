"""HunyuanVideo 1.5's text encoders: Qwen2.5-VL's language model, and byT5 for words to be drawn."""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from alload_jax.encoders.devices import choose_device, inference, require_packages
from alload_jax.encoders.folders import (
    CONFIG_NAME,
    find_beside,
    find_folder,
    read_config,
    weight_files,
    weights_digest,
)
from alload_jax.encoders.loading import load_model, load_tokenizer
from alload_jax.encoders.text_model import TEXT
from alload_jax.errors import InputError

GLYPHS = "glyphs"
"""The kind of tokens that byT5 gives."""
_WANTED = "Qwen2.5-VL's language model (Qwen2_5_VLTextModel, as transformers saves it)"
_WANTED_GLYPHS = "byT5 (T5EncoderModel, as transformers saves it)"
_TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json"),
    *("tokenizer_config.json", "chat_template.jinja"),
)
_INSTRUCTION = (
    "You are a helpful assistant. Describe the video by detailing the following aspects:",
    "1. The main content and theme of the video.",
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects.",
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the "
    "objects.",
    "4. background environment, light, style and atmosphere.",
    "5. camera angles, movements, and transitions used in the video.",
)
# The models were trained with these spaces between the sentences.
_SYSTEM = (" " * 9).join(_INSTRUCTION)
_SYSTEM_TOKENS = 108  # of the conversation up to the prompt, which the models do not see
_LAST_LAYERS = 2  # whose output the models do not take
_GLYPH_TOKENS = 256
_QUOTED = re.compile(r'"(.*?)"|“(.*?)”')


def glyph_prompt(text: str) -> str | None:
    """What byT5 is told of a prompt: each quoted part once; None without quotes."""
    parts = [straight or curly for straight, curly in _QUOTED.findall(text)]
    if not parts:
        return None
    return "".join(f'Text "{part}". ' for part in dict.fromkeys(parts))


class HunyuanVideoText:
    """Both text encoders with their tokenizers; the first text loads the weights.

    They give what diffusers' HunyuanVideo15Pipeline gives for valid tokens, the only ones that the
    transformer attends to. Padding, which changes no valid token, is not computed.

    Attributes:
      folder: folder of the language model's config.json and weights.
      length: most tokens of a text, with those that end it; the rest is cut off.
    """

    def __init__(
        self,
        folder: str | Path,
        length: int = 1000,
        *,
        device: str | None = None,
        dtype: str | None = None,
    ):
        """Reads the configs.

        Args:
          folder: local folder of a pipeline with the subfolders `text_encoder`, `tokenizer`,
            `text_encoder_2` and `tokenizer_2`, or its `text_encoder`.
          length: most tokens of a text.
          device: PyTorch device, such as `cuda:1`; None takes a GPU if there is one.
          dtype: `bfloat16` or `float32`; None takes bfloat16 on a GPU and float32 elsewhere.

        Raises:
          InputError: the folder holds no such encoders.
          ValueError: the length is not positive.
        """
        if length < 1:
            raise ValueError(f"length is {length}; it must be at least 1")
        self.folder = find_folder(Path(folder), "text_encoder", _WANTED)
        self.length = length
        self._config = read_config(self.folder, "model_type", ["qwen2_5_vl_text"], _WANTED)
        self._glyph_folder = self.folder.parent / "text_encoder_2"
        if not (self._glyph_folder / CONFIG_NAME).is_file():
            raise InputError(
                f"{self._glyph_folder}: has no {CONFIG_NAME}; give the folder of HunyuanVideo "
                f"1.5's pipeline, which has {_WANTED_GLYPHS} there"
            )
        self._glyph_config = read_config(self._glyph_folder, "model_type", ["t5"], _WANTED_GLYPHS)
        self._tokenizer_folders = [
            find_beside(folder, name, _TOKENIZER_FILES, "tokenizer")
            for folder, name in ((self.folder, "tokenizer"), (self._glyph_folder, "tokenizer_2"))
        ]
        self._asked = device, dtype

    @property
    def width(self) -> int:
        """Components of the language model's embeddings."""
        return int(self._config.get("hidden_size", 8192))

    def origin(self) -> dict[str, Any]:
        """Name, widths, length and a digest of both encoders and tokenizers, as JSON values.

        Raises:
          InputError: weights are missing.
        """
        digests = [
            weights_digest(config, [*weight_files(folder, "model"), *_files(tokenizer)])
            for config, folder, tokenizer in zip(
                (self._config, self._glyph_config),
                (self.folder, self._glyph_folder),
                self._tokenizer_folders,
                strict=True,
            )
        ]
        return {
            "name": "hunyuan_video",
            "width": self.width,
            "glyph_width": int(self._glyph_config.get("d_model", 512)),
            "length": self.length,
            "weights": "-".join(digests),
        }

    def tokens(self, text: str) -> dict[str, np.ndarray]:
        """Encodes a text by itself, so that equal texts have equal embeddings.

        Returns:
          `text` [L, width], the language model's states behind its system message, and `glyphs`
          [G, glyph width], none for a text without quotes; float32.

        Raises:
          InputError: the weights cannot be loaded, or a tokenizer is another model's.
        """
        return {TEXT: self._language(text), GLYPHS: self._glyphs(text)}

    def unload(self) -> None:
        """Frees the weights; the next text loads them again."""
        self.__dict__.pop("_models", None)

    def _language(self, text: str) -> np.ndarray:
        conversation = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": text or " "},
        ]
        tokenizer, _ = self._tokenizers
        ids = tokenizer.apply_chat_template(
            conversation,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            truncation=True,
            max_length=self.length + _SYSTEM_TOKENS,
        )["input_ids"]
        if len(ids) <= _SYSTEM_TOKENS:
            raise InputError(
                f"{self._tokenizer_folders[0]}: gives {len(ids)} tokens for a prompt with its "
                f"system message, which has {_SYSTEM_TOKENS} alone; copy HunyuanVideo's tokenizer"
            )
        model, _ = self._models
        with inference():
            states = model(
                input_ids=self._sent(ids), output_hidden_states=True, use_cache=False
            ).hidden_states[-1 - _LAST_LAYERS]
            return _to_host(states[0, _SYSTEM_TOKENS:])

    def _glyphs(self, text: str) -> np.ndarray:
        if (prompt := glyph_prompt(text)) is None:
            return np.zeros((0, int(self._glyph_config.get("d_model", 512))), np.float32)
        _, tokenizer = self._tokenizers
        ids = tokenizer(
            prompt, add_special_tokens=True, truncation=True, max_length=_GLYPH_TOKENS
        ).input_ids
        _, model = self._models
        with inference():
            return _to_host(model(input_ids=self._sent(ids)).last_hidden_state[0])

    def _sent(self, ids: Sequence[int]) -> Any:
        """Ids of tokens as [1, L] on the device."""
        import torch

        return torch.tensor([list(ids)], device=self._device)

    @cached_property
    def _device(self) -> Any:
        return choose_device(self._asked[0])

    @cached_property
    def _tokenizers(self) -> tuple[Any, Any]:
        require_packages(_WANTED)
        language, glyphs = map(load_tokenizer, self._tokenizer_folders)
        if not language.chat_template:
            raise InputError(
                f"{self._tokenizer_folders[0]}: has no chat template; copy chat_template.jinja of "
                "HunyuanVideo's tokenizer there"
            )
        return language, glyphs

    @cached_property
    def _models(self) -> tuple[Any, Any]:
        """The language model and byT5."""
        require_packages(_WANTED)
        for folder in (self.folder, self._glyph_folder):
            weight_files(folder, "model")
        from transformers import Qwen2_5_VLTextModel, T5EncoderModel

        dtype = self._asked[1]
        language = load_model(Qwen2_5_VLTextModel, self.folder, self._device, dtype)
        return language, load_model(T5EncoderModel, self._glyph_folder, self._device, dtype)


def _files(folder: Path) -> list[Path]:
    """The files of a tokenizer."""
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def _to_host(states: Any) -> np.ndarray:
    return np.asarray(states.float().cpu().numpy())
