"""Sockets that carry frames: an I/O layer for the format of wire.py.

Sending never joins or copies buffers. Sends on a connection are serialised, so that any thread of a child may report;
only one thread may receive. Standard library only.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from pyworker.wire import Buffer, Decoder, Frame, FrameType, ProtocolError, encode

_IOV_MAX = 1024


class FrameStream(Protocol):
    """Connection of a child: frames to its supervisor, and from it."""

    @property
    def closed(self) -> bool: ...

    def send(
        self,
        type: FrameType,
        job: int = 0,
        rank: int = 0,
        header: dict[str, Any] | None = None,
        buffers: Sequence[Buffer | Any] = (),
    ) -> None: ...

    def queue(
        self,
        type: FrameType,
        job: int = 0,
        rank: int = 0,
        header: dict[str, Any] | None = None,
        buffers: Sequence[Buffer | Any] = (),
    ) -> None: ...

    def flush(self) -> bool: ...

    def recv(self, timeout: float | None = None) -> Frame | None: ...

    def poll(self) -> Frame | None: ...


class Connection:
    """Socket that carries frames.

    Children use `send` and `recv`, which block whatever the socket's mode; a supervisor, which waits elsewhere, uses
    `queue`, `flush` and `poll`, which never block. One side may use both.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._decoder = Decoder()
        self._lock = threading.Lock()
        self._outgoing: deque[memoryview] = deque()
        self.closed = False  # the peer has closed its end

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def refuse_more(self) -> None:
        """Receive no more: what the peer sends from now on fails at once, so that it knows that nobody reads it."""
        self._socket.shutdown(socket.SHUT_RD)

    def send(
        self,
        type: FrameType,
        job: int = 0,
        rank: int = 0,
        header: dict[str, Any] | None = None,
        buffers: Sequence[Buffer | Any] = (),
    ) -> None:
        """Send one frame, blocking until the kernel has all of it.

        May be called from any thread. Raises OSError if the peer is gone.
        """
        parts = encode(type, job, rank, header, buffers)
        with self._lock:
            self._outgoing.extend(memoryview(part) for part in parts)
            while not self._flush():
                _wait(self._socket, select.POLLOUT, None)

    def queue(
        self,
        type: FrameType,
        job: int = 0,
        rank: int = 0,
        header: dict[str, Any] | None = None,
        buffers: Sequence[Buffer | Any] = (),
    ) -> None:
        """Append one frame to the queue, which `flush` sends. The buffers must not change until then."""
        parts = encode(type, job, rank, header, buffers)
        with self._lock:
            self._outgoing.extend(memoryview(part) for part in parts)

    def flush(self) -> bool:
        """Send as much of the queue as the kernel takes without blocking; return whether it is empty.

        Raises OSError if the peer is gone.
        """
        with self._lock:
            return self._flush()

    def _flush(self) -> bool:
        while self._outgoing:
            parts = [self._outgoing[index] for index in range(min(len(self._outgoing), _IOV_MAX))]
            try:
                sent = self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            while self._outgoing and sent >= self._outgoing[0].nbytes:
                sent -= self._outgoing.popleft().nbytes
            if sent:
                self._outgoing[0] = self._outgoing[0][sent:]
        return True

    def recv(self, timeout: float | None = None) -> Frame | None:
        """Return the next frame, or None if it does not arrive within `timeout` seconds.

        A `timeout` of None means to wait for ever, 0 not to wait. Raises EOFError if the peer has closed the connection
        between frames, ProtocolError if within one.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            frame = self.poll()
            if frame is not None:
                return frame
            if self.closed:
                raise EOFError("the peer closed the connection")
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return None
            _wait(self._socket, select.POLLIN, remaining)

    def poll(self, most_bytes: float = math.inf) -> Frame | None:
        """Return the next frame if it has arrived, else None; never block.

        Without a frame, ends soon after `most_bytes` were received, though more may have come. Sets `closed` at the end
        of the stream. Raises ProtocolError if the stream ends within a frame.
        """
        while not self.closed:
            frame = self._decoder.next_frame()
            if frame is not None:
                return frame
            if most_bytes <= 0:
                return None
            try:
                count = self._socket.recv_into(self._decoder.space(), 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                count = 0
            if count == 0:
                self.closed = True
                if not self._decoder.between_frames:
                    raise ProtocolError("the connection ended within a frame")
                return None
            self._decoder.received(count)
            most_bytes -= count
        return None


def _wait(sock: socket.socket, events: int, seconds: float | None) -> None:
    poll = select.poll()
    poll.register(sock, events)
    poll.poll(None if seconds is None else math.ceil(seconds * 1000))
