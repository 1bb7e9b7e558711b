"""Counts of predicted rows in the bins of their versions' histograms: a random share of all rows, `rate`.

Whether a row is counted is decided by the number of rows until the next one that is, so a row that is not counted costs
one subtraction. Rows that are counted wait for each other, so that many are counted at once. REPORT_S after the first
of them the counts are sent to the supervisor (DRIFT), which stores them; nothing else of a row leaves the process.
"""

from __future__ import annotations

import math
import random
import time

from pg_tensile.execution.data.answers import Answers
from pg_tensile.execution.data.drift import Counter, Reference, Sample, joined, sample
from pyworker.children.loaded_models import Model, Reply, Version
from pyworker.connection import Connection
from pyworker.wire import Frame, FrameType

REPORT_S = 2.0
MOST_WAITING = 64  # rows


class _Counts:
    """Counts of a version."""

    def __init__(self, reference: Reference) -> None:
        self._counter = Counter(reference)
        self._waiting: list[Sample] = []
        self._rows = 0  # that wait

    def add(self, sample: Sample) -> None:
        self._waiting.append(sample)
        self._rows += len(sample.answers.label) if sample.answers is not None else 0
        if self._rows >= MOST_WAITING:
            self.result()

    def result(self) -> Counter:
        """Return the counter, in which all rows are."""
        if self._waiting:
            self._counter.add(joined(self._waiting))
            self._waiting, self._rows = [], 0
        return self._counter


class DriftCounts:
    """Counts of all versions since the last report. All methods are called by the predictor's loop."""

    def __init__(self, supervisor: Connection) -> None:
        self._supervisor = supervisor
        self._rate = 0.0
        self._gap: float = math.inf  # rows until the next one that counts
        self._versions: dict[int, _Counts] = {}
        self._due = math.inf  # time of the next report
        self._random = random.Random()

    def set_rate(self, rate: float) -> None:
        """Count this share of the rows from now on, 0 to 1."""
        self._rate = rate
        self._gap = self._next_gap()

    def see(self, frame: Frame, reply: Reply, model: Model, rows: range) -> None:
        """Take these rows of a PREDICT frame and its answers; some of them may count."""
        if self._gap < len(rows):
            self._take(frame, reply, model, rows)
        self._gap -= len(rows)

    def _take(self, frame: Frame, reply: Reply, model: Model, rows: range) -> None:
        chosen = []
        while self._gap < len(rows):
            chosen.append(rows[int(self._gap)])
            self._gap += 1 + self._next_gap()
        if isinstance(model, Version) and model.reference is not None:
            self._keep(frame.job, model, model.reference, reply, chosen)

    def _keep(self, version: int, model: Version, reference: Reference, reply: Reply, chosen: list[int]) -> None:
        counts = self._versions.get(version)
        if counts is None:
            counts = self._versions[version] = _Counts(reference)
            self._due = min(self._due, time.monotonic() + REPORT_S)
        assert reply.inputs is not None
        given = reply.answers
        answers = Answers(given.prediction[chosen], given.probability[chosen], given.label[chosen])
        places = [reply.first + row for row in chosen]
        counts.add(sample(model.preprocessing, reply.inputs, places, answers))

    def _next_gap(self) -> float:
        """Return the number of rows before the next one that counts, if each does with probability `rate`."""
        if not 0 < self._rate < 1:
            return 0 if self._rate else math.inf
        gap = math.log(1 - self._random.random()) / math.log1p(-self._rate)
        return math.floor(gap) if gap < math.inf else gap

    def seconds_left(self) -> float | None:
        """Return the time until a report is due, or None while there is nothing to report."""
        return None if self._due == math.inf else max(0.0, self._due - time.monotonic())

    def report_if_due(self) -> None:
        """Send the counts to the supervisor if it is time."""
        if self._due == math.inf or time.monotonic() < self._due:
            return
        for version, counts in self._versions.items():
            counter = counts.result()
            buffers = [counter.counts.tobytes()]
            self._supervisor.send(FrameType.DRIFT, version, header={"rows": counter.rows}, buffers=buffers)
        self._versions.clear()
        self._due = math.inf
