"""Frames between the driver of a job and one of its ranks, as two queues in the rank's process.

The rank's code uses it as the connection to its supervisor; the actor (rank.py) takes what it sends, and adds what the
driver has sent. Buffers are copied, because the tensors that they show change in the next step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from pyworker.wire import Buffer, Frame, FrameType

MOST_BYTES = 64 << 20  # that are taken at once, unless a single frame has more


class Sent(NamedTuple):
    """A frame that can be pickled."""

    type: FrameType
    header: dict[str, Any]
    buffers: list[bytes]

    @property
    def nbytes(self) -> int:
        return sum(len(buffer) for buffer in self.buffers)


class FrameQueue:
    """Both directions of one rank's frames; frames of types that are not `wanted` by the driver are dropped."""

    def __init__(self, wanted: Collection[FrameType] = tuple(FrameType)) -> None:
        self._wanted = frozenset(wanted)
        self._up: deque[Sent] = deque()
        self._down: deque[Frame] = deque()
        self._changed = threading.Condition()

    # ---- the rank's side, in place of a Connection ----

    @property
    def closed(self) -> bool:
        """False: a rank whose driver is gone ends as a whole (rank.py)."""
        return False

    def send(
        self,
        type: FrameType,
        job: int = 0,
        rank: int = 0,
        header: dict[str, Any] | None = None,
        buffers: Sequence[Buffer | Any] = (),
    ) -> None:
        """Append a frame to those that the driver takes."""
        if type not in self._wanted:
            return
        sent = Sent(type, dict(header or {}), [bytes(memoryview(buffer).cast("B")) for buffer in buffers])
        with self._changed:
            self._up.append(sent)
            self._changed.notify_all()

    queue = send

    def flush(self) -> bool:
        """Return True: nothing waits to be sent."""
        return True

    def poll(self) -> Frame | None:
        """Return the driver's next frame if there is one, else None."""
        with self._changed:
            return self._down.popleft() if self._down else None

    def recv(self, timeout: float | None = None) -> Frame | None:
        """Return the driver's next frame, or None if it does not come within `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._down, timeout)
            return self._down.popleft() if self._down else None

    # ---- the driver's side ----

    def deliver(self, sent: Sent) -> None:
        """Append a frame to those that the rank receives."""
        header = sent.header
        if sent.type == FrameType.SAVED:
            header = {**header, "at": time.monotonic()}  # clocks of machines differ
        with self._changed:
            buffers = [memoryview(buffer) for buffer in sent.buffers]
            self._down.append(Frame(FrameType(sent.type), 0, 0, header, buffers))
            self._changed.notify_all()

    def take(self, seconds: float) -> list[Sent]:
        """Return the frames that the rank has sent, at most about MOST_BYTES; wait `seconds` for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._up, seconds)
            taken: list[Sent] = []
            room = MOST_BYTES
            while self._up and (not taken or self._up[0].nbytes <= room):
                taken.append(self._up.popleft())
                room -= taken[-1].nbytes
            return taken
