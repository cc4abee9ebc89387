"""Opens the samples of a folder, as its files or the config say.

Stores, safetensors of one sample each, whose tensors have names of your choice, and musubi-tuner's
caches: `wan_cache_latents.py` writes KEY_WIDTHxHEIGHT_wan.safetensors, with KEY_POSITION-FRAMES for
a clip of a video. Its latents are [C, T, H, W] and normalised by the VAE.
`wan_cache_text_encoder_outputs.py` writes KEY_wan_te.safetensors without padding. Widths and
heights are those of the original files.

A mapped file that another program truncates ends the process; reading it is an error of one sample.
"""

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors
from typing_extensions import override

from alload_jax.data.manifest import MANIFEST_NAME, read_manifest
from alload_jax.data.record import DTYPES
from alload_jax.data.sources import SOURCES, SampleSource, SourceConfig, arrays
from alload_jax.data.store import StoreReader
from alload_jax.data.store.reader import RemoteStore, is_address
from alload_jax.errors import InputError, print_stderr
from alload_jax.files import Json, parse_json, require_regular
from alload_jax.processes import waits

_PROBE = 4096


@contextmanager
def opened(path: Path) -> Iterator[safetensors.safe_open]:
    """Opens a file of tensors, which is read and not mapped.

    Raises:
      ValueError: the file is no complete safetensors file, or lacks a tensor that is asked for.
      OSError: the file cannot be read.
    """
    try:
        with safetensors.safe_open(path, "numpy", backend="pread") as file:
            yield file
    except FileNotFoundError:
        path.open("rb").close()  # safetensors reports an unreadable file as missing
        raise
    except safetensors.SafetensorError as error:
        raise ValueError(f"it is damaged, or no safetensors file: {error}") from error


def read_tensors(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Reads tensors by name.

    Raises:
      ValueError: as `opened`, or a dtype is not supported.
      OSError: the file cannot be read.
    """
    with opened(path) as file:
        for name in names:
            if (dtype := _slice_of(file, name).get_dtype()) not in DTYPES:
                raise ValueError(f"{name} is {dtype}; supported are {', '.join(DTYPES)}")
        return {name: file.get_tensor(name) for name in names}


def described(path: Path, *parts: list[str]) -> tuple[list[list[int]], int]:
    """Shapes of the tensors of all parts, and a mark of what they hold, without reading all of it.

    The mark joins the CRC-32 of each part: of dtypes, shapes, and the first and last 4 KiB.

    Raises:
      ValueError, OSError: as `opened`.
    """
    with opened(path) as tensors:
        shapes = [_slice_of(tensors, name).get_shape() for part in parts for name in part]
    marks = 0
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(size), str(path), "")
        for part in parts:
            mark = 0
            for info in map(header.__getitem__, part):
                mark = zlib.crc32(repr((info["dtype"], tuple(info["shape"]))).encode(), mark)
                first, end = (8 + size + at for at in info["data_offsets"])
                for begin in (first, max(first, end - _PROBE)):
                    file.seek(begin)
                    mark = zlib.crc32(file.read(min(_PROBE, end - begin)), mark)
            marks ^= mark
    return shapes, marks


def _slice_of(file: safetensors.safe_open, name: str) -> Any:
    held = file.keys()
    if name not in held:
        some = ", ".join(sorted(held)[:8]) or "nothing"
        raise ValueError(f"it lacks the tensor {name}, and holds {some}")
    return file.get_slice(name)


class TensorNames(NamedTuple):
    """Where a sample's tensors lie.

    Attributes:
      latents_file: file of the latents, relative to the data folder.
      latents: name of the tensor of latents.
      condition_file: file of the condition.
      condition: name of the tensor of text embeddings or classes.
      mask: name of the text's mask in the same file; None if there is none.
    """

    latents_file: str
    latents: str
    condition_file: str
    condition: str
    mask: str | None = None


@waits("for the data folder to be read")
class TensorSamples(arrays.FileSamples):
    """Random access to samples in safetensors files; see `SampleSource`."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[TensorNames],
        reading: arrays.Reading,
        origin: Json,
        caption: str = "caption",
    ):
        """Reads the headers of all files.

        Args:
          folder: the data folder.
          names: the samples, in their order.
          reading: how tensors become samples.
          origin: provenance.
          caption: name of the caption in the metadata of the condition's file.

        Raises:
          InputError: a file is damaged, or samples disagree.
        """
        self._root, self._names, self.reading = arrays.root_of(folder), list(names), reading
        self._caption_name = caption
        found = arrays.scan(self._scanned, self._names)
        sizes = {name: size for _, of_sample in found for name, size in of_sample.items()}
        super().__init__(folder, [sample for sample, _ in found], reading, sizes, origin)

    @override
    def _stored(self, sample: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        names = self._names[sample]
        latents = self._tensors(names.latents_file, [names.latents])[names.latents]
        wanted = [name for name in (names.condition, names.mask) if name]
        found = self._tensors(names.condition_file, wanted)
        return latents, found[names.condition], found.get(names.mask or "")

    def _tensors(self, file: str, names: list[str]) -> dict[str, np.ndarray]:
        """`read_tensors`, whose error says which file of a sample it is of."""
        try:
            return read_tensors(self._root / file, names)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @override
    def _place(self, sample: int) -> str:
        names = self._names[sample]
        files = dict.fromkeys((names.latents_file, names.condition_file))
        return f"{' with '.join(str(self._root / file) for file in files)} (sample {sample})"

    @override
    def _caption(self, sample: int) -> str | None:
        with opened(self._root / self._names[sample].condition_file) as file:
            return (file.metadata() or {}).get(self._caption_name)

    def _scanned(self, names: TensorNames) -> tuple[arrays.ScannedSample, dict[str, int]]:
        """What the headers say of a sample, and the sizes of its files."""
        beside = [name for name in (names.condition, names.mask) if name]
        parts: dict[str, list[list[str]]] = {names.latents_file: [[names.latents]]}
        parts.setdefault(names.condition_file, []).append(beside)
        shapes: list[list[int]] = []
        mark, sizes = 0, {}
        try:
            for file, held in parts.items():
                path = self._root / file
                sizes[file] = path.stat().st_size
                found, its_mark = described(path, *held)
                shapes, mark = shapes + found, mark ^ its_mark
            path = self._root / names.latents_file
            latents = arrays.latent_shape(shapes[0], self.reading.layout)
            path = self._root / names.condition_file
            length, width = (math.prod(shapes[1]), None)
            if not self.reading.labels:
                length, width = arrays.text_shape(shapes[1])
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path}: cannot be read ({error}); write it again, or remove it"
            ) from error
        return arrays.ScannedSample(names.latents_file, 0, latents, length, width, mark), sizes


