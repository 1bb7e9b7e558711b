"""Calls of the extension's SQL functions.

Arguments are passed by name, as parameters of the query, with the types that the functions declare. Only quoted names
are written into the SQL.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from psycopg import sql

from pg_tensile.errors import TensileError, noted


class ArgumentError(TensileError):
    """An argument of a method has the wrong type, or names a file that cannot be written."""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _optional_integer(value: Any) -> int | None:
    return None if value is None else _integer(value)


def _number(value: Any) -> float:
    if isinstance(value, bool | str | bytes):
        raise TypeError
    return float(value)


def _size(value: Any) -> str:
    return value if isinstance(value, str) else f"{_integer(value)}B"


def _interval(value: Any) -> timedelta | str:
    return value if isinstance(value, timedelta | str) else timedelta(seconds=_number(value))


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)


class Kind(NamedTuple):
    """A type of arguments: its name in SQL, the conversion of Python values to it, and what it accepts, in words."""

    type: str
    convert: Callable[[Any], Any]
    what: str


TEXT = Kind("text", _text, "a str")
FLAG = Kind("bool", _flag, "True or False")
INT4, INT8 = (Kind(name, _integer, "a whole number") for name in ("int4", "int8"))
OPTIONAL_INT4 = Kind("int4", _optional_integer, "a whole number or None")
FLOAT8 = Kind("float8", _number, "a number")
SIZE = Kind("text", _size, 'a size such as "8GB", or a number of bytes')
INTERVAL = Kind("interval", _interval, "a timedelta, a number of seconds, or an interval as a str")
TABLE = Kind("regclass", _text, "the name of a table as a str")
JSON = Kind("jsonb", _json, "a dict that JSON can express, or JSON as a str")

ARGUMENTS = {
    **dict.fromkeys(("name", "description", "model", "query", "target", "optimizer", "policy", "by", "metric"), TEXT),
    **dict.fromkeys(("architecture", "options", "space", "halving", "features"), JSON),
    **dict.fromkeys(("epochs", "batch_size", "priority", "version", "seconds", "repeats"), INT4),
    **dict.fromkeys(("trials", "parallel"), INT4),
    **dict.fromkeys(("seed", "job", "rows", "tuning"), INT8),
    **dict.fromkeys(("learning_rate", "validation", "timeout", "drift", "coverage"), FLOAT8),
    **dict.fromkeys(("split_by", "validation_query", "reason"), TEXT),
    **dict.fromkeys(("max_time", "every"), INTERVAL),
    "source": TABLE,
    "memory_budget": SIZE,
    "keep_versions": OPTIONAL_INT4,
    "replace": FLAG,
}


def converted(name: str, value: Any) -> Any:
    """Return the query parameter for argument `name`. Raises ArgumentError if the value does not fit its type."""
    kind = ARGUMENTS[name]
    try:
        return kind.convert(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        detail = str(error) or f"it is of type {type(value).__name__}"
        raise noted(ArgumentError(f"argument {name} is not {kind.what}", f"Pass {kind.what}.", detail)) from None


def call(
    schema: str, function: str, required: Mapping[str, Any], optional: Mapping[str, Any] | None = None
) -> tuple[sql.Composed, dict[str, Any]]:
    """Return the SQL of `schema.function(name => value, …)` and the query's parameters.

    Arguments of `optional` that are None are left to the function's defaults. Raises ArgumentError."""
    given = dict(required) | {name: value for name, value in (optional or {}).items() if value is not None}
    parameters = {name: converted(name, value) for name, value in given.items()}
    arguments = [
        sql.SQL("{} => {}::{}").format(
            sql.Identifier(name), sql.Placeholder(name), sql.Identifier("pg_catalog", ARGUMENTS[name].type)
        )
        for name in parameters
    ]
    name = sql.Identifier(schema.replace("%", "%%"), function)  # a lone % would begin a placeholder
    return sql.SQL("{}({})").format(name, sql.SQL(", ").join(arguments)), parameters
