"""`--engine ray`: the same folder as one process writes, whatever happens to Ray's workers."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from media_helpers import contents, moving_frames, prepare, rows, write_video
from patience import PATIENCE, wait_until
from PIL import Image

from alload_jax import cli
from alload_jax.errors import InputError

FLAGS = ("--area", "32x32", "--frames", "9", "--files-per-shard", "1", "--engine", "ray")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    for number in range(4):
        write_video(folder / f"clip {number}.mkv", moving_frames(9 + number))
        (folder / f"clip {number}.txt").write_text(f"clip number {number}")
    Image.new("RGB", (40, 40)).save(folder / "image.png")
    (folder / "bad.mp4").write_bytes(b"")
    return folder


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Ray's workers import this checkout."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(cli.__file__).parents[1])
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def start(media, out, *flags, program=("-m", "alload_jax.cli")):
    argv = [sys.executable, *program, "prepare", "media", str(media), "--out", str(out)]
    argv += [*FLAGS, *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def ray_processes(pid):
    """Ray's processes that run units, below a process."""
    below = psutil.Process(pid).children(recursive=True)
    return [process for process in below if "_prepare" in process.name()]


@pytest.fixture
def start_held(media, tmp_path, tmp_path_factory, monkeypatch):
    """Starts a preparation that waits where so many shards are finished, until `held` is gone."""
    held = tmp_path_factory.mktemp("held") / "held"
    held.touch()

    def run(shards):
        monkeypatch.setenv("HELD", f"{shards} {held}")
        program = [str(Path(__file__).with_name("held_prepare.py"))]
        begun = start(media, tmp_path / "ray", "--workers", "1", program=program)
        wait_until(lambda: finished(tmp_path) == shards, begun)
        return begun

    return SimpleNamespace(run=run, held=held)


def finished(folder):
    return len(list((folder / "ray.partial").glob("shard-*.parquet")))


def assert_same_bytes(media, folder):
    prepare(media, folder / "one", files_per_shard=1)
    assert contents(folder / "ray") == contents(folder / "one")
    assert sorted(path.name for path in folder.iterdir()) == ["one", "ray"]


def test_ray_writes_the_same_bytes_as_one_process_though_a_worker_is_lost(
    media, tmp_path, start_held
):
    begun = start_held.run(2)
    lost = wait_until(lambda: ray_processes(begun.pid), begun)[0]
    lost.kill()
    psutil.wait_procs([lost])
    start_held.held.unlink()
    out, err = begun.communicate(timeout=PATIENCE)
    assert (begun.returncode, err) == (0, "")
    assert "6 files" in out
    assert out.endswith("ray/manifest.parquet\n")
    assert_same_bytes(media, tmp_path)
    assert rows(tmp_path / "ray/skipped.parquet")[0]["path"] == "bad.mp4"


def test_a_run_that_was_interrupted_and_then_killed_goes_on_to_the_same_bytes(
    media, tmp_path, start_held, default_signals
):
    for shards, sent, status in ((2, signal.SIGINT, 130), (3, signal.SIGKILL, -signal.SIGKILL)):
        begun = start_held.run(shards)
        os.killpg(begun.pid, sent)
        _, err = begun.communicate(timeout=PATIENCE)
        assert begun.returncode == status
        assert err.count("\n") == (sent == signal.SIGINT)
        assert finished(tmp_path) == shards
    done = start(media, tmp_path / "ray", "--workers", "1")
    assert done.communicate(timeout=PATIENCE)[1] == ""
    assert_same_bytes(media, tmp_path)


def test_an_address_without_a_ray_is_one_line(media, tmp_path):
    begun = start(media, tmp_path / "out", "--ray-address", "127.0.0.1:9")
    _, err = begun.communicate(timeout=PATIENCE)
    assert begun.returncode == 2
    assert err.startswith("error: --ray-address 127.0.0.1:9: no Ray can be reached there")
    assert err.count("\n") == 1


def test_a_folder_or_input_that_is_not_shared_is_one_line(media, tmp_path):
    from alload_jax.data.prepare.ray_engine import _require_shared
    from alload_jax.data.prepare.work_folder import work_folder

    out = tmp_path / "out"
    with pytest.raises(InputError, match="out: is another folder on node"):
        _require_shared(out, "abc", None)
    work_folder(out).mkdir()
    (work_folder(out) / "token").write_text("old")
    with pytest.raises(InputError, match="out: is another folder on node"):
        _require_shared(out, "abc", None)
    (work_folder(out) / "token").write_text("abc")
    _require_shared(out, "abc", None)
    with pytest.raises(InputError, match=r"a\.mp4: is missing on node"):
        _require_shared(out, "abc", tmp_path / "a.mp4")
