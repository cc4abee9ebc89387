"""Builds the site: `make docs`, which writes build/site.

Pages are Markdown. The API reference is read from the source without importing it, so that it
needs neither JAX nor a GPU. It holds the public API alone. The appendix of Results is drawn from
benchmarks/results by appendix.py.
"""

import ast
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT)]

import appendix  # noqa: E402

import alload_jax  # noqa: E402

project = "alload-jax"
extensions = ["myst_parser", "autoapi.extension", "sphinx.ext.napoleon"]
exclude_patterns = ["clusters"]
html_theme = "furo"
html_title = "alload-jax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False

myst_heading_anchors = 3  # links to headings work here as they do on GitHub

autoapi_dirs = ["../alload_jax", "../pallas_kernels"]
autoapi_root = "reference"
autoapi_add_toctree_entry = False
autoapi_options = ["members", "show-module-summary"]
autoapi_member_order = "bysource"
autoapi_python_class_content = "both"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# A constant without a docstring has no entry to which an import of it could point, and a word of a
# docstring that is the name of several things points to none.
suppress_warnings = ["autoapi.python_import_resolution", "ref.python"]


def _imports(package: Path) -> dict[str, str]:
    """The module of each name that a package's __init__ imports."""
    tree = ast.walk(ast.parse((package / "__init__.py").read_text()))
    found = (node for node in tree if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in found for alias in node.names}


def _defined(module: str, name: str) -> str:
    """The full name of what a module defines, or of what a package's __init__ imports."""
    package = ROOT / module.replace(".", "/")
    imported = _imports(package).get(name) if package.is_dir() else None
    return _defined(imported, name) if imported else f"{module}.{name}"


def _public() -> set[str]:
    """Full names of what users import: from `alload_jax`, and from the packages of kernels."""
    names = {_defined(f"alload_jax.{module}", name) for name, module in alload_jax._API.items()}
    for package in sorted(p.parent for p in (ROOT / "pallas_kernels").glob("*/__init__.py")):
        names |= {_defined(module, name) for name, module in _imports(package).items()}
    return names


PUBLIC = _public()


def _without_public() -> list[str]:
    """Files that hold no public name; reading them takes most of the time of the site."""
    files = (file for package in autoapi_dirs for file in (ROOT / "docs" / package).rglob("*.py"))
    found = []
    for file in (file.resolve() for file in files):
        parts = file.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not any(name.startswith(f"{module}.") for name in PUBLIC):
            found.append(str(file))
    return found


autoapi_ignore = _without_public()


def _is_hidden(
    _app: Any, what: str, name: str, _obj: Any, skip: bool, _options: Any
) -> bool | None:
    """Skips what is no public name, holds none and belongs to none."""
    if skip or name in PUBLIC:
        return None
    inside = any(name.startswith(f"{public}.") for public in PUBLIC)
    around = what in ("package", "module") and any(p.startswith(f"{name}.") for p in PUBLIC)
    return None if inside or around else True


def _write_appendix(_app: Any) -> None:
    appendix.write_pages()


def _append_listing(_app: Any, page: str, source: list[str]) -> None:
    """Ends the page of results with a link to the page of each JSON."""
    if page == "results":
        source[0] += appendix.listing(appendix.write_pages())


_VALUES, _COLON = ("attribute", "data", "property"), "\0"
_CODE = re.compile(r"(`+)(.+?)\1")


def _escape(text: str) -> str:
    """Plain words: what reStructuredText would read as markup is meant as it stands."""
    return re.sub(r"([*|\\])|(?<=\w)_(?!\w)", lambda found: "\\" + found[0], text)


def _as_rst(line: str) -> str:
    """One line of a docstring, whose code is in single backticks, as reStructuredText."""
    parts, end = [], 0
    for code in _CODE.finditer(line):
        follows = line[code.end() : code.end() + 1]
        gap = "\\ " if follows.isalnum() else ""  # `x`s: markup must end before a letter
        parts += [_escape(line[end : code.start()]), f"``{code[2]}``{gap}"]
        end = code.end()
    return "".join([*parts, _escape(line[end:])])


def _convert(_app: Any, what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Turns a docstring into reStructuredText; indented examples after a colon stay code."""
    code_indent: int | None = None
    for number, line in enumerate(lines):
        indent = _indent(line)
        if code_indent is not None and line.strip() and indent <= code_indent:
            code_indent = None
        if code_indent is not None:
            continue
        lines[number] = _as_rst(line)
        following = lines[number + 1 : number + 3]
        blank_then_more = len(following) == 2 and not following[0].strip()
        if line.endswith(":") and blank_then_more and _indent(following[1]) > indent:
            lines[number] += ":"
            code_indent = indent
    if lines and what in _VALUES:
        lines[0] = lines[0].replace(":", _COLON)


def _restore(_app: Any, what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Puts back the colons that napoleon would read as the end of a value's type."""
    if what in _VALUES:
        lines[:] = [line.replace(_COLON, ":") for line in lines]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def setup(app: Any) -> None:
    """Converts docstrings before napoleon reads their sections, and once more after it.

    Draws the appendix before the pages are read.
    """
    app.connect("builder-inited", _write_appendix)
    app.connect("source-read", _append_listing)
    app.connect("autoapi-skip-member", _is_hidden)
    app.connect("autodoc-process-docstring", _convert, priority=100)
    app.connect("autodoc-process-docstring", _restore, priority=900)
