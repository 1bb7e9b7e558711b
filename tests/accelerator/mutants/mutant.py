"""Mutants: one place of the runtime changed, named by its file, its function and its line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.repository import REPOSITORY

EXECUTION = REPOSITORY / "pg_tensile" / "execution"


class Place(NamedTuple):
    """A line of code, without its comment, in a function of a file below pg_tensile/execution."""

    file: str
    function: str  # with its class
    line: str


class Mutant(NamedTuple):
    """Lines of one function replaced. `survives` is the reason why nothing finds it, empty if something does."""

    file: str
    function: str
    change: dict[str, str]
    survives: str = ""
    also: Mutant | None = None  # in another file, at the same time

    @property
    def name(self) -> str:
        text = f"{self.file}, {self.told}"
        return f"{text}; {self.also.name}" if self.also else text

    @property
    def told(self) -> str:
        """The change in one line, without the file."""
        changes = (f"without {line}" if new == "pass" else f"{line} → {new}" for line, new in self.change.items())
        return f"{self.function}: {'; '.join(changes)}".replace("\n", "; ")

    @property
    def places(self) -> list[Place]:
        return [Place(self.file, self.function, line) for line in self.change]

    @property
    def module(self) -> str:
        path = (EXECUTION / self.file).relative_to(REPOSITORY).with_suffix("")
        return ".".join(path.parts[:-1] if path.name == "__init__" else path.parts)

    def sources(self) -> dict[str, str]:
        """Return the mutated source by module.

        Raises LookupError if the table names a line that is not there, or not once."""
        return {self.module: self.mutated()} | (self.also.sources() if self.also else {})

    def mutated(self) -> str:
        text = (EXECUTION / self.file).read_text()
        lines = text.splitlines()
        for place in self.places:
            number = find(text, place)
            indentation = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
            lines[number] = "\n".join(indentation + new for new in self.change[place.line].split("\n"))
        return "\n".join(lines) + "\n"


def find(text: str, place: Place) -> int:
    """Return the index of the place's line. Raises LookupError."""
    span = next((span for name, span in functions(ast.parse(text)) if name == place.function), None)
    if span is None:
        raise LookupError(f"the table names a function that is not there: {place.function} in {place.file}")
    lines = text.splitlines()
    numbers = [number for number in span if code(lines[number]) == place.line]
    if len(numbers) != 1:
        raise LookupError(f"the table names a line that is there {len(numbers)} times, not once: {place}")
    return numbers[0]


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, range]]:
    """Yield the name of each function and method, and the indices of its lines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            yield prefix + node.name, range(node.lineno - 1, node.end_lineno)


def code(line: str) -> str:
    return line.split("  #")[0].strip()


# ---- completeness ----------------------------------------------------------------------------------------------------

# What orders the work of streams and threads, or keeps memory alive for work that is still to come.
ORDERING = {
    "Event", "_hold", "acquire", "finalize", "has_ended", "idle", "join", "query", "quiesce", "record", "record_event",
    "record_stream", "release", "synchronize", "wait", "wait_event", "wait_stream",
}  # fmt: skip
HOLDERS = {"held", "_asked", "_iterations", "_kept", "_queue"}


def ordering_places(path: Path) -> set[Place]:
    """Return every line of a file that calls something in ORDERING, or adds to or takes from one of HOLDERS."""
    text = path.read_text()
    lines, spans, places = text.splitlines(), list(functions(ast.parse(text))), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and orders(node.func):
            number = node.lineno - 1
            name = next(name for name, span in spans if number in span)
            places.add(Place(str(path.relative_to(EXECUTION)), name, code(lines[number])))
    return places


def orders(called: ast.expr) -> bool:
    if isinstance(called, ast.Name):
        return called.id in ORDERING
    if not isinstance(called, ast.Attribute) or isinstance(called.value, ast.Constant | ast.JoinedStr):
        return False
    owner = called.value.attr if isinstance(called.value, ast.Attribute) else getattr(called.value, "id", "")
    return called.attr in ORDERING or owner in HOLDERS
