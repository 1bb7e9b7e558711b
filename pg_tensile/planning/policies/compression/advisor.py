"""Choice of the swapped tensors to compress, and of their codecs (CSWAP, section IV-A: the execution advisor).

Each tensor gets the codec with the least cost by section IV-B, or none where that is cheaper. The policy then plans
again with the resulting swap times, and the simulator decides whether the whole iteration is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pg_tensile.errors import BudgetError
from pg_tensile.planning.compression.codec import Codec, available
from pg_tensile.planning.compression.codec_times import CodecTimes
from pg_tensile.planning.compression.coding import Coding
from pg_tensile.planning.compression.sparsity import Statistics, coded_bytes
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.plan.codecs import host_coding_us, with_codecs
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies.compression.cost import Window, swap_cost_us, windows
from pg_tensile.planning.simulator.simulator import SimulatedJob, Timeline, simulate
from pg_tensile.planning.trace.trace import Trace

LEAST_BYTES = 1 << 14  # of a tensor; transfers of smaller ones consist mainly of the link's latency
ROUNDS = 2  # of planning and advising; more than one, because a plan with compression exposes other transfers


class Compression(NamedTuple):
    """Plan with the coding for which it was made (None means no compression), and its simulated timeline."""

    plan: Plan
    coding: Coding | None
    timeline: Timeline


class TensorCoding(NamedTuple):
    """Decision about one tensor.

    `coded_us` and `plain_us` are T and T', the cost in µs of its swaps in an iteration with the best codec for it and
    without one. `codec` is None if no codec makes it smaller.
    """

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
    """Return the plan that the simulator finds fastest, of those without compression and with that of `choose`.

    `make` plans a trace that carries its coding. The µs of coding on the host's processors are added to the iteration.
    If both are equally fast, the plan without compression is returned. Raises what `make` raises without a coding.
    """
    trace = trace.with_coding(None)
    best = last = _simulated(make(trace), trace, profile)
    for _ in range(ROUNDS):
        traced = trace.with_coding(last.coding)
        coding, _ = choose(traced, last.plan, last.timeline, statistics, times, profile)
        if not coding.compresses:
            break
        coded = trace.with_coding(coding)
        try:
            last = _simulated(with_codecs(coded, make(coded)), coded, profile)
        except BudgetError:  # the staging memory does not fit into the budget
            break
        if _cost_us_of(last, trace) < _cost_us_of(best, trace):
            best = last
    return best


def _cost_us_of(compression: Compression, trace: Trace) -> float:
    """Return the µs of an iteration and of coding on the host's processors."""
    coded = trace.with_coding(compression.coding)
    return compression.timeline.iteration_us + host_coding_us(coded, compression.plan)


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
    """Choose the cheapest codec, or none, for each tensor with statistics, and list the decisions.

    `timeline` is the plan's. Tensors that the plan does not swap are judged as if no compute hid their transfers,
    because another plan might swap them. `compression` is "auto" or the name of the only codec allowed. Raises
    InvalidPlanError.
    """
    swaps: dict[int, list[Window]] = {}
    for window in windows(trace, plan, timeline, profile):
        swaps.setdefault(window.tensor, []).append(window)
    by_codec = codings(trace, statistics, times)
    coded = {
        codec: trace.with_coding(coding)
        for codec, coding in by_codec.items()
        if compression in ("auto", codec.name.lower())
    }
    chosen, listed = Coding.none(trace.tensor_bytes), []
    for tensor in sorted(statistics):
        mine = swaps.get(tensor, [Window(tensor, direction, 0.0, 1.0) for direction in Direction])
        plain_us = _cost_us(trace, mine, Codec.NONE, profile)
        cost_us = {
            codec: _cost_us(with_codec, mine, codec, profile)
            for codec, with_codec in coded.items()
            if by_codec[codec].codec[tensor]
        }
        if not cost_us:
            listed.append(TensorCoding(tensor, None, int(trace.tensor_bytes[tensor]), None, plain_us, False))
            continue
        best = min(cost_us, key=lambda codec: (cost_us[codec], codec))
        pays = cost_us[best] < plain_us
        if pays:
            chosen.take(tensor, by_codec[best])
        moved = int(by_codec[best].moved_bytes[tensor])
        listed.append(TensorCoding(tensor, best.name.lower(), moved, cost_us[best], plain_us, pays))
    return chosen, listed


def _cost_us(trace: Trace, swaps: Sequence[Window], codec: Codec, profile: DeviceProfile) -> float:
    """Return T or T′, summed over all transfers of a tensor."""
    return sum(swap_cost_us(trace, window, codec, profile) for window in swaps)


def codings(trace: Trace, statistics: Mapping[int, Statistics], times: CodecTimes) -> dict[Codec, Coding]:
    """Return for each codec with known times its coding of the tensors that it makes smaller."""
    return {codec: coding_with(codec, trace, statistics, times) for codec in times.codecs if available(codec)}


def coding_with(codec: Codec, trace: Trace, statistics: Mapping[int, Statistics], times: CodecTimes) -> Coding:
    """Return the coding that codes with `codec` every tensor that is large enough and becomes smaller."""
    coding = Coding.none(trace.tensor_bytes)
    for tensor, sparsity in statistics.items():
        size, width = int(trace.tensor_bytes[tensor]), word_bytes(trace.tensor_dtype[tensor])
        moved = coded_bytes(codec, size, width, sparsity)
        if size < LEAST_BYTES or moved >= size:
            continue
        coding.codec[tensor], coding.moved_bytes[tensor] = codec, moved
        sample = codec, size, sparsity.zero_share, sparsity.run_share, width
        coding.encode_us[tensor], coding.decode_us[tensor] = times.encode_us(*sample), times.decode_us(*sample)
        coding.waking_us[tensor] = times.waking_us
    return coding


def word_bytes(dtype: str) -> int:
    """Return the bytes of an element, given the trace's name of its type.

    The name ends with the number of bits ("bf16", "i64"); the result is 1 for any other name.
    """
    bits = dtype.lstrip("bcfiu")
    return max(1, int(bits) // 8) if bits.isdigit() else 1
