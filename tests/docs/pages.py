"""Reads Markdown pages: their links, headings and code blocks."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

_FENCE = re.compile(r"^(`{3,})(.*?)\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block: its language and its text."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(found[2].strip(), found[3]) for found in _FENCE.finditer(page.read_text())]


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Targets of links and images, except those on other sites."""
    return [link for link in _LINK.findall(prose(page)) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in kept}


def commands(page: Path) -> list[str]:
    """The commands of a page's blocks without a language, and in backticks, each on one line."""
    lines: list[str] = []
    for block in blocks(page):
        if not block.language:
            lines += block.text.replace("\\\n", " ").splitlines()
    lines += re.findall(r"`((?:alload|python|make|sbatch) [^`]+)`", prose(page))
    return [" ".join(re.sub(r"\s+#.*", "", line).split()) for line in lines]
