"""`--engine ray`: the same folder as one process writes, whatever happens to Ray's workers."""

import os
import signal

import psutil
import pytest
from data_helpers import contents
from media_helpers import finished_shards, hold, make_media, prepare, rows
from patience import PATIENCE, wait_until
from PIL import Image

from alload_jax.data.prepare.work_folder import work_folder
from alload_jax.errors import InputError

pytestmark = pytest.mark.slow


def ray_processes(pid):
    """Ray's processes that run units, below a process."""
    below = psutil.Process(pid).children(recursive=True)
    return [process for process in below if "_prepare" in process.name()]


def test_after_ctrl_c_a_kill_and_the_loss_of_a_worker_ray_writes_the_bytes_of_one_process(
    tmp_path, tmp_path_factory, default_signals
):
    media, out = make_media(tmp_path_factory.mktemp("media")), tmp_path / "ray"
    place = tmp_path_factory.mktemp("held")
    start, held = hold(place, media, out, "--engine", "ray", "--workers", "1")
    for shards, sent, status in ((2, signal.SIGINT, 130), (4, signal.SIGKILL, -signal.SIGKILL)):
        begun = start(shards)
        os.killpg(begun.pid, sent)
        _, err = begun.communicate(timeout=PATIENCE)
        assert begun.returncode == status
        assert err.count("\n") == (sent == signal.SIGINT)
        assert finished_shards(out) == shards
    begun = start(6)
    lost = wait_until(lambda: ray_processes(begun.pid), begun)[0]
    lost.kill()
    psutil.wait_procs([lost])
    held.unlink()
    printed, err = begun.communicate(timeout=PATIENCE)
    assert (begun.returncode, err) == (0, "")
    assert "10 files" in printed
    assert printed.endswith("ray/manifest.parquet\n")
    prepare(media, tmp_path / "one", files_per_shard=1)
    assert contents(out) == contents(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "ray"]
    assert rows(out / "skipped.parquet")[0]["path"] == "bad.mp4"


def test_a_cluster_that_is_not_there_or_does_not_share_the_files_is_named(tmp_path):
    from alload_jax.data.prepare.ray_engine import RayEngine, _require_shared

    (tmp_path / "media").mkdir()
    Image.new("RGB", (40, 40)).save(tmp_path / "media" / "image.png")
    out, engine = tmp_path / "out", RayEngine("127.0.0.1:9")
    with pytest.raises(InputError, match=r"--ray-address 127.0.0.1:9: no Ray can be reached there"):
        prepare(tmp_path / "media", out, engine=engine)
    with pytest.raises(InputError, match="out: is another folder on node"):
        _require_shared(out, "abc", None)
    (work_folder(out) / "token").write_text("old")
    with pytest.raises(InputError, match="out: is another folder on node"):
        _require_shared(out, "abc", None)
    (work_folder(out) / "token").write_text("abc")
    _require_shared(out, "abc", None)
    with pytest.raises(InputError, match=r"a\.mp4: is missing on node"):
        _require_shared(out, "abc", tmp_path / "a.mp4")
