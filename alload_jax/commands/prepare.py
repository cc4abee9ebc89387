"""`alload prepare`: writes a data folder, from media or from a data set by name."""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from alload_jax.commands import add_command
from alload_jax.commands.flags import add_settings, require_named, require_package, up_to
from alload_jax.data.datasets import DATASETS
from alload_jax.data.manifest import MANIFEST_NAME, caption_counts, read_manifest
from alload_jax.data.prepare import inputs, work_folder
from alload_jax.data.prepare.settings import MediaSettings
from alload_jax.data.prepare.sources import Item
from alload_jax.data.store.reader import is_address
from alload_jax.encoders.loading import VaeEncoder
from alload_jax.errors import InputError, one_line, print_stderr, reason_of
from alload_jax.files import Json

_HELP = {"digits": "Images and videos of handwritten digits."}
_MEDIA_HELP = "Images and videos with captions: a folder, a table or WebDataset shards."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares a command with its own flags for media and for each registered data set."""
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    _add_media_arguments(add_command(kinds, "media", _MEDIA_HELP, run_media))
    for name in DATASETS.names():
        words = _HELP.get(name, f"The data set {name}.")
        kind = add_command(kinds, name, words, run_dataset)
        kind.add_argument("--out", required=True, help="data folder to write; must not exist")
        kind.add_argument("--seed", type=int, default=0, help="seed of positions and motion")
        kind.set_defaults(kind=name)


def run_dataset(options: argparse.Namespace) -> int:
    """Writes the folder."""
    replace(DATASETS.get(options.kind)(), seed=options.seed).write(options.out)
    _draw_samples(Path(options.out))
    print(Path(options.out) / MANIFEST_NAME)
    return 0


def _draw_samples(out: Path, previews: Sequence[str] = ()) -> bool:
    """Draws a data folder's first samples, or some of all without previews, with captions.

    The folder is complete without them: returns False, with a warning, if they cannot be written.
    """
    # Imported here because they take a while to import.
    from alload_jax.data.sources.opening import open_source
    from alload_jax.report.pictures import write_contact_sheet

    try:
        write_contact_sheet(out / _SAMPLES, open_source(str(out)), previews=previews)
    except OSError as error:
        print_stderr(f"warning: {reason_of(error)}; the data folder is complete without it")
        return False
    return True


_SAMPLES = "samples.png"
_REASONS = 8
"""Most reasons for skipped files that the summary lists."""
_MOST_WORKERS = 10_000


def _add_media_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    add = parser.add_argument
    add("input", help="folder of media with captions in .txt or .json beside them, a table (.csv, "
        ".jsonl, .parquet), WebDataset .tar shards, or a set of several in .yaml")  # fmt: skip
    add("--out", required=True, help="data folder to write; must not exist, but for --update")
    add("--update", action="store_true", help="bring a data folder up to date with the input: "
        "encode new and changed files, and changed captions alone")  # fmt: skip
    add("--path-column", help="column of paths in a table; default: found by its name")
    add("--media-root", type=Path, help="folder that a table's paths are relative to; default: "
        "the table's")  # fmt: skip
    add("--caption-column", help="column or JSON key of captions; default: found by its name")
    special: dict[str, Json] = {"captions": {"choices": ["one", "all"]}}
    special["area"] = {"nargs": "+", "action": "extend"}
    add_settings(parser, MediaSettings, special=special)
    add("--workers", type=up_to(_MOST_WORKERS), help="processes that decode; encoders with weights "
        "run in one for each GPU; default 1, with --engine ray one for each CPU of it")  # fmt: skip
    add("--engine", choices=["local", "ray"], default="local", help="what runs the processes: this "
        "machine, or Ray; default local")  # fmt: skip
    add("--ray-address", help="address of a Ray cluster; default: the environment variable "
        "RAY_ADDRESS, else this machine")  # fmt: skip
    add("--report", help="Parquet list of skipped files; default: skipped.parquet in the folder")


def run_media(options: argparse.Namespace) -> int:
    """Prepares the folder and prints a summary."""
    require_package("av", "prepare", "alload prepare media")
    from alload_jax.data.prepare.pipeline import Engine, prepare_media
    from alload_jax.training.progress import ProgressBar

    engine: Engine | None = None
    if options.engine == "ray":
        require_package("ray", "ray", "--engine ray")
        from alload_jax.data.prepare.ray_engine import RayEngine

        engine = RayEngine(options.ray_address, options.workers)
    elif options.ray_address is not None:
        raise InputError("--ray-address does not apply to --engine local; add --engine ray")
    _check_places(options)
    names = MediaSettings.__dataclass_fields__
    given = {name: value for name, value in vars(options).items() if name in names}
    given["area"] = tuple(given.get("area", MediaSettings.area))
    settings = MediaSettings(**given)
    columns = (options.path_column, options.caption_column)
    if Path(options.input).suffix.lower() in inputs.SETS:
        for flag in ("path-column", "caption-column", "media-root"):
            if getattr(options, flag.replace("-", "_")) is not None:
                raise InputError(f"--{flag} does not apply to a set; name it per folder there")
        items = inputs.set_items(Path(options.input), settings)
    else:
        every = settings.captions == "all"
        items = inputs.find_items(Path(options.input), *columns, every, options.media_root)
    vae, _ = settings.encoders(items)
    began = time.monotonic()
    files = size = 0

    def finished(items: Sequence[Item], before: bool) -> None:
        """Advances the bar by files; those of an earlier run count for no speed."""
        nonlocal files, size
        if before:
            bar.skip(len(items))
            return
        files += len(items)
        size += sum(item.source.size for item in items if item.source)
        seconds = max(time.monotonic() - began, 1e-9)
        for _ in items:
            bar.advance(f"{files / seconds:.1f} files/s · {size / 1e6 / seconds:.1f} MB/s")

    try:
        with ProgressBar("prepare: file", total=len(items)) as bar:
            bar.say(f"{options.input}: {len(items):,} files")
            if ignored := inputs.count_ignored(Path(options.input), items):
                bar.say(
                    f"note: {ignored:,} other images and videos in the folder are not read, "
                    "because it holds a table or .tar files"
                )
            report = prepare_media(
                items,
                Path(options.out).absolute(),
                settings,
                workers=options.workers or 1,
                engine=engine,
                report=Path(options.report) if options.report else None,
                on_files=finished,
                update=options.update,
            )
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(
            "interrupted; run the same command again, which goes on after the last whole shard"
        ) from error
    _print_summary(Path(options.out), settings, vae, report)
    return 0


def _check_places(options: argparse.Namespace) -> None:
    from alload_jax.data.prepare.pipeline import is_skipped_list

    if is_address(options.out):
        raise InputError(
            f"--out is {options.out}, no folder of this machine; name one, and copy it there"
        )
    out, place = Path(os.path.realpath(options.out)), Path(options.input)
    is_set = place.suffix.lower() in inputs.SETS
    for source in inputs.set_places(place) if is_set else [place]:
        if source.is_dir() and out.is_relative_to(os.path.realpath(source)):
            raise InputError(
                f"--out {options.out} lies in the input folder {source}, which would list it as "
                "input; name a folder elsewhere"
            )
    if options.report:
        report = Path(options.report)
        require_named("alload prepare media", "--report", report, ".parquet")
        if report.is_file() and report.stat().st_size and not is_skipped_list(report):
            raise InputError(
                f"alload prepare media: --report {report}: is another file, which would be lost; "
                "name a new one"
            )


def _print_summary(
    out: Path, settings: MediaSettings, vae: VaeEncoder, report: work_folder.UnitReport
) -> None:
    console = Console(markup=False)
    manifest = read_manifest(out)
    patch = "×".join(map(str, vae.patch_size))
    table = Table("frames × height × width", "samples", f"tokens (patch {patch})", box=None)
    sizes, counts = np.unique(manifest.shape, axis=0, return_counts=True)
    tokens = manifest.geometry(vae.patch_size).seq_len(*sizes.T) * counts
    for size, *of_size in zip(sizes, counts, tokens, strict=True):
        table.add_row("×".join(map(str, size)), *(f"{number:,}" for number in of_size))
    console.print(table)
    skipped = [row for row in report.skipped if not row.used]
    changed = [row for row in report.skipped if row.used]
    for title, rows in (("not used, or not to its end", skipped), ("used, but", changed)):
        table = Table(title, "files", "such as", box=None)
        for reason, count, example in work_folder.reasons(rows)[:_REASONS]:
            table.add_row(one_line(reason), f"{count:,}", one_line(example))
        if rows:
            console.print(table)
    captions = caption_counts(manifest)
    if several := int((captions > 1).sum()):
        print(f"{several:,} samples have several captions, up to {captions.max()}")
    hours = work_folder.video_hours(manifest, settings.rate)
    console.print(
        f"{report.used:,} files used, {report.without_caption:,} of them without a caption · "
        f"{len(skipped):,} listed as skipped · {len(manifest):,} samples · "
        f"{hours:.3f} hours of video",
        highlight=False,
        soft_wrap=True,
    )
    if _draw_samples(out, report.previews):
        print(f"{out / _SAMPLES} shows the first samples")
    if report.changes:
        print(report.changes)
    print(out / MANIFEST_NAME)
