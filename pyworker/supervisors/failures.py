"""Ends of a supervisor's work that are exceptions, and the errors of SQL and of children as one of them, `Failure`.

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


class Gone(Exception):
    """The extension, or the role this process runs as, was dropped: leave at once and touch nothing."""


class CancelRequest(Exception):
    """pg_cancel_backend was called while the supervisor waited."""

    def __init__(self) -> None:
        super().__init__("canceling statement due to user request")


class Stopped(Exception):
    """SIGTERM came before there was anything to save."""


class Failure(Exception):
    """A job or request fails for good; the fields are those of a PostgreSQL error."""

    def __init__(
        self,
        sqlstate: str,
        message: str,
        *,
        hint: str | None = None,
        detail: str | None = None,
        traceback: str | None = None,
    ) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.message = message
        self.hint = hint
        self.detail = detail
        self.traceback = traceback


class ChildDied(Exception):
    """The child ended, or had to be killed, without having sent an ERROR frame.

    `traceback` is the tail of its output, `code` its `subprocess.Popen.returncode`; each is None if it is not known.
    """

    def __init__(self, reason: str, traceback: str | None, code: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.traceback = traceback
        self.code = code


DEVICE_FAULT = "58000"  # a child's SQLSTATE after its device has failed
CONNECTION = "08"  # class of a child's SQLSTATEs after it has lost what it was connected to, such as a Ray cluster
PROTOCOL = "08P01"  # of the same class; trying again does not help


def failure_of_sql(error: Any) -> Failure:
    """Return the PostgreSQL error behind a plpy.SPIError."""
    spidata = getattr(error, "spidata", None) or (None, None, None)
    code, detail, hint = spidata[:3]
    sqlstate = getattr(error, "sqlstate", "XX000") if code is None else unpack_sqlstate(code)
    return Failure(sqlstate, str(error), hint=hint, detail=detail)


def unpack_sqlstate(code: int) -> str:
    """Return the five characters of a SQLSTATE in PostgreSQL's packed form, six bits each."""
    return "".join(chr(ord("0") + (code >> 6 * position & 0x3F)) for position in range(5))


def failure_of_frame(header: Mapping[str, Any]) -> Failure:
    """Return the failure that a child's ERROR frame reports.

    A SQLSTATE that the server could not raise (csrc/base/owner.c) becomes XX000.
    """
    sqlstate = header.get("sqlstate")
    if not isinstance(sqlstate, str) or not re.fullmatch("(?!0[0-2])[0-9A-Z]{5}", sqlstate):
        sqlstate = "XX000"
    text = {key: str(header[key]) for key in ("hint", "detail", "traceback") if header.get(key)}
    return Failure(sqlstate, str(header.get("message") or "the child gave no message"), **text)


def end_of_trainer(header: Mapping[str, Any]) -> Failure | ChildDied:
    """Return what the ERROR frame of a job's trainer means.

    After a fault of its device, or the loss of a connection, the process is as good as dead, and the job continues in
    another one.
    """
    failure = failure_of_frame(header)
    reason = failure.message.partition("\n")[0]
    if failure.sqlstate == DEVICE_FAULT:
        return ChildDied(f"trainer has lost its device: {reason}", failure.traceback)
    if failure.sqlstate.startswith(CONNECTION) and failure.sqlstate != PROTOCOL:
        return ChildDied(reason, failure.traceback or failure.detail)
    return failure
