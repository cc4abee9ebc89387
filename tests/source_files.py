"""Files of samples as other trainers write them; used by the tests of several packages."""

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet
from safetensors.numpy import save_file

STRIDE = (4, 8, 8)


class Stored(NamedTuple):
    """A sample: normalised latents [t, h, w, C], text [L, width], caption."""

    latents: np.ndarray
    text: np.ndarray
    caption: str

    @property
    def size(self):
        frames, height, width = self.latents.shape[:3]
        return (4 * frames - 3, 8 * height, 8 * width)


def make_samples(count=5, channels=16, width=6, seed=0, dtype=ml_dtypes.bfloat16):
    """Samples of three sizes whose values bfloat16 holds."""
    rng = np.random.default_rng(seed)
    grids = [(1, 4, 6), (3, 4, 4), (2, 2, 4)]
    return [
        Stored(
            rng.normal(size=(*grids[n % 3], channels)).astype(dtype),
            rng.normal(size=(1 + n % 4, width)).astype(dtype),
            f"caption {n}",
        )
        for n in range(count)
    ]


def channels_first(latents):
    return np.ascontiguousarray(np.moveaxis(latents, -1, 0))


def write_musubi(folder, samples, image_to_video=False):
    """As wan_cache_latents.py and wan_cache_text_encoder_outputs.py of musubi-tuner.

    Videos are clips of VIDEO with a text each; widths and heights are those of the original files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, sample in enumerate(samples):
        frames, height, width = sample.latents.shape[:3]
        key = f"my file_{number:03d}"
        clip = f"_00016-{4 * frames - 3:03d}" if frames > 1 else ""
        note = {"architecture": "wan", "format_version": "1.0.1"}
        sizes = {"width": "1920", "height": "1080"}
        if frames > 1:
            sizes["frame_count"] = str(4 * frames - 3)
        tensors = {
            f"latents_{frames}x{height}x{width}_bfloat16": channels_first(sample.latents),
        }
        if image_to_video:
            given = np.zeros((20, frames, height, width), ml_dtypes.bfloat16)
            tensors[f"latents_image_{frames}x{height}x{width}_bfloat16"] = given
            tensors["clip_bfloat16"] = np.zeros((2, 4), ml_dtypes.bfloat16)
        save_file(tensors, folder / f"{key}{clip}_1920x1080_wan.safetensors", note | sizes)
        text = {"varlen_t5_bfloat16": sample.text}
        note["caption1"] = sample.caption
        save_file(text, folder / f"{key}_wan_te.safetensors", note)
    return folder


def triplet(name, array):
    return {
        f"{name}_bytes": array.tobytes(),
        f"{name}_shape": list(array.shape),
        f"{name}_dtype": str(array.dtype),
    }


ARRAY = (("bytes", pa.binary()), ("shape", pa.list_(pa.int64())), ("dtype", pa.string()))


def fastvideo_schema(*arrays):
    notes = [(name, pa.string()) for name in ("file_name", "caption", "media_type")]
    sizes = [(name, pa.int64()) for name in ("width", "height", "num_frames")]
    times = [(name, pa.float64()) for name in ("duration_sec", "fps")]
    columns = [(f"{name}_{part}", kind) for name in arrays for part, kind in ARRAY]
    return pa.schema([("id", pa.string()), *columns, *notes, *sizes, *times])


def fastvideo_row(number, sample, raw=lambda latents: latents):
    """A row of FastVideo's pyarrow_schema_t2v: num_frames counts latents, width is the height."""
    _, height, width = sample.size
    latents = channels_first(raw(sample.latents.astype(np.float32)))
    return {
        "id": f"video{number}",
        **triplet("vae_latent", latents),
        **triplet("text_embedding", sample.text.astype(np.float32)),
        "file_name": f"video{number}.mp4",
        "caption": sample.caption,
        "media_type": "video",
        "width": height,
        "height": width,
        "num_frames": latents.shape[1],
        "duration_sec": 1.0,
        "fps": 16.0,
    }


def write_rows(path, rows, schema=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = schema or fastvideo_schema("vae_latent", "text_embedding")
    table = pa.Table.from_pylist(rows, schema)
    pyarrow.parquet.write_table(table, path, compression="zstd", **options)
    return path


def write_fastvideo(folder, samples, raw=lambda latents: latents, rows_per_file=3):
    """As FastVideo's ParquetDatasetWriter: worker_0/data_chunk_N.parquet, zstd."""
    rows = [fastvideo_row(number, sample, raw) for number, sample in enumerate(samples)]
    for number, first in enumerate(range(0, len(rows), rows_per_file)):
        chunk = rows[first : first + rows_per_file]
        write_rows(folder / "worker_0" / f"data_chunk_{number}.parquet", chunk)
    return folder


def write_tensor_files(folder, samples):
    """A file for each sample, with latents [1, C, t, h, w] and padded text with a mask."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, sample in enumerate(samples):
        length = len(sample.text)
        padded = np.ones((1, 8, sample.text.shape[1]), sample.text.dtype)
        padded[0, :length] = sample.text
        tensors = {
            "latents": channels_first(sample.latents)[None],
            "prompt_embeds": padded,
            "prompt_attention_mask": (np.arange(8) < length).astype(np.int64)[None],
        }
        save_file(tensors, folder / f"{number:05d}.safetensors", {"caption": sample.caption})
    return folder
