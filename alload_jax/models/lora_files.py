"""Files of adapters: reads and writes them, and adds adapters to the parameters that they adapt.

Keys are those of diffusers and PEFT (`transformer.blocks.0.attn1.to_q.lora_A.weight`), of the
model's original repository and ComfyUI (`diffusion_model.blocks.0.self_attn.q.lora_down.weight`,
`.alpha`) and of musubi-tuner (`lora_unet_blocks_0_self_attn_q.lora_down.weight`). diffusers 0.42's
`lora_conversion_utils` was read for facts about them. HunyuanVideo has one layer for several of
ours there, such as `img_attn_qkv`, so that its adapter is those of all, side by side.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from alload_jax.errors import InputError
from alload_jax.files import parse_json, read_text, replacing, require_local
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.common.lora import ADAPTER, DOWN, MAGNITUDE, UP, LoraConfig, output_lengths
from alload_jax.models.common.safetensor_files import (
    FLOATS,
    TEXT_LENGTH,
    Naming,
    Tensor,
    WeightsDtype,
    check_sum,
    open_safetensors,
    write_safetensors,
)
from alload_jax.models.families import abstract_model, family_of

_PREFIX = re.compile(
    r"^(base_model\.model\.)?(model\.diffusion_model\.|diffusion_model\.|transformer\.)?"
)
_MUSUBI = "lora_unet_"
_TEXT = ("text_encoder", "lora_te")
_LOKR = {f"lokr_w{n}{part}" for n in (1, 2) for part in ("", "_a", "_b")}
_ENDINGS = {
    "down": r"\.lora(_A|_down)(\.default)?\.weight$",
    "up": r"\.lora(_B|_up)(\.default)?\.weight$",
    "magnitude": r"\.(dora_scale|lora_magnitude_vector(\.default)?(\.weight)?)$",
    **{name: rf"\.{name}$" for name in ("alpha", "diff", "diff_b", *_LOKR)},
}
"""Of keys, by what they hold."""
_METADATA = "lora_adapter_metadata"
_NAMES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""Names of the file in folders that diffusers and PEFT write."""


