"""Whatever the code and the documents cite exists: papers, pages, sections of pages."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.documents import REPOSITORY, tokens

SOURCES = [
    REPOSITORY / name
    for name in subprocess.check_output(
        ["git", "-c", "safe.directory=*", "ls-files"], cwd=REPOSITORY, text=True
    ).split()
    if name.endswith((".py", ".c", ".h", ".md", ".sql", ".sh"))
]
PAPERS = REPOSITORY / "docs" / "papers.md"
# "(NAME, section IV-A" or "NAME, Algorithm 1": a paper by its name in papers.md
PAPER = re.compile(r"\b([A-Z][A-Za-z]*[A-Z][A-Za-z]*|vDNN|Capuchin), (?:sections? [IVX0-9]|Algorithm \d)")
# docs/page.md, "Section"
SECTION = re.compile(r'(?<!["\w])docs/([\w-]+\.md)(?:, "([^"]+)")?')
# what earlier citations named, none of which is in the repository
GONE = re.compile(r"\bdesign\.md\b|\b\w+-notes\.md\b|\b(?:tensile|cswap|accudnn|swapadvisor)\.txt\b")


def headings(path: Path) -> list[str]:
    """Texts of a document's headings, without the marks of code."""
    neighbours = pairwise(tokens(path))
    return [inline.content.replace("`", "") for opening, inline in neighbours if opening.type == "heading_open"]


def joined(path: Path) -> str:
    """A file's text with each run of white space and comment marks as one space, so that citations may be wrapped."""
    return re.sub(r"\s+(?:[#*] |-- |// )?\s*", " ", path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_citations_resolve(path: Path) -> None:
    if path == Path(__file__):
        return
    text = joined(path)
    assert not GONE.search(text)
    papers = headings(PAPERS)
    assert set(PAPER.findall(text)) <= set(papers)
    for page, section in SECTION.findall(text):
        target = REPOSITORY / "docs" / page
        assert target.exists(), page
        if section:
            assert any(heading.startswith(section.replace("`", "")) for heading in headings(target)), (page, section)


def test_papers_are_cited() -> None:
    """Else the test above would find nothing wrong in nothing."""
    cited = {name for path in SOURCES if path.suffix == ".py" for name in PAPER.findall(joined(path))}
    assert {"TENSILE", "SwapAdvisor", "CSWAP", "AccUDNN"} <= cited
