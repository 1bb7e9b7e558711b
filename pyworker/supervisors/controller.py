"""The controller: starts queued jobs, and settles the jobs whose worker is gone.

It sleeps on its latch, which every change of a job's state sets at commit, and uses the clock only while jobs run or
wait for their time. A turn has three phases: reap (jobs that should have a worker and have none), submit the jobs of
schedules that are due and advance tunings (tunings.py), then launch in the order of the queue while slots are free; the
fork server of their processes is started with the first (fork_server.py). Between them, it begins and stops automatic
calibrations (auto_calibration.py), and stores the counts of rows that sessions have predicted (session_counts.py). From
time to time, ended jobs are deleted (pg_tensile.job_retention). All its state
is in the catalogue and in shared memory, so that it can be killed at any moment. SQL errors end the turn, not the
controller (Server.loop).

All jobs would wait while it waits for a lock. So it passes over rows that another transaction has locked (SKIP LOCKED),
and looks at them again after BUSY; any other lock it awaits for at most LOCK_TIMEOUT.
"""

from __future__ import annotations

import time
from typing import Any

from pyworker.supervisors.auto_calibration import AutoCalibration
from pyworker.supervisors.fork_server import ForkServer
from pyworker.supervisors.job.end import TERMINATED
from pyworker.supervisors.server import Server
from pyworker.supervisors.session_counts import SessionCounts
from pyworker.supervisors.tunings import Tunings

BUSY = 1.0  # seconds between turns while jobs run
IDLE = 30.0
LOCK_TIMEOUT = "500ms"
SOON = 0.1  # seconds before a schedule that is due is looked at again
ATTACH_LIMIT = 30.0  # seconds that a launched worker may take to attach to its slot
FREE_CRASHES = 3  # attempts that restarts of the server may cost a job before they count as its fault
RETENTION_PAUSE = 30.0  # seconds between two deletions of expired jobs
SCHEDULES = (  # name, function that returns those that are due, function that runs one
    ("schedule", "tensile_internal._due_schedules()", "tensile_internal._run_schedule(int8)"),
    ("evaluation", "tensile_internal._due_evaluations()", "tensile_internal._run_evaluation(int8)"),
)
NO_WORKER = "no background worker is free (max_worker_processes)"
NO_SLOT = "all job slots are taken (pg_tensile.max_jobs)"


async def run(plpy: Any) -> None:
    """Run the controller process."""
    await Controller(Server(plpy)).run()


