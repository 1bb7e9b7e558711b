"""The documents as tests read them: code blocks with the comment before each, links, anchors.

A comment directly before a code block says how a test treats it:

    <!-- setup: SQL -->              is executed before the block
    <!-- until N rows -->            its one query is repeated until it returns so many rows
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

DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")])
PART = re.compile(r"""--[^\n]*|'(?:[^']|'')*'|"[^"]*"|\$(\w*)\$.*?\$\1\$|;|[^-;'"$]+|.""", re.DOTALL)


class Block(NamedTuple):
    """A code block. `note`: the comment before it, "" if there is none; `line`: its first one, from 1."""

    text: str
    note: str
    line: int


def tokens(path: Path) -> list[Token]:
    return MarkdownIt("commonmark").parse(path.read_text())


def blocks(path: Path, language: str) -> list[Block]:
    """Those of a language, in order."""
    found = []
    note = ""
    for token in tokens(path):
        if token.type == "fence" and token.info == language:
            assert token.map is not None
            found.append(Block(token.content, note, token.map[0] + 2))
        comment = re.fullmatch(r"\s*<!--\s*(.*?)\s*-->\s*", token.content, re.DOTALL)
        note = comment[1] if token.type == "html_block" and comment else ""
    return found


def statements(sql: str) -> Iterator[str]:
    """One by one, without comments and semicolons, as psql sends them."""
    statement = ""
    for part in PART.finditer(sql + ";"):
        if part[0] != ";":
            statement += "" if part[0].startswith("--") else part[0]
        elif statement.strip():
            yield statement.strip()
            statement = ""


def links(path: Path) -> list[str]:
    """Where they lead, as written."""
    inline = (child for token in tokens(path) for child in token.children or ())
    return [unquote(str(child.attrs["href"])) for child in inline if child.type == "link_open"]


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    count: Counter[str] = Counter()
    found = set()
    for opening, inline in pairwise(tokens(path)):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or () if child.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(f"{slug}-{count[slug]}" if count[slug] else slug)
            count[slug] += 1
    return found
