"""Trackers: what each is told, and that services of others cannot fail or hang a run."""

import importlib.util
import io
import json
import struct
import sys
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import ANY, Mock, call

import numpy as np
import pytest
from patience import PATIENCE
from PIL import Image
from tensorboardX.proto.event_pb2 import Event

from alload_jax.config import read_config
from alload_jax.errors import InputError
from alload_jax.sampling.pictures import write_clip
from alload_jax.training import trackers
from alload_jax.training.trackers import TRACKERS, TensorBoard, TrackerContext, Trackers, services
from alload_jax.training.trackers.services import (
    InBackground,
    MlflowConfig,
    TrackedRun,
    TrackioConfig,
    WandbConfig,
)

FLAGS = ["--run.folder", "r", "--data.folder", "d", "--planning.m_mem", "9"]
VALUES = {"run.steps": 14, "optimizer.name": "adamw"}


@pytest.mark.parametrize("config", [WandbConfig(), MlflowConfig(), TrackioConfig()])
def test_a_missing_package_is_one_line_with_the_command(config, monkeypatch):
    monkeypatch.setattr(services.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=rf"{config.name} is not installed; run: pip install .*"):
        config.check()


def test_a_run_does_not_wait_for_the_import_of_tensorboard(tmp_path, monkeypatch):
    begun, waited = threading.Event(), threading.Event()
    monkeypatch.setattr(trackers, "import_module", lambda _: begun.set() or waited.wait(PATIENCE))
    TensorBoard(tmp_path, 0)
    assert begun.wait(PATIENCE)
    waited.set()


class Recorder:
    """A tracker that remembers its calls; `obstacle` runs before each."""

    def __init__(self, obstacle=lambda: None):
        self.calls, self.threads, self.obstacle = [], set(), obstacle

    def log(self, step, values):
        self._take(("log", step, values))

    def show(self, step, name, path):
        self._take(("show", step, name, path))

    def close(self):
        self._take(("close",))

    def _take(self, call):
        self.obstacle()
        self.calls.append(call)
        self.threads.add(threading.current_thread())


def test_a_tracker_from_outside_is_registered(tmp_path, monkeypatch):
    made = Recorder()

    @dataclass(frozen=True)
    class OutsideConfig:
        name: str = "outside"

        def check(self):
            pass

        def make(self, context):
            return made

    monkeypatch.setattr(TRACKERS, "_loaded", {})
    TRACKERS.register("outside", OutsideConfig)
    config = read_config([*FLAGS, "--trackers", "[{name: outside}]"])
    tracker = Trackers(config.trackers, TrackerContext(tmp_path, 0, VALUES))
    tracker.log(3, {"loss": 1.0})
    assert made.calls == [("log", 3, {"loss": 1.0})]


# ---------------------------------------------------------------- the thread


def test_calls_reach_the_service_in_order_and_in_another_thread(tmp_path):
    recorder = Recorder()
    tracker = InBackground("it", recorder)
    values = {"loss": 0.5}
    tracker.log(1, values)
    values["loss"] = 9.0  # the caller's dict is its own
    tracker.show(1, "samples/a", tmp_path / "a.GIF")
    tracker.show(1, "samples/a", tmp_path / "latents.safetensors")
    tracker.close()
    tracker.log(2, {"loss": 0.25})
    tracker.close()
    shown = ("show", 1, "samples/a", tmp_path / "a.GIF")
    first = [("log", 1, {"loss": 0.5}), shown, ("close",)]
    assert recorder.calls == [*first, ("log", 2, {"loss": 0.25}), ("close",)]
    assert threading.current_thread() not in recorder.threads


@pytest.mark.parametrize(
    ("fails", "taken", "attempts"),
    [({1}, [0, *range(2, 20)], 21), (range(20), [], 3)],
    ids=["one loses one call", "after some the service is left alone"],
)
def test_failures_are_told_once_in_a_line(fails, taken, attempts, capsys):
    tried = []

    def obstacle():
        tried.append(1)
        if len(tried) - 1 in fails:
            raise OSError(28, "No space left\non device")

    recorder = Recorder(obstacle)
    tracker = InBackground("it", recorder)
    for step in range(20):
        tracker.log(step, {"loss": 1.0})
    tracker.close()
    assert [call[1] for call in recorder.calls if call[0] == "log"] == taken
    assert len(tried) == attempts
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: trackers: it: No space left on device")


