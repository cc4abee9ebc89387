"""The libraries of tracking services themselves, where they are installed, without a network."""

import json
import shutil

import numpy as np
import pytest
from patience import PATIENCE
from PIL import Image

from alload_jax.sampling.pictures import write_clip
from alload_jax.training.trackers import TrackerContext
from alload_jax.training.trackers.services import MlflowConfig, TrackioConfig, WandbConfig

pytestmark = pytest.mark.slow
VALUES = {"run.steps": 14, "optimizer.name": "adamw", "data.source": None}


def follow(config, folder, capsys):
    """A run that is killed after step 3 with a checkpoint of step 2, and continued to step 5."""
    picture, clip = folder / "still.png", folder / "clip.gif"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(picture)
    write_clip(clip, np.zeros((3, 8, 8, 3), np.float32), {}, fps=4)
    for resumed_at, steps in ((0, (1, 2, 3)), (2, (3, 4, 5))):
        tracker = config.make(TrackerContext(folder, resumed_at, VALUES))
        for step in steps:
            tracker.log(step, {"loss": 1.0 / step, "tokens": 40})
        tracker.close()
        tracker.show(steps[-1], "samples/still", picture)
        tracker.show(steps[-1], "samples/clip", clip)
        tracker.close()
    assert "warning" not in capsys.readouterr().err


def test_mlflow_keeps_each_step_once(tmp_path, capsys, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path}/store"
    follow(MlflowConfig(tracking_uri=uri, experiment="e"), tmp_path, capsys)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(n, 1.0 / n) for n in range(1, 6)]
    assert run.data.params == {name: str(value) for name, value in VALUES.items()}
    assert run.info.status == "FINISHED"
    clips = [f.path for f in client.list_artifacts(run.info.run_id, "samples/00000005")]
    assert clips == ["samples/00000005/clip.gif"]
    stored = list((tmp_path / "store").rglob("*still*.png"))
    assert len(stored) == 2


def test_trackio_keeps_each_step_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    follow(TrackioConfig(project="p", run_name="mine"), tmp_path, capsys)
    rows = SQLiteStorage.get_logs("p", "mine")
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert losses == [(n, 1.0 / n) for n in range(1, 6)]
    assert len([row for row in rows if "samples/clip" in row]) == 2


def test_wandb_writes_an_offline_run_that_can_be_synced(tmp_path, capsys):
    pytest.importorskip("wandb")
    follow(WandbConfig(project="p", mode="offline"), tmp_path, capsys)
    starts = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert starts
    (known,) = json.loads((tmp_path / "trackers.json").read_text()).values()
    assert all(f"-{known}" in path.name for path in starts)
    media = [path.suffix for path in (tmp_path / "wandb").rglob("media/**/*.*")]
    assert sorted(set(media)) == [".gif", ".png"]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_run_on_a_dead_network_ends_as_usual(name, runs, monkeypatch):
    pytest.importorskip(name)
    dead = {
        "wandb": "{name: wandb, mode: online}",
        "mlflow": "{name: mlflow, tracking_uri: 'http://127.0.0.1:9'}",
        "trackio": "{name: trackio, space_id: nobody/none}",
    }
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("TRACKIO_DIR", str(runs.folder / "trackio"))
    process = runs.start("--trackers", f"[{dead[name]}]")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "finished at step 14" in out
    assert "Traceback" not in err
    told = [line for line in err.splitlines() if line.startswith("warning: trackers: ")]
    assert len(told) == 1, err
    shutil.rmtree(runs.folder / "run")
