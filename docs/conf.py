"""Builds the site: `make docs`, which writes build/site.

Pages are Markdown. The API reference is read from the source without importing it, so that it
needs neither JAX nor a GPU.
"""

import re
from typing import Any

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
autoapi_options = ["members", "undoc-members", "show-module-summary"]
autoapi_member_order = "bysource"
autoapi_python_class_content = "both"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# A constant without a docstring has no entry to which an import of it could point, and a word of a
# docstring that is the name of several things points to none.
suppress_warnings = ["autoapi.python_import_resolution", "ref.python"]

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
    """Converts docstrings before napoleon reads their sections, and once more after it."""
    app.connect("autodoc-process-docstring", _convert, priority=100)
    app.connect("autodoc-process-docstring", _restore, priority=900)
