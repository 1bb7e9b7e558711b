"""Codings of traces, codecs in plans, and what the simulator makes of both."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from pg_tensile.errors import InvalidPlanError, PlanError, TraceError
from pg_tensile.planning.compression.codec import Codec
from pg_tensile.planning.compression.coding import CHUNK_BYTES, STAGING_BYTES, Coding
from pg_tensile.planning.device.link import copy_us, moved_bytes, swap_us
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile, Direction
from pg_tensile.planning.plan.codecs import has_codecs, with_codecs
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import CODECS, NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.simulator.simulator import PlanChange, SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace
from tests.unit.graphs import traces

OUT, IN, RELEASE = EventKind.SWAP_OUT, EventKind.SWAP_IN, EventKind.RELEASE
CHUNK = CHUNK_BYTES["cpu"]
MIB = 1 << 20
# A byte a µs each way, nothing else takes time.
BYTE_A_US = DeviceProfile("bytes", "sim", 1 << 40, 1e6, 1e6, 1.0, 1e12, 1e12, 0.0, 0.0)
ACTIVATION, WEIGHT = 1, 2


def small_trace(size: int = 4 * CHUNK, us: float = 1e6) -> Trace:
    """An activation made by operator 1 and read by 4, a weight read by 1 and changed by 5."""
    read, create, write = Mode.READ, Mode.CREATE, Mode.WRITE
    operators = [
        Operator("placeholder", Phase.FORWARD, (Access(0, create),), latency_us=us),
        Operator("make", Phase.FORWARD, (Access(0, read), Access(2, read), Access(1, create)), latency_us=us),
        Operator("idle", Phase.FORWARD, (Access(0, read),), latency_us=us),
        Operator("idle", Phase.BACKWARD, (Access(0, read),), latency_us=us),
        Operator("use", Phase.BACKWARD, (Access(1, read), Access(3, create)), latency_us=us),
        Operator("update", Phase.OPTIMIZER, (Access(3, read), Access(2, write)), latency_us=us),
        Operator("output", Phase.OPTIMIZER, (Access(3, read),), latency_us=us),
    ]
    tensors = [
        Tensor(8, Kind.INPUT, dtype="f32"),
        Tensor(size, Kind.ACTIVATION, dtype="f32"),
        Tensor(size, Kind.PARAMETER, "weight", dtype="f32"),
        Tensor(8, Kind.GRADIENT, dtype="f32"),
    ]
    return Trace.build(operators, tensors)


def coded(trace: Trace, tensor: int, codec: int, moved: int, encode_us: float = 0.0, decode_us: float = 0.0) -> Trace:
    coding = Coding.none(trace.tensor_bytes)
    coding.codec[tensor], coding.moved_bytes[tensor] = codec, moved
    coding.encode_us[tensor], coding.decode_us[tensor] = encode_us, decode_us
    return trace.with_coding(coding)


def away(tensor: int = ACTIVATION, codec: int = 0, made: int = 1, used: int = 4) -> Plan:
    return Plan.build([Event(OUT, tensor, made, made + 1, codec=codec), Event(IN, tensor, used - 1, used)])


# ---- codings, and codecs in plans ----


def test_names_of_codecs_in_plans_are_those_of_the_codecs():
    assert [Codec(number).name.lower() for number in range(len(CODECS))] == list(CODECS)


def test_a_coding_is_no_part_of_a_trace_but_stays_with_it():
    plain = small_trace()
    trace = coded(plain, ACTIVATION, Codec.ZVC, 100)
    assert trace.fingerprint == plain.fingerprint and trace.to_bytes() == plain.to_bytes()
    assert trace.with_latencies(np.ones(7)).coding is trace.coding
    assert trace.with_coding(None).coding is None and Trace.from_bytes(trace.to_bytes()).coding is None


@pytest.mark.parametrize(("column", "value"), [("codec", 5), ("moved_bytes", -1), ("encode_us", np.nan)])
def test_a_coding_that_means_nothing_is_refused(column, value):
    trace = small_trace()
    coding = Coding.none(trace.tensor_bytes)
    getattr(coding, column)[1] = value
    with pytest.raises(TraceError, match="coding"):
        trace.with_coding(coding)
    with pytest.raises(TraceError, match="one entry for each of the 4 tensors"):
        trace.with_coding(Coding.none(over_a_peak().tensor_bytes)._replace(codec=np.zeros(2, np.uint8)))


def test_a_codec_takes_one_byte_of_an_event_and_none_of_a_plan_without():
    plain, packed = away(), away(codec=Codec.LZ4)
    assert np.flatnonzero(np.frombuffer(plain.to_bytes(), "u1") != np.frombuffer(packed.to_bytes(), "u1")).size > 0
    rows = packed.rows.copy()
    assert rows[0].tobytes()[1] == Codec.LZ4
    rows["codec"] = 0
    assert rows.tobytes() == plain.rows.tobytes()
    assert Plan.from_bytes(packed.to_bytes()) == packed
    assert packed.events[0].codec == Codec.LZ4 and packed.events[1].codec == 0


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan.build([Event(OUT, 1, 1, 2, codec=9), Event(IN, 1, 3, 4)]), "unknown codec 9: none, zvc, rle, csr, lz4"),
        (Plan.build([Event(OUT, 1, 1, 2), Event(IN, 1, 3, 4, codec=1)]), "only a swap_out codes what it copies"),
        (Plan.build([Event(RELEASE, 1, 4, 4, codec=2)]), "only a swap_out codes"),
        (
            Plan.build([Event(OUT, 1, 1, 2, codec=1), Event(IN, 1, 2, 3), Event(OUT, 1, 4, 4, codec=1)]),
            "has codec zvc for tensor 1, whose copy on the host is current: nothing is copied",
        ),
    ],
)
def test_a_codec_where_nothing_is_coded_is_refused(plan, message):
    with pytest.raises(InvalidPlanError, match=message) as refused:
        validate(small_trace(), plan)
    assert refused.value.event >= 0


def test_a_codec_does_not_fit_into_more_than_its_byte():
    with pytest.raises(PlanError, match="do not fit into a row"):
        Plan.build([Event(OUT, 1, 1, 2, codec=256)])


def test_codecs_are_set_where_a_swap_out_copies():
    trace = coded(small_trace(), ACTIVATION, Codec.RLE, 100)
    again = [Event(OUT, 1, 1, 2), Event(IN, 1, 2, 3), Event(OUT, 1, 4, 4), Event(OUT, 2, 1, 1), Event(IN, 2, 2, 5)]
    plan = Plan.build(again)
    assert [event.codec for event in with_codecs(trace, plan).events] == [Codec.RLE, 0, 0, 0, 0]
    assert with_codecs(small_trace(), plan) is plan
    assert not has_codecs(with_codecs(trace.with_coding(Coding.none(trace.tensor_bytes)), with_codecs(trace, plan)))


def test_staging_counts_while_a_plan_has_codecs():
    trace = small_trace()
    plain, packed = footprint(trace, away()), footprint(trace, away(codec=Codec.ZVC))
    assert packed.peak_bytes == plain.peak_bytes
    assert packed.device_peak_bytes == plain.device_peak_bytes + STAGING_BYTES["cpu"]


# ---- times ----


def test_the_slower_of_coding_and_moving_takes_its_time_and_a_chunk_of_the_other():
    trace = coded(small_trace(), ACTIVATION, Codec.ZVC, 1000, encode_us=400.0, decode_us=6000.0)  # of 4 chunks
    assert copy_us(trace, ACTIVATION, Codec.ZVC, Direction.OUT, BYTE_A_US) == 1000 + 400 / 4
    assert copy_us(trace, ACTIVATION, Codec.ZVC, Direction.IN, BYTE_A_US) == 6000 + 1000 / 4
    assert copy_us(trace, ACTIVATION, 0, Direction.OUT, BYTE_A_US) == 4 * CHUNK
    assert swap_us(trace, Direction.OUT, BYTE_A_US)[1:3] == [1100, 4 * CHUNK]
    # A codec that the coding knows nothing about moves everything.
    assert moved_bytes(trace, ACTIVATION, Codec.LZ4) == moved_bytes(trace.with_coding(None), 1, 1) == 4 * CHUNK


def test_transfers_move_coded_bytes_and_take_coded_time():
    trace = coded(small_trace(us=50_000.0), ACTIVATION, Codec.ZVC, 20_000, encode_us=40_000.0, decode_us=80_000.0)
    (timeline,) = simulate([SimulatedJob(trace, away(codec=Codec.ZVC))], BYTE_A_US)
    out, back = timeline.transfers
    assert (out.start_us, out.end_us, out.bytes, out.raw_bytes) == (100_000, 145_000, 20_000, 4 * CHUNK)
    assert (back.start_us, back.end_us, back.bytes, back.raw_bytes) == (200_000, 285_000, 20_000, 4 * CHUNK)
    assert timeline.stall_us == 85_000 and timeline.iteration_us == 7 * 50_000 + 85_000
    assert (timeline.bytes_out, timeline.raw_bytes_out) == (20_000, 4 * CHUNK) == (
        timeline.bytes_in, timeline.raw_bytes_in,
    )  # fmt: skip


def test_a_host_copy_keeps_its_codec_into_the_next_iteration_and_for_passive_swap_ins():
    """The weight goes after its update and comes back in the next iteration; after a change of plan passively."""
    trace = coded(small_trace(), WEIGHT, Codec.CSR, 10)
    plan = Plan.build([Event(IN, WEIGHT, 0, 1), Event(OUT, WEIGHT, 5, 6, codec=Codec.CSR)])
    job = SimulatedJob(trace, plan, changes=(PlanChange(2, NO_EVENTS),))
    (steady,) = simulate([SimulatedJob(trace, plan)], BYTE_A_US)
    assert [one.bytes for one in steady.transfers] == [10, 10]
    (changed,) = simulate([job], BYTE_A_US)
    (transition,) = changed.transitions
    assert (transition.passive_swap_ins, transition.passive_bytes) == (1, 10)
    raw = plan.rows.copy()
    raw["codec"] = 0
    (timeline,) = simulate([SimulatedJob(trace, Plan(raw))], BYTE_A_US)
    assert [one.bytes for one in timeline.transfers] == [4 * CHUNK] * 2


def test_while_both_lanes_are_busy_moving_slows_down_and_coding_does_not():
    size = 4 * CHUNK
    events = [Event(OUT, 1, 1, 2, codec=Codec.ZVC), Event(OUT, 2, 3, 4), Event(IN, 1, 3, 4), Event(IN, 2, 4, 5)]
    trace = coded(small_trace(), ACTIVATION, Codec.ZVC, size // 8, encode_us=size / 2, decode_us=size / 2)
    half = BYTE_A_US.with_link(1e6, 1e6, 0.5)
    (timeline,) = simulate([SimulatedJob(trace, Plan.build(events))], half)
    first, weight, back = timeline.transfers[:3]
    assert first.end_us - first.start_us == size / 2 + size / 8 / 4  # the coder's time, and a chunk of the link's
    assert (weight.start_us, weight.direction, back.direction) == (back.start_us, Direction.OUT, Direction.IN)
    assert back.end_us - back.start_us == pytest.approx(size / 2 + size / 4 / 4)
    shared_us = back.end_us - back.start_us
    assert weight.end_us - weight.start_us == pytest.approx(shared_us + size - shared_us / 2)


@given(traces())
def test_a_coding_that_changes_nothing_changes_no_time(trace):
    coding = Coding.none(trace.tensor_bytes)
    coding.codec[:] = Codec.ZVC
    profile = RTX_A6000.with_link(1e9, 1e9, 0.75)
    plan = POLICIES["swap_all"]({0: trace}, profile, None)[0]
    (plain,) = simulate([SimulatedJob(trace, plan)], profile)
    packed = with_codecs(trace.with_coding(coding), plan)
    (same,) = simulate([SimulatedJob(trace.with_coding(coding), packed)], profile)
    assert same.iteration_us == pytest.approx(plain.iteration_us)
    assert [one[:3] for one in same.transfers] == [one[:3] for one in plain.transfers]
    assert has_codecs(packed) == any(one.direction == Direction.OUT for one in plain.transfers)


def over_a_peak() -> Trace:
    """Tensor 1 lies idle while tensor 2 is made and used; 16 MiB each."""
    read, create = Mode.READ, Mode.CREATE
    accesses = [[(0, create)], [(0, read), (1, create)], [(0, read)], [(0, read), (2, create)]]
    accesses += [[(2, read), (3, create)], [(3, read)], [(1, read), (3, read)], [(3, read)]]
    targets = ["placeholder", "make", "idle", "make", "use", "idle", "use", "output"]
    operators = [
        Operator(target, Phase.FORWARD, tuple(Access(*access) for access in row), latency_us=50_000.0, flops=10**12)
        for target, row in zip(targets, accesses, strict=True)
    ]
    sizes = [8, 16 * MIB, 16 * MIB, 8]
    kinds = [Kind.INPUT, Kind.ACTIVATION, Kind.ACTIVATION, Kind.TEMPORARY]
    return Trace.build(operators, [Tensor(size, kind, dtype="f32") for size, kind in zip(sizes, kinds, strict=True)])


@pytest.mark.parametrize("policy", ["joint", "tensile", "capuchin", "lru", "swap_all"])
def test_policies_plan_with_codecs_and_leave_room_for_staging(policy):
    """Raw, the tensor takes longer than there is time; coded it does not."""
    plain = over_a_peak()
    trace = coded(plain, 1, Codec.ZVC, MIB)
    profile = RTX_A6000.with_link(1e8)
    budget = footprint(trace).device_peak_bytes - 8 * MIB
    plan = POLICIES[policy]({0: trace}, profile, budget)[0]
    validate(trace, plan)
    assert {(event.tensor, event.codec) for event in plan.events if event.kind == OUT} >= {(1, Codec.ZVC)}
    assert footprint(trace, plan).device_peak_bytes <= budget
    if policy == "joint":
        without = POLICIES[policy]({0: plain}, profile, budget)[0]
        assert _us(trace, plan, profile) < 1.001 * plain.latency_us.sum() < _us(plain, without, profile)


def _us(trace: Trace, plan: Plan, profile: DeviceProfile) -> float:
    return simulate([SimulatedJob(trace, plan)], profile)[0].iteration_us
