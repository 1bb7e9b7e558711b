"""The wire protocol: whatever is sent arrives, however it is cut; whatever else arrives is a ProtocolError."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyworker import wire
from pyworker.wire import Connection, Decoder, Frame, FrameType, ProtocolError, StateCollector, encode

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
frames = st.builds(
    Frame,
    st.sampled_from(FrameType),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**16 - 1),
    st.dictionaries(st.text(), json_values, max_size=5),
    st.lists(st.binary(max_size=100).map(memoryview), max_size=6),
)


def stream(*sent: Frame) -> bytes:
    return b"".join(bytes(part) for frame in sent for part in encode(*frame))


def decoded(data: bytes, cuts: list[int] | None = None) -> list[Frame]:
    """What a decoder makes of `data` received in pieces of the sizes in `cuts`, then the rest."""
    decoder = Decoder()
    found = []
    position = 0
    for size in [*(cuts or []), len(data)]:
        decoder.feed(data[position : position + size])
        position += size
        found += list(decoder)
    return found


@given(st.lists(frames, max_size=4), st.lists(st.integers(0, 70), max_size=60))
def test_frames_arrive_however_the_stream_is_cut(sent: list[Frame], cuts: list[int]) -> None:
    assert decoded(stream(*sent), cuts) == sent


@given(frames)
def test_every_part_is_aligned_to_eight_bytes(frame: Frame) -> None:
    data = stream(frame)
    header = struct.unpack_from("<I", data, 16)[0]
    payload = struct.unpack_from("<Q", data, 24)[0]
    assert header % 8 == 0
    assert payload % 8 == 0
    assert len(data) == 32 + header + payload


@given(frames, st.data())
def test_a_truncated_stream_yields_no_frame_and_is_noticed(frame: Frame, data: st.DataObject) -> None:
    whole = stream(frame)
    decoder = Decoder()
    decoder.feed(whole[: data.draw(st.integers(1, len(whole) - 1))])
    assert decoder.next_frame() is None
    assert not decoder.between_frames


@settings(max_examples=300)
@given(frames, st.data())
def test_flipped_bits_are_a_frame_or_a_protocol_error_but_never_a_crash(frame: Frame, data: st.DataObject) -> None:
    damaged = bytearray(stream(frame))
    for position in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=3)):
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(ProtocolError):
        decoded(bytes(damaged))


@given(st.binary(min_size=32, max_size=200).filter(lambda data: data[:4] != wire.MAGIC))
def test_anything_but_a_frame_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="starts with"):
        decoded(data)


def prefix(type: int = 10, header: int = 0, buffers: int = 0, payload: int = 0) -> bytes:
    return struct.pack("<4sHHqIIQ", wire.MAGIC, type, 0, 1, header, buffers, payload)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(prefix(header=wire.MAX_HEADER + 8), id="header over 16 MiB"),
        pytest.param(prefix(header=4), id="header not a multiple of 8"),
        pytest.param(prefix(buffers=wire.MAX_BUFFERS + 1, payload=wire.MAX_PAYLOAD), id="more than 65536 buffers"),
        pytest.param(prefix(payload=wire.MAX_PAYLOAD + 8), id="payload over 1 GiB"),
        pytest.param(prefix(payload=2**64 - 8), id="payload of 16 EiB"),
        pytest.param(prefix(buffers=2, payload=8), id="no room for the lengths"),
        pytest.param(prefix(type=99), id="unknown type"),
        pytest.param(prefix(payload=8) + bytes(8), id="payload without buffers"),
        pytest.param(
            prefix(buffers=1, payload=16) + struct.pack("<Q", 2**63) + bytes(8), id="buffer longer than payload"
        ),
        pytest.param(prefix(buffers=1, payload=16) + struct.pack("<Q", 0) + bytes(8), id="payload longer than buffers"),
        pytest.param(
            prefix(buffers=1, payload=16) + struct.pack("<Q", 5) + b"fivesX\0\0", id="padding that is not zero"
        ),
        pytest.param(prefix(header=8) + b"[1,2,3] ", id="header is a list"),
        pytest.param(prefix(header=8) + b'{"a":   ', id="header cut short"),
        pytest.param(prefix(header=8) + b'{"\xff":1} ', id="header is not UTF-8"),
        pytest.param(prefix(header=1 << 20) + b'{"a":' + b"[" * ((1 << 20) - 5), id="header nested too deep"),
    ],
)
def test_limits_and_malformed_frames_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decoded(data)


def test_the_sender_keeps_to_the_limits_as_well() -> None:
    with pytest.raises(ProtocolError, match="header"):
        encode(FrameType.ERROR, header={"traceback": "x" * wire.MAX_HEADER})
    with pytest.raises(ProtocolError, match="buffers"):
        encode(FrameType.ROWS, buffers=[b""] * (wire.MAX_BUFFERS + 1))


def test_a_payload_over_one_gibibyte_is_not_sent() -> None:
    mebibyte = bytes(1 << 20)
    with pytest.raises(ProtocolError, match="payload"):
        encode(FrameType.ROWS, buffers=[mebibyte] * 1024)


def test_numbers_that_json_does_not_know_become_null() -> None:
    header = {"loss": math.nan, "history": [1.0, math.inf], "best": {"rmse": -math.inf}}
    (frame,) = decoded(stream(Frame(FrameType.PROGRESS, 1, 0, header, [])))
    assert frame.header == {"loss": None, "history": [1.0, None], "best": {"rmse": None}}


def test_received_buffers_are_views_of_one_allocation() -> None:
    (frame,) = decoded(stream(Frame(FrameType.ROWS, 1, 0, {}, [memoryview(b"first"), memoryview(b"second")])))
    assert frame.buffers[0].obj is frame.buffers[1].obj


# -- connections -------------------------------------------------------------------------------------------------------


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
        left.sendall(stream(Frame(FrameType.DONE, 1, 0, {"task": "binary"}, []))[:-1])
    connection = Connection(right)
    with pytest.raises(ProtocolError, match="within a frame"):
        connection.recv()
    connection.close()


def test_sending_to_a_peer_that_is_gone_raises(pair: tuple[Connection, Connection]) -> None:
    pair[1].close()
    with pytest.raises(OSError):
        pair[0].send(FrameType.DONE, 1)


# -- states ------------------------------------------------------------------------------------------------------------


def state_frames(kind: str, data: bytes, meta: dict[str, Any] | None = None) -> list[Frame]:
    return [Frame(FrameType.STATE, 1, 0, header, [chunk]) for header, chunk in wire.state_frames(kind, data, meta)]


@pytest.mark.parametrize("size", [0, 1, 1000, 1001, 2000, 2500])
def test_a_state_is_cut_into_chunks_and_put_together_again(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STATE_CHUNK", 1000)
    data = bytes(number % 251 for number in range(size))
    sent = state_frames("checkpoint", data, {"epoch": 3})
    collector = StateCollector()
    states = [collector.add(frame) for frame in sent]
    assert len(sent) == max(1, math.ceil(size / 1000))
    assert states[:-1] == [None] * (len(sent) - 1)
    assert states[-1] == wire.State("checkpoint", {"epoch": 3}, data)


def test_one_collector_takes_state_after_state() -> None:
    collector = StateCollector()
    for kind, data in [("checkpoint", b"one"), ("weights", b"two")]:
        (frame,) = state_frames(kind, data)
        assert collector.add(frame) == wire.State(kind, {}, data)


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([0, 2], id="a chunk is missing"),
        pytest.param([0, 0], id="a chunk comes twice"),
        pytest.param([1], id="the first chunk is missing"),
    ],
)
def test_chunks_out_of_order_are_a_protocol_error(order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STATE_CHUNK", 10)
    sent = state_frames("weights", bytes(30))
    collector = StateCollector()
    with pytest.raises(ProtocolError, match="out of place"):
        for position in order:
            collector.add(sent[position])


def test_two_states_must_not_interleave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STATE_CHUNK", 10)
    collector = StateCollector()
    collector.add(state_frames("weights", bytes(30))[0])
    with pytest.raises(ProtocolError, match="between"):
        collector.add(state_frames("checkpoint", bytes(30))[1])


@pytest.mark.parametrize(
    "buffers", [[], [b"one", b"two"], [bytes(wire.STATE_CHUNK + 1)]], ids=["none", "two", "too long"]
)
def test_a_state_frame_has_one_buffer_of_limited_size(buffers: list[bytes]) -> None:
    header = {"kind": "weights", "seq": 0, "last": True, "meta": None}
    frame = Frame(FrameType.STATE, 1, 0, header, [memoryview(buffer) for buffer in buffers])
    with pytest.raises(ProtocolError, match="one buffer"):
        StateCollector().add(frame)
