"""PL/Python for supervisors that run in a test."""

from __future__ import annotations

import json
import sys
from typing import Any

from pyworker.version import VERSION

NUMBERS = ("pg_tensile.child_memory", "pg_tensile.executor_timeout", "pg_tensile.nice")


class Plpy:
    """Part of PL/Python that a supervisor needs as long as it reads no tables."""

    SPIError = RuntimeError

    def __init__(self) -> None:
        self.lines: list[str] = []

    def prepare(self, sql: str, types: list[str]) -> str:
        return sql

    def execute(self, sql: str, values: object = ()) -> list[dict[str, Any]]:
        if "server_encoding" in sql:
            return [{"encoding": "UTF8", "library": VERSION, "extension": 1}]
        return [{"value": json.dumps(dict.fromkeys(NUMBERS, "0")) if "pg_settings" in sql else sys.executable}]

    def commit(self) -> None:
        pass

    def log(self, line: str) -> None:
        self.lines.append(line)

    notice = log
