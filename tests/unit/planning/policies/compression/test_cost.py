"""The cost of a swap with and without compression, and the decision between both (CSWAP, section IV-B)."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.systems.cswap import oracle_ratio
from pg_tensile.planning.compression.codec import Codec
from pg_tensile.planning.compression.codec_times import CodecTimes, Sample, fit
from pg_tensile.planning.compression.coding import CHUNK_BYTES, Coding
from pg_tensile.planning.compression.sparsity import Statistics
from pg_tensile.planning.device.link import copy_us
from pg_tensile.planning.device.profile import RTX_A6000, Direction
from pg_tensile.planning.plan.codecs import host_coding_us
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.policies.compression.advisor import choose, choose_compression, word_bytes
from pg_tensile.planning.policies.compression.cost import Window, coded_cost_us, plain_cost_us, swap_cost_us, windows
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench.compression import Sparsity
from tests.unit.planning.compression.test_coding import (
    ACTIVATION,
    BYTE_A_US,
    MIB,
    WEIGHT,
    away,
    coded,
    over_a_peak,
    small_trace,
)

OUT, IN = EventKind.SWAP_OUT, EventKind.SWAP_IN
CHUNK = CHUNK_BYTES["cpu"]


def times_of(us_a_byte: float, codecs: tuple[Codec, ...] = (Codec.ZVC,)) -> CodecTimes:
    """Coding and decoding take so long, however sparse."""
    shares, sizes = (0.05, 0.2, 0.4, 0.5, 0.7, 0.8, 0.92, 0.97), (1 << 16, 1 << 18, 1 << 20)
    return fit(
        Sample(codec, size, 4, share, share * (1 - share), size * us_a_byte, size * us_a_byte)
        for codec in codecs
        for size in sizes
        for share in shares
    )


def test_the_equations():
    assert plain_cost_us(100.0, 30.0) == 70.0 and plain_cost_us(100.0, 130.0) == 0.0
    assert coded_cost_us(20.0, 40.0, 30.0) == 20.0 + 10.0 and coded_cost_us(20.0, 40.0, 90.0) == 20.0


def test_a_tensor_of_one_chunk_costs_what_the_paper_says():
    """Time_c + O_f on the way out, Time_dc + O_b on the way back; T′ without."""
    trace = coded(small_trace(CHUNK), 1, Codec.ZVC, 1000, encode_us=300.0, decode_us=500.0)
    out, back = Window(1, Direction.OUT, 400.0, 1.0), Window(1, Direction.IN, 1200.0, 1.0)
    assert swap_cost_us(trace, out, Codec.ZVC, BYTE_A_US) == 300 + (1000 - 400)
    assert swap_cost_us(trace, back, Codec.ZVC, BYTE_A_US) == 500
    assert swap_cost_us(trace, out, 0, BYTE_A_US) == CHUNK - 400
    assert swap_cost_us(trace, Window(1, Direction.OUT, 1e9, 1.0), 0, BYTE_A_US) == 0


def test_of_more_chunks_only_what_coding_adds_to_the_transfer_counts():
    trace = coded(small_trace(4 * CHUNK), 1, Codec.ZVC, 1000, encode_us=400.0, decode_us=400.0)
    assert swap_cost_us(trace, Window(1, Direction.OUT, 300.0, 1.0), Codec.ZVC, BYTE_A_US) == 400 / 4 + (1000 - 300)
    assert swap_cost_us(trace, Window(1, Direction.OUT, 300.0, 2.0), Codec.ZVC, BYTE_A_US) == 400 / 4 + (2000 - 300)


def test_a_coded_transfer_waits_for_its_lane_to_wake_up():
    """In either direction, however many chunks it has; one that is not coded does not."""
    trace = coded(small_trace(4 * CHUNK), 1, Codec.ZVC, 1000, encode_us=400.0, decode_us=400.0)
    before = [copy_us(trace, 1, codec, way, BYTE_A_US) for codec in (0, Codec.ZVC) for way in Direction]
    assert trace.coding is not None
    trace.coding.waking_us[1] = 70.0
    after = [copy_us(trace, 1, codec, way, BYTE_A_US) for codec in (0, Codec.ZVC) for way in Direction]
    assert np.subtract(after, before).tolist() == [0, 0, 70, 70]


def test_a_transfer_hides_behind_the_compute_until_it_is_needed():
    """Out after operator 1, freed after 2: one operator of 1 s. In after 3, needed by 4: none."""
    trace = small_trace(CHUNK)  # half a second on the link
    plan = Plan.build([Event(OUT, 1, 1, 2), Event(IN, 1, 3, 4)])
    (timeline,) = simulate([SimulatedJob(trace, plan)], BYTE_A_US)
    assert windows(trace, plan, timeline, BYTE_A_US) == [
        Window(1, Direction.OUT, 1e6, 1.0),
        Window(1, Direction.IN, 0.0, 1.0),
    ]


def test_a_transfer_that_keeps_others_waiting_hides_no_longer_than_they_can_wait():
    """The weight's copy ends in time for its own deadline, but keeps the activation's behind it from doing so."""
    trace = small_trace(3 * CHUNK)  # 1.5 s, and operators take 1 s
    plan = Plan.build([Event(OUT, 2, 1, 4), Event(OUT, 1, 1, 3), Event(IN, 1, 3, 4), Event(IN, 2, 4, 5)])
    (timeline,) = simulate([SimulatedJob(trace, plan)], BYTE_A_US)
    weight, activation = windows(trace, plan, timeline, BYTE_A_US)[:2]
    start_us, size = 2e6, 3 * CHUNK
    assert activation.hidden_us == pytest.approx(4e6 - (start_us + size))
    assert weight.hidden_us == pytest.approx((4e6 - size) - start_us)
    assert plain_cost_us(size, weight.hidden_us) == pytest.approx(timeline.stalls[0].us)


SPARSE, DENSE = Statistics(0.9, 0.09), Statistics(0.05, 0.05)


def advised(us_a_byte: float, statistics: Statistics, us: float = 1e5, codecs=(Codec.ZVC,)) -> Coding:
    trace = small_trace(4 * CHUNK, us)
    plan = Plan.build([Event(OUT, 1, 1, 2), Event(IN, 1, 3, 4)])
    (timeline,) = simulate([SimulatedJob(trace, plan)], BYTE_A_US)
    return choose(trace, plan, timeline, {1: statistics}, times_of(us_a_byte, codecs), BYTE_A_US)[0]


def test_what_pays_is_compressed():
    coding = advised(0.1, SPARSE)
    assert coding.codec.tolist() == [0, Codec.ZVC, 0, 0]
    assert coding.moved_bytes[1] < 0.15 * 4 * CHUNK
    assert coding.encode_us[1] == pytest.approx(0.1 * 4 * CHUNK, rel=0.01)


@pytest.mark.parametrize(
    ("us_a_byte", "statistics", "us"),
    [(1.5, SPARSE, 1e5), (0.1, Statistics(0.0, 0.0), 1e5), (0.01, SPARSE, 1e8), (1.0, DENSE, 1e5)],
    ids=["the coder is slow", "nothing is zero", "everything is hidden", "hardly anything is zero"],
)
def test_what_does_not_pay_is_not_compressed(us_a_byte, statistics, us):
    trace = small_trace(4 * CHUNK, us)
    plan = Plan.build([Event(OUT, 1, 1, 2), Event(IN, 1, 2, 4)])
    (timeline,) = simulate([SimulatedJob(trace, plan)], BYTE_A_US)
    assert not choose(trace, plan, timeline, {1: statistics}, times_of(us_a_byte), BYTE_A_US)[0].compresses


def test_the_cheapest_codec_is_chosen():
    """In runs of zeros RLE keeps fewer bytes than a bit for each word."""
    runs = Statistics(0.95, 0.0001)
    assert advised(0.001, runs, codecs=(Codec.ZVC, Codec.RLE, Codec.CSR)).codec[1] == Codec.RLE
    assert advised(0.001, SPARSE, codecs=(Codec.ZVC, Codec.RLE, Codec.CSR)).codec[1] == Codec.ZVC


def test_the_plan_is_made_again_with_compression_where_that_is_faster():
    trace, profile = over_a_peak(), RTX_A6000.with_link(1e8)
    budget = 16 * MIB * 2 - 4 * MIB

    def make(trace: Trace) -> Plan:
        return POLICIES["joint"]({0: trace}, profile, budget)[0]

    fast = choose_compression(make, trace, profile, {1: SPARSE}, times_of(0.0001))
    assert fast.coding is not None and fast.coding.codec[1] == Codec.ZVC
    (without,) = simulate([SimulatedJob(trace, make(trace))], profile)
    assert fast.timeline.iteration_us < 0.9 * without.iteration_us  # which recomputes the tensor
    assert fast.timeline.bytes_out < 0.2 * fast.timeline.raw_bytes_out
    slow = choose_compression(make, trace, profile, {1: SPARSE}, times_of(1.0)).plan
    assert slow == make(trace) and not slow.rows["codec"].any()
    assert choose_compression(lambda _: NO_EVENTS, trace, profile, {1: SPARSE}, times_of(0.0)).plan == NO_EVENTS


@pytest.mark.parametrize("us_a_byte", [0.0001, 0.001, 0.002, 0.003, 0.004, 0.005])
def test_a_plan_gains_more_than_coding_takes_of_the_hosts_processors(us_a_byte):
    trace, profile = over_a_peak(), RTX_A6000.with_link(1e8)

    def make(trace: Trace) -> Plan:
        return POLICIES["joint"]({0: trace}, profile, 16 * MIB * 2 - 4 * MIB)[0]

    (without,) = simulate([SimulatedJob(trace, make(trace))], profile)
    found = choose_compression(make, trace, profile, {1: SPARSE}, times_of(us_a_byte))
    taken_us = host_coding_us(trace.with_coding(found.coding), found.plan)
    assert (taken_us > 0) == bool(found.plan.rows["codec"].any())
    assert found.timeline.iteration_us + taken_us <= without.iteration_us


def test_the_words_of_a_type():
    types = ["f32", "bf16", "f16", "i64", "u8", "bool", "c128", "f8_e4m3fn", ""]
    assert [word_bytes(name) for name in types] == [4, 2, 2, 8, 1, 1, 16, 1, 1]


def test_the_oracle_of_the_benchmark_takes_the_smallest_code_and_no_time():
    """Half of what the plan moves has statistics, and nine tenths of that are zeros in long runs."""
    plan = Plan.build([*away().events, Event(OUT, WEIGHT, 5, 6), Event(IN, WEIGHT, 0, 1)])
    times = times_of(100.0, (Codec.ZVC, Codec.RLE))

    def found(statistics: Statistics) -> float | None:
        return oracle_ratio(small_trace(), BYTE_A_US, plan, Sparsity({ACTIVATION: statistics}, times, 0.0))

    assert found(SPARSE) == pytest.approx(0.5 + 0.5 * (1 / 32 + 0.1), rel=1e-3)
    assert found(Statistics(0.9, 0.0)) == pytest.approx(0.5 + 0.5 * 0.1, rel=1e-2)
    assert found(Statistics(0.0, 0.0)) == 1.0
