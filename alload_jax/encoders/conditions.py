"""Encoders of conditions, of transformers: texts and pictures to embeddings.

Texts by UMT5 and the text encoders of HunyuanVideo, pictures by CLIP and SigLIP.
"""

import html
import importlib.util
import re
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from PIL import Image
from typing_extensions import override

from alload_jax.encoders import loading
from alload_jax.errors import InputError, require_positive_value

if TYPE_CHECKING:
    import torch

TEXT = "text"
"""The kind of tokens that every text encoder gives; records hold them under this name."""


class TextModel(loading.Encoder, loading.TextEncoder):
    """A text encoder in a local folder, made of the folder and the most tokens of a text.

    Attributes:
      name: its name in the origin of data, and value of `--text`.
      model_type: the `model_type` of its config.json.
      second: a second encoder's kind of tokens, `model_type`, class, key of its width, and what it
        is in words; None for none.
      width_key: name and default of the width in its config.json.
      tokenizer_files: files of its tokenizers.
      length: most tokens of a text, with those that end it; the rest is cut off.
    """

    name: ClassVar[str]
    model_type: ClassVar[str]
    second: ClassVar[tuple[str, str, str, str, str] | None] = None
    width_key: ClassVar[tuple[str, int]]
    tokenizer_files: ClassVar[tuple[str, ...]]
    subfolder = "text_encoder"

    def __init__(self, folder: str | Path, length: int | None = None):
        """Reads the config.

        Args:
          folder: as of `Encoder`; tokenizers and further encoders are found in the pipeline too.
          length: most tokens of a text; None for the default.

        Raises:
          InputError: the folder holds no such encoder, or a part is missing.
          ValueError: the length is not positive.
        """
        self.length = self.default_length if length is None else length
        if self.length < 1:
            raise ValueError(f"length is {length}; it must be at least 1")
        super().__init__(folder)
        self._folders = [(self.folder, self._config)]
        if self.second is not None:
            other, (_, kind, _, _, wanted) = self.folder.parent / "text_encoder_2", self.second
            if not (other / loading.CONFIG_NAME).is_file():
                raise InputError(
                    f"{other}: has no {loading.CONFIG_NAME}; give the folder of HunyuanVideo's "
                    f"pipeline, which has {wanted} there"
                )
            config = loading.read_config(other, "model_type", [kind], wanted)
            self._folders.append((other, config))
        places = zip(self._folders, ("tokenizer", "tokenizer_2"), strict=False)
        self._tokenizer_folders = [
            loading.find_beside(folder, name, self.tokenizer_files) for (folder, _), name in places
        ]

    @classmethod
    @override
    def make(cls, options: loading.EncoderOptions) -> Self:
        assert options.folder is not None
        require_positive_value("--text-length", options.text_length, loading.LONGEST_TEXT)
        model = cls(options.folder, options.text_length)
        loading.require_packages(f"--text {cls.name}")
        return model

    @property
    def width(self) -> int:
        """Components of an embedding of the kind `TEXT`."""
        return int(self._config.get(*self.width_key))

    @override
    def _read_origin(self) -> dict[str, object]:
        digests = []
        for (folder, config), place in zip(self._folders, self._tokenizer_folders, strict=True):
            files = loading.weight_files(folder, "model")
            files += [path for name in self.tokenizer_files if (path := place / name).is_file()]
            digests.append(loading.weights_digest(config, files))
        return {
            "name": self.name,
            "width": self.width,
            **self._notes(),
            "length": self.length,
            "weights": "-".join(digests),
        }

    @abstractmethod
    def _notes(self) -> dict[str, object]:
        """What else determines the embeddings, for `origin`."""

    @override
    def encode(self, caption: str | None) -> dict[str, np.ndarray]:
        """`tokens` of a caption, or of an empty one, as float16, as they are stored; cached."""
        return dict(_stored_tokens(self, caption or ""))

    @abstractmethod
    def tokens(self, text: str) -> dict[str, np.ndarray]:
        """Encodes a text by itself, so that equal texts have equal embeddings.

        Returns:
          its tokens by kind, each [L, width] float32 without padding: `TEXT`, and further kinds by
          the names of the models' `condition_parts`.

        Raises:
          InputError: the weights cannot be loaded.
        """

    @cached_property
    def _tokenizers(self) -> list[Any]:
        loading.require_packages(self.described)
        return [loading.load_tokenizer(folder) for folder in self._tokenizer_folders]


