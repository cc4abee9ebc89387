"""Says what a thread waits for, by the functions that it is in."""

from pathlib import PurePath
from types import FrameType

FOR_OTHERS = "for the other processes"
_WAITS = (
    ("distributed/consensus.py", "", FOR_OTHERS),
    ("distributed/key_value_store.py", "wait_for", FOR_OTHERS),
    ("data/source.py", "", "for the loader to read its samples"),
    ("training/run_plan.py", "steps", "for the loader to read its samples"),
    ("training/checkpoint.py", "", "for a checkpoint to be written"),
    ("training/callbacks/drawing.py", "", "for samples to be drawn"),
    ("training/callbacks/validating.py", "", "for the validation"),
    ("training/callbacks/evaluation.py", "", "for samples to be measured"),
    ("training/bad_samples.py", "", "for the bad samples of a step to be found"),
    ("data/manifest.py", "", "for the manifest to be read"),
    ("data/sources", "", "for the data folder to be read"),
    ("data/store", "", "for the data folder to be read"),
    ("data/datasets", "", "for the data set to be written"),
    ("planning", "", "for the plan"),
    ("run/training.py", "_compile", "for programs to be compiled"),
    ("training/start.py", "", "for the weights to be read or drawn"),
    ("training/restore.py", "", "for the weights to be read or drawn"),
    ("training/loop.py", "_failed", "for the devices to finish the step before"),
    ("training/callbacks/telemetry.py", "settle", "for the devices to finish the step before"),
    ("training/trainer.py", "", "for the devices to take a step"),
    ("training/shape_groups.py", "", "for the devices to take a step"),
)
"""(file or folder, function, words); an empty function stands for all of it."""


def waiting_for(frame: FrameType | None) -> str:
    """Returns what a thread waits for, such as `for a checkpoint to be written`.

    Args:
      frame: the innermost frame of the thread.
    """
    innermost = ""
    while frame is not None:
        path, name = PurePath(frame.f_code.co_filename).as_posix(), frame.f_code.co_name
        for file, function, words in _WAITS:
            inside = path.endswith(f"alload_jax/{file}") or f"alload_jax/{file}/" in path
            if inside and function in ("", name):
                return words
        if not innermost or ("/alload_jax/" in path and "/alload_jax/" not in innermost):
            innermost = f"{path}:{name}"
        frame = frame.f_back
    return f"in {innermost}"
