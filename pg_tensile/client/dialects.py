"""Queries that are written in another dialect of SQL."""

from __future__ import annotations

from pg_tensile.client.calls import noted
from pg_tensile.client.frames import MissingPackageError


def in_postgres(query: str, read: str | None) -> str:
    """Return a query of the dialect `read` in the server's own; None means that it is already.

    Raises DialectError, and MissingPackageError if sqlglot is not installed."""
    if read is None:
        return query
    try:
        from pg_tensile.queries.dialects import DialectError, transpile
    except ImportError:
        hint = "pip install sqlglot installs it."
        raise noted(MissingPackageError("sqlglot is not installed, which reads other dialects of SQL", hint)) from None
    try:
        return transpile(query, read)
    except DialectError as error:
        raise noted(error) from None