@dataclass(frozen=True)
class Adapter:
    """What a file adds to one linear layer: scale·down·up to its kernel [in, out].

    With a magnitude (DoRA, arXiv 2402.09353) the outputs of the sum are then scaled to that length.

    Attributes:
      down: [in, rank] float32.
      up: [rank, out] float32.
      scale: alpha / rank.
      magnitude: [out] float32; None for LoRA.
    """

    down: np.ndarray
    up: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None

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
      differences: functions that return arrays to add to parameters of any kind, in our layout;
        those of LoKr are much larger than what the file holds.
      text_length: tokens to which training padded the texts; None if the file does not say.
      skipped: what the model lacks and was left out.
    """

    place: Path
    adapters: dict[Target, Adapter]
    differences: dict[Target, Callable[[], np.ndarray]]
    text_length: int | None
    skipped: list[str]


def read_lora(place: str | Path, config: ModelConfig, skip_unknown: bool = False) -> LoraFile:
    """Reads a file of adapters for a model, or the folder that holds one.

    Args:
      place: the file or folder.
      config: config of the model.
      skip_unknown: leave out what is for layers that the model lacks, or for text encoders.

    Raises:
      InputError: the file cannot be read, or does not fit the model; the message names what does
        not.
    """
    file = _file(Path(place))
    check_sum(file)
    parts: dict[str, dict[str, np.ndarray]] = {}
    with open_safetensors(file) as handle:
        metadata = handle.metadata() or {}
        for key in list(handle.keys()):
            module, what = _split(key)
            if what in parts.setdefault(module, {}):
                raise InputError(f"{file}: holds {module} twice; name another file")
            dtype = handle.get_slice(key).get_dtype()
            if dtype not in FLOATS:
                raise InputError(f"{file}: {key} is {dtype}, not float 16 to 64; name another file")
            value = np.asarray(handle.get_tensor(key))
            if not np.isfinite(value.astype(np.float32)).all():
                raise InputError(f"{file}: {key} has values that are not finite; name another file")
            parts[module][what] = value
    settings, tensors = _settings(file, metadata), _tensors_by_module(config)
    length = metadata.get(TEXT_LENGTH, "")
    lora = LoraFile(file, {}, {}, int(length) if length.isdecimal() else None, [])
    problems: list[str] = []
    for module, content in parts.items():
        known = tensors.get((module, "weight")) or tensors.get((module, "bias")) or []
        try:
            for number, found in enumerate(_apart(module, content, known)):
                _add(lora, module, number, found, tensors, settings)
        except InputError as error:
            problems.append(str(error))
    if lora.skipped and not skip_unknown:
        problems = lora.skipped + problems
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        skip = "; --skip-unknown leaves out what the model lacks (for training: in lora convert)"
        raise InputError(
            f"{file}: does not fit the model: {'; '.join(problems[:3])}{more}; name a LoRA file of "
            f"this model of family {config.family}{skip if lora.skipped else ''}"
        )
    if not lora.adapters and not lora.differences:
        what = "nothing for this model" if lora.skipped else "no tensors"
        raise InputError(f"{file}: holds {what}; name a LoRA file")
    return lora


def _apart(
    module: str, found: dict[str, np.ndarray], parts: list[Tensor]
) -> list[dict[str, np.ndarray]]:
    """What a file holds for each of the layers that are one there; empty where it does nothing."""
    if not any(part.outputs for part in parts):
        return [found]
    if found.keys() & _LOKR:
        raise InputError(f"{module} has LoKr for several layers at once, which is not supported")
    for what, value in found.items():
        if what not in ("down", "alpha") and value.shape[:1] != (parts[0].outputs,):
            raise InputError(f"{module}: {what} has shape {value.shape}, not {parts[0].outputs}")
    apart: list[dict[str, np.ndarray]] = []
    joined = len(parts) > 1 and found.keys() >= {"up", "down", "alpha"} and found["up"].any()
    for tensor in parts:
        part = {k: v if k in ("down", "alpha") else v[tensor.rows] for k, v in found.items()}
        # Of adapters that were joined, each has columns of its own.
        used = np.atleast_1d(part["up"].any(axis=0)) if joined else np.ones(1, bool)
        if used.any() and used.size == len(found.get("down", ())):
            part |= {"up": part["up"][:, used], "down": part["down"][used]}
            part["alpha"] = part["alpha"] * used.sum() / used.size
        elif not used.any() and part.keys() == {"up", "down", "alpha"}:
            part = {}
        apart.append(part)
    return apart


def _tensors_by_module(config: ModelConfig) -> dict[tuple[str, str], list[Tensor]]:
    """The tensors of a model by module and kind, `weight` or `bias`, in the keys of all namings.

    Several where a module of that naming is several layers of ours.
    """
    family = family_of(config)
    found: dict[tuple[str, str], list[Tensor]] = {}
    for naming in reversed(family.namings):
        named: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        for tensor in family.tensors(config, naming):
            module, _, kind = tensor.key.rpartition(".")
            named[module, kind].append(tensor)
            if naming != "diffusers":
                named[_MUSUBI + module.replace(".", "_"), kind].append(tensor)
        found |= named
    return found


def _file(place: Path) -> Path:
    if not place.is_dir():
        return place
    named = [place / name for name in _NAMES if (place / name).is_file()]
    found = named or sorted(place.glob("*.safetensors"))
    if len(found) != 1:
        raise InputError(f"{place}: holds {len(found)} safetensors files; name the LoRA file")
    return found[0]


def _settings(file: Path, notes: dict[str, str]) -> dict[str, Any]:
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
    """Splits a key into the module's and what it holds: down, up, alpha, diff, lokr_w1 or other."""
    name = _PREFIX.sub("", key, count=1)
    for what, ending in _ENDINGS.items():
        if found := re.search(ending, name):
            return name[: found.start()], what
    return name, "other"


