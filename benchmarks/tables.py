"""Tables of benchmarks: as Markdown for documents, and for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table as lines of Markdown; none without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings), *lines, ""] if lines else []


def show_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], width: int = 100) -> None:
    """Print a table whose first column is words and whose others are numbers."""
    shown = Table(title=title)
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*row)
    Console(width=width).print(shown)