SUFFIX = ".safetensors"


@dataclass(frozen=True)
class SafetensorsFolder(arrays.Reading):
    """Safetensors files with one sample each; see `SourceConfig`.

    Attributes:
      name: `safetensors`.
      latents: name of the tensor of latents.
      text: name of the tensor of text embeddings.
      mask: name of the text's mask: 1 for tokens, then 0 for padding; null if there is none.
      text_suffix: if the text lies in a file of its own beside FILE.safetensors, what follows FILE
        in its name, such as _te.safetensors; null if it lies in the same file.
    """

    name: Literal["safetensors"] = "safetensors"
    latents: str = "latents"
    text: str = "prompt_embeds"
    mask: str | None = None
    text_suffix: str | None = None

    def __post_init__(self) -> None:
        if self.text_suffix is not None and not self.text_suffix.endswith(SUFFIX):
            raise InputError(
                f"data.source.text_suffix is {self.text_suffix!r}; it must end in {SUFFIX}"
            )

    def open(self, folder: str) -> TensorSamples:
        """See `SourceConfig.open`.

        Raises:
          InputError: a file is missing or damaged, or lacks a tensor.
        """
        place = Path(folder)
        files = arrays.find_files(place, SUFFIX) if place.exists() else []
        if not files:
            raise InputError(f"{place}: holds no {SUFFIX} files; set data.folder to their folder")
        names, present, mask = [], set(files), None if self.labels else self.mask
        for name in files:
            other = name.removesuffix(SUFFIX) + self.text_suffix if self.text_suffix else name
            if self.text_suffix and name.endswith(self.text_suffix):
                if other in present:
                    raise InputError(
                        f"{place / name}: its name is that of a text, but {other} would be its "
                        "own; rename the sample so that it does not end in data.source.text_suffix"
                    )
                continue
            if other not in present:
                raise InputError(
                    f"{place / name}: its text {other} is missing; add it, or remove both"
                )
            names.append(TensorNames(name, self.latents, other, self.labels or self.text, mask))
        return TensorSamples(place, names, self, {"format": "safetensors"})


# ---------------------------------------------------------------- musubi-tuner

LATENTS_SUFFIX, TEXT_SUFFIX = "_wan.safetensors", "_wan_te.safetensors"

_NAME = re.compile(r"(?P<key>.*?)(?P<clip>_\d+-\d+(-\d+)?)?_\d+x\d+_wan\.safetensors", re.DOTALL)
_LATENTS = re.compile(r"latents_\d+x\d+x\d+_\w+")
_UNREAD = ("latents_image_", "latents_control_", "clip_")
_TEXT = re.compile(r"varlen_t5_\w+")


@dataclass(frozen=True)
class Musubi:
    """Latents and texts that musubi-tuner cached for Wan; see `SourceConfig`.

    Attributes:
      name: `musubi`.
    """

    name: Literal["musubi"] = "musubi"

    def open(self, folder: str) -> TensorSamples:
        """See `SourceConfig.open`.

        Raises:
          InputError: a text is missing, or a file is damaged or of another kind.
        """
        place = Path(folder)
        present = arrays.find_files(place, ".safetensors") if place.is_dir() else []
        files = [name for name in present if name.endswith(LATENTS_SUFFIX)]
        if not files:
            raise InputError(
                f"{place}: holds no files *{LATENTS_SUFFIX}; set data.folder to a cache_directory "
                "of musubi-tuner"
            )
        names_present = set(present)
        pairs = [(name, _text_file(place, name, names_present)) for name in files]
        unread: list[str] = []
        names = arrays.scan(lambda pair: _tensor_names(place, *pair, unread), pairs)
        if unread:
            kinds = ", ".join(
                f"{kind} in {count:,} files" for kind, count in sorted(Counter(unread).items())
            )
            print_stderr(
                f"note: {place}: not read are {kinds}; a model is trained from text alone, and "
                "`alload prepare media --image-to-video first` writes what image-to-video takes"
            )
        origin = {"format": "musubi-tuner", "vae": "wan2.1"}
        reading = arrays.Reading(normalize="none", vae_stride=(4, 8, 8))
        return TensorSamples(place, names, reading, origin, caption="caption1")