def _add(
    lora: LoraFile,
    module: str,
    number: int,
    found: dict[str, np.ndarray],
    tensors: dict[tuple[str, str], list[Tensor]],
    settings: dict[str, Any],
) -> None:
    """Adds what a file holds for a module's layer of that number to what was read before."""
    if module.startswith(_TEXT):
        lora.skipped.append(f"{module} is of a text encoder, and none is adapted here")
        return
    if "other" in found:
        raise InputError(
            f"{module} is of no known kind (LoRA pairs, alpha, DoRA, LoKr, diff and diff_b are)"
        )

    def require(kind: str, content: Container[Target]) -> tuple[Tensor, Target] | None:
        if (module, kind) not in tensors:
            lora.skipped.append(f"{module} has no {kind} in the model")
            return None
        tensor = tensors[module, kind][number]
        target = Target(tensor.path, tensor.layer)
        if target in content:
            raise InputError(f"{module} names the same layer as another key, in another naming")
        return tensor, target

    for what, kind in (("diff", "weight"), ("diff_b", "bias")):
        if what in found and (place := require(kind, lora.differences)):
            tensor, target = place
            _check_shape(f"{module}.{what}", found[what].shape, tensor.shape)
            lora.differences[target] = partial(tensor.to_ours, found[what].astype(np.float32))
    factors = {what: value for what, value in found.items() if what in _LOKR}
    if factors and "magnitude" in found:
        raise InputError(f"{module} has LoKr with magnitudes (DoRA), which is not supported")
    if factors and (place := require("weight", lora.differences)):
        tensor, target = place
        lora.differences[target] = _kronecker(module, factors, found.get("alpha"), tensor)
    if not found.keys() & {"down", "up", "magnitude"}:
        return
    if not {"down", "up"} <= found.keys():
        raise InputError(f"{module} has only one of the two matrices")
    if not (place := require("weight", lora.adapters)):
        return
    tensor, target = place
    down, up = (found[part].astype(np.float32) for part in ("down", "up"))
    if down.ndim != len(tensor.shape) or tensor.kind not in ("matrix", "patch"):
        raise InputError(f"{module} has adapters of shape {down.shape}")
    rank, outputs = down.shape[0], tensor.shape[0]
    _check_shape(f"{module}: down", down.shape, (rank, *tensor.shape[1:]))
    _check_shape(f"{module}: up", up.shape, (outputs, rank, *(1 for _ in tensor.shape[2:])))
    up = np.ascontiguousarray(up.reshape(outputs, rank).T)
    scale = _scale(module, found.get("alpha"), rank, settings)
    if (magnitude := found.get("magnitude")) is not None:
        if magnitude.shape[:1] != (outputs,) or magnitude.size != outputs:
            raise InputError(
                f"{module} has magnitudes of shape {magnitude.shape}, but only those of its "
                f"{outputs} outputs are supported"
            )
        magnitude = magnitude.astype(np.float32).reshape(-1)
    lora.adapters[target] = Adapter(tensor.to_ours(down), up, scale, magnitude)


def _kronecker(
    module: str, factors: dict[str, np.ndarray], alpha: np.ndarray | None, tensor: Tensor
) -> Callable[[], np.ndarray]:
    """LoKr (arXiv 2212.10650): alpha / rank · w1 ⊗ w2, each a matrix or the product of two.

    The rank is that of the second product, else of the first. Two whole matrices have none, and a
    scale of 1, as in LyCORIS.
    """
    whole: list[np.ndarray] = []
    rank = None
    for name in ("lokr_w1", "lokr_w2"):
        parts = [factors[part] for part in (name, f"{name}_a", f"{name}_b") if part in factors]
        pair = name not in factors
        if len(parts) != 1 + pair or any(part.ndim != 2 for part in parts):
            raise InputError(f"{module}: {name} must be a matrix, or {name}_a and {name}_b")
        if pair and parts[0].shape[1] != parts[1].shape[0]:
            raise InputError(f"{module}: {name}_a and {name}_b have no common rank")
        rank = parts[0].shape[1] if pair else rank
        matrices = [part.astype(np.float32) for part in parts]
        whole.append(matrices[0] @ matrices[1] if pair else matrices[0])
    shape = tuple(a * b for a, b in zip(whole[0].shape, whole[1].shape, strict=True))
    _check_shape(f"{module}: lokr_w1 ⊗ lokr_w2", shape, tensor.shape)
    scale = 1.0 if rank is None else _scale(module, alpha, rank, {})
    return lambda: tensor.to_ours(np.kron(np.float32(scale) * whole[0], whole[1]))


def _check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise InputError(f"{name} has shape {shape}, not {wanted}")


