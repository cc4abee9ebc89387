"""Trackers that are services of others: called in a thread, so that they cannot stop training."""

import importlib.util
import netrc
import os
import queue
import secrets
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlparse

from PIL import Image
from typing_extensions import override

from alload_jax.distributed.cluster import first_process
from alload_jax.errors import InputError, first_line, print_stderr, reason_of
from alload_jax.files import read_json
from alload_jax.training.run_files import write_json
from alload_jax.training.trackers import Tracker, TrackerConfig, TrackerContext

_PENDING = 10_000
"""The most calls that wait for a service; further ones are dropped."""
_FAILURES = 3
"""Number of failed calls in a row after which a service is not called again."""
PATIENCE = 60.0
"""Seconds that a run waits at its end for a service to take what is pending."""

PICTURES = (".png",)
CLIPS = (".gif", ".mp4")


class InBackground(Tracker):
    """A `Tracker` that hands calls to a service in a thread and never fails or waits long.

    The first failure is reported in one line; after some in a row the service is given up.
    """

    def __init__(self, name: str, service: Tracker, patience: float = PATIENCE):
        """Names the service, which may be slow or fail, in messages; `patience` is in seconds."""
        self._name, self._service, self._patience = name, service, patience
        self._calls: queue.Queue[Callable[[], None] | threading.Event] = queue.Queue(_PENDING)
        self._thread: threading.Thread | None = None
        self._warned = self._given_up = False
        self._failures = 0

    @override
    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._call(partial(self._service.log, step, dict(values)))

    @override
    def show(self, step: int, name: str, path: Path) -> None:
        """Other files than pictures and clips are not shown."""
        if path.suffix.lower() in (*PICTURES, *CLIPS):
            self._call(partial(self._service.show, step, name, path))

    @override
    def close(self) -> None:
        """Gives up what takes longer than the patience."""
        if self._thread is None or self._given_up:
            return
        done = threading.Event()
        self._call(self._service.close)
        self._call(done)
        if not done.wait(self._patience):
            self._give_up(f"took longer than {self._patience:.0f} s to finish")

    def _call(self, call: Callable[[], None] | threading.Event) -> None:
        if not first_process() or self._given_up:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._give_up(f"does not answer, and {_PENDING:,} calls wait")

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            if isinstance(call, threading.Event):
                call.set()
            elif not self._given_up:
                self._attempt(call)

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
            self._failures = 0
        except Exception as error:  # whatever a service raises, the run goes on
            self._failures += 1
            self._given_up = self._failures >= _FAILURES
            self._warn(reason_of(error))

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            print_stderr(
                f"warning: trackers: {self._name}: {' '.join(reason.split())[:300]}; training goes "
                "on, and metrics.jsonl has the figures"
            )


class ServiceConfig(TrackerConfig):
    """The config of a tracker that is a service, whose package has the tracker's name.

    Attributes:
      name: of the tracker.
      install: options of pip that install its package.
      place: names the service and what the run belongs to there, from the fields.
    """

    name: str
    install: ClassVar[str]
    place: ClassVar[str]

    @override
    def check(self) -> None:
        if importlib.util.find_spec(self.name) is None:
            raise InputError(
                f"trackers: {self.name} is not installed; run: pip install {self.install}"
            )

    @override
    def make(self, context: TrackerContext) -> Tracker:
        services: dict[str, type[TrackedRun]] = {
            "mlflow": Mlflow,
            "trackio": Trackio,
            "wandb": Wandb,
        }
        return InBackground(self.name, services[self.name](self, context))


class TrackedRun(Tracker, ABC):
    """A `Tracker` whose run is opened by the first call, and continued by later starts.

    trackers.json in the run folder has the id of the tracked run by service and place. A resumed
    run continues its tracked runs; a run from the start begins new ones.
    """

    def __init__(self, config: ServiceConfig, context: TrackerContext):
        self._config: Any = config
        self._context = context
        self._folder_name = context.folder.absolute().name
        self._continues = context.resumed_at > 0
        self._run: Any = None

    @abstractmethod
    def _open(self, known: str | None) -> tuple[Any, str]:
        """Opens the tracked run of an id, or a new one; returns it and its id."""

    def _opened(self) -> Any:
        if self._run is None:
            fields = {name: value or "" for name, value in vars(self._config).items()}
            place = self._config.place.format(**fields)
            path = self._context.folder / "trackers.json"
            known = read_json(path) or {}
            of_place = known.get(place) if self._continues else None
            self._run, run_id = self._open(None if of_place is None else str(of_place))
            write_json(path, known | {place: run_id})
            self._continues = True
        return self._run

    @override
    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


