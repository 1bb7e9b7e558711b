"""Mutants of any file of the repository: a piece of its text, which is there once, replaced by another."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

from tests.repository import REPOSITORY


class Mutant(NamedTuple):
    """A fault that a programmer could make, and the file of tests that have to see it.

    `word`: only the tests whose names contain it are run; all of the file if it is empty."""

    name: str
    file: str
    text: str
    replacement: str
    tests: str
    word: str = ""

    @property
    def is_installed(self) -> bool:
        """Return whether the tests see the file through a server, so that it has to be installed for them."""
        return self.tests.startswith("tests/server/")

    def mutated(self, root: Path = REPOSITORY) -> str:
        """Return the file's text with the fault. Raises LookupError unless what it replaces is there exactly once."""
        source = (root / self.file).read_text()
        count = source.count(self.text)
        if count != 1:
            raise LookupError(f"{self.file} has the text of mutant {self.name} {count} times, not once: {self.text!r}")
        return source.replace(self.text, self.replacement)

    def selected(self, root: Path = REPOSITORY) -> list[str]:
        """Return the node ids of its tests, without those that `make test` leaves out as a whole."""
        tree = ast.parse((root / self.tests).read_text())
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        return [
            f"{self.tests}::{function.name}"
            for function in functions
            if self.word in function.name and "pytest.mark.long" not in map(ast.unparse, function.decorator_list)
        ]