def _scale(module: str, alpha: np.ndarray | None, rank: int, settings: dict[str, Any]) -> float:
    """alpha / rank, where alpha is from the file, or from PEFT's settings, or the rank."""
    if rank == 0:
        raise InputError(f"{module} has a rank of 0")
    if alpha is None:
        patterns = settings.get("alpha_pattern") or {}
        named = (value for key, value in patterns.items() if re.search(rf"(^|\.){key}$", module))
        alpha = next(named, settings.get("lora_alpha", rank))
        if settings.get("use_rslora"):
            return float(alpha) / math.sqrt(rank)
    if np.size(alpha) != 1:
        raise InputError(f"{module} has {np.size(alpha)} values of alpha")
    scale = float(np.asarray(alpha, np.float32).reshape(())) / rank
    if not math.isfinite(scale):
        raise InputError(f"{module} has an alpha of {alpha}")
    return scale


BASE_NOTE = "alload_base"
"""Metadata key of files of adapters: the weights that they belong to."""


def lora_tensors(
    adapters: dict[Target, Adapter], config: ModelConfig, keys: Naming
) -> dict[str, np.ndarray]:
    """Returns the tensors of a file of adapters, float32.

    With `original` keys, `.alpha` holds the scale; diffusers' keys have none, so that the scale is
    part of `lora_B`.

    Args:
      adapters: by the kernel that they change.
      config: config of the model.
      keys: whose keys.

    Raises:
      InputError: the model has layers for which there are no keys.
    """
    tensors = family_of(config).tensors(config, keys)
    table = {Target(tensor.path, tensor.layer): tensor for tensor in tensors}
    together: dict[str, dict[Target, Tensor]] = defaultdict(dict)
    found: dict[str, np.ndarray] = {}
    for target, tensor in table.items():
        if tensor.outputs:
            together[tensor.key.removesuffix(".weight")][target] = tensor
    for target, adapter in adapters.items():
        if target not in table:
            raise InputError(
                f"{target.path.removesuffix('/kernel')} has an adapter, but there are no keys of "
                f"{keys} for that layer; leave it out of model.lora.targets"
                + ("" if keys == "diffusers" else ", or give --keys diffusers")
            )
        tensor = table[target]
        key = tensor.key.removesuffix(".weight")
        if tensor.outputs:
            continue
        # Those of a convolution are convolutions.
        narrow = replace(tensor, shape=(adapter.rank, *tensor.shape[1:]))
        down, up = narrow.to_theirs(adapter.down), np.ascontiguousarray(adapter.up.T)
        up = up.reshape(*up.shape, *(1 for _ in tensor.shape[2:]))
        if keys == "diffusers":
            found[f"transformer.{key}.lora_A.weight"] = down
            found[f"transformer.{key}.lora_B.weight"] = up * np.float32(adapter.scale)
            if adapter.magnitude is not None:
                found[f"transformer.{key}.lora_magnitude_vector"] = adapter.magnitude
        else:
            found |= _with_alpha(key, down, up, adapter.scale)
            if adapter.magnitude is not None:
                found[f"diffusion_model.{key}.dora_scale"] = adapter.magnitude[:, None]
    for key, targets in together.items():
        parts = {targets[target]: adapters[target] for target in targets if target in adapters}
        if not parts:
            continue
        outputs, columns = next(iter(parts)).outputs, 0
        up = np.zeros((outputs, sum(adapter.rank for adapter in parts.values())), np.float32)
        for tensor, adapter in parts.items():
            last = columns + adapter.rank
            up[tensor.rows, columns:last] = adapter.up.T * adapter.scale
            columns = last
        downs = [np.ascontiguousarray(adapter.down.T) for adapter in parts.values()]
        found |= _with_alpha(key, np.concatenate(downs), up, 1.0)
        if any(adapter.magnitude is not None for adapter in parts.values()):
            joint = np.full((outputs, 1), np.nan, np.float32)
            for tensor, adapter in parts.items():
                if adapter.magnitude is not None:
                    joint[tensor.rows, 0] = adapter.magnitude
            if np.isnan(joint).any():
                others = ", ".join(target.path.removesuffix("/kernel") for target in targets)
                raise InputError(
                    f"{others} have one adapter with keys of {keys}, and with DoRA all of them "
                    "need one; add them to model.lora.targets, or give --keys diffusers"
                )
            found[f"diffusion_model.{key}.dora_scale"] = joint
    return found


