"""What a checkpoint belongs to: the model, plan, data and settings of its run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alload_jax.errors import InputError
from alload_jax.planning.plan import current_identity

_DATA = "data"
"""The part of the identity that says which samples a run is trained on."""


def check_identity(
    place: Path,
    found: dict[str, Any],
    identity: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> None:
    """Checks that a checkpoint belongs to a run.

    Args:
      place: folder of the checkpoint, for messages.
      found: what it belongs to, JSON values.
      identity: what belongs to the run; an empty part equals a missing one.
      defaults: values of missing fields, for messages.

    Raises:
      InputError: they differ; the message names the difference.
    """
    if isinstance(found.get("plan"), dict):
        found = found | {"plan": current_identity(found["plan"])}
    # Data first: other samples also change the plan, in ways that say nothing to a person.
    for name in dict.fromkeys((_DATA, *identity, *found)):
        theirs, ours = found.get(name) or {}, identity.get(name) or {}
        if name == _DATA:
            _check_data(place, theirs, ours)
        elif theirs != ours:
            raise InputError(
                f"{place}: checkpoint of another {name}: "
                f"{difference(theirs, ours, defaults)}; {_remedy(theirs, ours)}"
            )


def difference(theirs: Any, ours: Any, defaults: Mapping[str, Any] | None = None) -> str:
    """Describes the first difference between two JSON values."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        # The policy comes first because it determines the other keys; digests of the data and of
        # its order come last because they follow from other differences.
        priority = {"policy": -1, "samples": 1, "order": 1}
        keys = sorted(theirs.keys() | ours.keys(), key=lambda key: (priority.get(key, 0), key))
        for key in keys:
            was, now = (side.get(key, (defaults or {}).get(key)) for side in (theirs, ours))
            if isinstance(was, dict) and isinstance(now, dict) and was != now:
                return f"of {key}, {difference(was, now)}"
            if was != now:
                return f"{key} was {was!r} and is now {now!r}"
    return f"it was {theirs!r} and is now {ours!r}"


def _check_data(place: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Refuses other samples than those of a checkpoint; checkpoints of old versions name none."""
    if not theirs or theirs == ours:
        return
    counts = [f"{each.get('samples', 0):,}" for each in (theirs, ours)]
    what = f"{counts[0]} samples, and data.folder now has {counts[1]}"
    if counts[0] == counts[1]:
        what = f"{counts[0]} samples, and data.folder now has as many of other content"
    raise InputError(
        f"{place}: the run was trained on {what}; give data.folder as it was, or begin a run with "
        "another run.folder (its run.initial_weights can be an export of this one)"
    )


def _remedy(theirs: Any, ours: Any) -> str:
    plans = [each if isinstance(each, dict) else {} for each in (theirs, ours)]
    ranks = [each.get("ranks") for each in plans]
    if any(each.get("context", 1) != 1 for each in plans):
        return "restore the config, with mesh and number of devices, or choose another run.folder"
    if ranks[0] is None or ranks[0] == ranks[1]:
        return "restore the config or choose another run.folder"
    return (
        f"on another number of devices give --planning.ranks {ranks[0]}; else restore the config "
        "or choose another run.folder"
    )
