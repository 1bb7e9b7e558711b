"""Queries of other dialects of SQL as PostgreSQL's, by sqlglot. A part that PostgreSQL does not have is an error, never
left out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import sqlglot
from sqlglot import exp
from sqlglot.errors import ErrorLevel, ParseError, SqlglotError

from pg_tensile.errors import TensileError

POSTGRES = "postgres"
DIALECTS = tuple(sorted(dialect.value for dialect in sqlglot.Dialects if dialect.value))


class DialectError(TensileError, ValueError):
    """A dialect that does not exist, or a statement that cannot be read in it or written in PostgreSQL's."""


def check_dialect(read: str) -> str:
    """Return the name of a dialect as sqlglot has it. Raises DialectError if there is none."""
    name = read.lower() if isinstance(read, str) else ""
    if name not in DIALECTS:
        raise DialectError(f'unknown dialect "{read}"', f"Use one of {', '.join(DIALECTS)}.")
    return name


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop sqlglot's warnings of statements that it does not know, and keeps as text: they are refused."""
    logger = logging.getLogger("sqlglot")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def parse(script: str, read: str, dialect: type[sqlglot.Dialect] | None = None) -> list[exp.Expr]:
    """Return the statements of a script. `dialect` reads it, if it is not `read` itself.

    Raises DialectError, with line and column."""
    try:
        with _quiet():
            trees = sqlglot.parse(script, read=dialect or check_dialect(read), error_level=ErrorLevel.IMMEDIATE)
    except ParseError as error:
        first = error.errors[0] if error.errors else {}
        said = str(first.get("description") or error).partition("\n")[0].partition(" but got <Token")[0]
        if not first.get("line"):
            raise DialectError(f"the statement is not {read} SQL: {said}", "Check its syntax.") from None
        near = f"{first['start_context']}{first['highlight']}{first['end_context']}".strip().partition("\n")[0]
        message = f"line {first['line']}, column {first['col']}: {said}"
        raise DialectError(message, f"The statement is read as {read} SQL.", f"near: {near}") from None
    except (SqlglotError, RecursionError) as error:
        raise DialectError(f"the statement is not {read} SQL: {str(error)[:200]}", "Check its syntax.") from None
    return [tree for tree in trees if tree is not None]


def written(tree: exp.Expr, read: str) -> str:
    """Return a statement in PostgreSQL's dialect. Raises DialectError."""
    if read == "bigquery":
        for table in tree.find_all(exp.Table):
            table.set("catalog", None)  # the project: a server of PostgreSQL has one
    try:
        with _quiet():
            return tree.sql(dialect=POSTGRES, unsupported_level=ErrorLevel.RAISE, comments=False)
    except (SqlglotError, RecursionError) as error:
        said = str(error).partition("\n")[0][:200]
        hint = "Write this part in PostgreSQL's dialect, and the query without read."
        raise DialectError(f"PostgreSQL cannot express the statement: {said}", hint) from None


def transpile(query: str, read: str) -> str:
    """Return a query of the dialect `read` in PostgreSQL's dialect.

    Raises DialectError for unknown dialects, syntax errors, what PostgreSQL does not have, and all but one SELECT."""
    read = check_dialect(read)
    trees = parse(query, read)
    if len(trees) != 1:
        number = "no statement" if not trees else f"{len(trees)} statements"
        raise DialectError(f"the query has {number}", "Give one SELECT.")
    if not isinstance(trees[0], exp.Query):
        raise DialectError("the query is not a SELECT", "Give one SELECT that returns the rows.")
    return written(trees[0], read)