@lru_cache(128)  # captions; 4 MB each at 512 tokens of width 4096
def _stored_tokens(model: TextModel, caption: str) -> dict[str, np.ndarray]:
    return {name: loading.as_float16(found) for name, found in model.tokens(caption).items()}


def clean_prompt(text: str) -> str:
    """A prompt as diffusers' Wan pipelines clean it: HTML entities and white space.

    Broken Unicode is repaired where the package ftfy is installed, as there.
    """
    if importlib.util.find_spec("ftfy") is not None:
        import ftfy

        text = ftfy.fix_text(text)
    return " ".join(html.unescape(html.unescape(text)).split())


class Umt5Text(TextModel):
    """umT5 with its tokenizer; Wan's models take zeros for the tokens behind a text's."""

    described = "umT5 (UMT5EncoderModel, as transformers saves it)"
    name = model_type = "umt5"
    library_class = "transformers.UMT5EncoderModel"
    default_length = 512
    width_key = ("d_model", 512)
    tokenizer_files = ("tokenizer.json", "spiece.model")

    @override
    def _notes(self) -> dict[str, object]:
        return {"length": self.length, "ftfy": importlib.util.find_spec("ftfy") is not None}

    @override
    def tokens(self, text: str) -> dict[str, np.ndarray]:
        model, device = self._model, self._device
        # Padded to the full length like the text that Wan was trained on.
        tokens = self._tokenizers[0](
            [clean_prompt(text)],
            padding="max_length",
            max_length=self.length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = tokens.attention_mask
        with loading.inference():
            state = model(tokens.input_ids.to(device), mask.to(device)).last_hidden_state
            return {TEXT: loading.to_host(state[0, : int(mask.sum())])}

    @override
    def surplus_tokens(self, caption: str) -> int:
        tokens = self._tokenizers[0](clean_prompt(caption), verbose=False).input_ids
        return max(0, len(tokens) - self.length)


GLYPHS = "glyphs"
"""The kind of tokens that byT5 gives."""
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
_LAST_LAYERS = 2  # whose output the models do not take
_GLYPH_TOKENS = 256
_QUOTED = re.compile(r'"(.*?)"|“(.*?)”')


def glyph_prompt(text: str) -> str | None:
    """What byT5 is told of a prompt: each quoted part once; None without quotes."""
    parts = [straight or curly for straight, curly in _QUOTED.findall(text)]
    if not parts:
        return None
    return "".join(f'Text "{part}". ' for part in dict.fromkeys(parts))


class HunyuanVideoText(TextModel):
    """Qwen2.5-VL's language model and byT5, with their tokenizers.

    They give what diffusers' HunyuanVideo15Pipeline gives for valid tokens, the only ones that the
    transformer attends to. Padding, which changes no valid token, is not computed. Subfolders of a
    pipeline are `text_encoder`, `tokenizer`, `text_encoder_2` and `tokenizer_2`.

    Attributes:
      folder: folder of the language model.
    """

    name = "hunyuan_video"
    second: ClassVar[tuple[str, str, str, str, str]] = (
        *(GLYPHS, "t5", "transformers.T5EncoderModel", "d_model"),
        "byT5 (T5EncoderModel, as transformers saves it)",
    )
    _system_tokens: ClassVar[int] = 108  # up to the prompt, which the models do not see
    described = "Qwen2.5-VL's language model (Qwen2_5_VLTextModel, as transformers saves it)"
    model_type = "qwen2_5_vl_text"
    library_class = "transformers.Qwen2_5_VLTextModel"
    default_length = 1000
    width_key = ("hidden_size", 8192)
    tokenizer_files = (
        *("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json"),
        *("tokenizer_config.json", "chat_template.jinja"),
    )

    @property
    def _second_width(self) -> int:
        return int(self._folders[1][1].get(self.second[3], 512))

    @override
    def _notes(self) -> dict[str, object]:
        return {f"{self.second[0].removesuffix('s')}_width": self._second_width}

    @override
    def tokens(self, text: str) -> dict[str, np.ndarray]:
        """As `TextModel.tokens`.

        Returns:
          `text` [L, width], the language model's states behind its system message, and those of the
          second encoder: `glyphs` [G, width], none for a text without quotes; float32.

        Raises:
          InputError: the weights cannot be loaded, or a tokenizer is another model's.
        """
        most = self.length + self._system_tokens
        ids = self._conversation_ids(text, truncation=True, max_length=most)
        if len(ids) <= self._system_tokens:
            raise InputError(
                f"{self._tokenizer_folders[0]}: gives {len(ids)} tokens for a prompt with its "
                f"system message, which has {self._system_tokens} alone; copy HunyuanVideo's "
                "tokenizer"
            )
        model, _ = self._model
        with loading.inference():
            states = model(
                input_ids=self._sent(ids), output_hidden_states=True, use_cache=False
            ).hidden_states[-1 - _LAST_LAYERS]
            language = loading.to_host(states[0, self._system_tokens :])
        return {TEXT: language, self.second[0]: self._of_second(text)}

    def _conversation_ids(self, text: str, **options: Any) -> list[int]:
        conversation = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": text or " "},
        ]
        options |= {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        if not self._tokenizers[0].chat_template:
            raise InputError(
                f"{self._tokenizer_folders[0]}: has no chat template; copy chat_template.jinja of "
                "HunyuanVideo's tokenizer there"
            )
        return self._tokenizers[0].apply_chat_template(conversation, **options)["input_ids"]

    @override
    def surplus_tokens(self, caption: str) -> int:
        quiet = {"verbose": False}  # about texts that are longer than the model takes
        ids = self._conversation_ids(caption, tokenizer_kwargs=quiet)
        found = max(0, len(ids) - self.length - self._system_tokens)
        if (prompt := glyph_prompt(caption)) is None:
            return found
        return found + max(0, len(self._tokenizers[1](prompt, **quiet).input_ids) - _GLYPH_TOKENS)

    def _of_second(self, text: str) -> np.ndarray:
        """[L, width] of the second encoder."""
        if (prompt := glyph_prompt(text)) is None:
            return np.zeros((0, self._second_width), np.float32)
        _, tokenizer = self._tokenizers
        ids = tokenizer(prompt, truncation=True, max_length=_GLYPH_TOKENS).input_ids
        _, model = self._model
        with loading.inference():
            return loading.to_host(model(input_ids=self._sent(ids)).last_hidden_state[0])

    def _sent(self, ids: Sequence[int]) -> "torch.Tensor":
        """Ids of tokens as [1, L] on the device."""
        import torch

        return torch.tensor([list(ids)], device=self._device)

    @override
    def _load(self) -> Any:
        """The language model and the second encoder."""
        second, _ = self._folders[1]
        loading.weight_files(second, "model")  # before the long loading of the other
        return super()._load(), self._read(self.second[2], second)


POOLED = "pooled"
"""The kind of tokens that CLIP gives."""
_POOLED_TOKENS = 77
_TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following "
    "aspects: 1. The main content and theme of the video.2. The color, shape, size, texture, "
    "quantity, text, and spatial relationships of the objects.3. Actions, events, behaviors "
    "temporal relationships, physical movement changes of the objects.4. background environment, "
    "light, style and atmosphere.5. camera angles, movements, and transitions used in the video:"
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)


