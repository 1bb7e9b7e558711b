"""Frames between a driver and a rank: whole, in order, and not those that the tensors have become since."""

from __future__ import annotations

import pickle
import threading
import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pyworker.ranks import frame_queue
from pyworker.ranks.frame_queue import FrameQueue, Sent
from pyworker.wire import FrameType

buffers = st.lists(st.binary(max_size=40), max_size=3)
frames = st.lists(st.tuples(st.sampled_from([FrameType.STATE, FrameType.PROGRESS]), buffers), max_size=20)


@given(frames, st.integers(1, 100))
def test_all_frames_come_in_their_order(sent: list[tuple[FrameType, list[bytes]]], room: int) -> None:
    queue = FrameQueue()
    for number, (type, data) in enumerate(sent):
        queue.send(type, header={"number": number}, buffers=data)
    taken: list[Sent] = []
    most, frame_queue.MOST_BYTES = frame_queue.MOST_BYTES, room
    try:
        while part := queue.take(0):
            assert len(part) == 1 or sum(frame.nbytes for frame in part) <= room
            taken += pickle.loads(pickle.dumps(part))
    finally:
        frame_queue.MOST_BYTES = most
    assert [(frame.type, frame.header["number"], frame.buffers) for frame in taken] == [
        (type, number, data) for number, (type, data) in enumerate(sent)
    ]


def test_buffers_are_those_of_the_moment_they_were_sent() -> None:
    queue, weights = FrameQueue(), np.arange(4.0)
    queue.send(FrameType.STATE, buffers=[weights])
    weights += 1
    assert np.frombuffer(queue.take(0)[0].buffers[0]).tolist() == [0, 1, 2, 3]


def test_frames_that_the_driver_does_not_want_are_dropped() -> None:
    queue = FrameQueue((FrameType.DONE,))
    queue.send(FrameType.STATE, buffers=[b"weights"])
    queue.queue(FrameType.DONE, header={"stopped": False})
    assert [frame.type for frame in queue.take(0)] == [FrameType.DONE]


def test_both_sides_wait_for_frames() -> None:
    queue = FrameQueue()
    assert queue.poll() is None and queue.recv(0) is None and queue.take(0) == []
    taken: list[Sent] = []
    driver = threading.Thread(target=lambda: taken.extend(queue.take(60)))
    driver.start()
    queue.send(FrameType.PROGRESS, header={"step": 1})
    driver.join(60)
    assert [frame.header for frame in taken] == [{"step": 1}]
    rank = threading.Thread(target=lambda: queue.deliver(Sent(FrameType.STOP, {"checkpoint": True}, [])))
    rank.start()
    frame = queue.recv(60)
    rank.join(60)
    assert frame is not None and (frame.type, frame.header) == (FrameType.STOP, {"checkpoint": True})
    assert queue.flush() and not queue.closed


def test_a_checkpoint_was_stored_when_its_confirmation_comes() -> None:
    """The clock of the server's machine is another one."""
    queue, before = FrameQueue(), time.monotonic()
    queue.deliver(Sent(FrameType.SAVED, {"at": 1e12}, []))
    frame = queue.poll()
    assert frame is not None and before <= frame.header["at"] <= time.monotonic()
