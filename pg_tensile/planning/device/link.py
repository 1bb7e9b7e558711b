"""Simulation of the link between device and host: two lanes, shared by all jobs.

Each lane serves one transfer at a time, in the order of the times from which they may start. While both are busy, each
runs at `duplex_factor` times its speed, so the end of a transfer is certain only when simulated time reaches it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from pg_tensile.planning.compression.coding import CHUNK_BYTES, Coding
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.trace.trace import Trace


def moved_bytes(trace: Trace, tensor: int, codec: int) -> int:
    """Return the bytes that cross the link when a tensor is swapped with `codec`.

    That is the whole tensor unless the trace's coding has this codec for it.
    """
    coding = _coding(trace, tensor, codec)
    return int(trace.tensor_bytes[tensor] if coding is None else coding.moved_bytes[tensor])


def copy_us(trace: Trace, tensor: int, codec: int, direction: Direction, profile: DeviceProfile) -> float:
    """Return the duration of a transfer that has the link to itself, in µs (CSWAP, section IV-B).

    `codec` is that of the host copy. Coding and moving are pipelined by chunks: the duration is that of the slower of
    the two, plus one chunk of the faster one, which precedes or follows it.
    """
    return _pipelined_us(trace, tensor, codec, direction, profile, 1.0)


def copy_stretch(trace: Trace, tensor: int, codec: int, direction: Direction, profile: DeviceProfile) -> float:
    """Return the factor on a transfer's duration while the other lane is busy; its coding keeps its own speed."""
    alone_us = copy_us(trace, tensor, codec, direction, profile)
    slowdown = 1 / profile.duplex_factor
    shared_us = _pipelined_us(trace, tensor, codec, direction, profile, slowdown)
    return shared_us / alone_us if alone_us else slowdown


def _pipelined_us(
    trace: Trace, tensor: int, codec: int, direction: Direction, profile: DeviceProfile, slowdown: float
) -> float:
    link_us = profile.transfer_us(moved_bytes(trace, tensor, codec), direction) * slowdown
    coding = _coding(trace, tensor, codec)
    if coding is None:
        return link_us
    coding_us = float((coding.encode_us if direction == Direction.OUT else coding.decode_us)[tensor])
    pipelined_us = max(link_us, coding_us) + min(link_us, coding_us) / _chunk_count(trace, tensor)
    return pipelined_us + float(coding.waking_us[tensor])


def _chunk_count(trace: Trace, tensor: int) -> int:
    """Return the number of chunks of a coded tensor, at least 1."""
    return max(1, -(-int(trace.tensor_bytes[tensor]) // CHUNK_BYTES[trace.device]))


def _coding(trace: Trace, tensor: int, codec: int) -> Coding | None:
    """Return the trace's coding if it has this codec for the tensor, else None."""
    coding = trace.coding
    return coding if codec and coding is not None and coding.codec[tensor] == codec else None


def swap_us(trace: Trace, direction: Direction, profile: DeviceProfile) -> list[float]:
    """Return `copy_us` of each of the m tensors, with the codec that `trace.coding` chooses for it."""
    rate = profile.out_bytes_per_s if direction == Direction.OUT else profile.in_bytes_per_s
    us: list[float] = (profile.transfer_latency_us + trace.tensor_bytes * (1e6 / rate)).tolist()
    if trace.coding is not None:
        for tensor in np.flatnonzero(trace.coding.codec).tolist():
            us[tensor] = copy_us(trace, tensor, int(trace.coding.codec[tensor]), direction, profile)
    return us


@dataclass(frozen=True, slots=True)
class Copy:
    """A transfer of a tensor, for an event of its job's plan (−1 for none)."""

    tensor: int
    direction: Direction
    bytes: int  # moved over the link
    event: int
    delay_us: int
    alone_us: float  # duration with the link to itself
    raw_bytes: int  # of the tensor
    stretch: float  # factor on its duration while the other lane is busy, too


@dataclass(slots=True)
class Request:
    """A copy in the queue of a lane, in flight or ended."""

    copy: Copy
    ready_us: float  # earliest start
    start_us: float = math.nan
    end_us: float = math.nan  # set when it has ended
    ended: bool = False
    waiter: int = -1  # the job that waits for the end; -1 for none


@dataclass(slots=True)
class _Lane:
    queue: list[tuple[float, int, Request]] = field(default_factory=list)  # heap: ready time, number, request
    current: Request | None = None
    end_us: float = math.inf  # of the current one, provided that the other lane does not change


class Link:
    """The two lanes of the link. Only `advance` moves time forward."""

    def __init__(self) -> None:
        self._lanes = (_Lane(), _Lane())
        self._now = -math.inf
        self._requests = 0
        self._both = False  # whether both lanes are busy

    def request(self, copy: Copy, ready_us: float) -> Request:
        request = Request(copy, ready_us)
        heappush(self._lanes[copy.direction].queue, (ready_us, self._requests, request))
        self._requests += 1
        return request

    def advance(self, until: float) -> Request | None:
        """Advance to the end of the next transfer and return it, or to `until` and return None if that comes first."""
        while True:
            soonest, ending, starting = until, None, None
            for lane in self._lanes:
                if lane.current is not None:
                    if lane.end_us <= soonest:
                        soonest, ending, starting = lane.end_us, lane, None
                elif lane.queue and max(lane.queue[0][0], self._now) < soonest:
                    soonest, ending, starting = max(lane.queue[0][0], self._now), None, lane
            if ending is not None:
                return self._end(ending)
            if starting is None:
                self._now = soonest if soonest < math.inf else self._now
                return None
            self._start(starting, soonest)

    def _start(self, lane: _Lane, now: float) -> None:
        self._now = now
        lane.current = heappop(lane.queue)[2]
        lane.current.start_us = now
        lane.end_us = now + lane.current.copy.alone_us
        self._share()

    def _end(self, lane: _Lane) -> Request:
        request = lane.current
        assert request is not None
        self._now = request.end_us = lane.end_us
        request.ended = True
        lane.current = None
        self._share()
        return request

    def _share(self) -> None:
        """Reschedule the ends of transfers in flight after both lanes have become busy, or one of them idle."""
        both = all(lane.current is not None for lane in self._lanes)
        if both != self._both:
            for lane in self._lanes:
                if lane.current is not None:
                    stretch = lane.current.copy.stretch
                    remaining = lane.end_us - self._now
                    lane.end_us = self._now + (remaining * stretch if both else remaining / stretch)
        self._both = both
