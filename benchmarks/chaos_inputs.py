"""Hostile inputs: what users mistype, and files that are not what they should be."""

import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from chaos_files import reading, write_hostile
from chaos_runs import Campaign, errors_of

PATIENCE = 300.0
_SIZE = "--frames 1 --height 8 --width 8"
_LISTED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


INPUTS = [
    *_LISTED["commands"],
    *(
        f"train --{key} {shlex.quote(value)}"
        for key, values in _LISTED["values"].items()
        for value in values
    ),
    *_LISTED["edges"],
    *reading(_LISTED["readers"]),
]
"""Command lines; {work}, {data}, {run}, {weights} are folders, {size} is that of a sample."""


def give_inputs(campaign: Campaign, inputs: list[str]) -> dict[str, Any]:
    """Runs each command; returns how they ended, and what is not one line and status 2."""
    began = time.monotonic()
    places = {"work": campaign.folder / "hostile", "data": campaign.data}
    places |= {"run": campaign.reference(), "weights": campaign.folder / "weights"}
    write_files(places["work"], campaign)
    write_hostile(*(places[name] for name in ("work", "data", "run")))
    end = _ender(campaign, places)
    found = [end(line) for line in inputs]
    return {
        "given": len(inputs),
        "seconds": round(time.monotonic() - began, 1),
        "faults": [f"{line}: {what}" for line, what in zip(inputs, found, strict=True) if what],
    }


def _ender(campaign: Campaign, places: dict[str, Path]) -> Callable[[str], str]:
    """A function that runs a command line and says what is wrong with its end."""

    def end(line: str) -> str:
        program, *words = shlex.split(line.replace("{size}", _SIZE))
        for name, path in places.items():
            words = [word.replace("{" + name + "}", str(path)) for word in words]
        if program == "train":
            words = [*_usual(campaign, words), *words]
        for path in places["work"].glob("new*"):  # what the last command wrote
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        before = _files(places)
        run = campaign.starter.start(program, words)
        status = run.wait(PATIENCE)
        after = _files(places)
        if lost := [str(path) for path in before if before[path] != after.get(path)]:
            return f"lost or changed: {', '.join(lost[:3])}"
        if status is None:
            run.kill()
            return f"no end within {PATIENCE:.0f} s"
        lines = errors_of(run.stderr)
        if status != 2 or len(lines) != 1 or "Traceback" in run.stderr:
            return f"status {status}, {len(lines)} lines: {' / '.join(lines[-2:])[:200]}"
        return ""

    return end


def _files(places: dict[str, Path]) -> dict[Path, tuple[int, ...]]:
    """What tells the state of each file that a command may read."""
    found: dict[Path, tuple[int, ...]] = {}
    for place in places.values():
        for path in place.rglob("*"):
            if not path.is_dir():
                stat = path.lstat()
                found[path] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found


def _usual(campaign: Campaign, words: list[str]) -> list[str]:
    """The usual flags of a run that a command line does not give itself."""
    flags = campaign.flags("hostile-run")
    flags = flags[2:] if "--config" in words else flags
    return flags if "--run.folder" not in words else flags[:-2]


def write_files(folder: Path, campaign: Campaign) -> None:
    """Writes files that are not what they should be."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Aliases that stand for 9⁹ values.
    bomb = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    bomb += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    texts = {
        "text.txt": "these are\nonly: words: [\n",
        "empty.yaml": "",
        "list.yaml": "[1, 2, 3]\n",
        "tag.yaml": "run: !!python/object/apply:os.system ['true']\n",
        "bomb.yaml": "\n".join(bomb) + "\n",
        "all.txt": "".join(f"{n}\n" for n in range(64)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "bytes.bin").write_bytes(bytes(range(256)) * 16)
    for name in ("torn_manifest", "text_manifest", "no_shards"):
        shutil.copytree(campaign.data, folder / name)
    torn = folder / "torn_manifest" / "manifest.parquet"
    torn.write_bytes(torn.read_bytes()[:-40])
    (folder / "text_manifest" / "manifest.parquet").write_text("no Parquet\n")
    for path in (folder / "no_shards").iterdir():
        if path.name != "manifest.parquet":
            path.unlink()
    for name, text in (("metrics.jsonl", "garbage\n{}\n"), ("summary.json", "[1]")):
        run = folder / f"bad_{name.split('.')[0]}"
        run.mkdir()
        (run / name).write_text(text)
