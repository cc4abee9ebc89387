"""`alload prepare media` as a whole: kills, workers, settings, disks, flags, and what it prints."""

import os
import re
import resource
import shutil
import signal
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import toy_encoders
from data_helpers import contents, manifest_of
from media_helpers import changed, finished_shards, hold, make_media, prepare, skipped, stored
from patience import PATIENCE
from PIL import Image

from alload_jax.data.manifest import read_manifest
from alload_jax.data.prepare.settings import MediaSettings, items_digest
from alload_jax.data.prepare.sources import AREA_CLASSES, Item, buckets_of, parse_area
from alload_jax.data.prepare.work_folder import Skipped, claimed, join_workers, reasons, video_hours
from alload_jax.data.record import unfold_frames
from alload_jax.errors import InputError
from alload_jax.planning.workloads import AREAS

FLAGS = ("--area", "32x32", "--frames", "9", "--files-per-shard", "1")


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    return make_media(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def whole(media, tmp_path_factory):
    """The data folder of an uninterrupted run, a shard for each file."""
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare(media, out, files_per_shard=1)
    return contents(out)


@pytest.mark.slow
def test_after_ctrl_c_which_gives_one_line_and_a_kill_a_run_goes_on_to_the_same_bytes(
    media, whole, tmp_path, tmp_path_factory, default_signals
):
    out = tmp_path / "out"
    start, _ = hold(tmp_path_factory.mktemp("held"), media, out, "--workers", "2")
    begun = start(1)
    for _ in range(3):
        os.killpg(begun.pid, signal.SIGINT)
        time.sleep(0.05)  # the next one comes at any moment of the end
    _, err = begun.communicate(timeout=PATIENCE)
    assert begun.returncode in (130, -signal.SIGINT)
    assert err.startswith("interrupted; run the same command again")
    assert err.count("\n") == 1
    begun = start(3)
    begun.kill()
    begun.communicate()
    assert not out.exists()
    assert 3 <= finished_shards(out) < 10
    prepare(media, out, files_per_shard=1)
    assert contents(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def stop_in(media, out, **changes):
    """Prepares the first shards, as a run that was stopped."""

    def stop(*_):
        if len(list(out.with_name("out.partial").glob("*.parquet"))) > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(media, out, files_per_shard=1, on_files=stop, **changes)


def test_a_run_goes_on_with_the_same_settings_and_files_alone(media, whole, tmp_path):
    folder, out, told = tmp_path / "media", tmp_path / "out", []
    shutil.copytree(media, folder)
    stop_in(folder, out)
    for changes, named in (
        ({"fps": "8"}, "--fps 16, not 8"),
        ({"frames": 5}, "--frames 9, not 5"),
        ({"area": ("48x48",)}, "--area 32x32, not 48x48"),
        ({"text_length": 9}, "--text-length 256, not 9"),
        ({"files_per_shard": 2}, "--files-per-shard 1, not 2"),
        ({"captions": "all"}, "--captions unset, not all"),
        ({"frames_per_latent": 4}, "--frames-per-latent unset, not 4"),
        ({"scenes": True}, "--scene-threshold unset, not 3.0"),
    ):
        match = f"out: was begun with .*, or remove .*out.prepare and {out}.partial to start again"
        with pytest.raises(InputError, match=match) as error:
            prepare(folder, out, **{"files_per_shard": 1} | changes)
        assert named in str(error.value)
    (folder / "clip 0.txt").write_text("another caption")
    with pytest.raises(InputError, match="other input files or captions"):
        prepare(folder, out, files_per_shard=1)
    with pytest.raises(InputError, match="--text-length 256, not 9"):  # which says more
        prepare(folder, out, files_per_shard=1, text_length=9)
    (folder / "clip 0.txt").write_text("clip number 0")

    def tell(items, before):
        told.append((len(items), before))

    prepare(folder, out, files_per_shard=1, on_files=tell)
    assert contents(out) == whole
    # Files of the earlier run come first, and are told as such.
    before = told.count((1, True))
    assert told == [(1, True)] * before + [(1, False)] * (10 - before)
    assert before >= 3


def test_folders_of_others_or_of_another_run_are_left_alone(media, tmp_path):
    for name, words in (("out", "exists already"), ("new.partial", r"new\.partial: holds")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
        with pytest.raises(InputError, match=words):
            prepare(media, tmp_path / name.removesuffix(".partial"))
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2
    refusals = []

    def second(*_):
        with pytest.raises(InputError, match="another process") as error:
            prepare(media, tmp_path / "together")
        refusals.append(error)

    (tmp_path / "together").mkdir()  # which is empty
    prepare(media, tmp_path / "together", on_files=second)
    assert refusals


def test_an_empty_folder_that_is_the_current_one_is_written(media, tmp_path, monkeypatch, alload):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with claimed(Path().absolute(), {"fps": "8"}):  # other settings, and stopped before a shard
        pass
    status, _, err = alload("prepare", "media", media, "--out", ".", *FLAGS)
    assert (status, err) == (0, "")
    assert {"manifest.parquet", "samples.png"} < {path.name for path in Path().iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


def test_a_killed_worker_ends_the_command_in_one_line(media, tmp_path):
    start, held = hold(tmp_path, media, tmp_path / "out", "--workers", "2")
    with start(2) as begun:
        children = Path(f"/proc/{begun.pid}/task/{begun.pid}/children").read_text().split()
        workers = [n for n in children if "spawn_main" in Path(f"/proc/{n}/cmdline").read_text()]
        os.kill(int(workers[-1]), signal.SIGKILL)
        held.unlink()
        _, err = begun.communicate(timeout=PATIENCE)
    assert (begun.returncode, err.count("\n")) == (2, 1)
    assert "a worker process ended at one of the shards" in err


def test_a_new_run_waits_for_the_workers_of_a_killed_one(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with claimed(out, {}):
        old = join_workers(out)
    clock = SimpleNamespace(now=0.0, ends_at=30.0, monotonic=lambda: clock.now)

    def sleep(seconds):
        clock.now += seconds
        if clock.now >= clock.ends_at:
            old.close()

    clock.sleep = sleep
    monkeypatch.setattr("alload_jax.data.prepare.work_folder.time", clock)
    with claimed(out, {}):
        assert clock.now >= 30
    clock.now, clock.ends_at = 0.0, 1e9
    with join_workers(out), pytest.raises(InputError, match="an earlier command still write"):
        claimed(out, {}).__enter__()
    assert clock.now >= 60


def test_progress_advances_by_file(media, tmp_path, monkeypatch):
    assert toy_encoders  # registers the encoder
    told, counted, few = [], tmp_path / "told", tmp_path / "media"
    few.mkdir()
    counted.touch()
    monkeypatch.setenv("TOLD", str(counted))

    def tell(items, before):
        told.append([item.name for item in items])
        with counted.open("a") as file:
            file.write("." * len(items))

    for number in range(4):
        shutil.copy(media / f"image{number}.png", few)
    prepare(few, tmp_path / "out", workers=2, files_per_shard=100, vae="told", on_files=tell)
    assert len(told) >= 3  # one shard of four files, of which few are finished between two looks
    assert sorted(name for some in told for name in some) == [f"image{n}.png" for n in range(4)]


def test_a_full_disk_gives_one_line_and_keeps_what_is_done(media, whole, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
        with pytest.raises(InputError, match=r"cannot be written .*; free disk space") as error:
            prepare(media, tmp_path / "out", files_per_shard=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
    prepare(media, tmp_path / "out", files_per_shard=1)
    assert contents(tmp_path / "out") == whole


def test_the_command_prints_a_summary(media, whole, tmp_path, alload):
    status, out, err = alload("prepare", "media", media, "--out", "out", *FLAGS)
    assert (status, err) == (0, "")
    with Image.open(tmp_path / "out/samples.png") as sheet:
        assert sheet.height > 8 * 150
        assert {(number, 0, 0) for number in range(4)} <= {c for _, c in sheet.getcolors(2**20)}
    (tmp_path / "out/samples.png").unlink()
    assert contents(tmp_path / "out") == whole
    for part in ("10 files", "files/s", "MB/s", "9×32×32", "8 files used, 4 of them without"):
        assert part in out
    assert "2 listed as skipped" in out
    assert "empty file" in out
    assert "bad.mp4" in out
    assert re.search(r"used, but .*\n *no caption +4 +image0.png", out)
    assert out.endswith("out/manifest.parquet\n")
    assert skipped(tmp_path / "out").keys() == {"bad.mp4", "worse.png"}
    assert changed(tmp_path / "out") == {f"image{n}.png": {"no caption"} for n in range(4)}
    # Earlier versions know their unfinished folders by it.
    item = Item("a.png", None, ("a cat", "a dog"))
    assert items_digest([item, replace(item, weight=2)]) == "b44feda4c5f5c636"
    # Reasons are counted whatever their numbers, and shown as they are.
    found = [Skipped("a", "too small: 9 wide"), Skipped("b", "its caption is not UTF-8 (byte 3)")]
    found += [Skipped("c", "too small: 12 wide"), Skipped("d", "too small: 7 wide")]
    manifest = manifest_of([(1, 32, 32), (2, 32, 32), (5, 32, 32)], [0] * 3)
    assert video_hours(manifest, Fraction(2)) == pytest.approx(3.5 / 3600)
    assert reasons(found) == [("too small: 9 wide", 3, "a"), ("its caption is not UTF-8", 1, "b")]


REFUSED = {
    "--frames 8": "such as 9",
    "--frames -3": "--frames is -3",
    "--fps x": "24000/1001",
    "--area 99p": "480p",
    "--area 30x32": "choose 32x32",
    "--area 32x8193": "32x8193",
    "--scene-threshold 3": "--scenes is missing",
    "--vae what": "none",
    "--text what": "bytes",
    "--vae wan": "--vae wan needs the folder of its weights; give --vae-folder",
    "--text umt5": "--text umt5 needs the folder of its weights; give --text-folder",
    "--vae-folder x": "--vae none has no weights; leave out --vae-folder x",
    "--text-folder x": "--text bytes has no weights; leave out --text-folder x",
    "--image-folder x": "--image-folder needs --image-to-video",
    "--image-to-video first": "--vae wan or --vae hunyuan_video",
    "--vae wan --image-to-video first": "--vae-folder",
    "--ray-address x": "--ray-address does not apply",
    "--caption-column x": "has no table, nor media whose caption has that name in a .json (a .txt",
    "--text class --text-length 3": "--text-length is 3; it must be left out with --text class",
    "--scenes --scene-threshold 0.5": "at least 1",
    "--scenes --scene-threshold inf": "'inf' is not a finite number",
    **{
        flags: flags.split()[0]
        for flags in (
            *("--fps 1001", "--fps 0", "--workers 0", "--workers 10001", "--max-enlarge inf"),
            *("--max-enlarge 0", "--stride-seconds inf", "--stride-seconds 0", "--max-clips 0"),
            *("--files-per-shard 0", "--text-length 0", "--min-frames 0", "--min-frames 90"),
            *("--frames-per-latent 3", "--frames-per-latent 2 --vae wan --vae-folder x"),
        )
    },
    **{
        f"--{kind} {name} --{kind}-folder missing": "missing: no such folder"
        for kind, name in (("vae", "wan"), ("text", "umt5"), ("vae", "hunyuan_video"))
    },
}
"""Flags that make no sense, and what is said about them."""


@pytest.mark.parametrize("flags", REFUSED)
def test_flags_that_make_no_sense_are_refused(media, tmp_path, alload, flags):
    given = ["--area", "32x32", *flags.split()]
    status, _, err = alload("prepare", "media", media, "--out", tmp_path / "out", *given)
    assert (status, err.count("\n")) == (2, 1)
    assert REFUSED[flags] in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("per_latent", [2, 4])
def test_latents_of_several_frames_unfold_to_the_frames(media, tmp_path, per_latent):
    prepare(media, tmp_path / "out", frames_per_latent=per_latent)
    prepare(media, tmp_path / "plain")
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.vae_stride, set(manifest.channels)) == ((per_latent, 1, 1), {3 * per_latent})
    for folded, frames in zip(stored(tmp_path / "out"), stored(tmp_path / "plain"), strict=True):
        assert len(folded) == 1 + (len(frames) - 1) // per_latent
        np.testing.assert_array_equal(unfold_frames(folded, per_latent), frames)


def test_places_that_make_no_sense_are_refused(media, tmp_path, refused, alload):
    pq.write_table(pa.table({"path": ["a.png"], "caption": ["a"]}), media / "mine.parquet")
    before = contents(media)
    for flags, named in (
        (["--out", tmp_path / "out", "--report", media / "mine.parquet"], "would be lost"),
        (["--out", media / "out"], "lies in the input folder"),
        (["--out", "s3://bucket/out"], "--out is s3://bucket/out, no folder of this machine"),
        (["--out", tmp_path / "out", "--report", tmp_path / "none" / "x.parquet"], "folder"),
        (["--out", tmp_path / "out", "--report", media / "clip 0.txt"], "is not named .parquet"),
    ):
        refused(named, "prepare", "media", media, *flags, *FLAGS)
    status, _, err = alload("prepare", "media", media, "--out", "out", "--area", "63x63", *FLAGS)
    assert (status, "--area 63x63" in err) == (2, True)  # beside that of FLAGS
    assert contents(media) == before


def test_settings_at_their_bounds_are_taken():
    found = MediaSettings(fps="1000", frames=9, min_frames=9, max_clips=1, files_per_shard=1)
    assert (found.rate, found.stride) == (1000, 9)
    MediaSettings(frames=1, min_frames=1, scenes=True, scene_threshold=1.0)
    assert MediaSettings(stride_seconds=0.0001).stride == 1
    assert parse_area("1x8192") == (1, 8192)


@pytest.mark.parametrize("area", [*AREA_CLASSES, "32x32"])
def test_buckets_have_about_one_area_and_whole_tokens(area):
    buckets = buckets_of(area, 16)
    height, width = parse_area(area)
    assert area not in AREAS or height * width == pytest.approx(AREAS[area], rel=0.01)
    assert {(height, width), (width, height)} <= set(buckets)
    assert all(b.height % 16 == b.width % 16 == 0 for b in buckets)
    if height > 200:
        assert all(b.height * b.width == pytest.approx(height * width, rel=0.1) for b in buckets)
    assert len(set(buckets)) == len(buckets)
    if area == "480p":  # folders that are begun go on with the same
        turned = [(480, 832), (544, 736), (512, 768), (416, 960)]
        assert set(buckets) == {(624, 624), *turned, *((w, h) for h, w in turned)}
