"""Queries that are written in another dialect of SQL."""

from __future__ import annotations

from pg_tensile.errors import noted


def in_postgres(query: str, read: str | None) -> str:
    """Return a query of the dialect `read` in the server's own; None means that it is already.

    Raises DialectError."""
    if read is None:
        return query
    from pg_tensile.queries.dialects import DialectError, transpile

    try:
        return transpile(query, read)
    except DialectError as error:
        raise noted(error) from None