def test_a_service_that_does_not_answer_holds_nothing_up(capsys, monkeypatch):
    class NotAwaited(threading.Event):
        def wait(self, timeout=None):
            pytest.fail("waits for a service that was given up")

    never = threading.Event()
    slow = InBackground("it", Recorder(never.wait), patience=0.2)
    slow.log(1, {})
    slow.close()
    assert "took longer than 0 s to finish" in capsys.readouterr().err
    held = SimpleNamespace(Event=NotAwaited, Thread=threading.Thread)
    monkeypatch.setattr(services, "threading", held)
    hangs = InBackground("it", Recorder(never.wait))
    for step in range(services._PENDING + 5):
        hangs.log(step, {"loss": 1.0})
    for _ in range(2):
        hangs.close()
        slow.close()
    assert capsys.readouterr().err.count("warning: trackers: it: ") == 1
    never.set()


def test_other_processes_write_nothing(monkeypatch):
    monkeypatch.setattr(services, "first_process", lambda: False)
    recorder = Recorder()
    tracker = InBackground("it", recorder)
    tracker.log(1, {})
    tracker.close()
    assert recorder.calls == []


class Placed(TrackedRun):
    """A service that names its runs after the place; `known` is what it was asked to continue."""

    def __init__(self, place, folder, resumed_at):
        config = SimpleNamespace(place=place) if isinstance(place, str) else place
        super().__init__(config, TrackerContext(folder, resumed_at, VALUES))
        self.place = place

    def _open(self, known):
        self.known = known
        return SimpleNamespace(finish=lambda: None), f"run of {self.place}"


def test_resumed_runs_continue_and_new_ones_begin(tmp_path):
    def known(place, resumed_at, times=1):
        run = Placed(place, tmp_path, resumed_at)
        for _ in range(times):
            run._opened()
            run.close()
        return run.known

    assert known("a", 0) is None
    assert known("a", 0, times=2) == "run of a"  # closed and opened again by the same start
    assert known("b", 0) is None
    assert known("a", 7) == "run of a"
    assert known("c", 7) is None
    assert known("a", 0) is None


@pytest.mark.parametrize(
    ("config", "place"),
    [
        (MlflowConfig(), "mlflow::alload"),
        (MlflowConfig(tracking_uri="http://it", experiment="e"), "mlflow:http://it:e"),
        (TrackioConfig(space_id="me/it", project="p"), "trackio:me/it:p"),
        (WandbConfig(entity="me"), "wandb:me/alload"),
    ],
)
def test_runs_are_known_by_service_and_place(config, place, tmp_path):
    Placed(config, tmp_path, 0)._opened()
    assert list(json.loads((tmp_path / "trackers.json").read_text())) == [place]


# ---------------------------------------------------------------- what each service is told


def follow(config, folder):
    """A run that is killed after step 3 with a checkpoint of step 2, and continued to step 4."""
    picture, clip = folder / "still.png", folder / "clip.gif"
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(picture)
    write_clip(clip, np.zeros((3, 8, 8, 3), np.float32), {}, fps=4)
    for resumed_at, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        tracker = config.make(TrackerContext(folder, resumed_at, VALUES))
        for step in steps:
            tracker.log(step, {"loss": 1.0 / step})
        if resumed_at == 0:
            tracker.close()
    tracker.show(4, "samples/still", picture)
    tracker.show(4, "samples/clip", clip)
    tracker.close()


EXPECTED = [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]


class FakeRun:
    """A run of wandb or Trackio by their documented behaviour."""

    def __init__(self, name, step):
        self.name, self.step, self.logged, self.finished = name, step, [], False

    @property
    def _next_step(self):
        return self.step

    def log(self, values, step):
        assert step >= self.step
        self.logged.append((step, values))
        self.step = step

    def finish(self):
        self.finished = True


