"""Plants single faults in the code, and counts those that the tests of their part see.

    make mutants

The tests of a part run once in workers, each under coverage, which says which tests reach which
line. A mutant changes one place of one line, drawn by a seed. The tests that reach the line run on
it, fastest first, until one fails. A line that runs at import is reached by all tests of its file.
mutmut forks a process in which JAX already has threads, and cosmic-ray runs all tests on every
mutant; both take days here.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Queue

import pytest
from coverage import Coverage, CoverageData

ROOT = Path(__file__).parents[1]
MARKS = "not slow and not gpu and not parity and not compiled"
PARTS = {
    "config": (
        ["alload_jax/config*.py", "alload_jax/errors.py", "alload_jax/files.py"],
        ["tests/test_config.py", "tests/test_hostile_inputs.py", "tests/commands/test_cli.py"],
    ),
    "planning": (["alload_jax/planning/**/*.py"], ["tests/planning", "tests/plug_points"]),
    "data": (["alload_jax/data/**/*.py"], ["tests/data"]),
    "training": (["alload_jax/training/**/*.py", "alload_jax/run/*.py"], ["tests/training"]),
    "diffusion": (
        ["alload_jax/diffusion/*.py", "alload_jax/objectives/*.py", "alload_jax/sampling/**/*.py"],
        ["tests/diffusion", "tests/sampling", "tests/training/*sample*", "tests/training/*draw*"],
    ),
    "models": (["alload_jax/models/**/*.py"], ["tests/models"]),
    "kernels": (
        ["pallas_kernels/*/reference.py", "pallas_kernels/*/api.py", "pallas_kernels/op.py"],
        ["tests/pallas_kernels"],
    ),
    "lora": (["alload_jax/models/lora*.py"], ["tests/models", "tests/training/test_*lora*"]),
    "checkpoints": (
        ["alload_jax/training/checkpoint*.py", "alload_jax/training/restore.py"],
        ["tests/training"],
    ),
}
"""Patterns of files of code, and of the tests that answer for them."""
PATIENCE = 180.0
"""Seconds of tests, as they were recorded, that a mutant gets at most."""
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
    ast.Pow: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "cumsum": "cumprod"}


# ---------------------------------------------------------------------- coverage, as a plugin


def pytest_configure(config: pytest.Config) -> None:
    """Starts coverage in each worker of a recorded run."""
    if (file := os.environ.get("MUTANTS_RECORD")) and hasattr(config, "workerinput"):
        patterns = os.environ["MUTANTS_PATTERNS"].split(",")
        recorder = Coverage(f"{file}.{config.workerinput['workerid']}", include=patterns)
        recorder.start()
        config.add_cleanup(recorder.save)
        config.add_cleanup(recorder.stop)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a file's fixtures compute is reached by all tests of the file."""
    _switch(item.nodeid.split("::")[0])


def pytest_runtest_call(item: pytest.Item) -> None:
    """A test with its parameters, all alike."""
    _switch(item.nodeid.split("[")[0])


pytest_runtest_teardown = pytest_runtest_setup


def _switch(context: str) -> None:
    if recorder := Coverage.current():
        recorder.switch_context(context)


@dataclass(frozen=True)
class Reached:
    """Which tests reach which line, and how long tests take."""

    tests: dict[tuple[str, int], set[str]]
    seconds: dict[str, float]


def record(part: str, cache: Path, workers: int) -> Reached:
    """Runs the tests of a part under coverage, unless the cache holds what it found."""
    patterns, tests = PARTS[part]
    data, times = cache / f"{part}.coverage", cache / f"{part}.xml"
    if not times.exists():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants", "-m", MARKS]
        command += ["-n", str(workers), "--dist", "loadfile", *_found(tests)]
        command += [f"--junitxml={times}.new", "-o", "junit_duration_report=total"]
        include = ",".join(patterns).replace("**/", "")
        recorded = {"MUTANTS_RECORD": str(data), "MUTANTS_PATTERNS": include}
        subprocess.run(command, cwd=ROOT, env=_environment(ROOT) | recorded, check=True)
        Path(f"{times}.new").rename(times)
    reached: dict[tuple[str, int], set[str]] = defaultdict(set)
    for worker in cache.glob(f"{part}.coverage.*"):
        content = CoverageData(str(worker))
        content.read()
        for file in content.measured_files():
            name = str(Path(file).relative_to(ROOT))
            lines = content.contexts_by_lineno(file)
            everywhere = {context for contexts in lines.values() for context in contexts}
            for line, contexts in lines.items():
                reached[name, line] |= set(contexts) - {""} or everywhere - {""}
    return Reached(reached, _seconds(times))


def _found(patterns: list[str]) -> list[str]:
    return sorted({str(path.relative_to(ROOT)) for each in patterns for path in ROOT.glob(each)})


def _seconds(file: Path) -> dict[str, float]:
    """Seconds of tests and of whole files, by the names of coverage's contexts."""
    from xml.etree import ElementTree

    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(file).iter("testcase"):
        path = case.attrib["classname"].replace(".", "/") + ".py"
        taken = float(case.attrib["time"])
        seconds[path] += taken
        seconds[f"{path}::{case.attrib['name'].split('[')[0]}"] += taken
    return dict(seconds)


