"""`alload prepare media --update`: what is encoded, what stays, and what an interruption leaves."""

import os
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from media_helpers import grey_frames, hold, make_media, prepare, write_video
from patience import PATIENCE
from PIL import Image

from alload_jax.data.manifest import read_manifest, read_rows
from alload_jax.data.prepare.unit import Job
from alload_jax.data.store import StoreReader, StoreWriter, damaged_records
from alload_jax.errors import InputError


@pytest.fixture
def encoded(monkeypatch):
    """Counts of clips and captions that are encoded."""
    counts, call = Counter(), Job.call

    def count(job, name, method, *arguments):
        counts[{"vae": "frames", "text": "caption"}[name]] += method == "encode"
        return call(job, name, method, *arguments)

    monkeypatch.setattr(Job, "call", count)
    return counts


def content(folder):
    """What a data folder holds: path and captions of each sample → its arrays' bytes."""
    manifest, rows = read_manifest(folder), read_rows(folder).to_pylist()
    reader = StoreReader(manifest)
    assert not list(damaged_records(reader))
    return sorted(
        (row["path"], row["caption"], str(row.get("captions")), name, array.tobytes())
        for number, row in enumerate(rows)
        for name, array in reader.read(number).items()
    )


def numbers(folder):
    """Path and frames of each sample → its number."""
    manifest, rows = read_manifest(folder), read_rows(folder).to_pylist()
    return {
        (row["path"], row["frames"], at): int(number)
        for at, (row, number) in enumerate(zip(rows, manifest.sample_numbers, strict=True))
    }


