"""The direction of imports: wings in order, packages of planning in order, and no cycle of modules.

Imports inside functions and those for type checkers count as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.repository import REPOSITORY

# From the bottom to the top: a module may import its own wing and those before it.
WINGS = ("errors", "rules", "memory_limit", "text"), ("planning",), ("execution",), ("tools", "client", "__main__")
# The packages and modules of planning, in the same manner.
PLANNING = (
    "compression", "trace", "plan", "device", "latency", "bounds", "simulator", "policies", "batchsize", "scheduling",
    "explain",
)  # fmt: skip


def modules() -> dict[str, Path]:
    """All modules of the library and of what imports it, by full name."""
    found = {}
    for top in ("pg_tensile", "pyworker", "benchmarks", "scripts"):
        for path in (REPOSITORY / top).rglob("*.py"):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: Iterable[str]) -> Iterator[str]:
    """Modules of `known` that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: {other for other in imported(path, known) if other in known} - {name} for name, path in known.items()}


def wing(module: str) -> int:
    """Number of a module's wing; 0 is the lowest."""
    name = module.split(".")[1]
    return next(number for number, names in enumerate(WINGS) if name in names)


def cycles(graph: Mapping[str, set[str]]) -> Iterator[frozenset[str]]:
    """Sets of modules that import each other, directly or not: each is as large as it can be."""
    left = {name: set(others) for name, others in graph.items()}
    while True:
        try:
            TopologicalSorter(left).prepare()
            return
        except CycleError as error:
            start = error.args[1][0]
        reached, back = closure(left, start), closure(transposed(left), start)
        yield frozenset(reached & back)
        for name in reached & back:
            left[name] -= reached & back


def closure(graph: Mapping[str, set[str]], start: str) -> set[str]:
    reached, waiting = {start}, [start]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def transposed(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {name: set() for name in graph}
    for name, others in graph.items():
        for other in others:
            found[other].add(name)
    return found


def test_no_modules_import_each_other(graph: dict[str, set[str]]) -> None:
    assert set(cycles(graph)) == set()


def test_wings_import_lower_wings_only(graph: dict[str, set[str]]) -> None:
    library = {name for name in graph if name.startswith("pg_tensile.")}
    assert {(name, other) for name in library for other in graph[name] & library if wing(other) > wing(name)} == set()


def test_packages_of_planning_import_lower_ones_only(graph: dict[str, set[str]]) -> None:
    planning = {name for name in graph if name.startswith("pg_tensile.planning.")}
    level = {name: PLANNING.index(name.split(".")[2]) for name in planning}
    imports = {(name, other) for name in planning for other in graph[name] & planning}
    assert {(name, other) for name, other in imports if level[other] > level[name]} == set()


def test_the_library_imports_nothing_that_imports_it(graph: dict[str, set[str]]) -> None:
    outside = {(name, other) for name, others in graph.items() for other in others if name.startswith("pg_tensile")}
    assert {(name, other) for name, other in outside if not other.startswith("pg_tensile")} == set()


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"f", "a"}, "f": {"e"}}
    assert set(cycles(graph)) == {frozenset("bc"), frozenset("ef")}
    assert set(cycles({"a": {"b"}, "b": set()})) == set()
