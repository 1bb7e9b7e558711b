"""Frames that supervisors, children and sessions exchange over Unix stream sockets.

docs/internals.md, "Frames", defines the format: a fixed prefix, a JSON header, a table of buffer lengths, then the raw
buffers, each padded to a multiple of 8. The protocol is separate from the I/O: `encode` and `Decoder` never touch a
socket, `Connection` (connection.py) adds one. A peer that breaks the format causes a `ProtocolError`, and its
connection is closed; a stream is never resynchronised.

Memory: everything after a frame's prefix is received directly into one allocation, and the frame's buffers are views of
it. A large one is mapped, so that a prefix that announces a gibibyte costs nothing before the bytes arrive.

Standard library only: both sides import this module, and one of them runs inside a PostgreSQL process.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

MAGIC = b"PGT1"
MAX_HEADER = 16 << 20
MAX_BUFFERS = 65536
MAX_PAYLOAD = 1 << 30

_PREFIX = struct.Struct("<4sHHqIIQ")
_ZEROS = bytes(8)
_SMALL = 1 << 20

Buffer = bytes | bytearray | memoryview


class FrameType(IntEnum):
    """Type of a frame; docs/internals.md lists the direction, header and buffers of each."""

    HELLO = 1
    JOB = 2
    COLUMNS = 3
    ROWS = 4
    ROWS_END = 5
    PLAN = 6
    STOP = 7
    TRACE = 8
    LATENCY = 9
    PROGRESS = 10
    METRICS = 11
    STATE = 12
    DONE = 13
    ERROR = 14
    REFUSE = 15
    RESULT = 16
    SPARSITY = 17
    CHOICE = 18
    SAVED = 19
    PREDICT = 20
    PREDICTION = 21
    LOAD = 22
    MODEL = 23
    VERSION = 24
    SETTINGS = 25
    DEVICE = 26
    EMBED = 27
    EMBEDDING = 28
    DRIFT = 29
    SCHEDULE = 30
    SCHEDULED = 31
    PLAN_SEARCH = 32
    FOUND = 33
    SUGGEST = 34
    SUGGESTED = 35
    QUERY = 36
    ARCHITECTURE = 37
    LACKING = 38
    PASSED = 39


class Frame(NamedTuple):
    """One message; `buffers` are views of the memory that it was received into."""

    type: FrameType
    job: int
    rank: int
    header: dict[str, Any]
    buffers: list[memoryview]


class ProtocolError(Exception):
    """The peer sent something that is not a frame, or a frame that is not valid at this point."""


def _padding(length: int) -> int:
    return -length % 8


def _finite(value: Any) -> Any:
    """Return `value` with NaN and infinities, which JSON lacks, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _encode_header(header: dict[str, Any]) -> bytes:
    if not header:
        return b""
    try:
        text = json.dumps(header, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(header), allow_nan=False, separators=(",", ":"))
    data = text.encode("ascii")
    return data + b" " * _padding(len(data))


def encode(
    type: FrameType,
    job: int = 0,
    rank: int = 0,
    header: dict[str, Any] | None = None,
    buffers: Sequence[Buffer | Any] = (),
) -> list[Buffer]:
    """Return the frame as a list of byte strings for `sendmsg`, in order.

    `buffers` may be anything with a contiguous buffer interface (bytes, memoryview, numpy array). Raises ProtocolError
    if a limit is exceeded.
    """
    head = _encode_header(header or {})
    views = [memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"") for buffer in buffers]
    payload = sum(8 + view.nbytes + _padding(view.nbytes) for view in views)
    if len(head) > MAX_HEADER:
        raise ProtocolError(f"a frame's header has {len(head)} bytes, more than {MAX_HEADER}")
    if len(views) > MAX_BUFFERS:
        raise ProtocolError(f"a frame has {len(views)} buffers, more than {MAX_BUFFERS}")
    if payload > MAX_PAYLOAD:
        raise ProtocolError(f"a frame's payload has {payload} bytes, more than {MAX_PAYLOAD}")
    prefix = _PREFIX.pack(MAGIC, type, rank, job, len(head), len(views), payload)
    lengths = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    parts: list[Buffer] = [prefix + head + lengths]
    for view in views:
        if view.nbytes:
            parts.append(view)
        if _padding(view.nbytes):
            parts.append(_ZEROS[: _padding(view.nbytes)])
    return parts


