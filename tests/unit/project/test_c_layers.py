"""The direction of includes and calls in C: folders in order, and no cycle of files.

Calls are those of the object files, if the extension has been compiled.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.repository import REPOSITORY
from tests.unit.project.test_layers import cycles

CSRC = REPOSITORY / "pg_tensile" / "csrc"
# From the bottom to the top: a file may include and call those of its own folder and of those before it.
FOLDERS = ("base", "evaluator", "state", "processes", "rows", "training", "predicting", "batching", "")
SOURCES = sorted(path for pattern in ("*.[ch]", "*/*.[ch]") for path in CSRC.glob(pattern))


def included(path: Path) -> set[str]:
    """Return the files of the shim that a file includes."""
    names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
    found = (folder / name for name in names for folder in (path.parent, CSRC))
    return {str(file.resolve().relative_to(CSRC)) for file in found if file.exists() and CSRC in file.resolve().parents}


def calls() -> dict[str, set[str]]:
    """Return for each C file those that define what its object refers to."""
    objects = [path.with_suffix(".o") for path in SOURCES if path.suffix == ".c" and path.with_suffix(".o").exists()]
    definers: dict[str, str] = {}
    symbols: dict[str, set[str]] = {}
    for path in objects:
        lines = subprocess.run(["nm", "-g", "-P", path], capture_output=True, text=True, check=True).stdout.splitlines()
        name = str(path.relative_to(CSRC).with_suffix(".c"))
        kinds = {symbol: kind for symbol, kind, *_ in map(str.split, lines)}
        definers |= {symbol: name for symbol, kind in kinds.items() if kind != "U"}
        symbols[name] = set(kinds)
    return {name: {definers.get(symbol, name) for symbol in used} - {name} for name, used in symbols.items()}


def upward(graph: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """Return the arrows of a graph of files that run from a folder to a higher one."""
    arrows = {(name, other) for name, others in graph.items() for other in others}
    return {(name, other) for name, other in arrows if level(other) > level(name)}


def level(name: str) -> int:
    """Return the number of a file's folder; 0 is the lowest."""
    return FOLDERS.index(name.rpartition("/")[0])


def test_includes_point_down() -> None:
    includes = {str(path.relative_to(CSRC)): included(path) for path in SOURCES}
    assert any(includes.values())
    assert upward(includes) == set()
    assert set(cycles(includes)) == set()


def test_the_evaluator_needs_no_server() -> None:
    """A plain program has it, too, which tests run under sanitizers."""
    used = {name for path in SOURCES if path.parent.name == "evaluator" for name in included(path)}
    assert {name for name in used if not name.startswith("evaluator/")} == {"base/compat.h"}


def test_calls_point_down() -> None:
    graph = calls()
    assert upward(graph) == set()
    assert set(cycles(graph)) == set()


def test_a_header_declares_what_its_file_defines() -> None:
    for header in (path for path in SOURCES if path.suffix == ".h"):
        text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
        declared = set(re.findall(r"^(?:pg_noreturn )?extern [^;(]*?(\w+)\(", text, re.MULTILINE))
        source = header.with_suffix(".c")
        defined = set(re.findall(r"^(\w+)\(", source.read_text(), re.MULTILINE)) if source.exists() else set()
        assert declared <= defined, header


def test_arrows_that_point_up_are_found() -> None:
    graph = {"state/slot.c": {"base/guc.c", "state/plan.c", "rows/feed.c"}, "rows/feed.c": {"pg_tensile.c"}}
    assert upward(graph) == {("state/slot.c", "rows/feed.c"), ("rows/feed.c", "pg_tensile.c")}
