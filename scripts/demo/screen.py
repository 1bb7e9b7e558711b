"""SQL and its results on the screen, as a user would see them in psql."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import Any, NamedTuple

import psycopg
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

Connection = psycopg.Connection[tuple[Any, ...]]
console = Console(highlight=False)


class DemoError(Exception):
    """An error that the user can understand and act upon; it ends the demo."""


def print_sql(sql: str) -> None:
    console.print()
    console.print(Syntax(sql.strip(), "sql", background_color="default", word_wrap=True))


def print_notice(diagnostic: psycopg.errors.Diagnostic) -> None:
    """Print a message of the server that is not an error, as psql does."""
    console.print(f"{diagnostic.severity}:  {diagnostic.message_primary}", markup=False, style="yellow")


class Rows(NamedTuple):
    """The result of a query."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


def rows_of(conn: Connection, sql: str, **parameters: Any) -> Rows | None:
    """Return the rows of a query; None if it is not a query, or has no rows."""
    cursor = conn.execute(sql.encode(), parameters or None)
    rows = cursor.fetchall() if cursor.description is not None else []
    return Rows([column.name for column in cursor.description or []], rows) if rows else None


def print_rows(result: Rows) -> None:
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for index, column in enumerate(result.columns):
        values = [row[index] for row in result.rows]
        numeric = all(isinstance(value, int | float | Decimal) or str(value).isnumeric() for value in values)
        table.add_column(column, justify="right" if numeric else "left", no_wrap=len(result.columns) == 1)
    for row in result.rows:
        table.add_row(*("" if value is None else f"{value}" for value in row))
    console.print(table)


def show(conn: Connection, sql: str, **parameters: Any) -> Rows | None:
    """Print SQL as a user would type it, run it, and print and return the rows of a query as a table."""
    print_sql(
        sql % {name: f"'{{{','.join(map(str, value))}}}'" for name, value in parameters.items()} if parameters else sql
    )
    started = time.monotonic()
    result = rows_of(conn, sql, **parameters)
    seconds = time.monotonic() - started
    if result is not None:
        print_rows(result)
        count = len(result.rows)
        console.print(f"({count} row{'s'[: count != 1]} in {seconds:.1f} s)", style="dim")
    return result
