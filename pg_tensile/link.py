"""The simulated link between device and host: two lanes, shared by all jobs (design.md section 5).

Each lane serves one transfer at a time, in the order in which they may start. While both are busy, each runs at the
duplex factor of its speed, so an end is certain only when it has been reached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush

from pg_tensile.compression.coding import chunk_count
from pg_tensile.profile import DeviceProfile, Direction
from pg_tensile.trace import Trace


def moved_bytes(trace: Trace, tensor: int, codec: int) -> int:
    """What crosses the link when a tensor is swapped with a codec; all of it where the trace's coding knows of none."""
    coding = trace.coding
    known = codec != 0 and coding is not None and coding.codec[tensor] == codec
    return int(coding.moved_bytes[tensor] if known and coding is not None else trace.tensor_bytes[tensor])


def copy_us(trace: Trace, tensor: int, codec: int, direction: Direction, profile: DeviceProfile) -> float:
    """How long a transfer takes that has the link to itself, in µs (cswap.txt, section IV-B).

    `codec`: of the host copy. Coding and moving go on side by side, chunk by chunk: the slower of the two takes its
    time, and of the faster one a chunk is left over, before or after.
    """
    link_us = profile.transfer_us(moved_bytes(trace, tensor, codec), direction)
    coding = trace.coding
    if codec == 0 or coding is None or coding.codec[tensor] != codec:
        return link_us
    coding_us = float((coding.encode_us if direction == Direction.OUT else coding.decode_us)[tensor])
    return max(link_us, coding_us) + min(link_us, coding_us) / chunk_count(trace, tensor)


def chosen_codec(trace: Trace, tensor: int) -> int:
    """The codec with which plans on this trace swap a tensor."""
    return 0 if trace.coding is None else int(trace.coding.codec[tensor])


@dataclass(frozen=True, slots=True)
class Copy:
    """A transfer to make: of a tensor, for an event of its job's plan (−1: for none)."""

    tensor: int
    direction: Direction
    bytes: int
    event: int
    delay_us: int
    alone_us: float  # with the link to itself


@dataclass(slots=True)
class Request:
    """A copy that has been asked for."""

    copy: Copy
    ready_us: float  # may start then
    start_us: float = math.nan
    end_us: float = math.nan  # known when it has ended
    ended: bool = False
    waiter: int = -1  # the job that waits for the end


@dataclass(slots=True)
class _Lane:
    queue: list[tuple[float, int, Request]] = field(default_factory=list)  # heap: ready time, number
    current: Request | None = None
    end_us: float = math.inf  # of the current one, if the other lane stays as it is


class Link:
    """Two lanes. Time goes on by `advance` only."""

    def __init__(self, duplex_factor: float) -> None:
        self._factor = duplex_factor
        self._lanes = (_Lane(), _Lane())
        self._now = -math.inf
        self._requests = 0
        self._both = False  # lanes are busy

    def request(self, copy: Copy, ready_us: float) -> Request:
        request = Request(copy, ready_us)
        heappush(self._lanes[copy.direction].queue, (ready_us, self._requests, request))
        self._requests += 1
        return request

    def advance(self, until: float) -> Request | None:
        """Goes on to the next end of a transfer, which is returned, but not beyond `until`: then None."""
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
        """If both lanes became busy, or one of both idle, what is under way ends later, or sooner."""
        if self._factor == 1.0:
            return
        both = all(lane.current is not None for lane in self._lanes)
        if both != self._both:
            stretch = 1 / self._factor if both else self._factor
            for lane in self._lanes:
                if lane.current is not None:
                    lane.end_us = self._now + (lane.end_us - self._now) * stretch
        self._both = both
