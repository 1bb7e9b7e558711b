"""The format of frames: whatever is sent arrives, however it is cut; whatever else arrives is a ProtocolError."""

from __future__ import annotations

import contextlib
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyworker import wire
from pyworker.wire import Decoder, Frame, FrameType, ProtocolError, encode
from tests.examples import examples

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
    """Return the frames that a decoder reads from `data`, received in pieces of the sizes in `cuts`, then the rest."""
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


@examples(40, long=300)
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
