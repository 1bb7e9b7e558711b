"""The end of a job's attempt, in its row. Standard library only.

DONE                                   finished
ERROR, a wrong query, model dropped    failed, with the error's own SQLSTATE
cancel_job, pg_cancel_backend          cancelled, and so is a job whose worker pg_terminate_backend stops
the trainer dies or hangs              interrupted, tried again after a pause, failed after pg_tensile.max_retries
the trainer's device has failed        the same
it has lost its Ray cluster or a rank  the same (an ERROR of class 08)
server stop, release_database, another pg_tensile.database   interrupted, with a checkpoint if there is time
role or extension dropped              nothing is written; the controller does the rest
"""

from __future__ import annotations

from typing import Any

from pyworker.supervisors.failures import Failure
from pyworker.supervisors.server import Server

END = "tensile_worker._job_end(text,text,text,text,text,text,text[],text)"
INTERRUPTED = {
    "server": "the server was stopped",
    "launcher": "pg_tensile.database was changed",
    "release": "its database was released (release_database)",
    "database": "a command such as CREATE DATABASE needed its database for itself",
}
TERMINATED = "its worker was terminated (pg_terminate_backend)"
CANCELLED = "cancelled by pg_cancel_backend"


class JobEnd:
    """Writes how an attempt at this process's job has ended."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def finish(self, done: dict[str, Any]) -> None:
        """Make the job `finished`, in the transaction that completes its results; `done` is DONE's header."""
        warnings = [self._server.text(str(warning)) for warning in done.get("warnings") or []]
        self._server.call(END, "finished", None, None, None, None, None, warnings or None, None)
        self._server.commit()

    def fail(self, failure: Failure) -> None:
        fields = (failure.message, failure.hint, failure.detail, failure.traceback)
        texts = (self._server.text(field) for field in fields)
        self._write_last_state(END, "failed", failure.sqlstate, *texts, None, None)

    def cancel(self, reason: str) -> None:
        self._write_last_state(END, "cancelled", None, None, None, None, None, None, reason)

    def interrupt(self, reason: str, *, retry: bool, traceback: str | None = None) -> None:
        text = self._server.text
        self._write_last_state("tensile_worker._job_interrupt(text,bool,text)", text(reason), retry, text(traceback))

    def stop(self) -> None:
        """End the attempt after SIGTERM: cancelled by pg_terminate_backend, else interrupted, to be resumed later."""
        self._server.rollback()
        cause = self.stop_cause()
        if cause == "terminated":
            self.cancel(TERMINATED)
        else:
            self.interrupt(INTERRUPTED[cause], retry=False)

    def stop_cause(self) -> str:
        """Return the cause of SIGTERM: server, launcher, release, database or terminated."""
        cause = self._server.call("tensile_worker._stop_cause()")
        self._server.commit()
        return str(cause)

    def end_after_sql_error(self, failure: Failure) -> None:
        """End the attempt after an SQL error in the bookkeeping.

        The extension may be gone; a full disk or a deadlock may be temporary, so the job is tried again.
        """
        self._server.rollback()
        if not self._server.installed():
            return
        if failure.sqlstate[:2] in ("40", "53"):
            self.interrupt(failure.message, retry=True)
        else:
            self.fail(failure)

    def _write_last_state(self, signature: str, *values: Any) -> None:
        """Write the job's last state; a cancel that arrives only now has no effect."""
        for _ in range(3):
            self._server.rollback()
            try:
                self._server.call(signature, *values)
                self._server.commit()
                return
            except self._server.plpy.spiexceptions.QueryCanceled:
                continue
            except self._server.plpy.SPIError:
                self._server.rollback()
                if self._server.installed():
                    raise
                return