def _text_file(folder: Path, name: str, present: set[str]) -> str:
    """The file of the text of a file of latents; all clips of a video share one."""
    path = PurePosixPath(name)
    if not (found := _NAME.fullmatch(path.name)):
        raise InputError(
            f"{folder / name}: its name is not KEY_WIDTHxHEIGHT{LATENTS_SUFFIX}; cache it again, "
            "or remove it"
        )
    keys = [found["key"], found["key"] + (found["clip"] or "")]
    files = [str(path.with_name(key + TEXT_SUFFIX)) for key in keys]
    there = sorted({file for file in files if file in present})
    if len(there) > 1:
        raise InputError(
            f"{folder / name}: both {there[0]} and {there[1]} may be its text; rename the media "
            "file of one of them and cache it again, or remove one"
        )
    if there:
        return there[0]
    raise InputError(
        f"{folder / name}: its text {files[0]} is missing; run "
        "wan_cache_text_encoder_outputs.py, or remove the file"
    )


def _tensor_names(
    folder: Path, latents_file: str, text_file: str, unread: list[str]
) -> TensorNames:
    """The tensors of a sample; adds kinds of others to `unread`."""
    found = []
    for file, pattern in ((latents_file, _LATENTS), (text_file, _TEXT)):
        try:
            with opened(folder / file) as held:
                names = held.keys()
        except (OSError, ValueError) as error:
            raise InputError(
                f"{folder / file}: cannot be read ({error}); cache it again, or remove it"
            ) from error
        if any(name.startswith("f_indices_") for name in names):
            raise InputError(
                f"{folder / file}: is for one-frame training, whose latents hold control frames; "
                "remove it, or cache again without --one_frame"
            )
        matching = [name for name in names if pattern.fullmatch(name)]
        unread.extend({kind for kind in _UNREAD for name in names if name.startswith(kind)})
        if len(matching) != 1:
            raise InputError(
                f"{folder / file}: needs one tensor {pattern.pattern}, and holds "
                f"{', '.join(sorted(names)[:8]) or 'nothing'}; cache it again, or remove it"
            )
        found.append(matching[0])
    return TensorNames(latents_file, found[0], text_file, found[1])


@dataclass(frozen=True)
class Store:
    """A data folder with manifest.parquet and shards; see `SourceConfig`.

    Attributes:
      name: `store`.
    """

    name: Literal["store"] = "store"

    def open(self, folder: str) -> StoreReader:
        """See `SourceConfig.open`.

        Raises:
          InputError: the manifest or a shard is missing, truncated or in another format.
        """
        if is_address(folder):
            return RemoteStore(folder)
        return StoreReader(read_manifest(folder))


@waits("for the data folder to be read")
def open_source(folder: str, config: SourceConfig | None = None) -> SampleSource:
    """Opens the source that the config names; without one, that of the files in the folder.

    Args:
      folder: `data.folder`: a folder, or one file.
      config: `data.source`.

    Raises:
      InputError: there is nothing that can be read, or it is damaged.
    """
    place = Path(folder)
    of_runs = (place / "checkpoints", place / "environment.json")
    if all(map(Path.exists, of_runs)) and not (place / MANIFEST_NAME).exists():
        raise InputError(f"{folder}: is the folder of a run, not of data; name a data folder")
    if config is None:
        config = SOURCES.get(find_source_name(folder))()
    return config.open(folder)


def find_source_name(folder: str) -> str:
    """Returns the name of the source that reads the files of a folder; `store` if there are none.

    Raises:
      InputError: the folder holds pickles of PyTorch alone, which are not read.
    """
    if is_address(folder):
        return "store"
    place = Path(folder)
    require_regular(place / MANIFEST_NAME, "prepare the data again", or_folder=False)
    if not place.exists() or (place / MANIFEST_NAME).is_file() or place.name == MANIFEST_NAME:
        return "store"
    tensors = arrays.find_files(place, ".safetensors")
    if any(name.endswith(LATENTS_SUFFIX) for name in tensors):
        return "musubi"
    if arrays.find_files(place, ".parquet"):
        return "parquet"
    if tensors:
        return "safetensors"
    if pickle := arrays.find_pickle(place):
        raise InputError(
            f"{place}: {pickle} is a pickle of PyTorch, which can run code when it is read, so it "
            "is not; convert such files with torch.load(FILE, weights_only=True) and StoreWriter, "
            "as docs/other-caches.md shows"
        )
    return "store"