def assert_as_new(media, out):
    """Whether a data folder holds what a new one of the same files would."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(media, Path(folder) / "new")
        assert content(out) == content(Path(folder) / "new")


def change(media):
    """One file of each kind of change: 4 clips and 1 picture stay, of which 1 has a new name."""
    (media / "clip 1.txt").write_text("otherwise")
    (media / "image0.png").rename(media / "ümläut.png")
    (media / "clip 3.mkv").unlink()
    shutil.copy(media / "image1.png", media / "copy.png")
    stat = (media / "image2.png").stat()
    Image.new("RGB", (40, 42), (9, 9, 9)).save(media / "image2.png")
    os.utime(media / "image2.png", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as cp -p leaves it
    write_video(media / "new.mkv", grey_frames([90] * 9))
    (media / "worse.png").write_bytes(b"nothing, as before")


@pytest.fixture
def media(tmp_path):
    (tmp_path / "media").mkdir()
    folder = make_media(tmp_path / "media")
    Image.new("RGBA", (40, 41), (1, 0, 0, 99)).save(folder / "image1.png")
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_an_update_holds_what_a_new_folder_would_and_encodes_what_is_new(
    media, tmp_path, encoded, workers
):
    out = tmp_path / "out"
    prepare(media, out)
    before, read = numbers(out), read_manifest(out)
    change(media)
    encoded.clear()
    report = prepare(media, out, update=True, workers=workers)
    assert report.changes == ("3 files joined, 2 left, 1 have new captions, 5 are the same")
    if workers == 1:  # image2.png and new.mkv; the copy and clip 1 need captions alone
        assert encoded == {"frames": 2, "caption": 6}
    whole = prepare(media, tmp_path / "new")
    assert content(out) == content(tmp_path / "new")
    assert set(report.skipped) == set(whole.skipped)
    assert len(report.skipped) == len(whole.skipped)
    unusable = {row.path for row in report.skipped if not row.used}
    assert unusable == {"bad.mp4", "worse.png"}
    clear = {row.path for row in report.skipped if "transparent" in row.reason}
    assert clear == {"image1.png", "copy.png"}
    after = numbers(out)
    names = {path: number for (path, *_), number in before.items()}
    for (path, *_), number in after.items():
        was = names.get({"ümläut.png": "image0.png"}.get(path, path))
        stays = path not in ("image2.png", "new.mkv", "copy.png")
        assert (number == was) if stays else number >= len(before)
    # The split follows the clip, not its caption; and a run that reads the folder goes on.
    sides = dict(zip(after.values(), read_manifest(out).contents.tolist(), strict=True))
    first = dict(zip(before.values(), read.checksum.tolist(), strict=True))
    assert all(sides[number] == first[number] for number in sides.keys() & first.keys())
    assert not list(damaged_records(StoreReader(read)))
    encoded.clear()
    assert "0 files joined, 0 left, 0 have" in prepare(media, out, update=True).changes
    assert not encoded["frames"]
    assert {path.name for path in out.glob("shard-*")} == set(read_manifest(out).shard_bytes)


STEPS = ("replace", "rename", "unlink", "rmdir")


def test_an_update_that_is_cut_off_anywhere_leaves_one_of_both_and_goes_on(media, tmp_path):
    first = tmp_path / "first"
    prepare(media, first)
    old = content(first)
    change(media)
    prepare(media, tmp_path / "new")
    new, out, cut = content(tmp_path / "new"), tmp_path / "out", 0
    while True:
        for name in ("out", "out.partial", "out.prepare", "out.prepare.removed"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        shutil.copytree(first, out)
        left = cut

        def counted(act):
            def run(self, *arguments, **options):
                nonlocal left
                if str(self).startswith(str(tmp_path / "out")):
                    left -= 1
                    if left < 0:
                        raise KeyboardInterrupt
                return act(self, *arguments, **options)

            return run

        with pytest.MonkeyPatch.context() as patch:
            for name in STEPS:
                patch.setattr(Path, name, counted(getattr(Path, name)))
            try:
                prepare(media, out, update=True)
            except KeyboardInterrupt:
                pass
            else:
                break
        assert content(out) in (old, new), cut
        prepare(media, out, update=True)
        assert content(out) == new
        assert sorted(path.name for path in tmp_path.glob("out*")) == ["out"]
        cut += 1
    assert cut > 20


def test_after_a_kill_an_update_keeps_what_it_has_encoded_whatever_changed_since(
    media, tmp_path, tmp_path_factory, encoded
):
    out = tmp_path / "out"
    prepare(media, out, files_per_shard=1)
    for number in range(4, 8):
        write_video(media / f"clip {number}.mkv", grey_frames([20 * number] * 9))
    start, held = hold(tmp_path_factory.mktemp("held"), media, out, "--update")
    begun = start(4)  # bad.mp4 and three clips
    os.killpg(begun.pid, signal.SIGKILL)
    begun.communicate(timeout=PATIENCE)
    held.unlink()
    assert len(read_manifest(out)) == 8
    write_video(media / "clip 8.mkv", grey_frames([222] * 9))
    (media / "clip 4.txt").write_text("said later")
    with pytest.raises(InputError, match="an update of it was interrupted; add --update"):
        prepare(media, out, files_per_shard=1)
    encoded.clear()
    prepare(media, out, files_per_shard=1, update=True)
    assert encoded["frames"] == 2  # clips 7 and 8
    assert_as_new(media, out)


def test_updates_are_refused_where_they_would_lose_what_is_there(media, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    prepare(media, out)
    other.mkdir()
    Image.new("RGB", (40, 40), (3, 1, 4)).save(other / "another.png")
    said = r"text.length \(256 in the folder, 9 in"
    for changes, words in (({"fps": "8"}, "media.fps"), ({"text_length": 9}, said)):
        with pytest.raises(InputError, match=f"other settings: {words}"):
            prepare(media, out, update=True, **changes)
    with pytest.raises(InputError, match="holds none of these 1 files"):
        prepare(other, out, update=True)
    with pytest.raises(InputError, match="exists already; add --update"):
        prepare(media, out)
    shutil.rmtree(tmp_path / "out.prepare", ignore_errors=True)
    assert len(read_manifest(out)) == 8
    # What a program has added stays, and the numbers of samples are never used again.
    with StoreWriter(out, vae_stride=(1, 1, 1), mode="append") as writer:
        sample = StoreReader(read_manifest(out)).read(0)
        writer.add(sample["latents"], sample["text"], (9, 32, 32), "by hand")
    (media / "image3.png").unlink()
    prepare(media, out, update=True)
    assert read_rows(out)["caption"].to_pylist().count("by hand") == 1
    (media / "image2.png").unlink()
    Image.new("RGB", (40, 40), (1, 2, 3)).save(media / "image9.png")
    prepare(media, out, update=True)
    assert read_manifest(out).sample_numbers.tolist() == [*range(6), 8, 9]


def test_a_folder_without_contents_or_one_that_is_not_there(media, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"out: no file can be used \(.*: too small"):
        prepare(media, out, update=True, area=("512x512",))
    assert not list(tmp_path.glob("out*"))
    prepare(media, out, update=True)
    assert_as_new(media, out)
    with StoreWriter(tmp_path / "old", vae_stride=(1, 1, 1), origin=read_manifest(out).origin) as w:
        w.add(np.zeros((1, 16, 16, 3)), np.zeros((0, 64)), (1, 16, 16), path="image0.png")
    with pytest.raises(InputError, match="does not record the content of its files"):
        prepare(media, tmp_path / "old", update=True)


def test_an_update_goes_on_with_the_list_that_report_names(media, tmp_path):
    out, report = tmp_path / "out", tmp_path / "list.parquet"
    first = prepare(media, out, report=report)
    assert any(row.used for row in first.skipped)
    again = prepare(media, out, report=report, update=True)
    assert set(again.skipped) == set(first.skipped)
    assert not (out / "skipped.parquet").exists()


def test_an_update_keeps_the_rows_of_a_table_apart_that_name_a_file_again(tmp_path):
    folder, out = tmp_path / "media", tmp_path / "out"
    folder.mkdir()
    write_video(folder / "a.mkv", grey_frames(range(10, 210, 10)))
    Image.new("RGB", (40, 40)).save(folder / "b.png")
    table = folder / "metadata.csv"

    def update(*lines):
        table.write_text("\n".join(("file_name,text", *lines)))
        changes = prepare(folder, out, update=True).changes
        assert_as_new(folder, out)
        return changes

    table.write_text("file_name,text\na.mkv,one\na.mkv,two\nb.png,same\nb.png,same\n")
    prepare(folder, out)
    lines = ["a.mkv,one", "a.mkv,two", "b.png,same", "b.png,same"]
    assert update(*lines) == "0 files joined, 0 left, 0 have new captions, 4 are the same"
    lines[1] = "a.mkv,three"
    assert update(*lines) == "0 files joined, 0 left, 1 have new captions, 3 are the same"
    assert update(*lines[1:3]).startswith("0 files joined, 2 left")
    assert update(*lines, "b.png,third").startswith("3 files joined, 0 left")
