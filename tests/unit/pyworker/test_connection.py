"""Connections: frames in both directions, from several threads, and the ends of streams."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from pyworker.connection import Connection
from pyworker.wire import Frame, FrameType, ProtocolError, encode


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    left, right = (Connection(sock) for sock in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_large_frames_pass_in_both_directions_at_once(pair: tuple[Connection, Connection]) -> None:
    """A supervisor sends a checkpoint while its child reports: queue and flush must not wait for each other."""
    supervisor, child = pair
    data = bytes(range(256)) * (8 << 12)

    def talk() -> None:
        child.send(FrameType.STATE, 7, header={"seq": 0}, buffers=[data])
        frame = child.recv()
        assert frame is not None and frame.buffers[0] == data
        child.send(FrameType.DONE, 7)

    thread = in_thread(talk)
    supervisor.queue(FrameType.STATE, 7, header={"seq": 0}, buffers=[data])
    received: list[Frame] = []
    while len(received) < 2:
        supervisor.flush()
        frame = supervisor.recv(timeout=0.05)
        received += [frame] if frame is not None else []
    thread.join()
    assert [frame.type for frame in received] == [FrameType.STATE, FrameType.DONE]
    assert received[0].buffers[0] == data


def test_frames_of_several_threads_do_not_mix(pair: tuple[Connection, Connection]) -> None:
    child, supervisor = pair
    payload = {rank: bytes([rank]) * 300_000 for rank in range(4)}

    def talk(rank: int) -> None:
        for _ in range(5):
            child.send(FrameType.PROGRESS, 1, rank, {}, [payload[rank]])

    threads = [in_thread(partial(talk, rank)) for rank in payload]
    for _ in range(20):
        frame = supervisor.recv(timeout=30)
        assert frame is not None and frame.buffers[0] == payload[frame.rank]
    for thread in threads:
        thread.join()


def test_recv_without_patience_returns_at_once(pair: tuple[Connection, Connection]) -> None:
    assert pair[0].recv(timeout=0) is None


def test_a_frame_with_more_buffers_than_one_system_call_takes(pair: tuple[Connection, Connection]) -> None:
    buffers = [bytes([number % 256]) * (number % 11) for number in range(3000)]
    thread = in_thread(lambda: pair[0].send(FrameType.ROWS, 1, buffers=buffers))
    frame = pair[1].recv(timeout=30)
    thread.join()
    assert frame is not None and [bytes(buffer) for buffer in frame.buffers] == buffers


def test_the_end_of_the_stream_between_frames(pair: tuple[Connection, Connection]) -> None:
    pair[0].send(FrameType.DONE, 1)
    pair[0].close()
    frame = pair[1].recv()
    assert frame is not None and frame.type is FrameType.DONE
    with pytest.raises(EOFError):
        pair[1].recv()
    assert pair[1].closed


def test_the_end_of_the_stream_within_a_frame() -> None:
    left, right = socket.socketpair()
    with left:
        left.sendall(b"".join(map(bytes, encode(FrameType.DONE, 1, 0, {"task": "binary"})))[:-1])
    connection = Connection(right)
    with pytest.raises(ProtocolError, match="within a frame"):
        connection.recv()
    connection.close()


def test_sending_to_a_peer_that_is_gone_raises(pair: tuple[Connection, Connection]) -> None:
    pair[1].close()
    with pytest.raises(OSError):
        pair[0].send(FrameType.DONE, 1)