class HunyuanVideo13bText(HunyuanVideoText):
    """LLaMA's language model and CLIP's text encoder, with their tokenizers.

    They give what diffusers' HunyuanVideoPipeline gives; see `HunyuanVideoText`.
    """

    name = "hunyuan_video_13b"
    second = (
        *(POOLED, "clip_text_model", "transformers.CLIPTextModel", "hidden_size"),
        "CLIP's text encoder (CLIPTextModel, as transformers saves it)",
    )
    _system_tokens = 95
    described = "LLaMA's language model (LlamaModel, as transformers saves it)"
    model_type = "llama"
    library_class = "transformers.LlamaModel"
    default_length = 256

    @override
    def _conversation_ids(self, text: str, **options: Any) -> list[int]:
        options = options.pop("tokenizer_kwargs", options)
        return self._tokenizers[0](_TEMPLATE.format(text), **options).input_ids

    @override
    def surplus_tokens(self, caption: str) -> int:
        """Of the language model, which sees more of a text."""
        ids = self._conversation_ids(caption, verbose=False)
        return max(0, len(ids) - self.length - self._system_tokens)

    @override
    def _of_second(self, text: str) -> np.ndarray:
        """[1, width], CLIP's pooled output."""
        _, tokenizer = self._tokenizers
        ids = tokenizer(text, truncation=True, max_length=_POOLED_TOKENS).input_ids
        _, model = self._model
        with loading.inference():
            return loading.to_host(model(input_ids=self._sent(ids)).pooler_output)


