"""The decision about each tensor that a job swaps, with the costs that it rests on (cswap.txt, section IV-B): what SQL
shows, and the coding that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pg_tensile.compression.advisor import codings
from pg_tensile.compression.codec import Codec
from pg_tensile.compression.coding import Coding
from pg_tensile.compression.cost import Window, swap_cost_us, windows
from pg_tensile.compression.statistics import Statistics
from pg_tensile.compression.times import CodecTimes
from pg_tensile.plan import Plan
from pg_tensile.profile import DeviceProfile, Direction
from pg_tensile.simulator import Timeline
from pg_tensile.trace import Trace


class TensorCoding(NamedTuple):
    """What was decided about a tensor. T and T', in µs of an iteration: what its swaps cost with the codec that is best
    for it (`coded_us`) and without one (`plain_us`). `codec` None: none makes it smaller."""

    tensor: int
    codec: str | None
    coded_bytes: int
    coded_us: float | None
    plain_us: float
    compressed: bool


def choose(
    trace: Trace,
    plan: Plan,
    timeline: Timeline,
    statistics: Mapping[int, Statistics],
    times: CodecTimes,
    profile: DeviceProfile,
    compression: str = "auto",
) -> tuple[Coding, list[TensorCoding]]:
    """What `advisor.advise` advises, and why. `compression`: auto, or the name of the one codec that may be used."""
    swaps: dict[int, list[Window]] = {}
    for window in windows(trace, plan, timeline, profile):
        swaps.setdefault(window.tensor, []).append(window)
    found = codings(trace, statistics, times)
    allowed = {codec: coding for codec, coding in found.items() if compression in ("auto", codec.name.lower())}
    chosen, listed = Coding.none(trace), []
    for tensor in sorted(statistics):
        mine = swaps.get(tensor, [Window(tensor, direction, 0.0, 1.0) for direction in Direction])
        plain_us = _cost_us(trace, mine, Codec.NONE, profile)
        coded = {codec: coding for codec, coding in allowed.items() if coding.codec[tensor]}
        cost_us = {codec: _cost_us(trace.with_coding(coding), mine, codec, profile) for codec, coding in coded.items()}
        if not cost_us:
            listed.append(TensorCoding(tensor, None, int(trace.tensor_bytes[tensor]), None, plain_us, False))
            continue
        best = min(cost_us, key=lambda codec: (cost_us[codec], codec))
        pays = cost_us[best] < plain_us
        if pays:
            chosen.take(tensor, coded[best])
        moved = int(coded[best].moved_bytes[tensor])
        listed.append(TensorCoding(tensor, best.name.lower(), moved, cost_us[best], plain_us, pays))
    return chosen, listed


def _cost_us(trace: Trace, swaps: list[Window], codec: Codec, profile: DeviceProfile) -> float:
    return sum(swap_cost_us(trace, window, codec, profile) for window in swaps)
