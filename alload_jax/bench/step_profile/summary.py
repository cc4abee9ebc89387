"""Adds the operations of a traced step up to rows by part, beside their roofs.

An operation's roof is the least time that it could take: a matrix product at the rate of large
products or, where that takes longer, its bytes at the rate of copies; fused attention in the time
of the same call alone; everything else its bytes at the rate of copies. All rates are measured.
What has no name has no roof.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from alload_jax.bench.step_profile.attribution import COMMUNICATION, ELSE, IDLE, ORDER, PRODUCTS
from alload_jax.files import Json

Operation = Json
"""As `measure` gives them: the fields of `Operation` and `Attribution`, and its times."""
SHORTEST = 5e-5
"""Seconds of a step from which an operation is worth a record of its own."""
_DETAILS = ("forward", "recomputed", "backward")


class Row(NamedTuple):
    """A part of a step, or one kind of its kernels.

    Attributes:
      part: its name.
      detail: the pass, or the kind of copy; "" for none.
      calls: kernels of a step.
      seconds: of a step.
      share: of the step's seconds.
      flops: of matrix products and attention.
      bytes: that its kernels must move.
      roof_seconds: the least time of the kernels whose work is known; None if there are none.
      of_roof: `roof_seconds` over the seconds in which these kernels run, alone or beside others;
        None if there are none.
      bound: "flops" or "bytes", whichever most of `roof_seconds` is for; "" if there is none.
    """

    part: str
    detail: str
    calls: float
    seconds: float
    share: float
    flops: float
    bytes: float
    roof_seconds: float | None
    of_roof: float | None
    bound: str


def attention_shapes(operations: Sequence[Operation]) -> list[dict[str, int]]:
    """The different shapes of fused attention, to be measured alone."""
    shapes: dict[tuple[int, ...], dict[str, int]] = {}
    for each in operations:
        if each["attention"]:
            shape = {k: v for k, v in each["attention"].items() if k != "backward"}
            shapes.setdefault(tuple(shape.values()), shape)
    return list(shapes.values())


def rows(profile: Json, roofs: Json | None) -> list[Row]:
    """The rows of a profile of `measure`, in the order of parts; `idle` last.

    Their seconds add up to the profile's `traced_seconds`.

    Args:
      profile: what `measure.measure` returns.
      roofs: what `roofs.measure` returns; None if nothing is known of the device.
    """
    operations, whole = profile["operations"], profile["traced_seconds"]
    runs = executions(operations)
    kernels: dict[tuple[str, ...], list[Operation]] = defaultdict(list)
    for each in operations:
        names = ("part", "detail", "program", "instruction")
        kernels[tuple(each[name] for name in names)].append(each)
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for (part, detail, *instruction), members in kernels.items():
        times = runs[tuple(instruction)]
        least, bound = _roof(members[-1], roofs)
        roof = None if least is None else times * least
        running = sum(each["running"] for each in members)
        seconds = sum(each["seconds"] for each in members)
        row = Row(
            part,
            detail,
            sum(each["calls"] for each in members),
            seconds,
            seconds / whole,
            times * members[-1]["flops"],
            times * members[-1]["bytes"],
            roof,
            None if roof is None or not running else roof / running,
            bound,
        )
        groups[part, detail].append(row)
    found = [_added(*key, members) for key, members in groups.items()]
    idle = profile["idle_seconds"]
    found.append(Row(IDLE, "", 0, idle, idle / whole, 0.0, 0.0, None, None, ""))
    return sorted(found, key=_place)


def _place(row: Row) -> tuple[int, int, float]:
    detail = _DETAILS.index(row.detail) if row.detail in _DETAILS else len(_DETAILS)
    return ORDER.index(row.part), detail, -row.seconds


def totals(found: Sequence[Row]) -> list[Row]:
    """One row for each part, the longest first; `idle` last."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in found:
        groups[row.part].append(row)
    added = [_added(part, "", members) for part, members in groups.items()]
    return sorted(added, key=lambda row: (row.part == IDLE, -row.seconds))


