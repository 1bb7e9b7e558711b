"""Automatic calibrations: the controller begins one when a device needs it and the server has been idle for a while.

A calibration is a job (sql/memory/calibration.sql), so that a worker runs it like any other. It begins only if the
machine was not busy, either, while the server was idle. Another job stops it at once, and so does
`pg_tensile.auto_calibrate = off`; so do a machine that has become busy, and the end of its time. It is begun again
after a pause, which doubles with each interruption and each failure; after MOST_FAILURES failures no more, until the
server is restarted or a setting of pg_tensile changes. Standard library only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pyworker.supervisors.machine_load import MachineLoad
from pyworker.supervisors.server import Server

MOST_FAILURES = 3
MOST_PAUSE = 3600.0  # seconds between two attempts, at most
CHECK_S = 10.0  # between two looks at the load of the machine and the time, while a calibration runs
NEVER = float("inf")
ANNOUNCEMENT = (
    'pg_tensile: device "{device}" is being calibrated while the server and the machine are idle, at the lowest '
    "priority and for at most {minutes:g} minutes; pg_tensile.auto_calibrate = off prevents it"
)
SWITCHED_OFF = "pg_tensile.auto_calibrate was switched off"
GIVEN_UP = "; it is not tried again until the server is restarted or a setting of pg_tensile changes"


@dataclass
class _Attempts:
    """Unsuccessful attempts to calibrate a device. `error` is that of the last failure."""

    failures: int = 0
    interruptions: int = 0
    after: float = 0.0  # earliest time of the next
    error: str | None = None

    def postpone(self, pause: float) -> None:
        doubled = pause * 2.0 ** min(self.failures + self.interruptions - 1, 30)
        self.after = time.monotonic() + min(doubled, MOST_PAUSE)


class AutoCalibration:
    """The controller's part that begins and stops automatic calibrations; `turn` is part of each of its turns."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._idle_since = time.monotonic()
        self._load = MachineLoad()  # since `_idle_since`, or the last look at a running calibration
        self._running: dict[str, Any] | None = None  # id and device of the calibration that was begun
        self._began = self._looked = 0.0
        self._announced = False
        self._attempts: dict[str, _Attempts] = {}
        self._settings = ""

    def turn(self) -> float:
        """Stop, settle or begin a calibration; return the seconds until the next turn."""
        jobs = self._server.rows(
            "SELECT id, automatic, options->>'device' AS device FROM tensile_internal.jobs"
            " WHERE ended_at IS NULL ORDER BY id"
        )
        running = next((job for job in jobs if job["automatic"]), None)
        others = [job["id"] for job in jobs if not job["automatic"]]
        enabled = self._server.setting("pg_tensile.auto_calibrate") == "on"
        if running is not None and self._running is None:  # an earlier controller has begun it
            self._began = self._looked = time.monotonic()
        self._settle(running)
        self._running = running
        if not enabled:
            self._attempts.clear()
        if running is None and enabled and not others and not self._sessions():
            return self._begin_when_due()
        if running is None:
            self._load.read()
        self._idle_since = time.monotonic()
        reason = f"job {others[0]} was submitted" if others else None if enabled else SWITCHED_OFF
        if running is not None and (reason := reason or self._limit()) is not None:
            self._stop(running["id"], reason)
        self._server.commit()
        return NEVER if running is None or reason else CHECK_S  # whatever ends it wakes the controller

    def _limit(self) -> str | None:
        """Return why the running calibration is to stop by itself, or None."""
        now = time.monotonic()
        if now < self._looked + CHECK_S:
            return None
        self._looked = now
        times, load = self._times(), self._load.read().urgent
        if now > self._began + times["most_s"]:
            return f"it has taken longer than {times['most_s']:g} seconds"
        return f"the machine is busy: {load:.0%}" if load > times["most_load"] else None

    def _times(self) -> dict[str, Any]:
        return self._server.rows("SELECT * FROM tensile_internal._automatic_calibration_times()")[0]

    def _sessions(self) -> bool:
        """Return whether trainers run in sessions, or that of a job has not quite ended."""
        return bool(self._server.call("tensile_internal._free_slots()") < self._server.number("pg_tensile.max_jobs"))

    def _stop(self, job: int, reason: str) -> None:
        what = f"calibration {job} cannot be stopped"
        self._server.attempt(what, "tensile_internal._stop_calibration(int8,text)", job, reason)

    # -- beginning ----------------------------------------------------------------------------------------------------

    def _begin_when_due(self) -> float:
        due = self._server.rows("SELECT device, cause FROM tensile_internal._uncalibrated()")
        times = self._times()
        self._server.commit()
        if due and self._attempts:
            self._forget_attempts_after_changes()
        earliest, chosen = NEVER, None
        for row in due:
            attempts = self._attempts.get(row["device"], _Attempts())
            if attempts.failures < MOST_FAILURES and attempts.after < earliest:
                earliest, chosen = attempts.after, row
        if chosen is None:
            return NEVER
        pause = max(earliest, self._idle_since + times["idle_s"]) - time.monotonic()
        if pause > 0:
            return float(pause)
        self._idle_since = time.monotonic()
        if self._load.read().busy > times["most_load"]:
            return float(times["idle_s"])
        if not self._attempts:
            self._settings = self._all_settings()
        job = self._server.call(
            "tensile_internal._calibrate_automatically(text,text,int4)",
            chosen["device"],
            chosen["cause"],
            times["device_seconds"],
        )
        self._server.commit()
        self._running = {"id": job, "device": chosen["device"]}
        self._began = self._looked = time.monotonic()
        if not self._announced:
            self._server.plpy.log(ANNOUNCEMENT.format(device=chosen["device"], minutes=times["most_s"] / 60))
            self._announced = True
        return CHECK_S

    def _forget_attempts_after_changes(self) -> None:
        """Begin again if a setting differs from those of the first unsuccessful attempt."""
        settings = self._all_settings()
        if settings != self._settings:
            self._attempts.clear()
            self._settings = settings

    def _all_settings(self) -> str:
        sql = (
            "SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) AS value"
            " FROM pg_catalog.pg_settings WHERE name LIKE 'pg\\_tensile.%'"
        )
        settings = str(self._server.rows(sql)[0]["value"])
        self._server.commit()
        return settings

    # -- the end ------------------------------------------------------------------------------------------------------

    def _settle(self, running: dict[str, Any] | None) -> None:
        """Take note of how the calibration has ended, if it has."""
        ended = self._running
        if ended is None or (running is not None and running["id"] == ended["id"]):
            return
        sql = "SELECT state, error, sqlstate FROM tensile_internal.jobs WHERE id = $1"
        rows = self._server.rows(sql, ["int8"], ended["id"])
        state = rows[0]["state"] if rows else "cancelled"
        if state == "finished":
            self._attempts.pop(ended["device"], None)
            return
        attempts = self._attempts.setdefault(ended["device"], _Attempts())
        if state == "failed":
            attempts.failures += 1
            self._log_failure(ended, attempts, rows[0]["error"])
        else:
            attempts.interruptions += 1
        attempts.postpone(self._times()["pause_s"])

    def _log_failure(self, ended: dict[str, Any], attempts: _Attempts, error: str) -> None:
        """Write the failure to the server's log and to scheduler_log: each error once, and the last failure."""
        gives_up = attempts.failures == MOST_FAILURES
        if error == attempts.error and not gives_up:
            return
        attempts.error = error
        reason = error + (GIVEN_UP if gives_up else "")
        self._server.call(
            "tensile_internal._log(text,int8,int8,text,text)", "calibration", ended["id"], None, ended["device"], reason
        )
        self._server.plpy.log(f'pg_tensile: the automatic calibration of device "{ended["device"]}" failed: {reason}')
