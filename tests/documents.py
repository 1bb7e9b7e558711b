"""Parse documents: code blocks with the comments before them, links and anchors.

A comment directly before a code block says how a test treats it:

    <!-- setup: SQL -->              is executed before the block
    <!-- until N rows -->            its query is repeated until it returns N rows
    <!-- no rows -->                 its queries return nothing, on a server where all is well
    <!-- not executed: reason -->    rare: how many there are is part of the test
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.repository import REPOSITORY

DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("docs/results/*.md")])
PART = re.compile(r"""--[^\n]*|'(?:[^']|'')*'|"[^"]*"|\$(\w*)\$.*?\$\1\$|;|[^-;'"$]+|.""", re.DOTALL)


class Block(NamedTuple):
    """A code block; `note` is the comment before it, or "", and `line` the number of its first line, from 1."""

    text: str
    note: str
    line: int


def tokens(path: Path) -> list[Token]:
    return MarkdownIt("commonmark").parse(path.read_text())


def blocks(path: Path, language: str) -> list[Block]:
    """Return the code blocks of a language, in order."""
    result = []
    note = ""
    for token in tokens(path):
        if token.type == "fence" and token.info == language:
            assert token.map is not None
            result.append(Block(token.content, note, token.map[0] + 2))
        comment = re.fullmatch(r"\s*<!--\s*(.*?)\s*-->\s*", token.content, re.DOTALL)
        note = comment[1] if token.type == "html_block" and comment else ""
    return result


def statements(sql: str) -> Iterator[str]:
    """Yield the statements as psql sends them, without comments and semicolons."""
    statement = ""
    for part in PART.finditer(sql + ";"):
        if part[0] != ";":
            statement += "" if part[0].startswith("--") else part[0]
        elif statement.strip():
            yield statement.strip()
            statement = ""


def links(path: Path) -> list[str]:
    """Return the targets of links, as written."""
    inline = (child for token in tokens(path) for child in token.children or ())
    return [unquote(str(child.attrs["href"])) for child in inline if child.type == "link_open"]


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub derives them."""
    count: Counter[str] = Counter()
    result = set()
    for opening, inline in pairwise(tokens(path)):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or () if child.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            result.add(f"{slug}-{count[slug]}" if count[slug] else slug)
            count[slug] += 1
    return result
