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


def _wrong_values() -> list[str]:
    """Values that a key of the config cannot have."""
    return [
        f"train --{key} {shlex.quote(value)}"
        for key, values in _LISTED["values"].items()
        for value in values
    ]


_TOO_LARGE, _TOO_SMALL, _EDGE = str(2**63), str(-(2**63) - 1), str(2**63 - 2)
_NO_NUMBERS = (".nan", ".inf", "1e999")


def _edges() -> list[str]:
    """Numbers at the edges of int64 and float64, and beyond."""
    whole = ("run.steps", "run.seed", "model.dim", "planning.m_mem", "checkpoint.every")
    wide = [
        f"model.{name}" for name in ("dim", "ffn_dim", "num_heads", "num_layers", "num_classes")
    ]
    real = [
        *("optimizer.learning_rate", "model.eps", "watchdog.step_factor", "cluster.lost_after"),
        *("checkpoint.minutes", "objective.condition_dropout", "validation.share", "planning.p"),
    ]
    plan = {"--ranks": _EDGE, "--m-mem": _TOO_LARGE, "--policy fixed --rows": _TOO_LARGE}
    plan |= {"--size": _EDGE, "--p": "nan", "--noise": "1e999", "--context": _EDGE}
    plan |= {"--margin": "nan", "--density": "nan", "--link-bandwidth": "nan"}
    sample = {"--seed": _TOO_LARGE, "--steps": _EDGE, "--batch": _EDGE, "--zoom": _EDGE}
    sample |= {"--guidance": "nan", "--shift": "inf", "--fps": "nan", "--step": _TOO_LARGE}
    sizes = ("--frames", "--height", "--width")
    media = {"--fps": "1e999", "--workers": _EDGE, "--area": f"{_EDGE}p", "--max-enlarge": "nan"}
    media |= {"--text-length": _TOO_LARGE, "--max-clips": "-1", "--stride-seconds": "inf"}
    media_of = f"alload prepare media {{work}}/media/pixels.png {_NEW} --area 192p --workers 1"
    planned = "alload plan --workload wan-480p --policy equal_tokens --ranks 2 --m-mem 100000"
    drawn = "alload sample --checkpoint {run} --class 1 --out {work}/new.gif"
    return [
        *(f"train --{key} {value}" for key in whole for value in (_TOO_LARGE, _TOO_SMALL)),
        *(f"train --{key} {_EDGE}" for key in wide),
        *(f"train --{key} {value}" for key in real for value in _NO_NUMBERS),
        *(f"{planned} {flag} {value}" for flag, value in plan.items()),
        *(f"{drawn} {{size}} {flag} {value}" for flag, value in sample.items()),
        *(f"{drawn} {{size}} {flag} {value}" for flag in sizes for value in (2**31, _TOO_LARGE)),
        *(f"{drawn} --frames 1 --height 16384 --width {width}" for width in (16_384, 131_072)),
        *(f"{media_of} {flag} {value}" for flag, value in media.items()),
        f"train --sampling.grids '[{{frames: 1, height: {2**31}, width: 8}}]'",
        f"alload data {{data}} --sheet {{work}}/new.png --samples {_EDGE}",
        f"alload export --checkpoint {{run}} {_NEW} --step {_TOO_LARGE}",
        "alload calibrate --config {work}/text.txt --out {work}/new.json --seconds nan",
    ]


_NEW = "--out {work}/new"
INPUTS = [*_LISTED["commands"], *_wrong_values(), *_edges(), *reading(_LISTED["readers"])]
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
        _remove_new(places["work"])
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


def _remove_new(folder: Path) -> None:
    """Removes what the last command wrote."""
    for path in folder.glob("new*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


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
    texts = {
        "text.txt": "these are\nonly: words: [\n",
        "empty.yaml": "",
        "list.yaml": "[1, 2, 3]\n",
        "tag.yaml": "run: !!python/object/apply:os.system ['true']\n",
        "bomb.yaml": _bomb(),
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


def _bomb() -> str:
    """Aliases that stand for 9⁹ values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    return "\n".join(lines) + "\n"
