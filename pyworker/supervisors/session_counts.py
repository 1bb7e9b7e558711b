"""Counts of rows that sessions have predicted, which the controller stores: sessions may not write the tables.

A session wakes the controller when it has counted the first row of a version (csrc/predicting/drift_counts.c). The
counts are taken REPORT_S later, so that many rows are stored at once.
"""

from __future__ import annotations

import time

from pyworker.supervisors.server import Server

REPORT_S = 2.0
NEVER = 3600.0


class SessionCounts:
    """The counts of all versions in the controller's database."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._due: float | None = None  # time at which pending counts are taken

    def turn(self) -> float:
        """Store the counts if it is time; return the seconds until the next turn."""
        pending = self._server.call("tensile_internal._counts_pending()")
        self._server.commit()
        if not pending:
            self._due = None
            return NEVER
        now = time.monotonic()
        if self._due is None:
            self._due = now + REPORT_S
        if now < self._due:
            return self._due - now
        self._due = None
        self._server.attempt("counts of predicted rows cannot be stored", "tensile_internal._store_counts()")
        return NEVER
