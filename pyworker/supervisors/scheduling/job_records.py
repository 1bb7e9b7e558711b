"""Records that the scheduler keeps of each job between two turns. Standard library only.

They only save work, for everything that counts is in the catalogue and in shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SEARCH_AFTER = 60.0  # seconds with a trace before a search is made for a job of policy joint: short jobs gain nothing
SEARCH_BEYOND = 1.05  # times the iteration without a plan: beyond it, a search may gain something


class Plan(NamedTuple):
    """Plan as the planner has made it."""

    device: str
    captured: str
    fields: dict[str, Any]
    buffers: list[memoryview]  # rows; order; for each step: operator, bytes under the plan, without one; groups
    reason: str

    @property
    def granted_bytes(self) -> int:
        return int(self.fields["granted_bytes"])

    @property
    def link_share(self) -> float:
        return float(self.fields["link_share"])

    @property
    def host_bytes(self) -> int:
        return int(self.fields["host_bytes"])

    @property
    def rows(self) -> bytes:
        return bytes(self.buffers[0])

    @property
    def order(self) -> bytes:
        return bytes(self.buffers[1])

    @property
    def groups(self) -> bytes:
        """Groups of a job whose memory flows; empty if its grant is constant."""
        return bytes(self.buffers[5])


@dataclass
class JobRecord:
    """State of a job: the data that the planner has been sent, and the plan that was published last."""

    captured: str  # the trace that the rest refers to
    sent: bool = False
    sparsity: int = 0  # revision of the statistics that were sent
    planned_us: float | None = None  # sum of the latencies that the planner plans with
    generation: int = 0  # of the plan that was published last; 0 if that is of no use
    published: Plan | None = None
    in_force: Plan | None = None  # the plan under which the trainer has run an iteration
    pinned: bool = False  # its trainer has rejected a plan since jobs came or went: it keeps its plan
    answered: bool = False  # a planner that had this trace has answered
    deaths: int = 0  # in a row, of planners that had this trace
    set_aside: bool = False
    searched: bool = False  # a search for a better plan was begun, and its result is of use
    since: float = field(default_factory=time.monotonic)

    def is_worth_a_search(self, plan: Plan) -> bool:
        """Return whether a search should be made for a job of policy joint with this plan, or was made for it."""
        slow = plan.fields["iteration_us"] > SEARCH_BEYOND * plan.fields["vanilla_us"]
        self.searched |= slow and time.monotonic() - self.since >= SEARCH_AFTER
        return self.searched

    def is_planned_from(self, row: Mapping[str, Any]) -> bool:
        """Return whether the newest plan was made for the trace of this row."""
        return self.published is not None and self.published.captured == row["captured"]


class JobRecords(dict[int, JobRecord]):
    """Records of all jobs that have a trace, by job."""

    def refresh(self, jobs: Mapping[int, dict[str, Any]], grants: Mapping[int, dict[str, Any]]) -> None:
        """Follow the catalogue (`jobs`) and the ledger (`grants`), both by job.

        Ended jobs are dropped, and so is what was published for an earlier attempt. If the set of jobs has changed,
        none is pinned any more.
        """
        if jobs.keys() != self.keys():
            for record in self.values():
                record.pinned = False
        for job in self.keys() - jobs.keys():
            del self[job]
        for job, row in jobs.items():
            record = self.setdefault(job, JobRecord(row["captured"]))
            if record.captured != row["captured"]:
                record = JobRecord(row["captured"], generation=record.generation, published=record.published)
                self[job] = record
            grant = grants.get(job, {"generation": 0, "acknowledged": 0})
            if record.generation > grant["generation"]:
                record.generation, record.published, record.in_force = 0, None, None
            if 0 < record.generation <= grant["acknowledged"]:
                record.in_force = record.published

    def is_current(self, row: Mapping[str, Any]) -> bool:
        """Return whether the job of this row still has the trace that the row was read with."""
        record = self.get(row["job"])
        return record is not None and record.captured == row["captured"]

    def is_planned(self, row: Mapping[str, Any]) -> bool:
        """Return whether the job of this row takes part in planning."""
        return not row["refused"] and not self[row["job"]].set_aside
