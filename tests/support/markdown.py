"""What the documentation tests read from Markdown: links, headings, and fenced blocks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its text."""

    language: str
    text: str


def pages() -> list[Path]:
    """Return every Markdown file of the repository."""
    skipped = {".venv", "build", "node_modules", ".git"}
    return sorted(path for path in ROOT.rglob("*.md") if not skipped & set(path.relative_to(ROOT).parts))


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    for match in _FENCE.finditer(text):
        yield Block(match[1], match[2])


def prose(text: str) -> str:
    """Return a page without fenced blocks, code spans and comments."""
    without_blocks = _FENCE.sub("", text)
    return re.sub(r"<!--.*?-->", "", re.sub(r"`[^`\n]*`", "", without_blocks), flags=re.DOTALL)


def links(text: str) -> list[str]:
    """Return the targets of a page's links."""
    return _LINK.findall(_FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Return the anchors that a page's headings get on the usual sites."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        plain = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
        found.add(plain.replace(" ", "-"))
    return found