class Decoder:
    """Decoder of a byte stream into frames, wherever the stream is cut.

    Receive into `space()`, report the number of bytes with `received(n)`, and take whole frames from `next_frame()`;
    `feed` does the first two for bytes that are in memory already. Any ProtocolError is final.
    """

    def __init__(self) -> None:
        self._prefix = bytearray(_PREFIX.size)
        self._body: bytearray | mmap.mmap | None = None  # None while the prefix is incomplete
        self._filled = 0
        self._fields: tuple[FrameType, int, int, int, int] = (FrameType.HELLO, 0, 0, 0, 0)
        self._frames: deque[Frame] = deque()

    @property
    def between_frames(self) -> bool:
        """True if no frame has been received in part, so that the stream may end here."""
        return self._body is None and self._filled == 0

    def space(self) -> memoryview:
        """Return the memory for the next bytes of the stream; it is never empty."""
        target = self._prefix if self._body is None else self._body
        return memoryview(target)[self._filled :]

    def received(self, count: int) -> None:
        """Decode the `count` bytes that were written to `space()`."""
        self._filled += count
        if self._body is None:
            if self._filled < _PREFIX.size:
                return
            self._start_body()
        assert self._body is not None
        if self._filled == len(self._body):
            self._frames.append(self._finish())
            self._body = None
            self._filled = 0

    def feed(self, data: Buffer) -> None:
        """Copy the next bytes of the stream into the decoder."""
        rest = memoryview(data)
        while rest.nbytes:
            space = self.space()
            count = min(space.nbytes, rest.nbytes)
            space[:count] = rest[:count]
            self.received(count)
            rest = rest[count:]

    def next_frame(self) -> Frame | None:
        """Return the oldest whole frame not yet taken, or None."""
        return self._frames.popleft() if self._frames else None

    def __iter__(self) -> Iterator[Frame]:
        while self._frames:
            yield self._frames.popleft()

    def _start_body(self) -> None:
        magic, type, rank, job, header, buffers, payload = _PREFIX.unpack(self._prefix)
        if magic != MAGIC:
            raise ProtocolError(f"a frame starts with {bytes(magic)!r} instead of {MAGIC!r}")
        if header > MAX_HEADER or header % 8 or buffers > MAX_BUFFERS or not 8 * buffers <= payload <= MAX_PAYLOAD:
            raise ProtocolError(f"a frame announces {header} bytes of header, {buffers} buffers, {payload} of payload")
        try:
            self._fields = (FrameType(type), job, rank, header, buffers)
        except ValueError:
            raise ProtocolError(f"a frame has the unknown type {type}") from None
        size = header + payload
        self._body = bytearray(size) if size <= _SMALL else mmap.mmap(-1, size)
        self._filled = 0

    def _finish(self) -> Frame:
        type, job, rank, header_bytes, count = self._fields
        assert self._body is not None
        body = memoryview(self._body)
        header = self._parse_header(bytes(body[:header_bytes]))
        lengths = struct.unpack_from(f"<{count}Q", body, header_bytes)
        buffers = []
        position = header_bytes + 8 * count
        for length in lengths:
            end = position + length
            padding = _padding(length)
            if end + padding > len(body) or body[end : end + padding] != _ZEROS[:padding]:
                raise ProtocolError("a frame's buffers do not fit its payload")
            buffers.append(body[position:end])
            position = end + padding
        if position != len(body):
            raise ProtocolError("a frame's payload is longer than its buffers")
        return Frame(type, job, rank, header, buffers)

    @staticmethod
    def _parse_header(data: bytes) -> dict[str, Any]:
        if not data:
            return {}
        try:
            header = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a frame's header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise ProtocolError("a frame's header is not a JSON object")
        return header