class Controller:
    """Launches and reaps jobs; its attributes only prevent repetition, so that a restart loses nothing."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._started = False
        self._launch_after = 0.0  # after a failed launch: the earliest time of the next
        self._launch_pause = BUSY
        self._is_held_up = False  # an orphan or a job of the queue may be locked by another transaction
        self._deletion_after = 0.0
        self._calibration = AutoCalibration(server)
        self._fork_server = ForkServer(server)
        self._tunings = Tunings(server)
        self._counts = SessionCounts(server)

    async def run(self) -> None:
        set_config = "pg_catalog.set_config(text,text,bool)"
        self._server.call(set_config, "lock_timeout", LOCK_TIMEOUT, False)
        self._server.commit()
        try:
            await self._server.loop(self._turn, lambda: self._tunings.fd)
        finally:
            self._fork_server.close()
            await self._tunings.close()

    async def _turn(self) -> float:
        """Reap, submit what is scheduled, launch and delete expired jobs; return the seconds until the next turn."""
        self._reap()
        self._fork_server.reap()
        pause = self._calibration.turn()
        self._run_schedules()
        await self._tunings.turn()
        self._launch()
        self._delete_expired()
        return min(pause, self._counts.turn(), self._pause())

    # -- reaping ------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        orphans = self._server.rows("SELECT job, state, attempt, terminated, error FROM tensile_internal._orphans()")
        self._is_held_up = bool(orphans)
        for row in orphans:
            if row["terminated"]:
                self._attempt(
                    row["job"], "settled", "tensile_internal._reap_terminated(int8,text)", row["job"], TERMINATED
                )
            elif row["error"] is not None:
                self._interrupt(row["job"], f"its worker ended with an error: {row['error']}", retry=True)
            elif self._started:
                self._interrupt(row["job"], "its worker ended unexpectedly", retry=True)
            else:
                # A job that crashes the server must not do so for ever.
                self._interrupt(row["job"], "the server was restarted", retry=row["attempt"] > FREE_CRASHES)
        self._started = True
        slow = "SELECT job FROM tensile_internal._job_slots() WHERE state = 'reserved' AND seconds > $1"
        for row in self._server.rows(slow, ["float8"], ATTACH_LIMIT):
            self._interrupt(row["job"], f"its worker did not start within {ATTACH_LIMIT:.0f} s", retry=True)

    def _interrupt(self, job: int, reason: str, *, retry: bool) -> None:
        self._attempt(job, "settled", "tensile_internal._reap(int8,text,bool)", job, reason, retry)

    def _attempt(self, job: int, done: str, signature: str, *values: Any) -> Any:
        """Call a function for one job; an error of it must not keep others from being launched."""
        return self._server.attempt(f"job {job} cannot be {done}", signature, *values)

    # -- schedules ----------------------------------------------------------------------------------------------------

    def _run_schedules(self) -> None:
        """Submit the trainings and evaluations that are due; an error of one must not keep jobs from being launched."""
        for name, due, run in SCHEDULES:
            rows = self._server.rows(f"SELECT schedule FROM {due}")
            self._server.commit()
            for row in rows:
                self._server.attempt(f"{name} {row['schedule']} cannot be run", run, row["schedule"])

    # -- launching ----------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        if time.monotonic() < self._launch_after:
            return
        live = self._live_jobs()  # may include an interrupted job, whose worker is still exiting
        most = self._server.number("pg_tensile.max_jobs")
        free = self._server.call("tensile_internal._free_slots()")  # sessions in explain_training take some
        if not free:
            self._server.commit()
            return
        queue = self._server.rows("SELECT job, is_held FROM tensile_internal._queue_next($1)", ["int4"], most)
        self._server.commit()
        self._is_held_up |= any(row["is_held"] for row in queue)
        waiting = [row["job"] for row in queue if row["job"] not in live and not row["is_held"]]
        for job in waiting[:free]:
            if not self._start(job):
                self._launch_after = time.monotonic() + self._launch_pause
                self._launch_pause = min(2 * self._launch_pause, IDLE / 2)
                return
            self._launch_pause = BUSY

    def _start(self, job: int) -> bool:
        """Launch a worker for the job; return False if none can be had now.

        `starting` is committed first, so that no worker runs unseen.
        """
        owner = self._attempt(job, "started", "tensile_internal._job_starting(int8)", job)
        if owner is None:
            return True  # cancelled or locked meanwhile, or failed because its role or model is gone
        self._fork_server.ensure()
        answer = self._server.call("tensile_internal._launch_worker(int8,oid)", job, owner)
        if answer == "started":
            self._server.commit()
            return True
        reason = NO_WORKER if answer == "no_worker" else NO_SLOT
        is_new = self._server.call("tensile_internal._job_requeue(int8,text)", job, reason)
        self._server.commit()
        if is_new:
            self._server.plpy.log(f"pg_tensile: job {job} stays queued: {reason}")
        return False

    # -- retention ----------------------------------------------------------------------------------------------------

    def _delete_expired(self) -> None:
        """Delete ended jobs and counts of predicted rows that have expired, from time to time."""
        if time.monotonic() < self._deletion_after:
            return
        for what in ("jobs", "drift", "tunings"):
            self._server.attempt(f"expired {what} cannot be deleted", f"tensile_internal._forget_{what}()")
        self._deletion_after = time.monotonic() + RETENTION_PAUSE

    # -- the clock ----------------------------------------------------------------------------------------------------

    def _live_jobs(self) -> set[int]:
        return {row["job"] for row in self._server.rows("SELECT job FROM tensile_internal._job_slots()")}

    def _pause(self) -> float:
        pauses = [IDLE]
        if self._live_jobs() or self._is_held_up or self._tunings.fd >= 0:
            pauses.append(BUSY)
        if self._launch_after > time.monotonic():
            pauses.append(self._launch_after - time.monotonic())
        delay_ms = self._server.call("tensile_internal._queue_delay_ms()")
        if delay_ms is not None:
            pauses.append(delay_ms / 1000)
        for delay in ("tensile_internal._schedule_delay_ms()", "tensile_internal._tuning_delay_ms()"):
            delay_ms = self._server.call(delay)
            if delay_ms is not None:
                pauses.append(max(SOON, delay_ms / 1000))
        self._server.commit()
        return min(pauses)
