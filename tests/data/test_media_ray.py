"""`--engine ray`: the same folder as one process writes, whatever happens to Ray's workers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from data_helpers import contents
from media_helpers import moving_frames, prepare, rows, write_video
from patience import PATIENCE, wait_until
from PIL import Image

from alload_jax import cli
from alload_jax.data.prepare.work_folder import work_folder
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


@pytest.fixture
def start_held(media, tmp_path, tmp_path_factory, monkeypatch):
    """Starts a preparation that waits where so many shards are finished, until `held` is gone."""
    held = tmp_path_factory.mktemp("held") / "held"
    held.touch()
    program = [sys.executable, str(Path(__file__).with_name("held_prepare.py")), "prepare", "media"]
    program += [str(media), "--out", str(tmp_path / "ray"), *FLAGS, "--workers", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    monkeypatch.setenv("PYTHONPATH", str(Path(cli.__file__).parents[1]))  # for Ray's workers

    def run(shards):
        monkeypatch.setenv("HELD", f"{shards} {held}")
        begun = subprocess.Popen(program, start_new_session=True, **pipes)
        wait_until(lambda: finished(tmp_path) == shards, begun)
        return begun, held

    return run


def finished(folder):
    return len(list((folder / "ray.partial").glob("shard-*.parquet")))


def ray_processes(pid):
    """Ray's processes that run units, below a process."""
    below = psutil.Process(pid).children(recursive=True)
    return [process for process in below if "_prepare" in process.name()]


def test_after_ctrl_c_a_kill_and_the_loss_of_a_worker_ray_writes_the_bytes_of_one_process(
    media, tmp_path, start_held, default_signals
):
    for shards, sent, status in ((1, signal.SIGINT, 130), (2, signal.SIGKILL, -signal.SIGKILL)):
        begun, _ = start_held(shards)
        os.killpg(begun.pid, sent)
        _, err = begun.communicate(timeout=PATIENCE)
        assert begun.returncode == status
        assert err.count("\n") == (sent == signal.SIGINT)
        assert finished(tmp_path) == shards
    begun, held = start_held(3)
    lost = wait_until(lambda: ray_processes(begun.pid), begun)[0]
    lost.kill()
    psutil.wait_procs([lost])
    held.unlink()
    out, err = begun.communicate(timeout=PATIENCE)
    assert (begun.returncode, err) == (0, "")
    assert "6 files" in out
    assert out.endswith("ray/manifest.parquet\n")
    prepare(media, tmp_path / "one", files_per_shard=1)
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "ray"]
    assert rows(tmp_path / "ray/skipped.parquet")[0]["path"] == "bad.mp4"


def test_a_cluster_that_is_not_there_or_does_not_share_the_files_is_named(media, tmp_path):
    from alload_jax.data.prepare.ray_engine import RayEngine, _require_shared

    out, engine = tmp_path / "out", RayEngine("127.0.0.1:9")
    with pytest.raises(InputError, match=r"--ray-address 127.0.0.1:9: no Ray can be reached there"):
        prepare(media, out, engine=engine)
    with pytest.raises(InputError, match="out: is another folder on node"):
        _require_shared(out, "abc", None)
    (work_folder(out) / "token").write_text("old")
    with pytest.raises(InputError, match="out: is another folder on node"):
        _require_shared(out, "abc", None)
    (work_folder(out) / "token").write_text("abc")
    _require_shared(out, "abc", None)
    with pytest.raises(InputError, match=r"a\.mp4: is missing on node"):
        _require_shared(out, "abc", tmp_path / "a.mp4")
