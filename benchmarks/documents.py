"""Pages of results: a page for each section in docs/results/, and its age in docs/benchmarks.md.

`python -m benchmarks tables` writes them from the files of results, and measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.checks import Check, verdicts
from benchmarks.command import ROOT, Row
from benchmarks.results import FAILURES, FOLDER, Results
from benchmarks.runner import Section
from benchmarks.sections import SECTIONS, load
from benchmarks.tables import table

PAGES = ROOT / "docs" / "results"
PLOTS = ROOT / "docs" / "plots"
OVERVIEW = ROOT / "docs" / "benchmarks.md"
WRITTEN = "begin, written by benchmarks/documents.py"


def stored(names: Sequence[str] = tuple(SECTIONS)) -> dict[str, tuple[Section, Results]]:
    """Return sections that have results, with them, by the names of their files."""
    paths = {path.stem: path for path in FOLDER.glob("*.json")}
    named = [(name, stem) for name in names for stem in sorted(paths) if section_of(stem) == name]
    return {stem: (load(name), Results(paths[stem])) for name, stem in named}


def write_documents(names: Sequence[str]) -> None:
    """Write the pages of these sections, and the ages of all."""
    for stem, (section, results) in stored(names).items():
        write_page(stem, section, results)
    write_part(OVERVIEW, "ages", ages())


def all_checks(section: Section, results: Results) -> list[Check]:
    """Return the section's checks, and a failed one for each scenario that could not be measured."""
    failed = ((row["scenario"], row["error"].splitlines()[0]) for row in results.rows(FAILURES))
    failures = [Check("failures", scenario, error, "rows", False) for scenario, error in failed]
    return [*failures, *(section.checks(results) if results.measured() else ())]


def missing(section: Section, results: Results) -> list[str]:
    there = {*results.measured(), *(row["scenario"] for row in results.rows(FAILURES))}
    return [] if results.is_quick else [name for name in section.expected(results.kind) if name not in there]


def page_part(section: Section, results: Results) -> str:
    """Return the generated part of a section's page."""
    checks = all_checks(section, results)
    said = [verdicts(checks, missing(section, results)), ""] if checks else []
    return (
        "\n".join([*measured_on(results), "", *said, *(section.tables(results) if results.measured() else ())]).rstrip()
        + "\n"
    )


def measured_on(results: Results) -> list[str]:
    """Return a line for each machine, with the revisions and dates of its runs."""
    ordered = sorted(results.runs, key=lambda run: (machine(run), run["date"], run["revision"]))
    return [
        f"{where}, revision {', '.join(dict.fromkeys(map(revision, runs)))}."
        for where, runs in groupby(ordered, machine)
    ]


def machine(run: Row) -> str:
    what, memory = run.get("gpu") or run["cpu"], f"{run['memory_bytes'] / 2**30:.0f} GiB"
    used = f"PyTorch {run['torch']}, Python {run['python']}"
    return f"Measured on `{run['device']}`: {what}, {run['cores']} cores, {memory}, {used}"


def revision(run: Row) -> str:
    return f"{run['revision']} ({run['date']})"


def ages() -> str:
    """Return a table with the last run of each section, and how many of its goals it reached."""
    rows = []
    for stem, (section, results) in stored().items():
        last, checks = max(results.runs, key=lambda run: run["date"]), all_checks(section, results)
        goals = f"{sum(check.holds for check in checks)} of {len(checks)}" if checks else ""
        rows.append((f"[{section.title}](results/{stem}.md)", f"`{command_of(stem)}`", *age(results, last), goals))
    return "\n".join(table(("results", "section", "last measured", "revision", "goals held"), rows))


def age(results: Results, last: Row) -> tuple[str, str]:
    others = len({run["revision"] for run in results.runs} - {last["revision"]})
    return last["date"], last["revision"] + (f" and {others} earlier" if others else "")


def section_of(stem: str) -> str:
    """Return the section of a file, whose name ends with the device's kind if that is another than usual."""
    return next((stem.removesuffix(end) for end in ("-cuda", "-model", "-host") if stem.endswith(end)), stem)


def command_of(stem: str) -> str:
    name = section_of(stem)
    return f"{SECTIONS[name].command} --section {name}"


def write_page(name: str, section: Section, results: Results) -> None:
    """Write the generated part of the page of a section, which is made if there is none, and its figures."""
    section.draw(results, PLOTS / name)
    path = PAGES / f"{name}.md"
    if not path.exists():
        PAGES.mkdir(exist_ok=True)
        begin, end = marks(name)
        path.write_text(f"# {section.title}\n\n{begin}\n{end}\n")
    write_part(path, name, page_part(section, results))


def write_part(path: Path, name: str, part: str) -> None:
    """Write a part of a page between its marks."""
    begin, end = marks(name)
    before, mark, rest = path.read_text().partition(begin)
    if not mark:
        raise SystemExit(f"{path} has no place for {name}")
    path.write_text(f"{before}{begin}\n{part}\n{end}{rest.partition(end)[2]}")


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: {WRITTEN} -->\n", f"<!-- {name}: end -->"
