"""Opens the samples of a folder, as its files or the config say."""

from pathlib import Path

from alload_jax.data.manifest import MANIFEST_NAME
from alload_jax.data.sources.files import find_files, find_pickle
from alload_jax.data.sources.musubi import LATENTS_SUFFIX
from alload_jax.data.sources.source import SOURCES, SampleSource, SourceConfig
from alload_jax.errors import InputError
from alload_jax.files import require_regular


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
            "as docs/data.md shows"
        )
    return "store"
