"""Opens the samples of a folder, as its files or the config say; musubi-tuner's caches too.

`wan_cache_latents.py` writes KEY_WIDTHxHEIGHT_wan.safetensors, with KEY_POSITION-FRAMES for a clip
of a video. Its latents are [C, T, H, W] and normalised by the VAE.
`wan_cache_text_encoder_outputs.py` writes KEY_wan_te.safetensors without padding. Widths and
heights are those of the original files.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from alload_jax.data.manifest import MANIFEST_NAME, read_manifest
from alload_jax.data.sources import SOURCES, SampleSource, SourceConfig
from alload_jax.data.sources.arrays import Reading, find_files, find_pickle, scan
from alload_jax.data.sources.safetensors_folder import TensorNames, TensorSamples, read_header
from alload_jax.data.store import StoreReader
from alload_jax.data.store.reader import RemoteStore, is_address
from alload_jax.errors import InputError, print_stderr
from alload_jax.files import require_regular
from alload_jax.processes import waits


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


LATENTS_SUFFIX, TEXT_SUFFIX = "_wan.safetensors", "_wan_te.safetensors"
_STRIDE = (4, 8, 8)

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
        present = find_files(place, ".safetensors") if place.is_dir() else []
        files = [name for name in present if name.endswith(LATENTS_SUFFIX)]
        if not files:
            raise InputError(
                f"{place}: holds no files *{LATENTS_SUFFIX}; set data.folder to a cache_directory "
                "of musubi-tuner"
            )
        names_present = set(present)
        pairs = [(name, _text_file(place, name, names_present)) for name in files]
        unread: list[str] = []
        names = scan(lambda pair: _tensor_names(place, *pair, unread), pairs)
        if unread:
            kinds = ", ".join(
                f"{kind} in {count:,} files" for kind, count in sorted(Counter(unread).items())
            )
            print_stderr(
                f"note: {place}: not read are {kinds}; a model is trained from text alone, and "
                "`alload prepare media --image-to-video first` writes what image-to-video takes"
            )
        origin = {"format": "musubi-tuner", "vae": "wan2.1"}
        return TensorSamples(place, names, Reading(), _STRIDE, origin, caption="caption1")


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
            names = list(read_header(folder / file).tensors)
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
        kinds = {kind for kind in _UNREAD for name in names if name.startswith(kind)}
        unread.extend(kinds)
        if len(matching) != 1:
            raise InputError(
                f"{folder / file}: needs one tensor {pattern.pattern}, and holds "
                f"{', '.join(sorted(names)[:8]) or 'nothing'}; cache it again, or remove it"
            )
        found.append(matching[0])
    return TensorNames(latents_file, found[0], text_file, found[1])


@waits("for the data folder to be read")
def open_source(folder: str, config: SourceConfig | None = None) -> SampleSource:
    """Opens the source that the config names; without one, that of the files in the folder.

    Args:
      folder: `data.folder`: a folder, or one file.
      config: `data.source`.

    Raises:
      InputError: there is nothing that can be read, or it is damaged.
    """
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
    tensors = find_files(place, ".safetensors")
    if any(name.endswith(LATENTS_SUFFIX) for name in tensors):
        return "musubi"
    if find_files(place, ".parquet"):
        return "parquet"
    if tensors:
        return "safetensors"
    if pickle := find_pickle(place):
        raise InputError(
            f"{place}: {pickle} is a pickle of PyTorch, which can run code when it is read, so it "
            "is not; convert such files with torch.load(FILE, weights_only=True) and StoreWriter, "
            "as docs/other-caches.md shows"
        )
    return "store"
