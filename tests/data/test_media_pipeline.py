"""`alload prepare media` as a whole: kills, workers, settings, disks, and what it prints."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from media_helpers import (
    ToldPixels,
    contents,
    moving_frames,
    prepare,
    rows,
    write_video,
)
from patience import PATIENCE, wait_until
from PIL import Image

from alload_jax import cli
from alload_jax.data.manifest import read_manifest
from alload_jax.data.prepare import unit
from alload_jax.data.prepare.encoders import VAE_ENCODERS, Pixels
from alload_jax.data.prepare.sources import AREA_CLASSES, buckets_of, parse_area
from alload_jax.data.prepare.videos import clip_lengths
from alload_jax.data.prepare.work_folder import claimed, join_workers
from alload_jax.errors import InputError, run_command
from alload_jax.planning.workloads import AREAS

FLAGS = ("--area", "32x32", "--frames", "9", "--files-per-shard", "1")


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """A folder of pictures, videos, and files that cannot be used."""
    folder = tmp_path_factory.mktemp("media")
    for number in range(4):
        write_video(folder / f"clip {number}.mkv", moving_frames(9 + number))
        (folder / f"clip {number}.txt").write_text(f"clip number {number}")
        Image.new("RGB", (40, 40 + number), (number, 0, 0)).save(folder / f"image{number}.png")
    (folder / "bad.mp4").write_bytes(b"")
    (folder / "worse.png").write_bytes(b"nothing")
    return folder


@pytest.fixture(scope="module")
def whole(media, tmp_path_factory):
    """The data folder of an uninterrupted run, a shard for each file."""
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare(media, out, files_per_shard=1)
    return contents(out)


def command(media, out, *flags, program=("-m", "alload_jax.cli")):
    return [sys.executable, *program, "prepare", "media", str(media), "--out", str(out),
            *FLAGS, *flags]  # fmt: skip


@pytest.fixture
def start_held(media, tmp_path, tmp_path_factory):
    """Starts a preparation that waits where so many shards are finished, until `held` is gone."""
    held = tmp_path_factory.mktemp("held") / "held"
    held.touch()

    def start(shards, *flags, **options):
        program = [str(Path(__file__).with_name("held_prepare.py"))]
        own = {"PYTHONPATH": str(Path(cli.__file__).parents[1]), "HELD": f"{shards} {held}"}
        begun = subprocess.Popen(
            command(media, tmp_path / "out", *flags, program=program),
            env=os.environ | own,
            stdout=subprocess.DEVNULL,
            **options,
        )
        partial = tmp_path / "out.partial"
        wait_until(lambda: len(list(partial.glob("shard-*.parquet"))) >= shards, begun)
        return begun

    return SimpleNamespace(start=start, held=held)


@pytest.fixture
def alload(capsys):
    def run(*argv):
        status = run_command(cli.main, [str(part) for part in argv])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


# ---------------------------------------------------------------- kills and workers


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_killed_run_goes_on_to_the_same_bytes(media, whole, tmp_path, start_held, workers):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    started = start_held.start(3, "--workers", workers)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert not out.exists()
    assert 3 <= len(list(partial.glob("shard-*.parquet"))) < 10
    prepare(media, out, files_per_shard=1)
    assert contents(out) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("number", [0, 5])
def test_a_failure_at_any_sample_keeps_the_shards_before(
    media, whole, tmp_path, monkeypatch, number
):
    added = []

    class Failing(unit.ShardWriter):
        def add(self, *arguments, **named):
            added.append(1)
            if len(added) > number:
                raise RuntimeError("a fault")
            return super().add(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(unit, "ShardWriter", Failing)
        with pytest.raises(RuntimeError, match="a fault"):
            prepare(media, tmp_path / "out", files_per_shard=1)
    done = list((tmp_path / "out.partial").glob("shard-*.parquet"))
    assert len(done) >= number
    begun = []
    monkeypatch.setattr(
        "alload_jax.data.prepare.pipeline.prepare_unit",
        lambda job, shard, *rest, **named: (
            begun.append(shard),
            unit.prepare_unit(job, shard, *rest, **named),
        ),
    )
    prepare(media, tmp_path / "out", files_per_shard=1)
    assert contents(tmp_path / "out") == whole
    assert len(begun) + len(done) == 10


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
    ):
        with pytest.raises(InputError, match="out: was begun with ") as error:
            prepare(folder, out, **{"files_per_shard": 1} | changes)
        assert named in str(error.value)
        assert "remove" in str(error.value)
    (folder / "clip 0.txt").write_text("another caption")
    with pytest.raises(InputError, match="other input files or captions"):
        prepare(folder, out, files_per_shard=1)
    (folder / "clip 0.txt").write_text("clip number 0")

    def tell(items, before):
        told.append((len(items), before))

    prepare(folder, out, files_per_shard=1, on_files=tell)
    assert contents(out) == whole
    # Files of the earlier run come first, and are told as such.
    before = told.count((1, True))
    assert told == [(1, True)] * before + [(1, False)] * (10 - before)
    assert before >= 3


def test_other_settings_are_taken_while_no_shard_is_finished(media, whole, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("alload_jax.data.prepare.pipeline.prepare_unit", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(media, tmp_path / "out", files_per_shard=1, fps="5")
    prepare(media, tmp_path / "out", files_per_shard=1, report=tmp_path / "new" / "list.parquet")
    assert len(rows(tmp_path / "new" / "list.parquet")) == 2  # elsewhere than in the folder
    made = contents(tmp_path / "out")
    assert made == {name: data for name, data in whole.items() if name != "skipped.parquet"}


def stop_in(media, out, **changes):
    """Prepares all but the last shards, as a run that was stopped."""

    class Stop(Exception):  # noqa: N818
        pass

    def stop(*_):
        if len(list(out.with_name("out.partial").glob("*.parquet"))) > 2:
            raise Stop

    with pytest.raises(Stop):
        prepare(media, out, files_per_shard=1, on_files=stop, **changes)


def test_folders_of_others_are_left_alone(media, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        prepare(media, tmp_path / "out")
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match=r"new\.partial: holds"):
        prepare(media, tmp_path / "new")
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2


def test_two_runs_do_not_share_a_folder(media, tmp_path):
    refusals = []

    def second(*_):
        with pytest.raises(InputError, match="another process") as error:
            prepare(media, tmp_path / "out")
        refusals.append(error)

    prepare(media, tmp_path / "out", on_files=second)
    assert refusals


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


# ---------------------------------------------------------------- progress


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_advances_by_file(media, tmp_path, workers, monkeypatch):
    if "told" not in VAE_ENCODERS.names():
        VAE_ENCODERS.register("told", ToldPixels)
    told, counted = [], tmp_path / "told"
    counted.touch()
    monkeypatch.setenv("TOLD", str(counted))

    def tell(items, before):
        told.append([before, *(item.name for item in items)])
        with counted.open("a") as file:
            file.write("." * len(items))

    prepare(
        media, tmp_path / "out", workers=workers, files_per_shard=100, vae="told", on_files=tell
    )
    assert len(told) >= 4  # one shard of ten files, of which few are finished between two looks
    assert not any(before for before, *_ in told)
    names = sorted(name for _, *some in told for name in some)
    assert names == sorted(path.name for path in media.iterdir() if path.suffix != ".txt")


# ---------------------------------------------------------------- disks


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk_gives_one_line_and_keeps_what_is_done(media, whole, tmp_path, workers):
    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    out = tmp_path / "out"
    done = subprocess.run(
        command(media, out, "--workers", workers),
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=small_files,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "cannot be written" in done.stderr
    assert "free disk space" in done.stderr
    assert not out.exists()
    prepare(media, out, files_per_shard=1)
    assert contents(out) == whole


# ---------------------------------------------------------------- the command


def test_the_command_prints_a_summary(media, whole, tmp_path, alload, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = alload("prepare", "media", media, "--out", "out", *FLAGS)
    assert (status, err) == (0, "")
    assert contents(tmp_path / "out") == whole
    for part in ("10 files", "files/s", "MB/s", "9×32×32", "8 files used, 4 of them without"):
        assert part in out
    assert "empty file" in out
    assert "bad.mp4" in out
    assert out.endswith("out/manifest.parquet\n")
    assert {row["path"] for row in rows(tmp_path / "out/skipped.parquet")} == {
        "bad.mp4",
        "worse.png",
    }


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--frames", "8"], ["--frames", "9"]),
        (["--fps", "x"], ["--fps", "24000/1001"]),
        (["--area", "99p"], ["99p", "480p"]),
        (["--area", "30x32"], ["30×32", "32x32"]),
        (["--workers", "0"], ["--workers"]),
        (["--max-enlarge", "nan"], ["--max-enlarge"]),
        (["--stride-seconds", "-1"], ["--stride-seconds"]),
        (["--text-length", "0"], ["--text-length"]),
        (["--min-frames", "90"], ["--min-frames"]),
        (["--vae", "what"], ["--vae", "none"]),
        (["--text", "what"], ["--text", "bytes", "class"]),
    ],
)
def test_flags_that_make_no_sense_are_refused(media, tmp_path, alload, flags, named):
    status, _, err = alload("prepare", "media", media, "--out", tmp_path / "out", *flags)
    assert status == 2
    assert err.count("\n") == 1
    for part in named:
        assert part in err
    assert list(tmp_path.iterdir()) == []


def test_places_that_make_no_sense_are_refused(media, tmp_path, alload):
    before = contents(media)
    for flags, named in (
        (["--out", media / "out"], "lies in the input folder"),
        (["--out", tmp_path / "out", "--report", tmp_path / "none" / "list"], "--report"),
        (["--out", tmp_path / "out", "--report", media / "clip 0.txt"], "would be lost"),
    ):
        status, _, err = alload("prepare", "media", media, *flags, *FLAGS)
        assert (status, err.count("\n")) == (2, 1)
        assert named in err
    assert contents(media) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("workers", "times"), [("1", 3), ("2", 1), ("2", 3)])
def test_ctrl_c_gives_one_line(start_held, workers, times, default_signals):
    begun = start_held.start(
        1, "--workers", workers, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for _ in range(times):
        os.killpg(begun.pid, signal.SIGINT)
        time.sleep(0.05)  # the next one comes at any moment of the end
    start_held.held.unlink()
    _, err = begun.communicate(timeout=PATIENCE)
    assert begun.returncode in (130, -signal.SIGINT)
    assert err.startswith("interrupted; run the same command again")
    assert err.count("\n") == 1


class Halves(Pixels):
    """Half of the pixels; of a single frame what is not finite."""

    def origin(self):
        return {"name": "halves"}

    def encode(self, frames):
        return super().encode(frames) / (np.nan if len(frames) == 1 else 2)


def test_a_registered_encoder_is_used_and_latents_that_are_not_finite_are_listed(media, tmp_path):
    if "halves" not in VAE_ENCODERS.names():
        VAE_ENCODERS.register("halves", Halves)
    report = prepare(media, tmp_path / "out", vae="halves")
    assert read_manifest(tmp_path / "out").origin["vae"] == {"name": "halves"}
    assert report.used == 4
    assert sum("not finite" in row.reason for row in report.skipped) == 4


# ---------------------------------------------------------------- buckets and lengths


def test_area_classes_are_those_of_planning():
    assert AREA_CLASSES.keys() == AREAS.keys()
    for name, (height, width) in AREA_CLASSES.items():
        assert height * width == pytest.approx(AREAS[name], rel=0.01)


@pytest.mark.parametrize("area", [*AREA_CLASSES, "32x32"])
def test_buckets_have_about_one_area_and_whole_tokens(area):
    buckets = buckets_of(area, 16)
    height, width = parse_area(area)
    assert {(height, width), (width, height)} <= set(buckets)
    assert all(b.height % 16 == b.width % 16 == 0 for b in buckets)
    if height > 200:
        assert all(b.height * b.width == pytest.approx(height * width, rel=0.1) for b in buckets)
    assert len(set(buckets)) == len(buckets)


def test_clip_lengths_are_few_and_4n_plus_1():
    assert clip_lengths(81) == (81, 65, 49, 33, 17, 9, 5, 1)
    assert clip_lengths(1) == (1,)
    assert clip_lengths(13) == (13, 9, 5, 1)
    assert all(length % 4 == 1 for length in clip_lengths(161))
