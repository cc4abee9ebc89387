"""Reads adapters from safetensors with the keys that other programs use.

These are the keys of diffusers and PEFT (`transformer.blocks.0.attn1.to_q.lora_A.weight`), of the
model's original repository and ComfyUI (`diffusion_model.blocks.0.self_attn.q.lora_down.weight`,
`.alpha`) and of musubi-tuner (`lora_unet_blocks_0_self_attn_q.lora_down.weight`). diffusers 0.42's
`lora_conversion_utils` was read for facts about them.
"""

import math
import re
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alload_jax.errors import InputError
from alload_jax.files import parse_json, read_text
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.named_tensors import Tensor
from alload_jax.models.common.safetensor_files import (
    FLOATS,
    TEXT_LENGTH,
    check_sum,
    open_safetensors,
)
from alload_jax.models.families import family_of

_PREFIX = re.compile(
    r"^(base_model\.model\.)?(model\.diffusion_model\.|diffusion_model\.|transformer\.)?"
)
_MUSUBI = "lora_unet_"
_TEXT = ("text_encoder", "lora_te")
_DOWN = re.compile(r"\.lora(_A|_down)(\.default)?\.weight$")
_UP = re.compile(r"\.lora(_B|_up)(\.default)?\.weight$")
_ALPHA, _DIFFERENCE, _BIAS = ".alpha", ".diff", ".diff_b"
_METADATA = "lora_adapter_metadata"
_NAMES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""Names of the file in folders that diffusers and PEFT write."""


@dataclass(frozen=True)
class Adapter:
    """What a file adds to one linear layer: scale·down·up to its kernel [in, out].

    Attributes:
      down: [in, rank] float32.
      up: [rank, out] float32.
      scale: alpha / rank.
    """

    down: np.ndarray
    up: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        """Width of the inner product."""
        return self.down.shape[1]


class Target(NamedTuple):
    """A parameter, or one layer of a stacked one.

    Attributes:
      path: path of the parameter, such as `blocks/self_attention/query/kernel`.
      layer: index of the layer; None if layers are not stacked.
    """

    path: str
    layer: int | None


class LoraFile(NamedTuple):
    """The content of a file.

    Attributes:
      place: the file.
      adapters: by the kernel that they change.
      differences: arrays to add to parameters of any kind, in our layout.
      text_length: tokens to which training padded the texts; None if the file does not say.
    """

    place: Path
    adapters: dict[Target, Adapter]
    differences: dict[Target, np.ndarray]
    text_length: int | None = None


def read_lora(place: str | Path, config: ModelConfig) -> LoraFile:
    """Reads a file of adapters for a model, or the folder that holds one.

    Raises:
      InputError: the file cannot be read, or does not fit the model; the message names what does
        not.
    """
    file = _file(Path(place))
    check_sum(file)
    with open_safetensors(file) as handle:
        names = list(handle.keys())
        content = {key: _read(file, handle, key) for key in names}
        metadata = handle.metadata() or {}
        notes = _metadata(file, metadata)
    table = _Table(config)
    parts: dict[str, dict[str, Any]] = {}
    for key, value in content.items():
        module, what = _split(key)
        if what in parts.setdefault(module, {}):
            raise InputError(f"{file}: holds {module} twice; name another file")
        parts[module][what] = value
    adapters: dict[Target, Adapter] = {}
    differences: dict[Target, np.ndarray] = {}
    problems: list[str] = []
    for module, found in parts.items():
        try:
            _add(module, found, table, notes, adapters, differences)
        except InputError as error:
            problems.append(str(error))
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise InputError(
            f"{file}: does not fit the model: {'; '.join(problems[:3])}{more}; name a LoRA file of "
            f"this model of family {config.family}"
        )
    if not adapters and not differences:
        raise InputError(f"{file}: holds no tensors; name a LoRA file")
    length = metadata.get(TEXT_LENGTH, "")
    return LoraFile(file, adapters, differences, int(length) if length.isdecimal() else None)


def _read(file: Path, handle: Any, key: str) -> np.ndarray:
    dtype = handle.get_slice(key).get_dtype()
    if dtype not in FLOATS:
        raise InputError(f"{file}: {key} is {dtype}, not float 16 to 64; name another file")
    value = np.asarray(handle.get_tensor(key))
    if not np.isfinite(value.astype(np.float32)).all():
        raise InputError(f"{file}: {key} has values that are not finite; name another file")
    return value


class _Table:
    """The parameters of a model by the keys of all namings."""

    def __init__(self, config: ModelConfig):
        family = family_of(config)
        self._tensors: dict[str, Tensor] = {}
        if "original" in family.namings:
            for tensor in family.tensors(config, "original"):
                self._tensors[tensor.key] = tensor
                self._tensors[_MUSUBI + tensor.key.replace(".", "_")] = tensor
        for tensor in family.tensors(config, "diffusers"):
            self._tensors[tensor.key] = tensor

    def find(self, module: str, kind: str) -> Tensor | None:
        """The tensor `weight` or `bias` of a module; norms have `weight` as well."""
        joint = "_" if module.startswith(_MUSUBI) else "."
        return self._tensors.get(f"{module}{joint}{kind}")


def _file(place: Path) -> Path:
    if not place.is_dir():
        return place
    named = [place / name for name in _NAMES if (place / name).is_file()]
    found = named or sorted(place.glob("*.safetensors"))
    if len(found) != 1:
        raise InputError(f"{place}: holds {len(found)} safetensors files; name the LoRA file")
    return found[0]


def _metadata(file: Path, notes: dict[str, str]) -> dict[str, Any]:
    """The settings of PEFT in a file's metadata or beside it; empty if there are none."""
    beside = file.with_name("adapter_config.json")
    text = notes.get(_METADATA)
    if text is None and file.name == _NAMES[1] and beside.is_file():
        text = read_text(beside)
    if text is None:
        return {}
    fields = parse_json(text, f"{file}: its settings", "download it again")
    if not isinstance(fields, dict):
        raise InputError(f"{file}: its settings are not an object; download it again")
    return {key.removeprefix("transformer."): value for key, value in fields.items()}


