"""The direction of imports: wings in order, packages of planning and execution in order, and no cycle of modules.

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
WINGS = (
    ("errors", "extras", "rules", "memory_limit", "text"),
    ("queries",),
    ("planning",),
    ("execution",),
    ("tools", "client", "__main__"),
)
# The packages and modules of planning, in the same manner.
PLANNING = (
    "device_types", "allocator_rules", "compression", "trace", "plan", "device", "latency", "bounds", "simulator",
    "memory_flow", "building_blocks", "job_planner", "policies", "batchsize", "scheduling", "explain",
)  # fmt: skip
# Those of execution.
EXECUTION = (
    "global_state", "raw_bytes", "evaluator", "codecs", "backends", "device_choice", "distributed", "capture",
    "runtime", "measuring", "data", "models", "training", "exchange",
)  # fmt: skip


def modules() -> dict[str, Path]:
    """Return paths of all modules of the library and of its importers by full name."""
    paths = {}
    for top in ("pg_tensile", "pyworker", "benchmarks", "scripts"):
        for path in (REPOSITORY / top).rglob("*.py"):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imported(path: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the modules of `names` that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in names else node.module


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    names = modules()
    return {name: set(imported(path, names)) & names.keys() - {name} for name, path in names.items()}


def wing(module: str) -> int:
    """Return the number of a module's wing; 0 is the lowest."""
    name = module.split(".")[1]
    return next(number for number, names in enumerate(WINGS) if name in names)


def cycles(graph: Mapping[str, set[str]]) -> Iterator[frozenset[str]]:
    """Yield the maximal sets of modules that import each other, directly or not."""
    remaining = {name: set(imports) for name, imports in graph.items()}
    while True:
        try:
            TopologicalSorter(remaining).prepare()
            return
        except CycleError as error:
            start = error.args[1][0]
        reached, back = closure(remaining, start), closure(transposed(remaining), start)
        yield frozenset(reached & back)
        for name in reached & back:
            remaining[name] -= reached & back


def closure(graph: Mapping[str, set[str]], start: str) -> set[str]:
    reached, waiting = {start}, [start]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def transposed(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    importers: dict[str, set[str]] = {name: set() for name in graph}
    for name, imports in graph.items():
        for module in imports:
            importers[module].add(name)
    return importers


def test_no_modules_import_each_other(graph: dict[str, set[str]]) -> None:
    assert set(cycles(graph)) == set()


def test_wings_import_lower_wings_only(graph: dict[str, set[str]]) -> None:
    library = {name for name in graph if name.startswith("pg_tensile.")}
    assert {(name, used) for name in library for used in graph[name] & library if wing(used) > wing(name)} == set()


@pytest.mark.parametrize(("wing", "order"), [("planning", PLANNING), ("execution", EXECUTION)])
def test_packages_import_lower_ones_of_their_wing_only(
    graph: dict[str, set[str]], wing: str, order: tuple[str, ...]
) -> None:
    inside = {name for name in graph if name.startswith(f"pg_tensile.{wing}.")}
    level = {name: order.index(name.split(".")[2]) for name in inside}
    imports = {(name, other) for name in inside for other in graph[name] & inside}
    assert {(name, other) for name, other in imports if level[other] > level[name]} == set()


def test_no_policy_imports_another(graph: dict[str, set[str]]) -> None:
    policies = {name for name in graph if name.startswith("pg_tensile.planning.policies.")}
    imports = {(name, other) for name in policies for other in graph[name] & policies}
    assert {(name, other) for name, other in imports if name.split(".")[3] != other.split(".")[3]} == set()


def test_the_library_imports_nothing_that_imports_it(graph: dict[str, set[str]]) -> None:
    outside = {(name, used) for name, imports in graph.items() for used in imports if name.startswith("pg_tensile")}
    assert {(name, used) for name, used in outside if not used.startswith("pg_tensile")} == set()


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"f", "a"}, "f": {"e"}}
    assert set(cycles(graph)) == {frozenset("bc"), frozenset("ef")}
    assert set(cycles({"a": {"b"}, "b": set()})) == set()
