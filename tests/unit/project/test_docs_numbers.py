"""Numbers in documents: measured ones come from a committed file of results, declared ones from the sources.

The parts of docs/results/ between marks, and the ages in docs/benchmarks.md, are generated from the files of results.
Elsewhere a measured number has a reference behind it, a comment with the file, a table, the values of some columns that
select one of its rows, and the column
(`12.3 ms<!-- name: table[column=value;…]/column -->`).
A number with a unit and no reference is one that the paper or a goal states, in a sentence that says so, or a constant:
of a code block of the same page, or of the sources. Where results are told, in docs/benchmarks.md, docs/results/ and in
sections called "Measured", no constant goes without a reference either, because there it would read as a measurement.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.documents import OVERVIEW, PAGES, ages, marks, page_part, section_of, stored
from benchmarks.results import FOLDER, Results
from benchmarks.sections import SECTIONS
from tests.documents import DOCUMENTS, REPOSITORY

FILES = sorted(FOLDER.glob("*.json"))
NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNITS = {
    "%": 0.01,
    "×": 1,
    "times": 1,
    "ns": 1e-9,
    "µs": 1e-6,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1,
    "seconds": 1,
    "min": 60,
    "minutes": 60,
    "hours": 3600,
    "rows/s": 1,
    "GB/s": 1e9,
    "MB/s": 1e6,
    **{f"{prefix}B": 1000 ** (power + 1) for power, prefix in enumerate("kMGT")},
    **{f"{prefix}iB": 1024 ** (power + 1) for power, prefix in enumerate("KMGT")},
}
UNIT = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
REFERENCE = re.compile(rf"({NUMBER})\s?({UNIT})?<!-- ([\w-]+): ([^>]*?) -->")
WITH_UNIT = re.compile(rf"(?<![\w.,/×-])({NUMBER})\s?({UNIT})(?![\w/]| ?\d)")
PATH = re.compile(r"([^\[/]+)(?:\[(.*)\])?/(.+)")
STATED = re.compile(r"\bpaper|\basked\b|\bgoal")

# ---- generated parts ------------------------------------------------------------------------------------------------


def part_of_page(page: Path, name: str) -> str:
    begin, end = marks(name)
    return page.read_text().partition(begin)[2].partition(end)[0].strip()


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_tables_agree_with_the_results(name: str) -> None:
    section, results = stored([section_of(name)])[name]
    assert part_of_page(PAGES / f"{name}.md", name) == page_part(section, results).strip()


def test_ages_are_those_of_the_results() -> None:
    assert part_of_page(OVERVIEW, "ages") == ages().strip()


def test_pages_without_results_have_no_numbers() -> None:
    pages, there = {path.stem: path for path in PAGES.glob("*.md")}, {path.stem for path in FILES}
    assert there <= pages.keys() and {name for name in pages if name in SECTIONS} == {*pages}
    for name in pages.keys() - there:
        assert not re.search(r"\d", part_of_page(pages[name], name)), name


def revisions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "revision" and isinstance(item, str):
                yield item.rstrip("+")
            else:
                yield from revisions(item)
    elif isinstance(value, list):
        for item in value:
            yield from revisions(item)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_results_are_of_revisions_in_the_history(path: Path) -> None:
    git = ["git", "-C", str(REPOSITORY), "-c", f"safe.directory={REPOSITORY}"]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.returncode or shallow.stdout.strip() != "false":
        pytest.skip("the history is not here")
    names = set(revisions(json.loads(path.read_text())))
    assert names
    for revision in names:
        done = subprocess.run([*git, "merge-base", "--is-ancestor", revision, "HEAD"], capture_output=True, text=True)
        assert done.returncode == 0, f"{path.name}: {revision} {done.stderr}"


# ---- references -----------------------------------------------------------------------------------------------------


def looked_up(name: str, path: str) -> float:
    """Return the number at a path of a file of results, from the only row with the values of its conditions."""
    found = PATH.fullmatch(path)
    assert found is not None, path
    wanted = dict(condition.split("=", 1) for condition in (found[2] or "").split(";") if condition)
    rows = Results(FOLDER / f"{name}.json").rows(found[1])
    (value,) = (row for row in rows if all(as_text(row[column]) == text for column, text in wanted.items()))
    for key in found[3].split("/"):
        value = value[key]
    assert isinstance(value, int | float) and not isinstance(value, bool), path
    return float(value)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def says(number: str, unit: str, value: float) -> bool:
    """True if the number is the value rounded to its digits. Percentages are of 1; others have the file's unit."""
    digits = len(number.partition(".")[2])
    return f"{100 * value if unit == '%' else value:,.{digits}f}" == number


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_referenced_numbers_are_in_the_results(document: Path) -> None:
    text = document.read_text()
    references = REFERENCE.findall(text)
    asked = re.findall(rf"<!-- (?:{'|'.join(path.stem for path in FILES)}): (?!begin,|end )", text)
    assert len(references) == len(asked), "a reference that is not behind a number"
    for number, unit, name, path in references:
        assert says(number, unit, looked_up(name, path)), f"{number} {unit}: {name} has {looked_up(name, path)}"


