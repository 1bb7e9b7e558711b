"""A tuning as an object: its state, its trials, and the best of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pg_tensile.client.calls import converted
from pg_tensile.client.connection import ServerError
from pg_tensile.client.frames import TRIALS, frame
from pg_tensile.client.job import INTERVAL_S, JobTimeout
from pg_tensile.client.session import Row, Session
from pg_tensile.errors import TensileError, noted

if TYPE_CHECKING:
    import pandas as pd

STATUS = "SELECT * FROM tensile.tunings WHERE tuning = %s"
TRIALS_OF_TUNING = """
    SELECT number AS trial, state, value, params, job, epochs, least_bytes, version, started_at, ended_at, error
    FROM tensile.trials WHERE tuning = %s ORDER BY number
"""


class TuningFailed(TensileError):
    """Error of a failed tuning: message and hint are its own, as `wait_for_tuning` would raise them in SQL."""

    def __init__(self, tuning: int, row: Row) -> None:
        super().__init__(row["error"] or f"tuning {tuning} has failed", row["hint"])
        self.tuning = tuning
        self.sqlstate: str | None = row["sqlstate"]


class Tuning:
    """A tuning of the server, as `Client.tune` and `Client.tuning` return it. It continues without this object and
    without the connection."""

    def __init__(self, session: Session, number: int) -> None:
        self._session = session
        self.number: int = converted("tuning", number)
        self.model: str = self._one("SELECT model FROM tensile.tunings WHERE tuning = %s")["model"]

    def _one(self, query: str) -> Row:
        rows = self._session.rows(query, (self.number,))
        if not rows:
            hint = "The tunings you may see are listed in tensile.tunings."
            raise noted(ServerError(f"tuning {self.number} does not exist", hint))
        return rows[0]

    @property
    def state(self) -> str:
        """The state now: queued, running, comparing (the best version with the deployed one), finished, failed or
        cancelled."""
        return str(self._one(STATUS)["state"])

    @property
    def best(self) -> dict[str, Any] | None:
        """The best trial so far: `trial`, `value`, `params` and `version`; None if none has finished."""
        row = self._one(STATUS)
        if row["best_trial"] is None:
            return None
        return {name: row[f"best_{name}"] for name in ("trial", "value", "params", "version")}

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the tuning has ended and return "finished" or "cancelled".

        Raises TuningFailed if it has failed, JobTimeout after `timeout` seconds (None means to wait without limit), and
        ConnectionLost if the connection breaks. The connection is free between two queries."""
        deadline = None if timeout is None else time.monotonic() + converted("timeout", timeout)
        while True:
            row = self._one("SELECT state, ended_at, sqlstate, error, hint FROM tensile.tunings WHERE tuning = %s")
            if row["state"] == "failed":
                raise noted(TuningFailed(self.number, row))
            if row["ended_at"] is not None:
                return str(row["state"])
            left = INTERVAL_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                hint = f"Wait longer, or stop it with tuning({self.number}).cancel()."
                message = f"tuning {self.number} has not ended in time: it is {row['state']}"
                raise noted(JobTimeout(message, hint, "The tuning continues."))
            time.sleep(min(left, INTERVAL_S))

    def cancel(self) -> bool:
        """Stop the tuning and its jobs (SQL: cancel_tuning). Return False if it had ended already."""
        return bool(self._session.answer("cancel_tuning", {"tuning": self.number})[0])

    def trials(self) -> pd.DataFrame:
        """Return the view tensile.trials: a row for each trial, with the values that were chosen for it."""
        return frame(TRIALS, self._session.rows(TRIALS_OF_TUNING, (self.number,)))

    def __repr__(self) -> str:
        return f"<tuning {self.number} of model {self.model!r}>"