_PARAMS = 100
"""The most parameters in one call of MLflow."""
_LONGEST = 500
"""The longest value of a parameter that every version of MLflow stores, in characters."""


@dataclass(frozen=True)
class MlflowConfig(ServiceConfig):
    """Tracks the run with MLflow.

    Attributes:
      name: `mlflow`.
      tracking_uri: server or database of MLflow; null for the environment's MLFLOW_TRACKING_URI, or
        MLflow's default.
      experiment: name of the experiment.
      run_name: name of the run; null for the run folder's name.
    """

    install = "-c constraints.txt -e '.[mlflow]'"
    place = "mlflow:{tracking_uri}:{experiment}"
    name: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = None
    experiment: str = "alload"
    run_name: str | None = None

    @override
    def check(self) -> None:
        super().check()
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            MlflowClient(self.tracking_uri)  # knows which stores there are, and asks no server
        except MlflowException as error:
            raise InputError(
                f"trackers: mlflow: {first_line(error)[:200]}; set tracking_uri to a server, or "
                "install mlflow for a database such as sqlite:///mlflow.db"
            ) from error


class Mlflow(TrackedRun):
    """A `Tracker` of MLflow, whose run is its client.

    MLflow keeps every point. Steps that a resumed run computes again are therefore left out where
    they have been logged; their losses are the same.
    """

    _id = ""
    _last: int | None = None

    @override
    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        client, now = self._opened(), int(time.time() * 1000)
        if self._last is None:
            known = client.get_metric_history(self._id, next(iter(values)))
            self._last = max((metric.step for metric in known), default=0)
        if step > self._last:
            metrics = [Metric(name, float(value), now, step) for name, value in values.items()]
            client.log_batch(self._id, metrics=metrics)
            self._last = step

    @override
    def show(self, step: int, name: str, path: Path) -> None:
        """Pictures as images by step, clips as artifacts."""
        client = self._opened()
        if path.suffix.lower() in PICTURES:
            with Image.open(path) as picture:
                client.log_image(self._id, picture, key=name.replace("/", "."), step=step)
        else:
            client.log_artifact(self._id, str(path), f"samples/{step:08d}")

    @override
    def close(self) -> None:
        if self._run is not None:
            self._run.set_terminated(self._id)
            self._run = None

    @override
    def _open(self, known: str | None) -> tuple[Any, str]:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        config = self._config
        client = MlflowClient(config.tracking_uri)
        if known is not None:
            self._id = known
            client.update_run(known, status="RUNNING")
            return client, known
        experiment = client.get_experiment_by_name(config.experiment)
        number = experiment.experiment_id if experiment else None
        number = number or client.create_experiment(config.experiment)
        run = client.create_run(number, run_name=config.run_name or self._folder_name)
        self._id = str(run.info.run_id)
        values = self._context.config.items()
        params = [Param(key, str(value)[:_LONGEST]) for key, value in values]
        for first in range(0, len(params), _PARAMS):
            client.log_batch(self._id, params=params[first : first + _PARAMS])
        return client, self._id


@dataclass(frozen=True)
class TrackioConfig(ServiceConfig):
    """Tracks the run with Trackio.

    Attributes:
      name: `trackio`.
      project: project of the run.
      run_name: name of the run; null for the run folder's name and some random digits.
      space_id: Hugging Face Space that shows the run; null for this machine (`trackio show`).
      private: whether a Space that is made for the run is private; null for the account's default.
    """

    install = "-e '.[trackio]'"
    place = "trackio:{space_id}:{project}"
    name: Literal["trackio"] = "trackio"
    project: str = "alload"
    run_name: str | None = None
    space_id: str | None = None
    private: bool | None = None


class Trackio(TrackedRun):
    """A `Tracker` of Trackio.

    Trackio keeps every point. Steps that a resumed run computes again are therefore left out where
    they have been logged; their losses are the same.
    """

    _next = 0

    @override
    def log(self, step: int, values: Mapping[str, float]) -> None:
        run = self._opened()
        if step >= self._next:
            run.log(dict(values), step=step)
            self._next = step + 1

    @override
    def show(self, step: int, name: str, path: Path) -> None:
        import trackio

        run = self._opened()
        kind = trackio.Image if path.suffix.lower() in PICTURES else trackio.Video
        run.log({name: kind(path)}, step=step)

    @override
    def _open(self, known: str | None) -> tuple[Any, str]:
        import trackio

        # Its lines disturb the progress bar; its warnings come another way.
        for name in ("", ".run"):
            vars(sys.modules.get(f"trackio{name}", trackio))["print"] = _silent
        if "trackio.utils" in sys.modules:
            vars(sys.modules["trackio.utils"])["print_dashboard_instructions"] = _silent
        run = trackio.init(
            self._config.project,
            name=known or self._config.run_name or f"{self._folder_name}-{secrets.token_hex(4)}",
            space_id=self._config.space_id,
            private=self._config.private,
            config=None if known else dict(self._context.config),
            resume="allow" if known else "never",
            embed=False,
        )
        # Where the logged steps end is said nowhere else.
        self._next = max(self._next, getattr(run, "_next_step", 0))
        return run, run.name