def test_references_are_compared_with_the_file() -> None:
    assert says("19.1", "%", 0.190712) and not says("19.2", "%", 0.190712)
    assert says("1,214", "ms", 1213.6) and not says("1,214", "ms", 1214.6)
    assert looked_up("predict", "rows/p50_us") == 234
    assert looked_up("db", "rows[jobs=1]/times_as_many") == 0.76
    with pytest.raises(ValueError, match="not enough"):
        looked_up("db", "rows[jobs=9]/times_as_many")


# ---- all other numbers ----------------------------------------------------------------------------------------------


class Claim(NamedTuple):
    """A number with a unit and no reference, and its sentence."""

    number: str
    unit: str
    sentence: str
    strict: bool  # in a place where results are told


def claims(page: Path) -> Iterator[Claim]:
    text = re.sub(r"<!-- [\w-]+: begin, written.*?<!-- [\w-]+: end -->", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", REFERENCE.sub("", text), flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        strict = page == OVERVIEW or page.parent == PAGES or bool(re.match(r"#+ Measured\b", section))
        for sentence in re.split(r"(?<=[.;:!?])\s|\n(?=[-|#])|\n\n", section):
            for number, unit in WITH_UNIT.findall(sentence):
                yield Claim(number, unit, sentence.strip(), strict)


OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.LShift: lambda left, right: int(left) << int(right),
}


def folded(node: ast.AST) -> float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = folded(node.left), folded(node.right)
        if left is not None and right is not None and abs(right) < 1e6:
            return float(OPERATORS[type(node.op)](left, right))
    return None


@cache
def constants() -> set[float]:
    """Return numbers in the sources: literals, and in Python their products and shifts."""
    numbers: set[float] = set()
    for folder in ("pg_tensile", "pyworker", "scripts"):
        for path in REPOSITORY.glob(f"{folder}/**/*.py"):
            numbers |= {value for node in ast.walk(ast.parse(path.read_text())) if (value := folded(node)) is not None}
    for path in (*REPOSITORY.glob("pg_tensile/csrc/**/*.[ch]"), *REPOSITORY.glob("sql/*/*.sql")):
        numbers |= {float(literal) for literal in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", path.read_text())}
    return numbers


def declared(claim: Claim, page: Path) -> bool:
    """True if the sources contain it, as written or in the base unit, or a code block of the page does."""
    value = float(claim.number.replace(",", ""))
    in_base = value * UNITS[claim.unit]
    if value in constants() or any(abs(in_base - constant) <= 1e-9 * abs(in_base) for constant in constants()):
        return True
    blocks = " ".join(re.findall(r"^```.*?^```|`[^`\n]*`", page.read_text(), flags=re.DOTALL | re.MULTILINE))
    return re.search(rf"(?<![\d.]){re.escape(claim.number)}(?![\d.])", blocks) is not None


# docs/sql.md repeats the comments of the SQL surface and the ranges of settings, which other tests compare
@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.name != "sql.md"], ids=lambda path: path.name)
def test_no_number_is_without_a_source(document: Path) -> None:
    for claim in claims(document):
        allowed = STATED.search(claim.sentence) or (not claim.strict and declared(claim, document))
        assert allowed, f"{claim.number} {claim.unit} has no source: {claim.sentence}"


def test_measurements_without_a_source_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\nIt waits for 30 s, and takes 47.31 ms.\n\n"
        "| a | 12.3 %<!-- db: rows[jobs=1]/x --> |\n\n## Measured\n\nAt most 2 % more: the paper has 5 %.\n"
    )
    unsourced = {f"{claim.number} {claim.unit}": claim for claim in claims(page)}
    assert set(unsourced) == {"30 s", "47.31 ms", "2 %", "5 %"}
    assert declared(unsourced["30 s"], page) and not declared(unsourced["47.31 ms"], page)
    assert unsourced["2 %"].strict and not unsourced["30 s"].strict
