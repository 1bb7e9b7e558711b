"""Traces: columns, versions, writers; contradictions are refused by name; any bytes make a trace or a TraceError."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning_speed import build
from pg_tensile.errors import TraceError
from pg_tensile.planning.allocator_rules import DEFAULT_RULES, AllocatorRules
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace
from tests.examples import examples
from tests.unit import graphs

READ, STATS, WRITE, CREATE = Mode.READ, Mode.STATS, Mode.WRITE, Mode.CREATE
FORWARD, BACKWARD, OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER


def operator(target: str, *accesses: tuple[int, Mode], **more) -> Operator:
    return Operator(target, more.pop("phase", FORWARD), tuple(Access(*access) for access in accesses), **more)


# weight, batch, an activation with two writers, a gradient, running statistics, an unused parameter
TENSORS = [
    Tensor(16, Kind.PARAMETER, "layer.weight", "f32", (4,)),
    Tensor(8, Kind.INPUT),
    Tensor(32, Kind.ACTIVATION, "", "f32", (2, 4)),
    Tensor(16, Kind.GRADIENT),
    Tensor(4, Kind.BUFFER, "running_mean"),
    Tensor(100, Kind.PARAMETER, "unused"),
]
OPERATORS = [
    operator("placeholder", (1, CREATE)),
    operator("norm", (0, READ), (1, READ), (4, STATS), (2, CREATE), module="layer", source="model.py:3"),
    operator("relu_", (2, WRITE), latency_us=2.5, flops=8, bytes=64),
    operator("backward", (2, READ), (1, READ), (3, CREATE), phase=BACKWARD, random=True),
    operator("sgd", (0, WRITE), (3, READ), phase=OPTIMIZER, workspace_bytes=10, signature="f32[4]"),
    operator("output", (2, READ), phase=OPTIMIZER),
]


def make(operators: list[Operator] = OPERATORS, tensors: list[Tensor] = TENSORS) -> Trace:
    return Trace.build(operators, tensors)


def rows(trace: Trace) -> tuple[list[Operator], list[Tensor], str]:
    return list(trace.operators), list(trace.tensors), trace.device


def test_rows_come_back_as_they_were_given():
    trace = make()
    assert rows(trace) == (OPERATORS, TENSORS, "cpu")
    assert trace.operators[-2] == OPERATORS[4]
    assert list(trace.operators[1:3]) == OPERATORS[1:3]
    assert len(trace.tensors) == trace.tensor_count == 6
    with pytest.raises(IndexError):
        trace.tensors[6]


def test_columns_follow_the_accesses():
    trace = make()
    assert trace.access_operator.tolist() == [0, 1, 1, 1, 1, 2, 3, 3, 3, 4, 4, 5]
    assert trace.access_version.tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert trace.tensor_first.tolist() == [1, 0, 1, 3, 1, 6]
    assert trace.tensor_last.tolist() == [4, 3, 5, 4, 1, 6]
    assert trace.tensor_writes.tolist() == [1, 0, 1, 0, 1, 0]
    assert trace.persistent.tolist() == [True, False, False, False, True, True]
    assert trace.accessed_bytes.tolist() == [8, 16 + 8 + 4 + 32, 32, 32 + 8 + 16, 16 + 16, 32]
    assert trace.working_set_bytes.tolist() == [8, 60, 32, 56, 32 + 10, 32] and trace.largest_operator == 1


def test_writers_are_the_creator_and_those_that_changed_it():
    trace = make()
    assert trace.writers(2, 0) == (1,)
    assert trace.writers(2, 1) == (1, 2)
    assert trace.writers(0, 0) == ()  # persistent: it was there before
    assert trace.writers(4, 1) == (1,)
    for tensor, version in ((2, 2), (2, -1), (6, 0), (-1, 0)):
        with pytest.raises(TraceError):
            trace.writers(tensor, version)


def test_a_trace_cannot_be_changed():
    trace = make()
    for column in (trace.access_tensor, trace.latency_us, trace.access_version, trace.tensor_first, trace.target.codes):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


def changed(place: int, **changes) -> list[Operator]:
    return [*OPERATORS[:place], OPERATORS[place]._replace(**changes), *OPERATORS[place + 1 :]]


def accessing(place: int, *accesses: tuple[int, int]) -> list[Operator]:
    return changed(place, accesses=tuple(Access(*access) for access in accesses))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ([], "begins with the operator placeholder"),
        (OPERATORS[1:], "begins with the operator placeholder"),
        (OPERATORS[:-1], "ends with the operator output"),
        (OPERATORS[:1], "ends with the operator output"),
        (accessing(2, (6, READ)), r"operator 2 \(relu_\) accesses tensor 6, which the trace does not have"),
        (accessing(2, (-1, READ)), "tensor -1, which the trace does not have"),
        (accessing(2, (2, WRITE), (0, READ), (2, READ)), r"operator 2 \(relu_\) accesses tensor 2 twice"),
        (accessing(2, (0, CREATE)), r"operator 2 \(relu_\) creates tensor 0 \(layer.weight\), which is persistent"),
        (accessing(2, (2, CREATE)), "creates tensor 2, which exists already"),
        (accessing(2, (3, READ)), "operator 2 .* accesses tensor 3 before it is created"),
        (accessing(0, (1, CREATE), (0, READ)), "placeholder.* accesses tensor 0 .*without creating it"),
        (accessing(0, (1, CREATE), (3, CREATE)), r"operator 3 \(backward\) creates tensor 3, which exists already"),
        (accessing(5, (2, WRITE)), "output.* does more than read tensor 2"),
        (accessing(4, (0, WRITE)), None),
        (accessing(3, (2, READ)), "accesses tensor 3 before it is created"),
        (accessing(2, (2, 4)), r"operator 2 \(relu_\) accesses tensor 2 in an unknown mode"),
        (changed(2, latency_us=float("nan")), r"operator 2 \(relu_\) cannot have latency_us = nan"),
        (changed(2, latency_us=-1.0), "cannot have latency_us = -1.0"),
        (changed(2, flops=-1), "cannot have flops = -1"),
        (changed(2, workspace_bytes=1 << 62), "cannot have workspace_bytes"),
        (changed(2, bytes=1 << 70), "does not fit into its column"),
        (changed(2, phase=3), "unknown phase"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_by_operator_and_tensor(operators, message):
    if message is None:
        make(operators)
    else:
        with pytest.raises(TraceError, match=message):
            make(operators)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (Tensor(-1, Kind.PARAMETER, "w"), r"tensor 5 \(w\) cannot have tensor_bytes = -1"),
        (Tensor(1 << 61, Kind.PARAMETER), "tensor_bytes"),
        (Tensor(1, Kind.ACTIVATION, "a"), r"no operator of the trace creates tensor 5 \(a\)"),
        (Tensor(1, 8), "unknown kind"),  # type: ignore[arg-type]
        (Tensor(1, Kind.PARAMETER, shape=(-1,)), "shape_sizes = -1"),
    ],
)
def test_impossible_tensors_are_refused(tensor, message):
    with pytest.raises(TraceError, match=message):
        make(tensors=[*TENSORS[:5], tensor])


def test_tensors_whose_bytes_cannot_be_added_are_refused():
    with pytest.raises(TraceError, match="more bytes together than can be counted"):
        make(tensors=[*TENSORS[:4], TENSORS[4]._replace(bytes=1 << 60), TENSORS[5]._replace(bytes=1 << 60)])


def test_the_placeholder_creates_all_inputs_and_nothing_else():
    tensors = [*TENSORS[:2], TENSORS[2]._replace(kind=Kind.INPUT), *TENSORS[3:]]
    with pytest.raises(TraceError, match=r"operator 1 .*creates tensor 2, but the placeholder creates inputs"):
        make(tensors=tensors)
    tensors = [TENSORS[0], TENSORS[1]._replace(kind=Kind.TEMPORARY), *TENSORS[2:]]
    with pytest.raises(TraceError, match=r"operator 0 .*creates tensor 1, but the placeholder creates inputs"):
        make(tensors=tensors)


def test_a_trace_without_tensors_or_of_another_device_is_refused():
    with pytest.raises(TraceError, match="at least one tensor"):
        Trace.build([operator("placeholder"), operator("output")], [])
    with pytest.raises(TraceError, match="cpu, cuda, emulated, not of 'tpu'"):
        Trace.build(OPERATORS, TENSORS, "tpu")


def test_the_fingerprint_is_of_the_structure_only():
    mark = make().fingerprint
    same = [
        make(changed(1, module="other", source="elsewhere.py:1")),
        make(changed(1, latency_us=7.0, workspace_bytes=5, flops=3, bytes=2)),
        make(tensors=[TENSORS[0]._replace(name="renamed"), *TENSORS[1:]]),
        make().with_latencies(np.ones(6)),
    ]
    assert {trace.fingerprint for trace in same} == {mark}
    others = [
        make(changed(1, target="other")),
        make(changed(1, signature="f32[5]")),
        make(changed(1, random=True)),
        make(changed(1, phase=BACKWARD)),
        make(accessing(3, (2, READ), (3, CREATE))),
        make(accessing(2, (2, READ))),
        make(tensors=[TENSORS[0]._replace(bytes=17), *TENSORS[1:]]),
        make(tensors=[TENSORS[0]._replace(kind=Kind.CONSTANT), *TENSORS[1:]]),
    ]
    assert len({mark, *(trace.fingerprint for trace in others)}) == len(others) + 1
    assert len(mark) == 32


def test_latencies_are_replaced_and_nothing_else():
    trace = make().with_latencies([1, 2, 3, 4, 5, 6], workspace_bytes=[0, 0, 7, 0, 0, 0])
    assert trace.latency_us.tolist() == [1, 2, 3, 4, 5, 6]
    assert trace.workspace_bytes[2] == 7
    assert trace.with_latencies(np.zeros(6)).workspace_bytes[2] == 7
    assert trace.operators[2].accesses == OPERATORS[2].accesses
    for wrong in ([1.0], np.ones((6, 1)), [float("inf")] * 6):
        with pytest.raises(TraceError):
            trace.with_latencies(wrong)


# ---- bytes ----


@given(graphs.traces())
def test_every_trace_survives_its_bytes(trace):
    data = trace.to_bytes()
    read = Trace.from_bytes(data)
    assert rows(read) == rows(trace)
    assert read.fingerprint == trace.fingerprint
    assert read.to_bytes() == data


@given(st.lists(st.text(st.characters(), max_size=8), min_size=6, max_size=6))
def test_any_text_survives(texts):
    texts[0] += "\0"
    texts[1] += "\udcff"  # a byte of a file name that is not UTF-8
    operators = [each._replace(source=text) for each, text in zip(OPERATORS, texts, strict=True)]
    assert list(Trace.from_bytes(make(operators).to_bytes()).operators) == operators


def sealed(payload: bytes, size: int | None = None) -> bytes:
    """Bytes whose header is right for this payload, whatever it is."""
    body = struct.pack("<Q", len(payload) if size is None else size) + zlib.compress(payload)
    return struct.pack("<8sII", b"tensileT", 1, zlib.crc32(body)) + body


def payload_of(data: bytes) -> bytes:
    return zlib.decompress(data[24:])


def test_sealing_is_what_the_format_does():
    data = make().to_bytes()
    assert Trace.from_bytes(sealed(payload_of(data))).fingerprint == make().fingerprint


def test_truncated_bytes_are_refused():
    data = make().to_bytes()
    for end in range(len(data)):
        with pytest.raises(TraceError):
            Trace.from_bytes(data[:end])
    with pytest.raises(TraceError):
        Trace.from_bytes(data + b"\0")


def test_flipped_bits_are_refused():
    data = make().to_bytes()
    for place in range(len(data)):
        for bit in (1, 0x80):
            damaged = bytearray(data)
            damaged[place] ^= bit
            with pytest.raises(TraceError):
                Trace.from_bytes(bytes(damaged))


def test_another_version_is_refused_by_name():
    data = make().to_bytes()
    with pytest.raises(TraceError, match="a trace of format 2 cannot be read") as caught:
        Trace.from_bytes(data[:8] + struct.pack("<I", 2) + data[12:])
    assert caught.value.hint


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    for whole in (data, b"tensileT" + data, sealed(data)):
        with pytest.raises(TraceError):
            Trace.from_bytes(whole)


@given(graphs.traces(8, 8), graphs.dice())
@examples(50, long=400)
def test_damage_behind_a_right_checksum_makes_a_trace_or_an_error(trace, dice: random.Random):
    payload = bytearray(payload_of(trace.to_bytes()))
    for _ in range(dice.choice((1, 1, 2, 8))):
        place = dice.choice((dice.randrange(len(payload)), dice.randrange(40)))
        payload[place] = dice.choice((0, 1, 2, 0x7F, 0x80, 0xFF, dice.randrange(256)))
    if dice.random() < 0.2:
        del payload[dice.randrange(len(payload)) :]
    try:
        read = Trace.from_bytes(sealed(bytes(payload)))
    except TraceError:
        return
    assert Trace.from_bytes(read.to_bytes()).fingerprint == read.fingerprint
    assert len(list(read.operators)) == read.operator_count


def test_a_small_file_cannot_ask_for_much_memory():
    bombs = [
        sealed(bytes(64 << 20)),  # zeros: no trace
        sealed(b"", size=1 << 62),
        sealed(bytes(1 << 20), size=10),  # longer than it says
        sealed(struct.pack("<5Q", 0, 1 << 40, 1 << 40, 1 << 40, 1 << 40)),
        sealed(struct.pack("<5Q", 0, (1 << 64) - 1, 0, 0, 0)),
    ]
    tracemalloc.start()
    try:
        for bomb in bombs:
            with pytest.raises(TraceError):
                Trace.from_bytes(bomb)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


def test_ten_thousand_operators_are_written_small():
    trace, _ = build(10_000)
    data = trace.to_bytes()
    assert len(data) < 2_000_000
    assert Trace.from_bytes(data).fingerprint == trace.fingerprint


# ---- the allocator ---------------------------------------------------------------------------------------------------


def test_the_rules_of_the_allocator_travel_with_a_trace_and_are_not_its_graph() -> None:
    trace = graphs.random_trace(random.Random(1), 10, 8)
    other = trace.with_allocator(AllocatorRules(large_page_bytes=64 << 20))
    assert Trace.from_bytes(trace.to_bytes()).allocator == DEFAULT_RULES
    assert Trace.from_bytes(other.to_bytes()).allocator == other.allocator
    assert other.fingerprint == trace.fingerprint
    assert trace.with_allocator(DEFAULT_RULES) is trace


def test_an_impossible_allocator_is_a_damaged_trace() -> None:
    trace = graphs.random_trace(random.Random(1), 10, 8)
    rules = AllocatorRules(large_page_bytes=64 << 20)
    object.__setattr__(rules, "block_bytes", 0)
    with pytest.raises(TraceError, match="its allocator is impossible"):
        Trace.from_bytes(trace.with_allocator(rules).to_bytes())