def _silent(*_: object, **__: object) -> None:
    """Takes the place of a function that only prints."""


Mode = Literal["online", "offline", "disabled"]
_START = 30.0
"""Seconds that the service may take to start a run; then the run is offline."""


@dataclass(frozen=True)
class WandbConfig(ServiceConfig):
    """Tracks the run with Weights & Biases.

    Attributes:
      name: `wandb`.
      project: project of the run.
      entity: user or team; null for the account's default.
      run_name: name of the run; null for the run folder's name.
      group: group of the run; null for none.
      tags: tags of the run.
      notes: notes on the run; null for none.
      mode: online, offline (written to `wandb/` in the run folder, for `wandb sync`), or disabled;
        null for the environment's WANDB_MODE, or online. Without a login or a connection at the
        start, a run is offline.
    """

    install = "-c constraints.txt -e '.[wandb]'"
    place = "wandb:{entity}/{project}"
    name: Literal["wandb"] = "wandb"
    project: str = "alload"
    entity: str | None = None
    run_name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    mode: Mode | None = None


class Wandb(TrackedRun):
    """A `Tracker` of Weights & Biases.

    It takes steps in rising order only. Steps that a resumed run computes again stay as they were
    logged first; their losses are the same.
    """

    _unreachable = False

    @override
    def log(self, step: int, values: Mapping[str, float]) -> None:
        run = self._opened()
        if step >= run.step:
            run.log(dict(values), step=step)

    @override
    def show(self, step: int, name: str, path: Path) -> None:
        import wandb

        run, suffix = self._opened(), path.suffix.lower()
        if suffix in PICTURES:
            shown: Any = wandb.Image(str(path))
        else:
            shown = wandb.Video(str(path), format="mp4" if suffix == ".mp4" else "gif")
        run.log({name: shown}, step=max(step, run.step))

    @override
    def _open(self, known: str | None) -> tuple[Any, str]:
        import wandb

        config, run_id = self._config, known or secrets.token_hex(4)
        mode = config.mode or os.environ.get("WANDB_MODE") or "online"
        if mode == "online" and not _has_login():  # it would ask for one
            _warn("there is no login", "`wandb login` once, and `wandb sync`")
            mode = "offline"
        arguments = {
            "project": config.project,
            "entity": config.entity,
            "name": config.run_name or self._folder_name,
            "group": config.group,
            "tags": config.tags or None,
            "notes": config.notes,
            "id": run_id,
            "dir": str(self._context.folder),
            "config": None if known else dict(self._context.config),
            "resume": "allow",
            "reinit": "create_new",
            # Its capture of the terminal and its messages disturb the progress bar.
            "settings": wandb.Settings(
                console="off", silent=True, init_timeout=_START, finish_timeout=PATIENCE
            ),
        }
        # An offline run cannot resume: `wandb sync` adds to the run of its id.
        offline = arguments | {"mode": "offline", "resume": None}
        if mode == "offline" or self._unreachable:
            return wandb.init(**offline), run_id
        try:
            return wandb.init(**arguments, mode=mode), run_id
        except wandb.Error as error:
            self._unreachable = True
            _warn(reason_of(error), "`wandb sync`")
            wandb.teardown()  # else the id of the failed attempt is in use
            return wandb.init(**offline), run_id


def _warn(reason: str, remedy: str) -> None:
    print_stderr(
        f"warning: trackers: wandb: {reason}, so the run is written to wandb/ in the run folder; "
        f"run {remedy} for this run"
    )


def _has_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    names = [os.environ.get("NETRC") or "", "~/.netrc", "~/_netrc"]
    for path in (Path(os.path.expanduser(name)) for name in names if name):
        try:
            if path.is_file() and netrc.netrc(str(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError) as error:
            raise InputError(f"{path}: cannot be read ({error}); fix it") from error
    return False
