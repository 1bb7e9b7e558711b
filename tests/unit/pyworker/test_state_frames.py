"""States as sequences of STATE frames: they come whole and in order, or are a ProtocolError."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pyworker import state_frames
from pyworker.state_frames import State, StateCollector
from pyworker.wire import Frame, FrameType, ProtocolError


def frames_of(kind: str, data: bytes, meta: dict[str, Any] | None = None) -> list[Frame]:
    return [
        Frame(FrameType.STATE, 1, 0, header, [chunk]) for header, chunk in state_frames.state_frames(kind, data, meta)
    ]


@pytest.mark.parametrize("size", [0, 1, 1000, 1001, 2000, 2500])
def test_a_state_is_cut_into_chunks_and_put_together_again(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_frames, "STATE_CHUNK", 1000)
    data = bytes(number % 251 for number in range(size))
    sent = frames_of("checkpoint", data, {"epoch": 3})
    collector = StateCollector()
    states = [collector.add(frame) for frame in sent]
    assert len(sent) == max(1, math.ceil(size / 1000))
    assert states[:-1] == [None] * (len(sent) - 1)
    assert states[-1] == State("checkpoint", {"epoch": 3}, data)


def test_one_collector_takes_state_after_state() -> None:
    collector = StateCollector()
    for kind, data in [("checkpoint", b"one"), ("weights", b"two")]:
        (frame,) = frames_of(kind, data)
        assert collector.add(frame) == State(kind, {}, data)


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([0, 2], id="a chunk is missing"),
        pytest.param([0, 0], id="a chunk comes twice"),
        pytest.param([1], id="the first chunk is missing"),
    ],
)
def test_chunks_out_of_order_are_a_protocol_error(order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_frames, "STATE_CHUNK", 10)
    sent = frames_of("weights", bytes(30))
    collector = StateCollector()
    with pytest.raises(ProtocolError, match="out of place"):
        for position in order:
            collector.add(sent[position])


def test_two_states_must_not_interleave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_frames, "STATE_CHUNK", 10)
    collector = StateCollector()
    collector.add(frames_of("weights", bytes(30))[0])
    with pytest.raises(ProtocolError, match="between"):
        collector.add(frames_of("checkpoint", bytes(30))[1])


@pytest.mark.parametrize(
    "buffers", [[], [b"one", b"two"], [bytes(state_frames.STATE_CHUNK + 1)]], ids=["none", "two", "too long"]
)
def test_a_state_frame_has_one_buffer_of_limited_size(buffers: list[bytes]) -> None:
    header = {"kind": "weights", "seq": 0, "last": True, "meta": None}
    frame = Frame(FrameType.STATE, 1, 0, header, [memoryview(buffer) for buffer in buffers])
    with pytest.raises(ProtocolError, match="one buffer"):
        StateCollector().add(frame)
