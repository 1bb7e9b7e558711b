"""The input of the view: the newest snapshot, the history, and the user's choices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pg_tensile.tools.top import details
from pg_tensile.tools.top.history import History
from pg_tensile.tools.top.snapshot import Job, Snapshot
from pg_tensile.tools.top.table import ORDERS


@dataclass(frozen=True)
class ViewState:
    """State of the view. `alarm`: why the snapshot is old. `note`: a question or an answer, for the footer."""

    snapshot: Snapshot
    history: History
    where: str  # database, role and address of the server
    order: str = "job"  # one of ORDERS
    selected: int | None = None  # number of a job
    page: str = "jobs"  # or "details" or "help"
    details: details.Row | None = None
    offset: int = 0  # lines by which details or help are scrolled down
    alarm: str = ""
    note: str = ""

    @cached_property
    def running(self) -> list[Job]:
        """The running jobs, in the chosen order."""
        return sorted((job for job in self.snapshot.jobs if not job.waits), key=ORDERS[self.order])

    @cached_property
    def queue(self) -> list[Job]:
        return self.snapshot.queue()

    @property
    def jobs(self) -> list[Job]:
        """All jobs, in the order of their lines."""
        return self.running + self.queue
