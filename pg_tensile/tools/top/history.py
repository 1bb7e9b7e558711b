"""What is remembered from one snapshot to the next: the course of losses, rates, and so when jobs will be done.

Time is that of a job's heartbeats: numbers are as old as the last one, however often one looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pg_tensile.tools.top.snapshot import Epoch, Job, Snapshot

RATE_S = 5.0  # of the past that rates of transfers and stalls are taken over
PACE_S = 300.0  # and the pace of epochs, which pause to validate and to save
SILENT_S = 10.0  # without a heartbeat: rates are not known any more
POINTS = 256  # of a loss's course


class Sample(NamedTuple):
    at: float  # of the heartbeat, seconds
    done: float  # epochs
    bytes_swapped: int | None
    stall_s: float | None


class Course:
    """Of one job. `losses`: (epochs done, mean loss of the epoch so far), in order."""

    def __init__(self, epochs: Sequence[Epoch] = ()) -> None:
        """`epochs`: those before it was seen first."""
        self.losses = [(epoch.done, epoch.loss) for epoch in epochs]
        self._silent_s = 0.0  # since the last heartbeat
        self._attempt = 1  # epochs of earlier ones have no pace: there were pauses between them
        self._samples = deque(Sample(epoch.at, epoch.done, None, None) for epoch in epochs)

    def add(self, job: Job, now: float) -> None:
        """What a snapshot says at `now`; it need not be new."""
        if job.attempts != self._attempt:  # another executor counts from zero
            self._attempt = job.attempts
            self._samples.clear()
        self._silent_s = 0.0 if job.heartbeat_at is None else now - job.heartbeat_at
        if job.heartbeat_at is None or job.done is None:
            return
        if self._samples and job.heartbeat_at <= self._samples[-1].at:
            return
        self._samples.append(Sample(job.heartbeat_at, job.done, job.bytes_swapped, job.stall_s))
        while self._samples[0].at < job.heartbeat_at - PACE_S:
            self._samples.popleft()
        if job.loss is not None:
            self._add_loss(job.done, job.loss)

    def _add_loss(self, done: float, loss: float) -> None:
        while self.losses and self.losses[-1][0] >= done:  # it has gone back to a checkpoint, or has not moved
            self.losses.pop()
        self.losses.append((done, loss))
        if len(self.losses) > POINTS:
            del self.losses[1:-1:2]

    def _rate(self, name: str, seconds: float) -> float | None:
        """How much one of the numbers has grown in a second, over so many seconds; None: not known."""
        known = [(sample.at, getattr(sample, name)) for sample in self._samples if getattr(sample, name) is not None]
        if len(known) < 2 or self._silent_s > SILENT_S:
            return None
        now, after = known[-1]
        then, before = next((each for each in reversed(known) if each[0] <= now - seconds), known[0])
        return None if after < before else (after - before) / (now - then)

    @property
    def swap_bytes_per_s(self) -> float | None:
        """Over the link, both ways together."""
        return self._rate("bytes_swapped", RATE_S)

    @property
    def stall_share(self) -> float | None:
        """The part of the time for which the device waits for tensors, 0 to 1."""
        return self._rate("stall_s", RATE_S)

    def eta_s(self, job: Job) -> float | None:
        """Seconds until all its epochs are done: at the pace so far, or before there is one at that of its samples."""
        if job.done is None:
            return None
        left, pace = job.epochs - job.done, self._rate("done", PACE_S)
        if pace:
            return left / pace
        if job.kind == "train" and job.samples_per_s and job.steps and job.batch_size:
            return left * job.steps * job.batch_size / job.samples_per_s
        return None


class History:
    """The courses of all open jobs."""

    def __init__(self) -> None:
        self._courses: dict[int, Course] = {}

    def unknown(self, snapshot: Snapshot) -> list[int]:
        """Jobs that were in a later epoch than their first when they were seen first: what came before can be read."""
        return [
            job.job
            for job in snapshot.jobs
            if job.done is not None and (job.epoch or 0) > 1 and job.job not in self._courses
        ]

    def add(self, snapshot: Snapshot, epochs: Mapping[int, Sequence[Epoch]] | None = None) -> None:
        """The next snapshot, with epochs of the `unknown` jobs; jobs that it does not have are forgotten."""
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
        """What the jobs that are seen move over the device's link, both ways together; None: not known yet."""
        rates = [self.of(job).swap_bytes_per_s for job in snapshot.jobs if job.device == device]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None