class FakeWandb:
    Error = ConnectionError
    online = True
    torn_down = 0
    Image = staticmethod(lambda path: ("image", path))
    Video = staticmethod(lambda path, format=None: ("video", path))

    def __init__(self):
        self.runs, self.inits = [], []

    def Settings(self, **settings):  # noqa: N802
        return settings

    def teardown(self):
        self.torn_down += 1

    def init(self, *positional, **arguments):
        self.inits.append(arguments)
        if not self.online and arguments["mode"] == "online":
            raise ConnectionError("no route\nto host")
        last = self.runs[-1].step + 1 if self.runs else 0
        self.runs.append(FakeRun(arguments.get("name"), last))
        return self.runs[-1]


@pytest.fixture
def fake_wandb(monkeypatch):
    """In place of wandb and Trackio, with a login."""
    fake = FakeWandb()
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    return fake


@pytest.mark.parametrize("config", [WandbConfig(project="p"), TrackioConfig(project="p")])
def test_a_continued_run_is_the_same_with_every_step_once(config, tmp_path, fake_wandb):
    follow(config, tmp_path)
    first, again = fake_wandb.inits
    same = "id" if config.name == "wandb" else "name"
    assert first[same] == again[same]
    assert (dict(first["config"]), again["config"]) == (VALUES, None)
    assert again["resume"] == "allow"
    logged = [entry for run in fake_wandb.runs for entry in run.logged]
    assert [(step, v["loss"]) for step, v in logged if "loss" in v] == EXPECTED
    media = [name for _, values in logged for name in values if name.startswith("samples/")]
    assert media == ["samples/still", "samples/clip"]
    assert all(run.finished for run in fake_wandb.runs)


def test_without_a_login_wandb_is_offline_and_asks_nothing(
    tmp_path, fake_wandb, monkeypatch, capsys, request
):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    tracker = WandbConfig().make(TrackerContext(tmp_path, 0, VALUES))
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert fake_wandb.inits[0]["mode"] == "offline"
    assert "wandb: there is no login" in capsys.readouterr().err
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\nlogin user\npassword 123\n")
    tracker.log(2, {"loss": 1.0})
    tracker.close()
    assert fake_wandb.inits[1]["mode"] == "online"
    request.getfixturevalue("no_home")
    tracker.log(3, {"loss": 1.0})
    tracker.close()
    assert fake_wandb.inits[2]["mode"] == "offline"


def test_without_a_connection_wandb_is_offline(tmp_path, fake_wandb, capsys):
    fake_wandb.online = False
    tracker = WandbConfig(mode="online").make(TrackerContext(tmp_path, 0, VALUES))
    for step in (1, 2):
        tracker.log(step, {"loss": 1.0})
        tracker.close()
    assert [each["mode"] for each in fake_wandb.inits] == ["online", "offline", "offline"]
    assert len({each["id"] for each in fake_wandb.inits}) == 1
    assert fake_wandb.torn_down == 1  # the id of the failed attempt is free again
    assert [step for run in fake_wandb.runs for step, _ in run.logged] == [1, 2]
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "no route to host, so the run is written to wandb/ in the run folder" in err


def test_mlflow_gets_every_step_once_and_the_config_once(tmp_path, monkeypatch):
    client, entities = Mock(), SimpleNamespace(Metric=lambda *it: it, Param=lambda *it: it)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda uri: client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setattr(services, "_PARAMS", 1)  # as many as a call takes
    client.get_experiment_by_name.return_value = None
    client.create_run.return_value.info.run_id = "r"
    logged = []  # name, value, time and step of each metric
    client.log_batch.side_effect = lambda run, metrics=(), params=(): logged.extend(metrics)
    client.get_metric_history.side_effect = lambda *_: [
        SimpleNamespace(step=step) for *_, step in logged
    ]
    follow(MlflowConfig(experiment="e", run_name="mine"), tmp_path)
    assert [(step, value) for _, value, _, step in logged] == EXPECTED
    assert all(0 <= time.time() - at / 1000 < 3600 for _, _, at, _ in logged)
    told = [call for call in client.mock_calls if "metrics" not in call.kwargs]
    expected = [
        call.get_experiment_by_name("e"),
        call.create_experiment("e"),
        call.create_run(client.create_experiment.return_value, run_name="mine"),
        *(call.log_batch("r", params=[(key, str(value))]) for key, value in VALUES.items()),
        call.get_metric_history("r", "loss"),
        call.set_terminated("r"),
        call.update_run("r", status="RUNNING"),
        call.get_metric_history("r", "loss"),
        call.log_image("r", ANY, key="samples.still", step=4),
        call.log_artifact("r", str(tmp_path / "clip.gif"), "samples/00000004"),
        call.set_terminated("r"),
    ]
    assert told == expected


