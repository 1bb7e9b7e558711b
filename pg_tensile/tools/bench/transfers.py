"""Rates of a step's transfers, and how much of their time the compute did not wait for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from pg_tensile.planning.device.profile import GB, Direction


class Copy(Protocol):
    """One copy over the link, as the executor records it and the simulator predicts it. Times in µs."""

    @property
    def direction(self) -> Direction: ...

    @property
    def bytes(self) -> int: ...

    @property
    def start_us(self) -> float: ...

    @property
    def end_us(self) -> float: ...


def transfer_ms(copies: Iterable[Copy]) -> float:
    """Return the sum of the durations; copies of both directions at the same time count twice."""
    return sum(copy.end_us - copy.start_us for copy in copies) / 1e3


def rate_gbps(copies: Iterable[Copy], direction: Direction) -> float | None:
    """Return the bytes moved in a direction over the sum of their transfers' durations, in GB/s; None without any."""
    chosen = [copy for copy in copies if copy.direction == direction]
    seconds = transfer_ms(chosen) / 1e3
    return sum(copy.bytes for copy in chosen) / seconds / GB if seconds > 0 else None


def overlap(copies: Sequence[Copy], stall_us: float) -> float | None:
    """Return the share of the link's busy time in which the compute did not wait for a transfer; None without any.

    It is 1 − stall / busy, where `stall_us` is the sum of the step's waits, which never overlap each other, and busy is
    the time in which at least one transfer was under way. 0 if the compute waited for longer than that.
    """
    busy_us = latest_us = 0.0
    for copy in sorted(copies, key=lambda copy: copy.start_us):
        busy_us += max(0.0, copy.end_us - max(copy.start_us, latest_us))
        latest_us = max(latest_us, copy.end_us)
    return max(0.0, 1 - stall_us / busy_us) if busy_us > 0 else None