def _split(key: str) -> tuple[str, str]:
    """Splits a key into the module's and what it holds: down, up, alpha, diff, diff_b or other."""
    name = _PREFIX.sub("", key, count=1)
    for pattern, what in ((_DOWN, "down"), (_UP, "up")):
        if found := pattern.search(name):
            return name[: found.start()], what
    for ending in (_ALPHA, _DIFFERENCE, _BIAS):
        if name.endswith(ending):
            return name.removesuffix(ending), ending[1:]
    return name, "other"


def _add(
    module: str,
    found: dict[str, Any],
    table: _Table,
    notes: dict[str, Any],
    adapters: dict[Target, Adapter],
    differences: dict[Target, np.ndarray],
) -> None:
    if module.startswith(_TEXT):
        raise InputError(f"{module} is of a text encoder, and none is adapted here; leave it out")
    if "other" in found:
        raise InputError(f"{module} is of no known kind (LoRA pairs, alpha, diff and diff_b are)")
    for what, kind in (("diff", "weight"), ("diff_b", "bias")):
        if what in found:
            tensor = _require(table.find(module, kind), module, kind)
            value = found[what].astype(np.float32)
            _check_shape(f"{module}.{what}", value.shape, tensor.shape)
            target = Target(tensor.path, tensor.layer)
            _require_first(module, target, differences)
            differences[target] = tensor.to_ours(value)
    if not found.keys() & {"down", "up"}:
        return
    if not {"down", "up"} <= found.keys():
        raise InputError(f"{module} has only one of the two matrices")
    tensor = _require(table.find(module, "weight"), module, "weight")
    target = Target(tensor.path, tensor.layer)
    _require_first(module, target, adapters)
    adapters[target] = _to_ours(module, tensor, found, notes)


def _require_first(module: str, target: Target, found: Container[Target]) -> None:
    if target in found:
        raise InputError(f"{module} names the same layer as another key, in another naming")


def _require(tensor: Tensor | None, module: str, kind: str) -> Tensor:
    if tensor is None:
        raise InputError(f"{module} has no {kind} in the model")
    return tensor


def _check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise InputError(f"{name} has shape {shape}, not {wanted}")


def _to_ours(module: str, tensor: Tensor, found: dict[str, Any], notes: dict[str, Any]) -> Adapter:
    down, up = (found[part].astype(np.float32) for part in ("down", "up"))
    if down.ndim != len(tensor.shape) or tensor.kind not in ("matrix", "patch"):
        raise InputError(f"{module} has adapters of shape {down.shape}")
    rank, outputs = down.shape[0], tensor.shape[0]
    _check_shape(f"{module}: down", down.shape, (rank, *tensor.shape[1:]))
    _check_shape(f"{module}: up", up.shape, (outputs, rank, *(1 for _ in tensor.shape[2:])))
    up = np.ascontiguousarray(up.reshape(outputs, rank).T)
    return Adapter(tensor.to_ours(down), up, _scale(module, found.get("alpha"), rank, notes))


def _scale(module: str, alpha: Any, rank: int, notes: dict[str, Any]) -> float:
    """alpha / rank, where alpha is from the file, or from PEFT's settings, or the rank."""
    if alpha is None:
        patterns = notes.get("alpha_pattern") or {}
        named = (value for key, value in patterns.items() if re.search(rf"(^|\.){key}$", module))
        alpha = next(named, notes.get("lora_alpha", rank))
        if notes.get("use_rslora"):
            return float(alpha) / math.sqrt(rank)
    scale = float(np.asarray(alpha, np.float32).reshape(())) / rank
    if not math.isfinite(scale):
        raise InputError(f"{module} has an alpha of {alpha}")
    return scale
