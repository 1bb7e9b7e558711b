"""Citations in code and documents resolve: papers, pages, sections and files."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path

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
# a Python file of this repository, with or without folders
FILE = re.compile(r"(?<![\w/.*<>-])((?:\w+/)*\w+\.py)\b(?!\w)")
EXAMPLES = {"model.py", "file.py", "net.py", "nets.py", "longest.py", "test_longest.py"}  # of users
CITING = ("docs", "pg_tensile", "pyworker", "sql")
# names of earlier citations that are not in the repository
GONE = re.compile(r"\bdesign\.md\b|\b\w+-notes\.md\b|\b(?:tensile|cswap|accudnn|swapadvisor)\.txt\b")


@cache
def headings(path: Path) -> list[str]:
    """Return the texts of a document's headings, without backticks."""
    neighbours = pairwise(tokens(path))
    return [inline.content.replace("`", "") for opening, inline in neighbours if opening.type == "heading_open"]


@cache
def joined(path: Path) -> str:
    """Return a file's text with each run of white space and comment marks as a space: citations may be wrapped."""
    return re.sub(r"\s+(?:[#*] |-- |// )?\s*", " ", path.read_text())


def unresolved(path: Path, papers: set[str]) -> list[str]:
    """Return the citations of a file that do not resolve."""
    text = joined(path)
    citations = [*GONE.findall(text), *(set(PAPER.findall(text)) - papers)]
    for page, section in SECTION.findall(text):
        target = REPOSITORY / "docs" / page
        named = section.replace("`", "")
        if not target.exists() or not any(heading.startswith(named) for heading in headings(target)):
            citations.append(f"docs/{page}, {section}")
    if path.relative_to(REPOSITORY).parts[0] in CITING and path.name != "pg_tensile--0.1.0.sql":
        citations += [file for file in set(FILE.findall(path.read_text())) if not exists(file)]
    return citations


@cache
def endings() -> set[str]:
    """Return what the paths of the repository's files end with, by whole names."""
    parts = [path.relative_to(REPOSITORY).parts for path in SOURCES]
    return {"/".join(names[start:]) for names in parts for start in range(len(names))}


def exists(file: str) -> bool:
    """True if the repository has a file whose path ends with this one, and for files of users."""
    return file.rpartition("/")[2] in EXAMPLES or file in endings()


def test_citations_resolve() -> None:
    papers = set(headings(PAPERS))
    unresolved_citations = {path.name: unresolved(path, papers) for path in SOURCES if path != Path(__file__)}
    assert {name: citations for name, citations in unresolved_citations.items() if citations} == {}


def test_papers_are_cited() -> None:
    """Check that the patterns of the test above match."""
    cited = {name for path in SOURCES if path.suffix == ".py" for name in PAPER.findall(joined(path))}
    assert {"TENSILE", "SwapAdvisor", "CSWAP", "AccUDNN"} <= cited
