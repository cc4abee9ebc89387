"""Weights & Biases (extra `wandb`)."""

import netrc
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from alload_jax.errors import InputError, reason_of
from alload_jax.training.trackers.service import (
    PATIENCE,
    PICTURES,
    InBackground,
    TrackedRuns,
    new_id,
    require_package,
)
from alload_jax.training.trackers.tracker import Tracker, TrackerContext

Mode = Literal["online", "offline", "disabled"]
_START = 30.0
"""Seconds that the service may take to start a run; then the run is offline."""


@dataclass(frozen=True)
class WandbConfig:
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

    name: Literal["wandb"] = "wandb"
    project: str = "alload"
    entity: str | None = None
    run_name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    mode: Mode | None = None

    def check(self) -> None:
        """See `TrackerConfig.check`."""
        require_package("wandb", "wandb", "pip install -c constraints.txt -e '.[wandb]'")

    def make(self, context: TrackerContext) -> Tracker:
        """See `TrackerConfig.make`."""
        return InBackground("wandb", Wandb(self, context))


class Wandb:
    """A `Service` of Weights & Biases.

    It takes steps in rising order only. Steps that a resumed run computes again stay as they were
    logged first; their losses are the same.
    """

    def __init__(self, config: WandbConfig, context: TrackerContext):
        self._config, self._context = config, context
        self._runs = TrackedRuns(context.folder, context.resumed_at)
        self._run: Any = None
        self._unreachable = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Service.log`."""
        run = self._opened()
        if step >= run.step:
            run.log(dict(values), step=step)

    def show(self, step: int, name: str, path: Path) -> None:
        """See `Service.show`."""
        import wandb

        run, suffix = self._opened(), path.suffix.lower()
        if suffix in PICTURES:
            shown: Any = wandb.Image(str(path))
        else:
            shown = wandb.Video(str(path), format="mp4" if suffix == ".mp4" else "gif")
        run.log({name: shown}, step=max(step, run.step))

    def close(self) -> None:
        """See `Service.close`."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _opened(self) -> Any:
        if self._run is None:
            import wandb

            place = f"wandb:{self._config.entity or ''}/{self._config.project}"
            known = self._runs.known(place)
            run_id = known or new_id()
            self._run = self._start(wandb, run_id, None if known else dict(self._context.config))
            self._runs.keep(place, run_id)
        return self._run

    def _start(self, wandb: Any, run_id: str, values: dict[str, Any] | None) -> Any:
        config = self._config
        mode = _mode(config.mode)
        arguments = {
            "project": config.project,
            "entity": config.entity,
            "name": config.run_name or self._context.folder.absolute().name,
            "group": config.group,
            "tags": config.tags or None,
            "notes": config.notes,
            "id": run_id,
            "dir": str(self._context.folder),
            "config": values,
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
            return wandb.init(**offline)
        try:
            return wandb.init(**arguments, mode=mode)
        except wandb.Error as error:
            self._unreachable = True
            _warn(f"{reason_of(error)}, so the run is written", "run `wandb sync` for this run")
            wandb.teardown()  # else the id of the failed attempt is in use
            return wandb.init(**offline)


def _warn(reason: str, remedy: str) -> None:
    print(
        f"warning: trackers: wandb: {reason} to wandb/ in the run folder; {remedy}",
        file=sys.stderr,
        flush=True,
    )


def _mode(mode: Mode | None) -> str:
    """The mode of a start; without a login `online` would ask for one."""
    found = mode or os.environ.get("WANDB_MODE") or "online"
    if found != "online" or _has_login():
        return found
    _warn(
        "there is no login, so the run is written",
        "run `wandb login` once, and `wandb sync` for this run",
    )
    return "offline"


def _has_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    names = [os.environ.get("NETRC") or "", "~/.netrc", "~/_netrc"]
    for path in (Path(name).expanduser() for name in names if name):
        try:
            if path.is_file() and netrc.netrc(str(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError) as error:
            raise InputError(f"{path}: cannot be read ({error}); fix it") from error
    return False
