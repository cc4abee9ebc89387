"""`alload prepare`: writes a data folder, from media or from a data set by name."""

import argparse
import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from alload_jax.commands.flags import require_place
from alload_jax.data.datasets import DATASETS
from alload_jax.data.manifest import MANIFEST_NAME
from alload_jax.errors import InputError, one_line

if TYPE_CHECKING:
    from alload_jax.data.prepare.encoders import VaeEncoder
    from alload_jax.data.prepare.pipeline import Engine
    from alload_jax.data.prepare.settings import MediaSettings
    from alload_jax.data.prepare.sources import Item
    from alload_jax.data.prepare.work_folder import UnitReport
    from alload_jax.training.progress import ProgressBar


_HELP = {"digits": "Images and videos of handwritten digits."}


def add_kinds(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declares a subcommand for each registered data set.

    Args:
      kinds: what `add_subparsers` returned.
    """
    for name in DATASETS.names():
        help_text = _HELP.get(name, f"The data set {name}.")
        parser = kinds.add_parser(name, help=help_text, description=help_text)
        parser.add_argument("--out", required=True, help="data folder to write; must not exist")
        parser.add_argument("--seed", type=int, default=0, help="seed of positions and motion")
        parser.set_defaults(prepare=run_dataset, parser=parser, kind=name)


def run_dataset(options: argparse.Namespace) -> int:
    """Writes the folder."""
    replace(DATASETS.get(options.kind)(), seed=options.seed).write(options.out)
    print(Path(options.out) / MANIFEST_NAME)
    return 0


MEDIA_HELP = "Images and videos with captions: a folder, a table or WebDataset shards."

_REASONS = 8
"""Most reasons for skipped files that the summary lists."""
_PARQUET = b"PAR1"
"""First bytes of a Parquet file."""
_MOST_WORKERS = 10_000


def add_media_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add("input", help="folder of media with captions in .txt or .json beside them, a table (.csv, "
        ".jsonl, .parquet), or WebDataset .tar shards")  # fmt: skip
    add("--out", required=True, help="data folder to write; must not exist")
    add("--path-column", help="column of paths in a table; default: found by its name")
    add("--caption-column", help="column or JSON key of captions; default: found by its name")
    add("--captions", choices=["one", "all"], default="one", help="captions of a file to store: "
        "one, or all: each line of a .txt file, each entry of a list, the columns caption, "
        "caption_1, caption_2 and so on; an epoch takes one of them; default one")  # fmt: skip
    add("--vae", default="none", help="encoder of frames: none stores pixels, wan latents of Wan's "
        "VAE, hunyuan_video those of HunyuanVideo 1.5's; default none")  # fmt: skip
    add("--vae-folder", help="local folder of the VAE's weights, as diffusers saves them")
    add("--frames-per-latent", type=int, default=1, help="frames that a latent of pixels holds in "
        "its channels, which makes clips shorter in tokens: 1, 2 or 4; default 1")  # fmt: skip
    add("--text", default="bytes", help="encoder of captions: bytes, class where captions are "
        "classes, umt5 for Wan's, hunyuan_video for HunyuanVideo 1.5's; default bytes")  # fmt: skip
    add("--text-folder", help="local folder of the text encoder's weights and tokenizer")
    add("--text-length", type=int, help="most tokens of a caption; default: 256 bytes for bytes, "
        "512 tokens for umt5, 1000 for hunyuan_video")  # fmt: skip
    add("--image-to-video", help="store what image-to-video models are given: first, or first-last "
        "for first and last frame, which Wan's models take; default: nothing")  # fmt: skip
    add("--image-folder", help="local folder of their image encoder: CLIP for wan, SigLIP for "
        "hunyuan_video; default: none")  # fmt: skip
    add("--area", nargs="+", default=["480p"], help="area classes of the buckets: 192p, 256p, "
        "480p, 512p, 720p, 1080p, or HEIGHTxWIDTH; default 480p")  # fmt: skip
    add("--max-enlarge", type=float, default=1.25, help="smaller pictures than this needs are "
        "skipped; default 1.25")  # fmt: skip
    add("--fps", default="16", help="frames per second of clips; default 16")
    add("--frames", type=int, default=81, help="frames of a clip, 4n + 1; default 81")
    add("--min-frames", type=int, default=1, help="shorter videos are skipped; default 1")
    add("--stride-seconds", type=float, help="from the start of a clip to the next; default: "
        "the clip's length")  # fmt: skip
    add("--max-clips", type=int, help="most clips of a video; default: all")
    add("--scenes", action="store_true", help="cut videos at scene changes, by PySceneDetect")
    add("--scene-threshold", type=float, help="how many times as much as around it a picture must "
        "change at a scene change; default 3")  # fmt: skip
    add("--files-per-shard", type=int, default=32, help="input files in a shard; default 32")
    add("--workers", type=int, help="processes that decode; encoders with weights run "
        "in one for each GPU; default 1, with --engine ray one for each CPU of it")  # fmt: skip
    add("--engine", choices=["local", "ray"], default="local", help="what runs the processes: this "
        "machine, or Ray; default local")  # fmt: skip
    add("--ray-address", help="address of a Ray cluster; default: the environment variable "
        "RAY_ADDRESS, else this machine")  # fmt: skip
    add("--report", help="Parquet list of skipped files; default: skipped.parquet in the folder")


def run_media(options: argparse.Namespace) -> int:
    """Prepares the folder and prints a summary."""
    _require("av", "prepare", "alload prepare media")
    from alload_jax.data.prepare.inputs import count_ignored, find_items
    from alload_jax.data.prepare.pipeline import prepare_media
    from alload_jax.training.progress import ProgressBar

    engine = _engine(options)
    _check_places(options)
    settings = _settings(options)
    columns = (options.path_column, options.caption_column)
    items = find_items(Path(options.input), *columns, options.captions == "all")
    vae, _ = settings.encoders(items)
    out = Path(options.out).absolute()
    with ProgressBar("prepare: file", total=len(items)) as bar, _interruptible():
        bar.say(f"{options.input}: {len(items):,} files")
        if ignored := count_ignored(Path(options.input), items):
            bar.say(
                f"note: {ignored:,} other images and videos in the folder are not read, because it "
                "holds a table or .tar files"
            )
        report = prepare_media(
            items,
            out,
            settings,
            workers=options.workers or 1,
            engine=engine,
            report=Path(options.report) if options.report else None,
            on_files=_Speed(bar).finished,
        )
    _print_summary(Path(options.out), settings, vae, report)
    return 0


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(
            "interrupted; run the same command again, which goes on after the last whole shard"
        ) from error


def _require(package: str, extra: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{what} needs the package {package}; install alload-jax[{extra}]")


def _check_places(options: argparse.Namespace) -> None:
    out, source = (Path(os.path.realpath(each)) for each in (options.out, options.input))
    if source.is_dir() and out.is_relative_to(source):
        raise InputError(
            f"--out {options.out} lies in the input folder {options.input}, which would list it as "
            "input; name a folder elsewhere"
        )
    if options.report:
        report = Path(options.report)
        require_place("alload prepare media", "--report", report)
        if report.is_file() and _first_bytes(report) not in (_PARQUET, b""):
            raise InputError(
                f"alload prepare media: --report {report}: is another file, which would be lost; "
                "name a new one"
            )


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_PARQUET))


def _engine(options: argparse.Namespace) -> "Engine | None":
    if options.workers is not None and not 1 <= options.workers <= _MOST_WORKERS:
        raise InputError(f"--workers is {options.workers}; it must be 1 to {_MOST_WORKERS:,}")
    if options.engine == "local":
        if options.ray_address is not None:
            raise InputError("--ray-address does not apply to --engine local; add --engine ray")
        return None
    _require("ray", "ray", "--engine ray")
    from alload_jax.data.prepare.ray_engine import RayEngine

    return RayEngine(options.ray_address, options.workers)


def _settings(options: argparse.Namespace) -> "MediaSettings":
    from alload_jax.data.prepare.settings import MediaSettings

    names = MediaSettings.__dataclass_fields__
    values = {name: getattr(options, name) for name in names}
    return MediaSettings(**values | {"area": tuple(options.area)})


class _Speed:
    """Shows files and bytes per second on a bar."""

    def __init__(self, bar: "ProgressBar"):
        self._bar = bar
        self._began = time.monotonic()
        self._files, self._bytes = 0, 0

    def finished(self, items: "Sequence[Item]", before: bool) -> None:
        """Advances by files; those of an earlier run count for no speed."""
        if before:
            self._bar.skip(len(items))
            return
        self._files += len(items)
        self._bytes += sum(item.source.size for item in items if item.source)
        seconds = max(time.monotonic() - self._began, 1e-9)
        megabytes = self._bytes / 1e6 / seconds
        note = f"{self._files / seconds:.1f} files/s · {megabytes:.1f} MB/s"
        for _ in items:
            self._bar.advance(note)


def _print_summary(
    out: Path, settings: "MediaSettings", vae: "VaeEncoder", report: "UnitReport"
) -> None:
    from rich.console import Console
    from rich.table import Table

    from alload_jax.data.manifest import MANIFEST_NAME, caption_counts, read_manifest
    from alload_jax.data.prepare.work_folder import bucket_rows, reasons, video_hours

    console = Console(markup=False)
    manifest = read_manifest(out)
    patch = "×".join(map(str, vae.patch_size))
    table = Table("frames × height × width", "samples", f"tokens (patch {patch})", box=None)
    for size, samples, tokens in bucket_rows(manifest, vae.patch_size):
        table.add_row("×".join(map(str, size)), f"{samples:,}", f"{tokens:,}")
    console.print(table)
    if report.skipped:
        table = Table("not used, or not to its end", "files", "such as", box=None)
        found = reasons(report.skipped)
        for reason, count, example in found[:_REASONS]:
            table.add_row(one_line(reason), f"{count:,}", one_line(example))
        console.print(table)
    counts = caption_counts(manifest)
    if several := int((counts > 1).sum()):
        print(f"{several:,} samples have several captions, up to {counts.max()}")
    hours = video_hours(manifest, settings.rate)
    console.print(
        f"{report.used:,} files used, {report.without_caption:,} of them without a caption · "
        f"{len(report.skipped):,} listed as skipped · {len(manifest):,} samples · "
        f"{hours:.3f} hours of video",
        highlight=False,
        soft_wrap=True,
    )
    print(out / MANIFEST_NAME)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares a subcommand with its own flags for each kind of data."""
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    media = kinds.add_parser("media", help=MEDIA_HELP, description=MEDIA_HELP)
    add_media_arguments(media)
    media.set_defaults(prepare=run_media, parser=media)
    add_kinds(kinds)


def run(options: argparse.Namespace) -> int:
    """Writes the folder."""
    return options.prepare(options)