# ---------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Mutant:
    """A change of the characters `begin` to `end` of a line, both counted from 0 in bytes."""

    file: str
    line: int
    begin: int
    end: int
    text: str

    def apply(self, root: Path) -> str:
        """Writes the fault; returns the file's text from before."""
        path = root / self.file
        before = path.read_text()
        lines = before.encode().split(b"\n")
        old = lines[self.line - 1]
        lines[self.line - 1] = old[: self.begin] + self.text.encode() + old[self.end :]
        path.write_bytes(b"\n".join(lines))
        return before


def mutants_of(file: Path) -> Iterator[Mutant]:
    """All changes of a file that this program knows, each of one operator, number or name."""
    source = file.read_text()
    lines = source.encode().split(b"\n")
    name = str(file.relative_to(ROOT))
    tree = ast.parse(source)
    skipped = {id(part) for node in ast.walk(tree) for part in _skipped(node)}

    def between(left: ast.expr, right: ast.expr, kind: ast.AST) -> Iterator[Mutant]:
        if left.end_lineno == right.lineno and left.end_col_offset is not None:
            begin, end = left.end_col_offset, right.col_offset
            gap = lines[right.lineno - 1][begin:end]
            if not gap.strip(b" <>=!+-*/%andorinst") and gap.strip():
                yield Mutant(name, right.lineno, begin, end, f" {SWAPS[type(kind)]} ")

    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if id(node) in skipped:
            continue
        stack.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Compare):
            for left, kind, right in zip(
                [node.left, *node.comparators], node.ops, node.comparators, strict=False
            ):
                yield from between(left, right, kind)
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            yield from between(node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from between(left, right, node.op)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield Mutant(name, node.lineno, node.col_offset, node.operand.col_offset, "")
        elif isinstance(node, ast.Constant) and node.lineno == node.end_lineno:
            changed = _changed(node.value)
            if changed is not None:
                assert node.end_col_offset is not None
                yield Mutant(name, node.lineno, node.col_offset, node.end_col_offset, changed)
        elif isinstance(node, ast.Call):
            called = node.func
            end = called.end_col_offset
            word = getattr(called, "id", None) or getattr(called, "attr", None)
            if word in NAMES and end is not None and called.end_lineno is not None:
                yield Mutant(name, called.end_lineno, end - len(word), end, NAMES[word])


def _skipped(node: ast.AST) -> Iterator[ast.AST]:
    """Parts that carry no behaviour of their own: types, docstrings, messages of errors."""
    if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation:
        yield node.annotation
    if isinstance(node, ast.FunctionDef) and node.returns:
        yield node.returns
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
        yield node
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node


def _changed(value: object) -> str | None:
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return str(value + 1)
    if isinstance(value, float) and value == value and abs(value) < 1e30:
        return repr(value * 2 or 1.0)
    return None


def drawn(part: str, number: int, seed: int) -> list[Mutant]:
    """The mutants of a part."""
    known = [mutant for file in _found(PARTS[part][0]) for mutant in mutants_of(ROOT / file)]
    return random.Random(f"{seed} {part}").sample(known, min(number, len(known)))


# ---------------------------------------------------------------------- runs


def seen(mutant: Mutant, reached: Reached, roots: Queue[Path]) -> bool:
    """Whether a test that reaches the mutant's line fails on it."""
    tests = set(reached.tests.get((mutant.file, mutant.line), ()))
    whole = {test for test in tests if "::" not in test}
    tests -= {test for test in tests if "::" in test and test.split("::")[0] in whole}
    chosen, total = [], 0.0
    for test in sorted(tests, key=lambda test: reached.seconds.get(test, 0.0)):
        total += reached.seconds.get(test, 0.0)
        if total > PATIENCE and chosen:
            break
        chosen.append(test)
    if not chosen:
        return False
    root = roots.get()
    before = mutant.apply(root)
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist"]
        command += ["-p", "no:cacheprovider", "-m", MARKS, *chosen]
        options = {"cwd": root, "env": _environment(root), "timeout": 60 + 10 * total}
        return subprocess.run(command, capture_output=True, **options).returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        (root / mutant.file).write_text(before)
        roots.put(root)


def _environment(root: Path) -> dict[str, str]:
    path = os.pathsep.join([str(root), str(root / "tests")])
    return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def main() -> None:
    """Draws, runs and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=50, help="mutants of each part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants" / "mutants.json")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    results: dict[str, object] = {"seed": options.seed, "unseen": (unseen := [])}
    with tempfile.TemporaryDirectory() as folder:
        roots: Queue[Path] = Queue()
        for number in range(options.workers):
            copy = Path(folder, str(number))
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "runs"))
            roots.put(copy)
        for part in options.parts:
            began, reached = time.monotonic(), record(part, options.cache, options.workers)
            mutants = drawn(part, options.number, options.seed)
            with ThreadPoolExecutor(options.workers) as workers:
                verdicts = list(workers.map(partial(seen, reached=reached, roots=roots), mutants))
            unseen += [
                asdict(m) for m, verdict in zip(mutants, verdicts, strict=True) if not verdict
            ]
            results[part] = {"mutants": len(mutants), "seen": sum(verdicts)}
            print(f"{part}: {sum(verdicts)} of {len(mutants)}, {time.monotonic() - began:.0f} s")
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
