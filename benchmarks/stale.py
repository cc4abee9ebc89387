"""Lists results whose code has changed since they were measured, those that README.md names first.

    python benchmarks/stale.py

The code of a result is the program that its command names and the project's modules that this
imports, directly or not. A change of docstrings, comments and layout does not count. A result that
notes no commit was measured before the commit that added it, which is taken. Needs the history.
"""

import ast
import json
import re
import subprocess
from functools import cache
from operator import itemgetter
from pathlib import Path

from alload_jax.bench.harness import console, table_of

ROOT = Path(__file__).parents[1]


def git(*words: str) -> str:
    """What git prints; nothing where a commit or a file in it is unknown."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout


def program_of(command: str) -> Path:
    """The file that a command runs, which may be gone."""
    if (found := re.search(r"(\w+)\.py\b", command)) and found[1] != "train":
        return ROOT / "benchmarks" / found[0]
    if found:
        return ROOT / "train.py"
    words = re.findall(r"(?<= )[a-z][a-z-]+", command.partition("alload")[2])[:2]
    name = "_".join(words[: 2 if words[:1] == ["bench"] else 1]).replace("-", "_")
    return ROOT / "alload_jax/commands" / f"{name}.py"


@cache
def imports(path: Path) -> frozenset[Path]:
    """The project's files that a file imports anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            inner = (alias.name for alias in node.names)
            names |= {f"{module}.{name}" for name in inner} | {module} if module else set(inner)
    places = [ROOT / name.replace(".", "/") for name in names if name]
    files = [each for place in places for each in (Path(f"{place}.py"), place / "__init__.py")]
    return frozenset(file for file in files if file.exists())


def closure(path: Path) -> set[Path]:
    """A file and all that it imports, directly or not."""
    known, waiting = {path}, [path]
    while waiting:
        new = imports(waiting.pop()) - known
        known |= new
        waiting += new
    return known


def code(text: str) -> str:
    """A file's syntax tree, whose texts that are no values are empty."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.dump(tree)


@cache
def changed(path: Path, commit: str) -> bool:
    """Whether a file's code differs from that of a commit."""
    return code(path.read_text()) != code(git("show", f"{commit}:{path.relative_to(ROOT)}"))


def main() -> None:
    """Prints the table."""
    readme = (ROOT / "README.md").read_text()
    rows = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        content = json.loads(path.read_text())
        added = git("log", "--format=%h", "--diff-filter=A", "--", str(path)).split()
        cases = [case for case in content.get("cases", ()) if isinstance(case, dict)]
        commits = [each["commit"] for each in (content, *cases) if "commit" in each]
        commit = [*commits, *reversed(added), "?"][0].rstrip("+")
        program = program_of(content.get("command") or "")
        files = closure(program) if program.exists() else set()
        count = sum(changed(file, commit) for file in files)
        what = f"{count} of {len(files)}" if files else "the program is gone"
        if count or not files:
            named = "yes" if path.name in readme else ""
            rows.append((path.name, named, commit, what))
    rows.sort(key=lambda row: (not row[1], row[0]))
    names = ("result", "in README", "commit", "changed files")
    columns = {name: itemgetter(number) for number, name in enumerate(names)}
    console().print(table_of("", columns, rows))


if __name__ == "__main__":
    main()