def _with_alpha(key: str, down: np.ndarray, up: np.ndarray, scale: float) -> dict[str, np.ndarray]:
    """The tensors of an adapter with keys of original repositories."""
    name = f"diffusion_model.{key}"
    alpha = np.asarray(scale * len(down), np.float32)
    return {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": alpha}


def require_writable(file: Path, force: bool) -> None:
    """Checks that `write_lora` may write a file, which `force` may replace.

    Raises:
      InputError: the file has another suffix, exists, or is in object storage.
    """
    require_local(file)
    if file.suffix != ".safetensors" or file.is_dir():
        raise InputError(f"{file}: name a file that ends in .safetensors")
    if file.exists() and not force:
        raise InputError(f"{file}: exists already; give --force to replace it, or name another")


def write_lora(
    file: Path,
    adapters: dict[Target, Adapter],
    config: ModelConfig,
    keys: Naming,
    dtype: WeightsDtype = "float32",
    force: bool = False,
    base: str = "",
    text_length: int | None = None,
) -> int:
    """Writes adapters atomically as a safetensors file; see `lora_tensors`.

    Args:
      file: file to write.
      adapters: by the kernel that they change.
      config: config of the model.
      keys: whose keys.
      dtype: dtype of the tensors.
      force: replace a file that exists.
      base: the weights that the adapters belong to, for the file's metadata.
      text_length: tokens to which training padded the texts, for the metadata; None if not known.

    Returns:
      The number of tensors.

    Raises:
      InputError: the file exists or cannot be written, or there are no keys for a layer.
    """
    tensors = lora_tensors(adapters, config, keys)
    require_writable(file, force)
    content = {
        # alpha and magnitudes stay exact
        key: value.astype(jnp.dtype(dtype)) if key.endswith(".weight") else value
        for key, value in tensors.items()
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        notes = {BASE_NOTE: base} if base else {}
        if text_length is not None:
            notes[TEXT_LENGTH] = str(text_length)
        with replacing(file) as unfinished:
            write_safetensors(unfinished, content, notes)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{file}: cannot be written ({error}); make room, or name another") from (
            error
        )
    return len(content)


# ---------------------------------------------------------------- adapters and parameters


def merge_adapters(params: PyTree, config: LoraConfig) -> PyTree:
    """Returns parameters without adapters: kernel + scale·lora_down·lora_up, in float32.

    Args:
      params: nested dict of a model's parameters; kernels may be stacked, [..., in, out].
      config: the model's adapters.
    """
    flat = flatten_dict(params, sep="/")
    merged = {name: value for name, value in flat.items() if not name.endswith(ADAPTER)}
    for name in flat:
        if name.endswith(DOWN):
            layer = name.removesuffix(DOWN)
            kernel = merged[f"{layer}kernel"]
            scale = config.of_layer(layer[:-1]).scale
            merged[f"{layer}kernel"] = _adapted(
                kernel, flat[name], flat[layer + UP], scale, 1.0, flat.get(layer + MAGNITUDE)
            )
    return unflatten_dict(merged, sep="/")


def merge_file(params: PyTree, lora: LoraFile, scale: float = 1.0) -> PyTree:
    """Returns parameters with the content of a file added, times `scale`, in float32.

    Args:
      params: nested dict of a model's parameters, with or without adapters of its own.
      lora: the file.
      scale: factor of everything that the file adds; of DoRA, of the change that it makes.
    """
    flat = flatten_dict(params, sep="/")
    for path in {target.path for target in (*lora.adapters, *lora.differences)}:
        flat[path] = jnp.asarray(flat[path][...], jnp.float32)
    for target, adapter in lora.adapters.items():
        arrays = (adapter.down, adapter.up, adapter.scale, scale, adapter.magnitude)
        if target.layer is None:
            flat[target.path] = _adapted(flat[target.path], *arrays)
        else:
            flat[target.path] = _adapted_layer(flat[target.path], target.layer, *arrays)
    for target, difference in lora.differences.items():
        place = ... if target.layer is None else target.layer
        flat[target.path] = flat[target.path].at[place].add(scale * difference())
    return unflatten_dict(flat, sep="/")


def adapters_of(params: PyTree, config: LoraConfig) -> dict[Target, Adapter]:
    """Returns a model's adapters, layer by layer, as files hold them."""
    flat = flatten_dict(params, sep="/")
    found: dict[Target, Adapter] = {}
    for name, value in flat.items():
        if not name.endswith(DOWN):
            continue
        path = name.removesuffix(DOWN) + "kernel"
        down, up = np.asarray(value), np.asarray(flat[name.removesuffix(DOWN) + UP])
        scale = config.of_layer(name.removesuffix(f"/{DOWN}")).scale
        lengths = flat.get(name.removesuffix(DOWN) + MAGNITUDE)
        for layer in [None] if down.ndim == 2 else range(len(down)):
            at = ... if layer is None else layer
            length = None if lengths is None else np.asarray(lengths)[at]
            found[Target(path, layer)] = Adapter(down[at], up[at], scale, length)
    return found


def given_adapters(lora: LoraFile, config: ModelConfig) -> PyTree:
    """Returns a file's adapters as parameters of a model that has adapters.

    Layers that the file does not adapt begin without effect, with a magnitude of NaN, which stands
    for that of the kernel; where all layers of a stack are missing, the result lacks them.

    Returns:
      Nested dict of NumPy arrays, float32.

    Raises:
      InputError: the file adapts other layers than the model, or with another rank.
    """
    assert config.lora is not None
    shapes = flatten_dict(abstract_model(config).params, sep="/")
    if lora.differences:
        raise InputError(
            f"{lora.place}: also changes weights and biases (diff, diff_b, LoKr), which are no "
            "adapters; merge it into a folder with `alload lora merge` and start from that"
        )
    flat: dict[str, np.ndarray] = {}
    for target, adapter in lora.adapters.items():
        layer = target.path.removesuffix("/kernel")
        if f"{layer}/{DOWN}" not in shapes:
            raise InputError(
                f"{lora.place}: adapts {layer}, which model.lora.targets leaves out; add it"
            )
        ours = config.lora.of_layer(layer)
        if adapter.rank != ours.rank:
            raise InputError(
                f"{lora.place}: the adapter of {layer} has rank {adapter.rank}, and model.lora.rank"
                f" is {ours.rank}; set it to {adapter.rank}, for some layers in model.lora.groups"
            )
        if (adapter.magnitude is not None) != ours.dora:
            raise InputError(
                f"{lora.place}: the adapter of {layer} has {'no ' if ours.dora else ''}magnitudes "
                f"(DoRA); set model.lora.dora to {str(not ours.dora).lower()}"
            )
        up = adapter.up * np.float32(adapter.scale / ours.scale)
        arrays = {DOWN: adapter.down, UP: up, MAGNITUDE: adapter.magnitude}
        for name, value in ((k, v) for k, v in arrays.items() if v is not None):
            path = target.path.removesuffix("kernel") + name
            if target.layer is None:
                flat[path] = value
                continue
            if path not in flat:  # without effect; were both zero, nothing would be learnt
                shape, bound = shapes[path].shape, 1 / math.sqrt(shapes[path].shape[-2])
                drawn = np.random.default_rng(0).uniform(-bound, bound, shape)
                flat[path] = drawn.astype(np.float32)
                if name != DOWN:
                    flat[path][:] = 0 if name == UP else np.nan
            flat[path][target.layer] = value
    return unflatten_dict(flat, sep="/")


@jax.jit
def _adapted(
    kernel: PyTree,
    down: jax.Array,
    up: jax.Array,
    scale: float,
    factor: float,
    magnitude: jax.Array | None,
) -> jax.Array:
    """The kernel and `factor` times the change that an adapter makes of it."""
    change = scale * jnp.matmul(down, up, precision=jax.lax.Precision.HIGHEST)
    before = kernel[...].astype(jnp.float32)
    if magnitude is not None:
        after = before + change
        gain = magnitude / output_lengths(after)
        change = after * gain[..., None, :] - before
    return before + factor * change


@jax.jit
def _adapted_layer(stack: jax.Array, layer: int, *arrays: Any) -> jax.Array:
    return stack.at[layer].set(_adapted(stack[layer], *arrays))
