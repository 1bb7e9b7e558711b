"""Free time on the link while each operator runs.

A lane is a row of operators with their durations. A transfer takes time from the operators that it may overlap with: a
swap-out from the earliest, a swap-in from the latest. Operators whose time is used up are skipped by path compression,
so a transfer costs almost constant time however full the lane is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Booking(NamedTuple):
    """Time that fitted: `us` between the operators `first` and `last`, both included; first > last means none."""

    us: float
    first: int
    last: int


class Lane:
    """One direction of the link; `_free_us[i]` is the time during operator i that is not taken yet."""

    def __init__(self, operator_us: Sequence[float]) -> None:
        count = len(operator_us)
        self._free_us = list(operator_us)
        self._later = list(range(count + 1))  # operator → itself or a later one that has time left
        self._earlier = list(range(count + 1))  # the same for earlier ones, shifted by one: 0 means "none"
        for operator, us in enumerate(operator_us):
            if us <= 0:
                self._take(operator, 0.0)

    def earliest(self, us: float, first: int, last: int, book: bool = True) -> Booking:
        """Take `us` from the operators first … last, the earliest first, or as much as is free.

        `book=False` only looks.
        """
        if first > last:
            return Booking(0.0, first, first - 1)
        free_us, later = self._free_us, self._later
        booked_us, begin, end, operator = 0.0, first, first - 1, first
        while booked_us < us:
            if later[operator] != operator:
                operator = _find(later, operator)
            if operator > last:
                break
            part_us = min(free_us[operator], us - booked_us)
            begin = begin if booked_us else operator
            booked_us, end = booked_us + part_us, operator
            if book:
                self._take(operator, part_us)
            operator += 1
        return Booking(booked_us, begin, end)

    def latest(self, us: float, first: int, last: int, book: bool = True) -> Booking:
        """Take `us` from the operators first … last, the latest first, or as much as is free.

        `book=False` only looks.
        """
        if first > last:
            return Booking(0.0, last + 1, last)
        free_us, earlier = self._free_us, self._earlier
        booked_us, begin, end, operator = 0.0, last + 1, last, last
        while booked_us < us:
            if earlier[operator + 1] != operator + 1:
                operator = _find(earlier, operator + 1) - 1
            if operator < first:
                break
            part_us = min(free_us[operator], us - booked_us)
            end = end if booked_us else operator
            booked_us, begin = booked_us + part_us, operator
            if book:
                self._take(operator, part_us)
            operator -= 1
        return Booking(booked_us, begin, end)

    def _take(self, operator: int, us: float) -> None:
        self._free_us[operator] -= us
        if self._free_us[operator] <= 1e-9:
            self._free_us[operator] = 0.0
            self._later[operator] = operator + 1
            self._earlier[operator + 1] = operator


def _find(parent: list[int], operator: int) -> int:
    root = operator
    while parent[root] != root:
        root = parent[root]
    while parent[operator] != root:
        parent[operator], operator = root, parent[operator]
    return root
