"""States (checkpoints, weights, latency models) as sequences of STATE frames. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pyworker.connection import FrameStream
from pyworker.wire import Buffer, Frame, FrameType, ProtocolError

STATE_CHUNK = 16 << 20


def state_frames(
    kind: str, data: Buffer, meta: dict[str, Any] | None = None
) -> Iterator[tuple[dict[str, Any], memoryview]]:
    """Yield header and buffer of each STATE frame for `data` (a safetensors file); the last has `meta`."""
    view = memoryview(data)
    count = max(1, -(-view.nbytes // STATE_CHUNK))
    for seq in range(count):
        last = seq == count - 1
        header = {"kind": kind, "seq": seq, "last": last, "meta": meta if last else None}
        yield header, view[seq * STATE_CHUNK : (seq + 1) * STATE_CHUNK]


class StateChunk(NamedTuple):
    """STATE frame that has come in its order; `meta` comes with the last one."""

    kind: str
    seq: int
    last: bool
    meta: dict[str, Any]
    data: memoryview


class StateReader:
    """Checks the order of STATE frames: raises ProtocolError if one is missing, duplicated or out of place."""

    def __init__(self) -> None:
        self._kind = ""
        self._next = 0
        self.bytes = 0  # of the current state, the newest chunk included

    def chunk(self, frame: Frame) -> StateChunk:
        kind, seq, last = frame.header.get("kind"), frame.header.get("seq"), frame.header.get("last")
        meta = frame.header.get("meta") or {}
        if not isinstance(kind, str) or seq != self._next or not isinstance(last, bool) or not isinstance(meta, dict):
            raise ProtocolError(f"a STATE frame is out of place (kind {kind!r}, seq {seq!r})")
        if self._next > 0 and kind != self._kind:
            raise ProtocolError(f"a STATE frame of kind {kind!r} came between those of kind {self._kind!r}")
        if len(frame.buffers) != 1 or frame.buffers[0].nbytes > STATE_CHUNK:
            raise ProtocolError(f"a STATE frame must have one buffer of at most {STATE_CHUNK} bytes")
        self.bytes = frame.buffers[0].nbytes + (self.bytes if seq else 0)
        self._kind = kind
        self._next = 0 if last else seq + 1
        return StateChunk(kind, seq, last, meta, frame.buffers[0])


class State(NamedTuple):
    """Complete state: its kind ("checkpoint" or "weights"), its meta and the safetensors file."""

    kind: str
    meta: dict[str, Any]
    data: bytes


class StateCollector:
    """Assembles a state from its STATE frames; raises ProtocolError as StateReader does."""

    def __init__(self) -> None:
        self._reader = StateReader()
        self._chunks: list[memoryview] = []

    def add(self, frame: Frame) -> State | None:
        """Add a frame; return the complete state if it was the last one, else None."""
        chunk = self._reader.chunk(frame)
        self._chunks.append(chunk.data)
        if not chunk.last:
            return None
        chunks, self._chunks = self._chunks, []
        return State(chunk.kind, chunk.meta, b"".join(chunks))


def send_state(
    connection: FrameStream, job: int, rank: int, kind: str, data: Buffer, meta: dict[str, Any] | None = None
) -> None:
    """Send `data` in as many STATE frames as it takes; blocks like `Connection.send`."""
    for header, chunk in state_frames(kind, data, meta):
        connection.send(FrameType.STATE, job, rank, header, [chunk])
