"""Draws the appendix of Results: a page for each JSON of measurements, when the site is built.

A page says what was measured, by which command, when and on what, and has the figures as tables.
Nothing of it is written by hand, and nothing of it is committed.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "appendix"

ORIGIN = ("command", "commands", "commit", "date", "device", "devices", "driver", "versions")
NOTES = ("note", "left_out", "compiled_for", "xla_flags")
AS_CODE = ("command", "commands", "xla_flags")
MOST_ROWS, MOST_COLUMNS = 100, 24
_MARKUP = re.compile(r"([\\`*_\[\]|<>#$~{}])")

Row = dict[str, Any]


def write_pages(results: Path = RESULTS, out: Path = PAGES) -> list[str]:
    """Writes a page for each JSON in `results` to `out` and returns their names."""
    out.mkdir(parents=True, exist_ok=True)
    names = sorted(path.stem for path in results.glob("*.json"))
    for old in out.glob("*.md"):
        if old.stem not in names:
            old.unlink()
    for name in names:
        text, path = page(results / f"{name}.json"), out / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return names


def listing(names: list[str]) -> str:
    """The end of the page of results: a link to the page of each JSON."""
    lines = [f"- [{name}](appendix/{name}.md)" for name in names]
    tree = ["```{toctree}", ":hidden:", "", *(f"appendix/{name}" for name in names), "```"]
    return "\n".join(["", "## All measurements", "", *lines, "", *tree, ""])


def page(path: Path) -> str:
    """The page of one JSON, in Markdown."""
    content = json.loads(path.read_text())
    origin = [["JSON", f"[{path.name}](../../benchmarks/results/{path.name})"]]
    for key in (*ORIGIN, *NOTES):
        show = _code if key in AS_CODE else _text_of
        values = dict.fromkeys(show(value) for value in _values(content, key))
        origin += [[key.replace("_", " "), value] for value in values if value]
    parts = [f"# {path.stem}", _table(["", ""], origin)]
    parts += [f"![{image.stem}](../{image.relative_to(ROOT / 'docs')})" for image in _images(path)]
    if figures := _flat(content):
        rows = [[_escape(key), _text(value)] for key, value in figures.items()]
        parts += ["## Figures", _table(["figure", "value"], rows)]
    for name, rows in _tables(content).items():
        parts += [f"## {_escape(name)}", *_drawn(rows)]
    return "\n\n".join(parts) + "\n"


def _images(path: Path) -> list[Path]:
    """Pictures under docs/results named as the JSON, by their name or folder and name."""
    found = sorted((ROOT / "docs" / "results").glob("*/*.png"))
    return [p for p in found if path.stem in (p.stem, f"{p.parent.name}_{p.stem}")]


def _values(content: Any, key: str) -> Iterator[Any]:
    """All values of a key, at any depth."""
    if isinstance(content, dict):
        if content.get(key) is not None:
            yield content[key]
        content = [value for name, value in content.items() if name != key]
    if isinstance(content, list):
        for value in content:
            yield from _values(value, key)


def _text_of(value: Any) -> str:
    """The text of what says where figures come from."""
    if isinstance(value, dict):
        return ", ".join(f"{_escape(str(k))} {_escape(str(v))}" for k, v in value.items() if v)
    if isinstance(value, list):
        return ", ".join(_text_of(each) for each in value)
    return _escape(str(value))


def _code(value: Any) -> str:
    """A command, or several, as code."""
    if isinstance(value, list):
        return ", ".join(map(_code, value))
    return "`` " + " ".join(str(value).split()).replace("|", "\\|") + " ``"


def _flat(content: Row, prefix: str = "") -> Row:
    """Scalars and short lists of a dict and of the dicts in it, by dotted name."""
    found: Row = {}
    for key, value in content.items():
        if key in (*ORIGIN, *NOTES):
            continue
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        elif not _is_rows(value):
            found[f"{prefix}{key}"] = value
    return found


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _lists(content: Row, prefix: str = "") -> Iterator[tuple[str, list[Row]]]:
    """Lists of dicts in a dict and in the dicts in it."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _lists(value, f"{prefix}{key}.")
        elif _is_rows(value):
            yield f"{prefix}{key}", value


def _tables(content: Row) -> dict[str, list[Row]]:
    """Rows by the name of their list. Rows of inner lists begin with what names the outer row."""
    found: dict[str, list[Row]] = {}

    def collect(name: str, rows: list[Row], outer: Row) -> None:
        for row in rows:
            flat = _flat(row)
            found.setdefault(name, []).append(outer | flat)
            named = {k: v for k, v in flat.items() if isinstance(v, str | int)}
            below = outer | dict(list(named.items())[:3])
            for inner, values in _lists(row):
                collect(f"{name}: {inner}", values, below)

    for name, rows in _lists(content):
        collect(name, rows, {})
    return {name: rows for name, rows in found.items() if any(rows)}


def _drawn(rows: list[Row]) -> list[str]:
    """A table of rows. What all rows share stands before it, and what is left out behind it."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    shared = {
        k for k in keys if len(rows) > 1 and all(row.get(k) == rows[0].get(k) for row in rows)
    }
    parts = []
    if shared:
        same = [[_escape(key), _text(rows[0].get(key))] for key in keys if key in shared]
        parts.append(_table(["in all rows", ""], same))
    lists = {key for key in keys for row in rows if isinstance(row.get(key), list)}
    keys = sorted((key for key in keys if key not in shared), key=lists.__contains__)
    columns = keys[:MOST_COLUMNS]
    if columns:
        body = [[_text(row.get(key)) for key in columns] for row in rows[:MOST_ROWS]]
        parts.append(_table([_escape(key) for key in columns], body))
    left = [(len(rows) - MOST_ROWS, "rows"), (len(keys) - MOST_COLUMNS, "columns")]
    parts += [f"{n:,} more {what} are in the JSON." for n, what in left if n > 0]
    return parts


def _text(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, list):
        if len(value) > 4 or any(isinstance(each, list) for each in value):
            return f"{len(value):,} values"
        return ", ".join(map(_text, value)) or "none"
    return _escape(str(value))


def _escape(text: str) -> str:
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
