"""Which swapped tensors are compressed, and how (CSWAP, section IV-A: the execution advisor).

For each tensor the codec with the least cost of section IV-B, or none where that is cheaper. Then the policy plans
again with what that makes of the swaps, and the simulator says whether the whole iteration is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pg_tensile.errors import BudgetError
from pg_tensile.planning.compression.codec import Codec, available
from pg_tensile.planning.compression.codec_times import CodecTimes
from pg_tensile.planning.compression.coding import Coding, host_coding_us, with_codecs
from pg_tensile.planning.compression.cost import Window, swap_cost_us, windows
from pg_tensile.planning.compression.sparsity import Statistics, coded_bytes
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.simulator.simulator import SimulatedJob, Timeline, simulate
from pg_tensile.planning.trace.trace import Trace

LEAST_BYTES = 1 << 14  # of a tensor: below, the latency of the link is all there is
ROUNDS = 2  # of planning and advising: a plan with compression leaves other transfers exposed


class Compression(NamedTuple):
    """A plan and the coding that it was made with (None: without), and what the simulator expects of it."""

    plan: Plan
    coding: Coding | None
    timeline: Timeline


class TensorCoding(NamedTuple):
    """What was decided about a tensor. T and T', in µs of an iteration: what its swaps cost with the codec that is best
    for it (`coded_us`) and without one (`plain_us`). `codec` None: none makes it smaller."""

    tensor: int
    codec: str | None
    coded_bytes: int
    coded_us: float | None
    plain_us: float
    compressed: bool


def choose_compression(
    make: Callable[[Trace], Plan],
    trace: Trace,
    profile: DeviceProfile,
    statistics: Mapping[int, Statistics],
    times: CodecTimes,
) -> Compression:
    """The fastest in the simulator of the plans that `make` makes without compression and with what `choose` chooses,
    where what coding takes of the host's processors counts as well; without, where both are as fast. `make` takes a
    trace with its coding. Raises what it raises without one."""
    trace = trace.with_coding(None)
    best = last = _simulated(make(trace), trace, profile)
    for _ in range(ROUNDS):
        known = trace.with_coding(last.coding)
        coding, _ = choose(known, last.plan, last.timeline, statistics, times, profile)
        if not coding.compresses:
            break
        coded = trace.with_coding(coding)
        try:
            last = _simulated(with_codecs(coded, make(coded)), coded, profile)
        except BudgetError:  # there is no room for staging
            break
        if _cost_of(last, trace) < _cost_of(best, trace):
            best = last
    return best


def _cost_of(found: Compression, trace: Trace) -> float:
    return found.timeline.iteration_us + host_coding_us(trace.with_coding(found.coding), found.plan)


def _simulated(plan: Plan, trace: Trace, profile: DeviceProfile) -> Compression:
    return Compression(plan, trace.coding, simulate([SimulatedJob(trace, plan)], profile)[0])


def choose(
    trace: Trace,
    plan: Plan,
    timeline: Timeline,
    statistics: Mapping[int, Statistics],
    times: CodecTimes,
    profile: DeviceProfile,
    compression: str = "auto",
) -> tuple[Coding, list[TensorCoding]]:
    """For each tensor with statistics the cheapest codec, or none, and why; `timeline` is the plan's. What it does not
    swap is looked at as if nothing hid its transfers: another plan might. `compression`: auto, or the name of the
    one codec that may be used. Raises InvalidPlanError."""
    swaps: dict[int, list[Window]] = {}
    for window in windows(trace, plan, timeline, profile):
        swaps.setdefault(window.tensor, []).append(window)
    known = codings(trace, statistics, times)
    coded = {
        codec: trace.with_coding(coding)
        for codec, coding in known.items()
        if compression in ("auto", codec.name.lower())
    }
    chosen, listed = Coding.none(trace), []
    for tensor in sorted(statistics):
        mine = swaps.get(tensor, [Window(tensor, direction, 0.0, 1.0) for direction in Direction])
        plain_us = _cost_us(trace, mine, Codec.NONE, profile)
        cost_us = {
            codec: _cost_us(with_codec, mine, codec, profile)
            for codec, with_codec in coded.items()
            if known[codec].codec[tensor]
        }
        if not cost_us:
            listed.append(TensorCoding(tensor, None, int(trace.tensor_bytes[tensor]), None, plain_us, False))
            continue
        best = min(cost_us, key=lambda codec: (cost_us[codec], codec))
        pays = cost_us[best] < plain_us
        if pays:
            chosen.take(tensor, known[best])
        moved = int(known[best].moved_bytes[tensor])
        listed.append(TensorCoding(tensor, best.name.lower(), moved, cost_us[best], plain_us, pays))
    return chosen, listed


def _cost_us(trace: Trace, swaps: Sequence[Window], codec: Codec, profile: DeviceProfile) -> float:
    """T or T′: of all transfers of a tensor."""
    return sum(swap_cost_us(trace, window, codec, profile) for window in swaps)


def codings(trace: Trace, statistics: Mapping[int, Statistics], times: CodecTimes) -> dict[Codec, Coding]:
    """For each codec whose times are known, what it makes of the tensors that it makes smaller."""
    return {codec: coding_with(codec, trace, statistics, times) for codec in times.codecs if available(codec)}


def coding_with(codec: Codec, trace: Trace, statistics: Mapping[int, Statistics], times: CodecTimes) -> Coding:
    """Every tensor that is large enough and becomes smaller is coded with `codec`."""
    coding = Coding.none(trace)
    for tensor, known in statistics.items():
        size, width = int(trace.tensor_bytes[tensor]), word_bytes(trace.tensor_dtype[tensor])
        moved = coded_bytes(codec, size, width, known)
        if size < LEAST_BYTES or moved >= size:
            continue
        coding.codec[tensor], coding.moved_bytes[tensor] = codec, moved
        sample = codec, size, known.zero_share, known.run_share, width
        coding.encode_us[tensor], coding.decode_us[tensor] = times.encode_us(*sample), times.decode_us(*sample)
        coding.waking_us[tensor] = times.waking_us
    return coding


def word_bytes(dtype: str) -> int:
    """Of an element, by the trace's name of its type, which ends with its bits: "bf16", "i64"; 1 of any other."""
    bits = dtype.lstrip("bcfiu")
    return max(1, int(bits) // 8) if bits.isdigit() else 1