_PROCESSORS = ("preprocessor_config.json",)


class ImageEncoder(loading.Encoder):
    """An image encoder in local folders; see `Encoder`.

    Attributes:
      name: its name in the origin of data.
      model_type: the `model_type` of its config.json.
      processor: name of the folder of the image processor in a pipeline.
      processor_class: its class in transformers.
    """

    name: ClassVar[str]
    model_type: ClassVar[str]
    processor: ClassVar[str]
    processor_class: ClassVar[str]
    subfolder = "image_encoder"
    dtype = "float32"  # as in Wan's pipelines

    @override
    def __init__(self, folder: str | Path):
        super().__init__(folder)
        self._processor_folder = loading.find_beside(
            self.folder, self.processor, _PROCESSORS, "image processor"
        )

    @property
    def width(self) -> int:
        """Components of an embedding."""
        return int(self._config.get("hidden_size", 768))

    @override
    def _read_origin(self) -> dict[str, object]:
        files = loading.weight_files(self.folder, "model")
        files += [self._processor_folder / name for name in _PROCESSORS]
        return {"name": self.name, "weights": loading.weights_digest(self._config, files)}

    def encode(self, picture: np.ndarray) -> np.ndarray:
        """Encodes a picture.

        Args:
          picture: [H, W, 3] uint8.

        Returns:
          [L, width] float32.

        Raises:
          ValueError: the picture has another shape or dtype.
          InputError: the weights cannot be loaded.
        """
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
            raise ValueError(
                f"the picture is {picture.dtype} of shape {picture.shape}; give uint8 [H, W, 3]"
            )
        model = self._model
        pixels = self._processor(images=Image.fromarray(picture), return_tensors="pt").pixel_values
        with loading.inference():
            return loading.to_host(self._states(model, pixels.to(self._device, model.dtype))[0])

    def _states(self, model: Any, pixels: "torch.Tensor") -> "torch.Tensor":
        """[1, L, width], what diffusion models take: the states of the last layer, normed."""
        return model(pixels).last_hidden_state

    @cached_property
    def _processor(self) -> Any:
        loading.require_packages(self.described)
        kind = getattr(import_module("transformers"), self.processor_class)
        return kind.from_pretrained(self._processor_folder, local_files_only=True)


class ClipImage(ImageEncoder):
    """CLIP's image encoder; see `ImageEncoder`. It gives the states before the last layer.

    They are [257, 1280] for the released encoder.
    """

    name = "clip"
    model_type = "clip_vision_model"
    described = "CLIP's image encoder (CLIPVisionModel, as transformers saves it)"
    processor = "image_processor"
    library_class = "transformers.CLIPVisionModel"
    # Pillow's resizing: torchvision's, where it is installed, gives other pixels.
    processor_class = "CLIPImageProcessorPil"

    @override
    def _states(self, model: Any, pixels: "torch.Tensor") -> "torch.Tensor":
        return model(pixels, output_hidden_states=True).hidden_states[-2]


class SiglipImage(ImageEncoder):
    """SigLIP's image encoder; see `ImageEncoder`. It gives the states of the last layer, normed.

    They are [729, 1152] for the released encoder.
    """

    name = "siglip"
    model_type = "siglip_vision_model"
    described = "SigLIP's image encoder (SiglipVisionModel, as transformers saves it)"
    processor = "feature_extractor"
    library_class = "transformers.SiglipVisionModel"
    # Pillow's resizing: torchvision's, where it is installed, gives other pixels.
    processor_class = "SiglipImageProcessorPil"