# ---------------------------------------------------------------- TensorBoard


def events(folder):
    """The events of a folder's files, in the order of their times."""
    found = []
    for path in folder.glob("events*"):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return sorted(found, key=lambda event: event.wall_time)


def shown_in(folder):
    return [(event.step, value) for event in events(folder) for value in event.summary.value]


def test_figures_are_shown_also_after_closing(tmp_path):
    tracker = TensorBoard(tmp_path, resumed_at=4)
    tracker.log(5, {"loss": 0.5})
    tracker.close()
    tracker.log(6, {"loss": 0.25})
    tracker.close()
    tracker.close()
    found = [(step, value.tag, value.simple_value) for step, value in shown_in(tmp_path)]
    assert found == [(5, "loss", 0.5), (6, "loss", 0.25)]
    starts = [event.step for event in events(tmp_path) if event.HasField("session_log")]
    assert starts == [5]  # once: TensorBoard drops what was written from this step on


@pytest.mark.parametrize("name", ["clip.gif", "clip.mp4", "still.png"])
def test_pictures_and_clips_are_shown_as_a_browser_shows_them_and_no_latents(tmp_path, name):
    if name.endswith("mp4"):
        pytest.importorskip("av")
    frames = 1 if name.endswith("png") else 5
    ramp = np.linspace(-1, 1, frames * 32 * 48).reshape(frames, 32, 48, 1)
    clip = np.broadcast_to(ramp, (frames, 32, 48, 3)).astype(np.float32)
    path = tmp_path / name
    write_clip(path, clip, {}, fps=5)
    latents = tmp_path / "latents.safetensors"
    write_clip(latents, np.zeros((1, 4, 4, 16), np.float32), {})
    tracker = TensorBoard(tmp_path / "tensorboard", resumed_at=0)
    tracker.show(7, "samples/one", latents)
    tracker.show(7, "samples/one", path)
    tracker.close()
    ((step, value),) = shown_in(tmp_path / "tensorboard")
    assert (step, value.tag, value.image.height, value.image.width) == (7, "samples/one", 32, 48)
    shown = Image.open(io.BytesIO(value.image.encoded_image_string))
    assert shown.format == ("PNG" if frames == 1 else "GIF")
    assert getattr(shown, "n_frames", 1) == frames
    if frames > 1:
        assert shown.info["duration"] == 200
    for number in range(frames):
        shown.seek(number)
        pixels = np.asarray(shown.convert("RGB"), np.float32)
        assert np.abs(pixels - (clip[number] + 1) * 127.5).max() < 12


# ---------------------------------------------------------------- the libraries themselves


def test_a_store_that_mlflow_refuses_is_named_before_the_run(monkeypatch):
    class RefusedError(Exception):
        """MLflow's."""

    def client(uri):
        if not uri.startswith("http"):
            raise RefusedError("The filesystem tracking backend is in maintenance mode\nmore")

    fake = {"mlflow": SimpleNamespace(MlflowClient=client)}
    fake["mlflow.exceptions"] = SimpleNamespace(MlflowException=RefusedError)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    for name, module in fake.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(InputError, match="maintenance mode; set tracking_uri to a server"):
        MlflowConfig(tracking_uri="file:///x").check()
    MlflowConfig(tracking_uri="http://127.0.0.1:9").check()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_the_libraries_themselves_take_what_they_are_told(name, tmp_path, capsys, monkeypatch):
    library = pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    uri = f"file:{tmp_path}/store"
    configs = {
        "wandb": WandbConfig(project="p", mode="offline"),
        "mlflow": MlflowConfig(tracking_uri=uri, experiment="e"),
        "trackio": TrackioConfig(project="p", run_name="mine"),
    }
    follow(configs[name], tmp_path)
    assert "warning" not in capsys.readouterr().err
    if name == "mlflow":
        client = library.MlflowClient(uri)
        (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
        history = client.get_metric_history(run.info.run_id, "loss")
        assert [(m.step, m.value) for m in history] == EXPECTED
