"""`--engine ray`: the same folder as one process writes, whatever happens to Ray's workers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

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


def test_ray_writes_the_same_bytes_as_one_process(media, tmp_path):
    prepare(media, tmp_path / "one", files_per_shard=1)
    begun = start(media, tmp_path / "ray")
    out, err = begun.communicate(timeout=PATIENCE)
    assert (begun.returncode, err) == (0, "")
    assert "6 files" in out
    assert out.endswith("ray/manifest.parquet\n")
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "ray"]
    assert rows(tmp_path / "ray/skipped.parquet")[0]["path"] == "bad.mp4"


@pytest.mark.parametrize("ends", ["worker lost", "interrupted", "killed"])
def test_whatever_is_lost_the_bytes_are_the_same(
    media, tmp_path, tmp_path_factory, monkeypatch, ends, default_signals
):
    held = tmp_path_factory.mktemp("held") / "held"
    held.touch()
    monkeypatch.setenv("HELD", f"2 {held}")
    program = [str(Path(__file__).with_name("held_prepare.py"))]
    begun = start(media, tmp_path / "ray", "--workers", "1", program=program)
    partial = tmp_path / "ray.partial"
    wait_until(lambda: len(list(partial.glob("shard-*.parquet"))) == 2, begun)
    if ends == "worker lost":
        lost = wait_until(lambda: ray_processes(begun.pid), begun)[0]
        lost.kill()
        psutil.wait_procs([lost])
        held.unlink()
    else:
        os.killpg(begun.pid, signal.SIGINT if ends == "interrupted" else signal.SIGKILL)
    _, err = begun.communicate(timeout=PATIENCE)
    if ends == "worker lost":
        assert (begun.returncode, err) == (0, "")
    else:
        assert begun.returncode == (130 if ends == "interrupted" else -signal.SIGKILL)
        assert err.count("\n") == (ends == "interrupted")
        assert len(list(partial.glob("shard-*.parquet"))) == 2
        done = start(media, tmp_path / "ray", "--workers", "1")
        assert done.communicate(timeout=PATIENCE)[1] == ""
    prepare(media, tmp_path / "one", files_per_shard=1)
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "ray"]


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
