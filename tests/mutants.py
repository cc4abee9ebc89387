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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from operator import setitem
from pathlib import Path
from queue import Queue
from xml.etree import ElementTree

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
        ["alload_jax/diffusion/*.py", "alload_jax/objectives.py", "alload_jax/sampling/**/*.py"],
        ["tests/diffusion", "tests/sampling", "tests/training/*sample*", "tests/training/*draw*"],
    ),
    "models": (
        ["alload_jax/models/**/*.py"],
        ["tests/models", "tests/planning/test_analytic.py"],  # the latter has the families' costs
    ),
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
OF_SOURCE = "tests/test_structure.py::test_dataclasses_are_frozen"
"""A test that reads all lines without running them."""
PATIENCE = 180.0
"""Seconds of tests, as they were recorded, that a mutant gets at most."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
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
        recorded = {"MUTANTS_RECORD": str(data), "MUTANTS_PATTERNS": ",".join(patterns)}
        done = subprocess.run(command, cwd=ROOT, env=_environment(ROOT) | recorded)
        if done.returncode not in (0, 1):
            raise SystemExit(f"error: {' '.join(command)} ended with status {done.returncode}")
        Path(f"{times}.new").rename(times)
    failed = _failed(times)
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
            reached[name, 0] |= everywhere - {""}
    for tests_of_line in reached.values():
        tests_of_line -= failed
    return Reached(reached, _seconds(times))


def _failed(file: Path) -> set[str]:
    """Names of tests that fail without a fault, and of their files: they see nothing."""
    kinds = ("failure", "error")
    cases = [each for kind in kinds for each in ElementTree.parse(file).iterfind(f".//{kind}/..")]
    names = {name for case in cases for name in _names(case)}
    if names:
        print(f"left out, since they fail without a fault: {', '.join(sorted(names))}")
    return names


def _names(case: ElementTree.Element) -> tuple[str, str]:
    """Of coverage's contexts: a test's file, and the test."""
    path = case.attrib["classname"].replace(".", "/") + ".py"
    return path, f"{path}::{case.attrib['name'].split('[')[0]}"


def _found(patterns: list[str]) -> list[str]:
    return sorted({str(path.relative_to(ROOT)) for each in patterns for path in ROOT.glob(each)})


def _seconds(file: Path) -> dict[str, float]:
    """Seconds of tests and of whole files, by the names of coverage's contexts."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(file).iter("testcase"):
        for name in _names(case):
            seconds[name] += float(case.attrib["time"])
    return dict(seconds)


# ---------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Mutant:
    """One fault of a file, by its number among those of `faults`; `was` is the line's code."""

    file: str
    line: int
    number: int
    was: str

    def apply(self, root: Path) -> str:
        """Writes the file with the fault; returns its text from before."""
        path = root / self.file
        tree = ast.parse(before := path.read_text())
        list(faults(tree))[self.number][1]()
        path.write_text(ast.unparse(tree))
        return before


def mutants_of(file: Path) -> Iterator[Mutant]:
    """All faults that can be planted in a file."""
    lines = (source := file.read_text()).splitlines()
    for number, (line, _) in enumerate(faults(ast.parse(source))):
        yield Mutant(str(file.relative_to(ROOT)), line, number, lines[line - 1].strip())


def faults(tree: ast.AST) -> Iterator[tuple[int, Callable[[], None]]]:
    """The line and what plants the fault in the tree, for each operator, number or name."""
    skipped = {id(part) for node in ast.walk(tree) for part in _skipped(node)}
    stack = [tree]
    while stack:
        if id(node := stack.pop()) in skipped:
            continue
        stack.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Compare):
            for place, kind in enumerate(node.ops):
                yield node.lineno, partial(setitem, node.ops, place, SWAPS[type(kind)]())
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
            yield node.lineno, partial(setattr, node, "op", SWAPS[type(node.op)]())
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.lineno, partial(setattr, node, "operand", ast.UnaryOp(node.op, node.operand))
        elif isinstance(node, ast.Constant) and (changed := _changed(node.value)) is not None:
            yield node.lineno, partial(setattr, node, "value", changed)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = "id" if isinstance(node, ast.Name) else "attr"
            if (other := NAMES.get(getattr(node, name))) is not None:
                yield node.lineno, partial(setattr, node, name, other)


def _skipped(node: ast.AST) -> Iterator[ast.AST]:
    """Parts that carry no behaviour of their own: types, docstrings, messages of errors, checks."""
    if isinstance(node, ast.keyword) and node.arg == "strict":
        yield node.value
    if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation:
        yield node.annotation
    if isinstance(node, ast.FunctionDef) and node.returns:
        yield node.returns
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
        yield node
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node


def _changed(value: object) -> bool | float | None:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value * 2 or 1.0 if isinstance(value, float) else None


def drawn(part: str, number: int, seed: int) -> list[Mutant]:
    """The mutants of a part."""
    known = [mutant for file in _found(PARTS[part][0]) for mutant in mutants_of(ROOT / file)]
    return random.Random(f"{seed} {part}").sample(known, min(number, len(known)))


# ---------------------------------------------------------------------- runs


def seen(mutant: Mutant, reached: Reached, roots: Queue[Path]) -> bool:
    """Whether a test that reaches the mutant's line fails on it."""
    # Other processes and imports of conftest.py are not recorded: what they run, all tests may.
    tests = reached.tests.get((mutant.file, mutant.line)) or reached.tests[mutant.file, 0]
    whole = {test for test in tests if "::" not in test}
    tests = tests - {test for test in tests if "::" in test and test.split("::")[0] in whole}
    chosen, total = [], 0.0
    for test in sorted(tests, key=lambda test: reached.seconds.get(test, 0.0)):
        total += reached.seconds.get(test, 0.0)
        if total > PATIENCE and chosen:
            break
        chosen.append(test)
    chosen.append(OF_SOURCE)
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