def _added(part: str, detail: str, members: Sequence[Row]) -> Row:
    bounds = {"flops": 0.0, "bytes": 0.0}
    running, timed = 0.0, 0.0
    known = [row for row in members if row.roof_seconds is not None]
    for row in known:
        roof = row.roof_seconds or 0.0
        bounds[row.bound] += roof
        if row.of_roof:
            timed += roof
            running += roof / row.of_roof
    return Row(
        part,
        detail,
        sum(row.calls for row in members),
        sum(row.seconds for row in members),
        sum(row.share for row in members),
        sum(row.flops for row in members),
        sum(row.bytes for row in members),
        roof_seconds=sum(bounds.values()) if known else None,
        of_roof=timed / running if running else None,
        bound=max(bounds, key=lambda bound: bounds[bound]) if known else "",
    )


def executions(operations: Sequence[Operation]) -> dict[tuple[str, ...], float]:
    """How often each instruction runs in a step, by program and name.

    Some launch several kernels, of which one runs least.
    """
    calls: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for each in operations:
        calls[each["program"], each["instruction"]].append(each["calls"])
    return {key: min(counts) for key, counts in calls.items()}


def _roof(operation: Operation, roofs: Json | None) -> tuple[float | None, str]:
    """The least seconds of one run, and whether "flops" or "bytes" take them.

    None and "" if its work or the device's rates are unknown.
    """
    if roofs is None or operation["part"] in (COMMUNICATION, ELSE):
        return None, ""
    if operation["attention"]:
        found = _alone(operation["attention"], roofs)
        return (found[operation["attention"]["backward"]], "flops") if found else (None, "")
    if not operation["flops"] and not operation["bytes"]:
        return None, ""
    return max(
        (operation["flops"] / roofs["matmul_flops_per_second"], "flops"),
        (operation["bytes"] / roofs["copy_bytes_per_second"], "bytes"),
    )


def _alone(call: Mapping[str, int], roofs: Json) -> tuple[float, float] | None:
    """Seconds of the forward and of the backward of a call of attention by itself."""
    for each in roofs["attention"]:
        if all(each[name] == call[name] for name in call if name != "backward"):
            return each["forward_seconds"], each["backward_seconds"]
    return None


def step_roof(profile: Json, roofs: Json) -> dict[str, float]:
    """The least time of a step, by the measured rates: what no rematerialisation avoids.

    Recomputation does not count. Every forward of fused attention has one backward, so that the
    calls of the backward say how often both are needed.

    Returns:
      Seconds of the `products` of the forward and the backward pass; of `attention`, each forward
      and backward once; of the `optimizer`, bytes of state and gradients at the rate of copies; and
      `seconds`, their sum.
    """
    operations = profile["operations"]
    runs, products, attention = executions(operations), 0.0, 0.0
    # One kernel of each instruction, the first.
    first = {(each["program"], each["instruction"]): each for each in reversed(operations)}
    for place, each in first.items():
        if each["attention"]:
            both = _alone(each["attention"], roofs)
            if both and each["attention"]["backward"]:
                attention += runs[place] * sum(both)
        elif each["detail"] in ("forward", "backward"):
            seconds = runs[place] * each["flops"] / roofs["matmul_flops_per_second"]
            if each["part"] == PRODUCTS:
                products += seconds
            else:
                attention += seconds
    optimizer = profile["optimizer_bytes"] / roofs["copy_bytes_per_second"]
    roof = {"products": products, "attention": attention, "optimizer": optimizer}
    return roof | {"seconds": sum(roof.values())}


def records(operations: Sequence[Operation]) -> dict[str, list[Json]]:
    """The operations as they are kept: the long ones each, the others added up by part.

    Returns:
      `operations` of at least `SHORTEST` seconds, the longest first, without fields that are empty
      or 0; `shorter`, with `part`, `detail`, their number `operations`, `calls` and `seconds`.
    """
    groups: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    for each in operations:
        if each["seconds"] < SHORTEST:
            groups[each["part"], each["detail"]].append(each)
    long = (
        {name: value for name, value in each.items() if value}
        for each in operations
        if each["seconds"] >= SHORTEST
    )
    shorter = [
        {
            "part": part,
            "detail": detail,
            "operations": len(members),
            "calls": sum(each["calls"] for each in members),
            "seconds": sum(each["seconds"] for each in members),
        }
        for (part, detail), members in sorted(groups.items())
    ]
    return {"operations": sorted(long, key=lambda each: -each["seconds"]), "shorter": shorter}
