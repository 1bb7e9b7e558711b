"""Start and end times of the transfers of one lane: one at a time, each in one piece (TENSILE, section IV-C).

Unlike link_time.py, which divides up time, this module fixes the exact µs, so that transfers happen as planned: each
starts a whole number of µs after the end of an operator, as an event of a plan does.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np

Span = tuple[float, float]  # start and end, µs
EXACT_US = 1e-7  # tolerance for a whole number of µs


class Timetable:
    """Free time of a lane in one iteration, from the end of the first operator to the end of the last.

    Free spans are in √n buckets by their starts, with the longest span of each bucket, so that a search skips the
    buckets in which no span is long enough.
    """

    def __init__(self, ends_us: Sequence[float], shortest_us: float = 0.0) -> None:
        """Start with a free lane.

        `ends_us`: float[n], the end of each operator; ascending. No transfer is shorter than `shortest_us`.
        """
        self._ends_us = ends_us
        self._shortest_us = shortest_us
        count = math.isqrt(len(ends_us)) + 1
        self._width_us = max((ends_us[-1] - ends_us[0]) / count, 1e-9)
        self._free: list[list[Span]] = [[] for _ in range(count)]
        self._longest_us = np.zeros(count)
        self._insert((ends_us[0], ends_us[-1]))

    def earliest(self, us: float, first_us: float, last_us: float) -> float | None:
        """Return the earliest start of `us` of free time between `first_us` and `last_us`, or None."""
        for bucket in self._buckets(us, first_us, last_us):
            for start, end in self._free[bucket]:
                if end - start >= us and min(end, last_us) - max(start, first_us) >= us:
                    begin = self._rounded_up(max(start, first_us))
                    if begin + us <= min(end, last_us):
                        return begin
        return None

    def latest(self, us: float, first_us: float, last_us: float) -> float | None:
        """Return the latest start of `us` of free time between `first_us` and `last_us`, or None."""
        for bucket in reversed(self._buckets(us, first_us, last_us)):
            for start, end in reversed(self._free[bucket]):
                if end - start >= us and min(end, last_us) - max(start, first_us) >= us:
                    begin = self._rounded_down(min(end, last_us) - us)
                    if begin >= max(start, first_us):
                        return begin
        return None

    def book(self, start_us: float, us: float) -> None:
        """Take `us` from `start_us` on, which have to be free."""
        bucket = self._holding(start_us)
        spans = self._free[bucket]
        start, end = spans.pop(bisect_right(spans, (start_us, math.inf)) - 1)
        self._longest_us[bucket] = max((end - start for start, end in spans), default=0.0)
        for span in ((start, start_us), (start_us + us, end)):
            if span[1] - span[0] > self._shortest_us:
                self._insert(span)

    def cancel(self, start_us: float, us: float) -> None:
        """Free time that was booked."""
        self._insert((start_us, start_us + us))

    def trigger(self, start_us: float) -> tuple[int, int]:
        """Return the operator in whose gap a transfer with this start is requested, and the µs from its end."""
        operator = bisect_right(self._ends_us, start_us) - 1
        return operator, round(start_us - self._ends_us[operator])

    # ---- buckets ----

    def _buckets(self, us: float, first_us: float, last_us: float) -> list[int]:
        """Return the buckets with a span of at least `us`, from the one that holds `first_us` to that of `last_us`."""
        begin, end = self._holding(first_us), self._bucket(last_us)
        long: list[int] = ((self._longest_us[begin : end + 1] >= us).nonzero()[0] + begin).tolist()
        return long

    def _holding(self, us: float) -> int:
        """Return the bucket of the last span that starts at or before `us`, or else the bucket of `us`."""
        bucket = self._bucket(us)
        spans = self._free[bucket]
        if spans and spans[0][0] <= us:
            return bucket
        before = bucket - 1
        while before >= 0 and not self._free[before]:
            before -= 1
        return before if before >= 0 else bucket

    def _bucket(self, us: float) -> int:
        return min(max(int((us - self._ends_us[0]) / self._width_us), 0), len(self._free) - 1)

    def _insert(self, span: Span) -> None:
        bucket = self._bucket(span[0])
        insort(self._free[bucket], span)
        self._longest_us[bucket] = max(self._longest_us[bucket], span[1] - span[0])

    # ---- whole µs ----

    def _rounded_down(self, us: float) -> float:
        end = self._ends_us[max(bisect_right(self._ends_us, us) - 1, 0)]
        whole = math.floor(us - end + EXACT_US)
        return us if abs(us - end - whole) <= EXACT_US else end + whole

    def _rounded_up(self, us: float) -> float:
        following = bisect_left(self._ends_us, us)
        end = self._ends_us[max(following - 1, 0)]
        whole = math.ceil(us - end - EXACT_US)
        if abs(us - end - whole) <= EXACT_US:
            return us
        return min(end + whole, self._ends_us[min(following, len(self._ends_us) - 1)])
