"""`alload data`: shows and checks a data folder, and merges several."""

import argparse
import csv
import json
from pathlib import Path

import numpy as np
import rich.box
from rich.table import Column, Table
from rich.text import Text

from alload_jax.bench.harness import console
from alload_jax.commands.flags import (
    require_named,
    require_place,
    source_config,
    triple,
    up_to,
    usual_model,
)
from alload_jax.data import manifest as manifests
from alload_jax.data.prepare.inputs import write_captions
from alload_jax.data.sources.opening import open_source
from alload_jax.data.store import damaged_records, merge_stores, origin_differences
from alload_jax.errors import InputError, one_line, print_stderr
from alload_jax.files import replacing
from alload_jax.planning.samples import Triple

_MOST_BUCKETS = 30
_LONGEST_VALUE = 100


def store_table(manifest: manifests.Manifest, patch_size: Triple) -> Table:
    """A table of what a store holds."""
    frames, captions = manifest.shape[:, 0], manifests.caption_counts(manifest)
    count, fps = int(frames[frames > 1].sum()), manifest.fps
    video = f"{count:,} frames; the origin names no fps"
    if fps is not None:
        video = f"{count / fps / 3600:,.3f} hours: {count:,} frames at {fps:g} fps"
    tokens = manifest.samples(patch_size).seq_len
    title = Text(one_line(str(manifest.folder)))
    table = Table("what", "value", title=title, title_justify="left", show_header=False)
    rows = {
        "samples": f"{len(manifest):,}",
        "images": f"{int((frames == 1).sum()):,}",
        "videos": f"{int((frames > 1).sum()):,}",
        "video": video,
        "tokens": f"{int(tokens.sum()):,} with patch size {_joined(patch_size)}",
        "tokens of a sample": _range(tokens),
        **{name: held for name, held in manifest.form.described().items() if held != "none"},
        "condition tokens of a sample": _range(manifest.text_length),
        "channels": str(int(manifest.channels[0])),
        "VAE stride": _joined(manifest.vae_stride),
        "shards" if manifest.is_store else "files": f"{len(manifest.shard_bytes):,}",
        "bytes": f"{sum(manifest.shard_bytes.values()):,}",
    }
    if several := int((captions > 1).sum()):
        rows["captions of a sample"] = f"{_range(captions)}; {several:,} samples have several"
    for name, value in manifest.origin.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text = one_line(text)
        text = text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
        rows[one_line(f"origin: {name}")] = text
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    return table


def bucket_table(manifest: manifests.Manifest, patch_size: Triple) -> Table:
    """A table with a row for each size, those with the most tokens first."""
    sizes, first, counts = np.unique(manifest.shape, axis=0, return_index=True, return_counts=True)
    each = manifest.samples(patch_size).seq_len[first]
    total = each * counts
    names = ("frames×height×width", "samples", "tokens each", "tokens", "share of tokens")
    columns = (Column(name, justify="right") for name in names)
    table = Table(*columns, title="buckets", title_justify="left", box=rich.box.SIMPLE_HEAD)
    order = np.argsort(-total, kind="stable")
    for bucket in order[:_MOST_BUCKETS]:
        table.add_row(
            "×".join(map(str, sizes[bucket])),
            f"{counts[bucket]:,}",
            f"{each[bucket]:,}",
            f"{total[bucket]:,}",
            f"{total[bucket] / total.sum():.1%}",
        )
    if (rest := order[_MOST_BUCKETS:]).size:
        share = f"{total[rest].sum() / total.sum():.1%}"
        others = f"{len(rest):,} other sizes"
        table.add_row(others, f"{counts[rest].sum():,}", "", f"{total[rest].sum():,}", share)
    return table


def _range(values: np.ndarray) -> str:
    low, middle, high = (float(np.quantile(values, q)) for q in (0, 0.5, 1))
    return f"{low:,.0f} to {high:,.0f}, median {middle:,.0f}"


def _joined(triple: Triple) -> str:
    return ",".join(map(str, triple))


