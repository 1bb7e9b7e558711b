"""Which job may begin its next group: the grants of memory that flow between jobs.

Waterwave pairs the groups of jobs in advance, the i-th that takes memory with the i-th that gives it back, with
barriers between the pairs. Here a group may begin whenever its memory is free and the state stays *safe*, as in
Dijkstra's banker's algorithm: there is an order in which each job can end its iteration while those after it rest where
they are. So no job ever waits for memory that cannot become free, jobs of any number and of different lengths interlock
by themselves, they come and go between two groups, and a job that is gone only leaves more memory to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pg_tensile.planning.memory_flow.groups import Group

OVERTAKEN = 64  # groups of other jobs that may begin while a job waits, before it is its turn


class GroupedJob:
    """A job's groups, the number of the next one, and whether that one runs.

    `waiting` is the number of groups of other jobs that have begun since this job waits; None if it does not.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        if not groups:
            raise ValueError("a job has at least one group")
        self.groups = groups
        self.position = 0
        self.running = False
        self.waiting: int | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes that the job holds now: the most of its running group, else what it keeps between two groups."""
        return self.groups[self.position].most_bytes if self.running else self.groups[self.position - 1].rest_bytes

    @property
    def needed_bytes(self) -> int:
        """Most bytes that the job takes until the end of its iteration."""
        return max(group.most_bytes for group in self.groups[self.position :])

    @property
    def least_bytes(self) -> int:
        """Bytes that the job keeps between two iterations."""
        return self.groups[-1].rest_bytes

    @property
    def begun(self) -> bool:
        return self.running or self.position > 0


class Grants:
    """Jobs within `budget_bytes` of device memory."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.jobs: dict[int, GroupedJob] = {}

    def fits(self, jobs: Iterable[GroupedJob]) -> bool:
        """Return whether jobs between two iterations could end one each, in any order."""
        jobs = list(jobs)
        kept = sum(job.least_bytes for job in jobs)
        return all(
            kept - job.least_bytes + max(group.most_bytes for group in job.groups) <= self.budget_bytes for job in jobs
        )

    def join(self, number: int, groups: Sequence[Group]) -> bool:
        """Add a job between two iterations; return False, and add nothing, if that is not safe now."""
        job = GroupedJob(groups)
        if not self.fits([*self.jobs.values(), job]) or not self._is_safe([*self.jobs.values(), job]):
            return False
        self.jobs[number] = job
        return True

    def leave(self, number: int) -> None:
        """Remove a job, wherever it is; all that it held is free."""
        del self.jobs[number]

    def change(self, number: int, groups: Sequence[Group]) -> None:
        """Change the groups of a job that is between two iterations.

        While they do not fit beside the other jobs, it cannot begin."""
        job = self.jobs[number]
        if job.begun:
            raise ValueError(f"job {number} is not between two iterations")
        waiting = job.waiting
        self.jobs[number] = job = GroupedJob(groups)
        job.waiting = waiting

    def begin(self, number: int) -> bool:
        """Begin the job's next group; return False if it has to wait, until a group ends or a job leaves."""
        job = self.jobs[number]
        if job.running:
            raise ValueError(f"job {number} has not ended its group")
        if job.waiting is None:
            job.waiting = 0
        if self._is_overtaken(job):
            return False
        job.running = True
        if self._is_safe(list(self.jobs.values())):
            job.waiting = None
            for other in self.jobs.values():
                if other.waiting is not None:
                    other.waiting += 1
            return True
        job.running = False
        return False

    def end(self, number: int) -> None:
        """End the job's running group."""
        job = self.jobs[number]
        if not job.running:
            raise ValueError(f"job {number} runs no group")
        job.running = False
        job.position = (job.position + 1) % len(job.groups)

    def held_bytes(self) -> int:
        return sum(job.held_bytes for job in self.jobs.values())

    def _is_overtaken(self, job: GroupedJob) -> bool:
        """Return whether another job has waited so long that no iteration begins before it goes on.

        Of several such jobs, those that have waited longest are not overtaken: else all could wait for each other."""
        least = max(OVERTAKEN, (job.waiting or 0) + 1)
        return not job.begun and any(
            other.waiting is not None and other.waiting >= least for other in self.jobs.values()
        )

    def _is_safe(self, jobs: Sequence[GroupedJob]) -> bool:
        """Return whether what jobs hold fits, and there is an order in which each can end its iteration."""
        free = self.budget_bytes - sum(job.held_bytes for job in jobs)
        # Jobs between two iterations hold the least that they can. Of the others, those that give memory back come
        # first, then those that only get back what a plan had swapped out, the one that leaves the most last.
        begun = [(job.needed_bytes - job.held_bytes, job.held_bytes - job.least_bytes) for job in jobs if job.begun]
        giving = sorted(job for job in begun if job[1] >= 0)
        taking = sorted((job for job in begun if job[1] < 0), key=lambda job: -sum(job))
        for more_bytes, given_bytes in giving + taking:
            if more_bytes > free:
                return False
            free += given_bytes
        return True
