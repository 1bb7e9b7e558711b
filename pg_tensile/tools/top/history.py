"""State kept from one snapshot to the next: the course of losses, and rates.

Times are those of a job's heartbeats: numbers change only with a heartbeat, however often snapshots are taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pg_tensile.tools.top.snapshot import Epoch, Job, Snapshot

RATE_S = 5.0  # window of the rates of transfers and stalls
SILENT_S = 10.0  # without a heartbeat, after which rates are unknown
POINTS = 256  # of the course of a loss, at most


class Sample(NamedTuple):
    at: float  # of the heartbeat, seconds
    bytes_swapped: int | None
    stall_s: float | None


class Course:
    """The history of one job. `losses`: (epochs done, mean loss of the epoch so far), in order."""

    def __init__(self, epochs: Sequence[Epoch] = ()) -> None:
        """`epochs`: those that ended before the first snapshot with the job."""
        self.losses = [(epoch.done, epoch.loss) for epoch in epochs]
        self._silent_s = 0.0  # since the last heartbeat
        self._attempt = 1
        self._samples: deque[Sample] = deque()

    def add(self, job: Job, now: float) -> None:
        """Add the job as a snapshot at `now` has it; without a new heartbeat no sample is added."""
        if job.attempts != self._attempt:  # the counters of a new trainer start from zero
            self._attempt = job.attempts
            self._samples.clear()
        self._silent_s = 0.0 if job.heartbeat_at is None else now - job.heartbeat_at
        if job.heartbeat_at is None or job.done is None:
            return
        if self._samples and job.heartbeat_at <= self._samples[-1].at:
            return
        self._samples.append(Sample(job.heartbeat_at, job.bytes_swapped, job.stall_s))
        while len(self._samples) > 1 and self._samples[1].at <= job.heartbeat_at - RATE_S:
            self._samples.popleft()
        if job.loss is not None:
            self._add_loss(job.done, job.loss)

    def _add_loss(self, done: float, loss: float) -> None:
        while self.losses and self.losses[-1][0] >= done:  # it was resumed from a checkpoint, or has made no progress
            self.losses.pop()
        self.losses.append((done, loss))
        if len(self.losses) > POINTS:
            del self.losses[1:-1:2]

    def _rate(self, name: str) -> float | None:
        """Return the growth per second of a field of Sample over the last RATE_S, or None if it is not known."""
        samples = [(sample.at, getattr(sample, name)) for sample in self._samples if getattr(sample, name) is not None]
        if len(samples) < 2 or self._silent_s > SILENT_S:
            return None
        (then, before), (now, after) = samples[0], samples[-1]
        return None if after < before else (after - before) / (now - then)

    @property
    def swap_bytes_per_s(self) -> float | None:
        """Bytes moved over the link per second, both ways together; None if not known."""
        return self._rate("bytes_swapped")

    @property
    def stall_share(self) -> float | None:
        """The share of the time for which the device waits for tensors, from 0 to 1; None if not known."""
        return self._rate("stall_s")


class History:
    """Courses of all open jobs."""

    def __init__(self) -> None:
        self._courses: dict[int, Course] = {}

    def unknown(self, snapshot: Snapshot) -> list[int]:
        """Return the jobs that are new in the snapshot but past their first epoch, whose earlier epochs can be read."""
        return [
            job.job
            for job in snapshot.jobs
            if job.done is not None and (job.epoch or 0) > 1 and job.job not in self._courses
        ]

    def add(self, snapshot: Snapshot, epochs: Mapping[int, Sequence[Epoch]] | None = None) -> None:
        """Add the next snapshot, with earlier epochs of the `unknown` jobs; jobs that are not in it are forgotten."""
        courses: dict[int, Course] = {}
        for job in snapshot.jobs:
            course = self._courses.get(job.job)
            if course is None and job.done is not None:
                course = Course((epochs or {}).get(job.job, ()))
            if course is not None:
                course.add(job, snapshot.at)
                courses[job.job] = course
        self._courses = courses

    def of(self, job: Job) -> Course:
        return self._courses.get(job.job) or Course()

    def link_bytes_per_s(self, snapshot: Snapshot, device: str) -> float | None:
        """Return the bytes per second that the snapshot's jobs move over the device's link, both ways together.

        None if not known yet."""
        rates = [self.of(job).swap_bytes_per_s for job in snapshot.jobs if job.device == device]
        known_rates = [rate for rate in rates if rate is not None]
        return sum(known_rates) if known_rates else None