_MERGE, _CAPTIONS = "merge", "captions"
_OF_SHOW = ("--config", "--patch-size", "--check", "--sheet", "--samples", "--force")
_MOST_SAMPLES = 1000
_DIFFERENCES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's flags."""
    parser.usage = (
        "alload data STORE [--config FILE] [--patch-size F,H,W] [--check] [--sheet FILE.png]\n"
        "       alload data merge STORE STORE [STORE ...] --out FOLDER [--add-names]\n"
        "       alload data captions STORE --out TABLE.csv\n"
        "       alload data captions TABLE.csv [--media FOLDER]"
    )
    parser.description = (
        "Shows what a data folder holds: counts, lengths, sizes, origin. With `merge`, writes one "
        "data folder of several; their shards are linked or copied. With `captions`, writes the "
        "captions of a folder to a table, or those of a table to text files beside the media. "
        "Folders of these names are written ./merge and ./captions."
    )
    add = parser.add_argument
    add("words", nargs="+", metavar="STORE", help="a data folder; or merge and the folders")
    add("--config", metavar="FILE", help="training config whose data.source says how to read it")
    add("--patch-size", type=triple, help="latents per token; default that of the VAE's "
        "model, and 1,16,16 for pixels")  # fmt: skip
    add("--check", action="store_true", help="read every record; status 1 if one is damaged")
    add("--sheet", metavar="FILE", help="PNG of samples from the whole folder, with captions")
    add("--force", action="store_true", help="replace a sheet that exists")
    add("--samples", type=up_to(_MOST_SAMPLES), help="samples on the sheet; default 16")
    add("--out", metavar="FOLDER", help="with merge: data folder to write, with captions: "
        "table; must not exist")  # fmt: skip
    add("--media", metavar="FOLDER", help="with captions: folder that a table's paths are "
        "relative to; default: its own")  # fmt: skip
    add("--add-names", action="store_true", help="with merge: begin the paths of samples with the "
        "name of their folder, for data.weights")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Shows, checks or merges."""
    if options.words[0] == _MERGE:
        return _merge(options)
    if options.words[0] == _CAPTIONS:
        return _captions(options)
    by = {"--out": "merge` or `alload data captions", "--add-names": "merge", "--media": "captions"}
    for flag, name in by.items():
        _require_absent(options, flag, f"belongs to `alload data {name}`")
    if len(options.words) > 1:
        raise InputError(
            f"alload data: {len(options.words)} folders; give one, or `alload data merge` them"
        )
    return _show(options)


def _merge(options: argparse.Namespace) -> int:
    for flag in (*_OF_SHOW, "--media"):
        _require_absent(options, flag, "does not apply to merge")
    if options.out is None:
        raise InputError("alload data merge: --out is missing; name the folder to write")
    path = merge_stores(options.words[1:], options.out, add_names=options.add_names)
    origins = {each: manifests.read_manifest(each).origin for each in options.words[1:]}
    if found := origin_differences(origins):
        more = f" and {len(found) - _DIFFERENCES} more" if len(found) > _DIFFERENCES else ""
        print_stderr(f"note: the origins differ: {one_line(', '.join(found[:_DIFFERENCES]))}{more}")
    print(path)
    return 0


def _captions(options: argparse.Namespace) -> int:
    for flag in (*_OF_SHOW, "--add-names"):
        _require_absent(options, flag, "does not apply to captions")
    if len(options.words) != 2:
        raise InputError("alload data captions: give one data folder, or one table of captions")
    place = Path(options.words[1])
    if not place.is_dir():
        _require_absent(options, "--out", "does not apply to a table, which --media takes")
        changed, same = write_captions(place, Path(options.media or place.parent))
        print(
            f"{changed:,} caption files changed, {same:,} are the same; `alload prepare media "
            "--update` encodes them"
        )
        return 0
    _require_absent(options, "--media", "does not apply to a data folder; give --out TABLE.csv")
    if options.out is None or Path(options.out).suffix.lower() != ".csv":
        raise InputError("alload data captions: --out is missing; name a .csv file to write")
    require_place("alload data", "--out", Path(options.out))
    if Path(options.out).exists():
        raise InputError(f"alload data captions: --out {options.out}: exists already; name another")
    rows = manifests.read_rows(place).to_pylist()
    if None in (row.get(manifests.PATH) for row in rows):
        raise InputError(f"{place}: does not record the paths of its files, as prepare media does")
    with (
        replacing(Path(options.out)) as unfinished,
        unfinished.open("w", -1, "utf-8-sig", newline="") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(("path", "caption"))
        lines: dict[tuple[str, str], None] = {}
        for row in sorted(rows, key=lambda row: str(row[manifests.PATH])):
            found, several = row.get(manifests.FOUND), row.get(manifests.CAPTIONS)
            words = found or several or [row[manifests.CAPTION] or ""]
            text = json.dumps(words, ensure_ascii=False) if len(words) > 1 else words[0]
            lines[row[manifests.PATH], text] = None
        writer.writerows(lines)
    print(options.out)
    return 0


def _require_absent(options: argparse.Namespace, flag: str, reason: str) -> None:
    if getattr(options, flag.lstrip("-").replace("-", "_")) not in (None, False):
        raise InputError(f"alload data: {flag} {reason}; leave it out")


def _show(options: argparse.Namespace) -> int:
    for flag in ("--samples", "--force") if not options.sheet else ():
        _require_absent(options, flag, "needs --sheet FILE")
    if options.sheet:
        require_named("alload data", "--sheet", Path(options.sheet))
        if Path(options.sheet).exists() and not options.force:
            raise InputError(
                f"alload data: --sheet {options.sheet}: exists already; give --force to replace "
                "it, or name another file"
            )
    source = open_source(options.words[0], source_config(options.config, "alload data"))
    manifest = source.manifest
    patch_size = options.patch_size or usual_model(manifest)[1]
    console().print(store_table(manifest, patch_size))
    console().print(bucket_table(manifest, patch_size))
    if options.sheet:
        # Imported here because Matplotlib takes a while to import.
        from alload_jax.report.pictures import write_contact_sheet

        write_contact_sheet(options.sheet, source, options.samples or 16)
        print(f"written: {options.sheet}")
    if not options.check:
        return 0
    damaged = 0
    for line in damaged_records(source):
        print(line)
        damaged += 1
    read = len(manifest) - len(source.stand_ins)
    print(f"{read:,} records read, {damaged:,} damaged")
    return 1 if damaged else 0
