"""`--engine ray`: the same folder as one process writes, whatever happens to Ray's workers."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
import toy_encoders  # noqa: F401
from data_helpers import contents
from media_helpers import finished_shards, hold, make_media, prepare, rows, skipped
from patience import PATIENCE, wait_until
from PIL import Image

from alload_jax.data.prepare import ray_engine
from alload_jax.data.prepare.ray_engine import RayEngine, _require_shared
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
    (out / "samples.png").unlink()  # which the command draws
    prepare(media, tmp_path / "one", files_per_shard=1)
    assert contents(out) == contents(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "ray"]
    assert rows(out / "skipped.parquet")[0]["path"] == "bad.mp4"


@pytest.fixture
def cluster_of_two_gpus(tmp_path_factory, monkeypatch):
    """A Ray with GPUs that are declared only, whose workers find the encoders of tests."""
    folders = (Path(__file__).parent, Path(__file__).parents[1], Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*map(str, folders), *sys.path]))
    options = {"include_dashboard": False, "object_store_memory": 10**8, "log_to_driver": False}
    ray.init("local", num_cpus=3, num_gpus=2, **options)
    yield
    ray.shutdown()


def test_an_encoder_on_each_gpu_of_the_cluster_encodes_for_all_tasks(
    tmp_path, cluster_of_two_gpus, monkeypatch
):
    media, weights = tmp_path / "media", tmp_path / "weights"
    media.mkdir()
    weights.mkdir()
    make_media(media)
    (weights / "weights").write_text("picky")
    Image.new("RGB", (40, 40), (255, 255, 255)).save(media / "white.png")
    flags = {"vae": "weighed", "vae_folder": str(weights), "files_per_shard": 1}
    flags |= {"text": "spoken", "text_folder": str(weights), "image_to_video": "ends"}
    prepare(media, tmp_path / "one", **flags)
    for process in weights.glob("process-*"):
        process.unlink()
    prepare(media, tmp_path / "ray", engine=RayEngine(), **flags)
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")
    assert skipped(tmp_path / "ray")["white.png"] == "white"
    assert sorted(path.read_text() for path in weights.glob("process-*")) == ["0", "1"]

    (weights / "fatal").touch()  # ends a process, which starts again
    prepare(media, tmp_path / "again", engine=RayEngine(), **flags)
    assert contents(tmp_path / "again") == contents(tmp_path / "one")
    for weight, said in (("refuses", "the weights are damaged"), ("ends", "process that encodes")):
        (weights / "weights").write_text(weight)
        with pytest.raises(InputError, match=said) as refused:
            prepare(media, tmp_path / weight, engine=RayEngine(), **flags)
        assert "\n" not in str(refused.value)

    monkeypatch.setattr(ray_engine, "_GPU_SECONDS", 15.0)
    (weights / "weights").write_text("half")
    holder = ray.remote(num_gpus=1, num_cpus=0)(SimpleNamespace)
    held = [holder.remote()]
    wait_until(lambda: ray.available_resources().get("GPU", 0) == 1)
    prepare(media, tmp_path / "half", engine=RayEngine(), **flags)
    held.append(holder.remote())
    with pytest.raises(InputError, match="all 2 GPUs of the cluster are in use"):
        prepare(media, tmp_path / "none", engine=RayEngine(), **flags)


def test_a_cluster_that_is_not_there_or_does_not_share_the_files_is_named(tmp_path):
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
