"""Flags that several commands have, their checks, and the `data.source` of a config."""

import argparse
import contextlib
import dataclasses
import importlib.util
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet

from alload_jax.config_parser import build_named, read_yaml
from alload_jax.data.manifest import VAE, Manifest
from alload_jax.data.sources import SOURCES, SourceConfig
from alload_jax.data.store.reader import is_address
from alload_jax.errors import InputError
from alload_jax.files import require_regular
from alload_jax.planning.samples import PIXEL_PATCH, Geometry, Triple
from alload_jax.training import EXPERTS, TRANSFORMERS, expert_file, expert_places

KEYS = ("diffusers", "original", "comfyui")
KEYS_HELP = (
    "keys of diffusers (default), of the original repository, or of ComfyUI, which differ for "
    "HunyuanVideo"
)

AddFlag = Callable[..., object]
"""`add_argument` of a parser or of a group of its flags."""


def triple(text: str, example: str = "4,8,8", least: int = 0) -> tuple[int, int, int]:
    """Three whole numbers of at least `least`, such as the example.

    Raises:
      argparse.ArgumentTypeError: the text is something else.
    """
    parts = text.split(",")
    most = 10**9  # as sizes of samples are bounded
    if len(parts) != 3 or not all(p.isdecimal() and least <= int(p) <= most for p in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not three whole numbers such as {example}")
    return (int(parts[0]), int(parts[1]), int(parts[2]))


def number(
    kind: type[int] | type[float],
    wanted: str,
    holds: Callable[[float], bool] = lambda _: True,
    words: typing.Container[str] = (),
) -> Callable[[str], int | float | str | None]:
    """The type of a flag that takes finite numbers within bounds.

    Args:
      kind: whole numbers, or all.
      wanted: what it takes in words, such as `a number above 0`.
      holds: whether a number is within the bounds.
      words: taken in place of a number; `none`, which configs call `null`, becomes None.
    """

    def read(text: str) -> int | float | str | None:
        if text in words or (text == "null" and "none" in words):
            return None if text in ("none", "null") else text
        with contextlib.suppress(ValueError, OverflowError):
            if text.isascii() and math.isfinite(value := kind(text)) and holds(value):
                return value
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {wanted}")

    return read


def up_to(most: int) -> Callable[[str], object]:
    """The type of a flag that takes whole numbers from 1 to `most`."""
    return number(int, f"a whole number from 1 to {most:,}", lambda value: 1 <= value <= most)


COUNT = number(int, "a whole number from 1", lambda value: value >= 1)
WHOLE = number(int, "a whole number from 0", lambda value: value >= 0)
FROM_0 = number(float, "a number from 0", lambda value: value >= 0)
ABOVE_0 = number(float, "a number above 0", lambda value: value > 0)
SHARE = number(float, "a number from 0 to below 1", lambda value: 0 <= value < 1)
STEP = number(int, "a step such as 500, nor best", lambda step: 0 <= step < 10**18, ["best"])
"""Types of flags."""


def add_run_flags(add: AddFlag, base: bool = True) -> None:
    """Declares the flags that say which weights of a run are read.

    Args:
      add: declares a flag.
      base: whether frozen parameters are read too.
    """
    add("--weights", choices=["ema", "raw"], help="which weights of a run; default ema")
    add("--step", type=STEP, help="step of a run's checkpoint, or best for the lowest validation "
        "loss; default the newest")  # fmt: skip
    if base:
        add("--base", metavar="DIR", help="weights that a run of adapters was trained on; default: "
            "where they were in training")  # fmt: skip


def add_skip_unknown(add: AddFlag) -> None:
    """Declares the flag that leaves out what a model lacks of LoRA files."""
    add("--skip-unknown", action="store_true", help="leave out, with a note, what LoRA files have "
        "for layers that the model lacks")  # fmt: skip


def lora_name(name: str) -> tuple[str, float]:
    """Splits `FILE:SCALE`; the scale is 1 where it is left out."""
    place, _, scale = name.rpartition(":")
    try:
        factor = float(scale)
    except ValueError:
        return name, 1.0
    return (place, factor) if place and math.isfinite(factor) else (name, 1.0)


def of_each_expert(
    options: argparse.Namespace, name: str, as_files: bool = False
) -> list[argparse.Namespace]:
    """The flags for each of two experts, with places of their own; for one model as they are.

    Args:
      options: the flags, among which may be `out`, `base` and `lora`.
      name: of the flag that says where the experts are.
      as_files: whether outputs are files, not folders.

    Raises:
      InputError: a LoRA file is that of one expert, or the second expert is missing.
    """
    places, given, found = expert_places(vars(options)[name]), vars(options), []
    if gone := [str(place) for place in places[1:] if not place.exists()]:
        raise InputError(
            f"{gone[0]}: is not there, so that the second expert was not trained yet; train it, "
            f"or name {places[0]} alone"
        )
    for number, place in enumerate(places if len(places) > 1 else ()):
        out, loras = Path(options.out or ""), []
        for file, scale in map(lora_name, given.get("lora", ())):
            both = expert_places(file)
            if Path(file).stem.endswith(tuple(f"_{expert}" for expert in EXPERTS)):
                raise InputError(
                    f"--lora {file}: {given[name]} holds two experts; give x.safetensors for the "
                    "files x_high_noise.safetensors and x_low_noise.safetensors"
                )
            # That of a model without experts, as Wan 2.1, goes to both, or has another beside it.
            if not (number and len(both) == 1 and given.get("low_noise_lora")):
                loras.append(f"{both[number % len(both)]}:{scale}")
        out = expert_file(out, EXPERTS[number]) if as_files else out / TRANSFORMERS[number]
        base = expert_places(options.base)[-number] if given.get("base") else None
        own = {name: str(place), "lora": loras, "out": str(out), "base": base and str(base)}
        found.append(argparse.Namespace(**given | own))
    return found or [options]


def run_each_expert(
    run: Callable[[argparse.Namespace], int],
    options: argparse.Namespace,
    name: str,
    as_files: bool = False,
) -> int:
    """Runs a command for each of two experts, or one model, if all that it writes can be written.

    Raises:
      InputError: an output exists, or as `of_each_expert`.
    """
    from alload_jax.models import lora_files, weights  # import JAX, which takes a second

    every = of_each_expert(options, name, as_files)
    for out in (Path(each.out) for each in every):
        lora_files.require_writable(out, options.force) if as_files else weights.require_free(out)
    return max(map(run, every))


def add_settings(
    group: "argparse._ActionsContainer",
    kind: type,
    left_out: typing.Container[str] = (),
    special: Mapping[str, Mapping[str, object]] | None = None,
) -> None:
    """Declares a flag for each field of a dataclass, by the field's name, type and description.

    The parsed namespace holds those that are given, and no others. A number of which a word may
    stand in place takes the word too, and `none` where None is another value than the default.

    Args:
      group: where to declare them.
      kind: the dataclass; its docstring, and those of its bases, describe the fields.
      left_out: names of fields without a flag.
      special: arguments of `add_argument` by field, in place of those that follow from the field.
    """
    hints, texts = typing.get_type_hints(kind), _descriptions(kind)
    for field in dataclasses.fields(kind):
        if field.name in left_out:
            continue
        options: dict[str, object] = {"default": argparse.SUPPRESS, "help": texts[field.name]}
        options |= _reading(hints[field.name], field.default)
        options |= (special or {}).get(field.name, {})
        group.add_argument(f"--{field.name.replace('_', '-')}", **options)  # type: ignore[arg-type]


def _descriptions(kind: type) -> dict[str, str]:
    """The lines of `Attributes` in the docstrings of a class and its bases, for argparse."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        attributes = (inspect.cleandoc(base.__doc__ or "")).partition("Attributes:\n")[2]
        for name, text in re.findall(r"^  (\w+): (.*(?:\n {4}.*)*)", attributes, re.MULTILINE):
            found[name] = " ".join(text.split()).replace("%", "%%")
    return found


def _reading(hint: object, default: object) -> dict[str, object]:
    """How argparse reads a field of a type; a mapping among its types is left to configs."""
    parts = typing.get_args(hint) if typing.get_origin(hint) is not Literal else (hint,)
    parts = parts or (hint,)
    words = [word for part in parts for word in typing.get_args(part) if isinstance(word, str)]
    if bool in parts:
        return {"action": "store_true"}
    if int not in parts and float not in parts:
        return {"choices": words} if words else {}
    kind, what = (int, "a whole number") if int in parts else (float, "a finite number")
    if type(None) in parts and default is not None:
        words.append("none")
    return {"type": number(kind, " or ".join([what, *words]), words=words)}


def source_config(path: str | None, prog: str) -> SourceConfig | None:
    """Returns `data.source` of a config; None without a config, or if the files say it.

    Args:
      path: a training config, of which only this section is read.
      prog: name of the command, for messages.

    Raises:
      InputError: the config is not valid.
    """
    if path is None:
        return None
    section = read_yaml(path).get("data") or {}
    if not isinstance(section, dict):
        raise InputError(f"{prog}: {path}: data is {section!r}; write its keys below it")
    if (named := section.get("source")) is None:
        return None
    found: SourceConfig = build_named(f"{prog}: {path}: data.source", named, SOURCES)
    return found


def holds_samples(place: str) -> bool:
    """Returns whether a path is a data folder, or a Parquet file of latents, and no manifest."""
    if not place.endswith(".parquet"):
        return is_address(place) or Path(place).is_dir()
    require_regular(place)
    try:
        names = pyarrow.parquet.read_schema(place).names
    except (pa.ArrowException, OSError):
        return False
    return any(name.endswith("_bytes") for name in names)


def require_package(package: str, extra: str, what: str) -> None:
    """Raises InputError unless a package is installed."""
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{what} needs the package {package}; install alload-jax[{extra}]")


def require_place(command: str, flag: str, path: Path) -> None:
    """Raises InputError unless the path can be written as a file."""
    if not path.name or not path.parent.is_dir():
        raise InputError(f"{command}: {flag} {path}: not a file in an existing folder; name one")
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise InputError(f"{command}: {flag} {path}: {reason}; name another file") from error
    if not existed:
        path.unlink()


def require_named(command: str, flag: str, path: Path, suffix: str = ".png") -> None:
    """Raises InputError unless the path can be written as a file of a suffix."""
    if path.suffix.lower() != suffix:
        raise InputError(f"{command}: {flag} {path}: is not named {suffix}; rename it")
    require_place(command, flag, path)


def require_outputs(command: str, out: str) -> tuple[Path, Path]:
    """The JSON and the PNG of `--out`; raises InputError unless both can be written."""
    paths = Path(f"{out}.json"), Path(f"{out}.png")
    for path in paths if Path(out).name else (Path(out),):
        require_place(command, "--out", path)
    return paths


_MODEL_OF_VAE: dict[str, tuple[str, Triple]] = {
    "hunyuan_video": ("hunyuan-video-1.5", (1, 1, 1)),
    "hunyuan_video_13b": ("hunyuan-video-13b", (1, 2, 2)),
}
"""Models and patch sizes by the name of the VAE in a folder's origin, but for Wan's."""


def usual_model(manifest: Manifest) -> tuple[str | None, Triple]:
    """The model that a folder's samples are counted for, and its patch size.

    That of the VAE which the origin names; of pixels `PIXEL_PATCH`, and no model of costs.
    """
    vae = manifest.origin.get(VAE)
    if isinstance(vae, dict) and (found := _MODEL_OF_VAE.get(str(vae.get("name")))):
        return found
    if manifest.holds_pixels and not (manifest.shape[:, 1:] % PIXEL_PATCH[1:]).any():
        return None, PIXEL_PATCH
    return None, Geometry().patch_size
