"""Memory over time: by hand on a chain, and as the slow interpreter of plans has it on random graphs and plans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import InvalidPlanError, SimulationError
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Mode, Trace
from pg_tensile.tools.bench.timeline import timeline
from tests.unit import oracle
from tests.unit.graphs import planned
from tests.unit.handmade import network, trace_of

# a byte takes a millisecond each way
DEVICE = replace(
    RTX_A6000, out_bytes_per_s=1e3, in_bytes_per_s=1e3, transfer_latency_us=0.0, launch_us=0.0, handover_us=0.0
)
READ, WRITE, CREATE = Mode.READ, Mode.WRITE, Mode.CREATE
BATCH, WEIGHT, HIDDEN, SECOND, LOSS = range(5)


def chain() -> Trace:
    """Operators of 100 ms each; hidden (80 bytes) is idle after operator 2 and needed by 4; operator 2 takes 500 bytes
    of workspace."""
    trace = trace_of(
        (1e5, {BATCH: READ, WEIGHT: READ, HIDDEN: CREATE}),
        (1e5, {HIDDEN: READ, SECOND: CREATE}),
        (1e5, {SECOND: READ, LOSS: CREATE}),
        (1e5, {HIDDEN: READ, LOSS: READ}),
        (1e5, {WEIGHT: WRITE}),
        sizes=(10, 20, 80, 40, 4),
        persistent=1,
    )
    return trace.with_latencies(trace.latency_us, [0, 0, 500, 0, 0, 0, 0])


def pairs(found: dict[str, list[Any]]) -> list[tuple[float, int]]:
    return list(zip(found["ms"], found["bytes"], strict=True))


def test_without_events_there_is_a_point_for_each_step():
    assert pairs(timeline(chain(), NO_EVENTS, DEVICE)) == [
        (0, 30),  # the placeholder takes no time
        (0, 110),
        (100, 140 + 500),
        (200, 144),
        (300, 104),
        (400, 20),
        (500, 20),
    ]


def test_while_the_compute_waits_there_is_what_the_gap_has():
    """Hidden goes from 200 to 280, during which operator 2's workspace is free again; it comes back from 380 to 460."""
    plan = Plan.build([Event(EventKind.SWAP_OUT, HIDDEN, 2, 2), Event(EventKind.SWAP_IN, HIDDEN, 3, 4)])
    assert pairs(timeline(chain(), plan, DEVICE)) == [
        (0, 30),
        (0, 110),
        (100, 640),
        (200, 140),
        (280, 64),
        (380, 104),
        (560, 20),
        (660, 20),
    ]
    late = timeline(chain(), plan, replace(DEVICE, handover_us=5000.0))
    assert late["ms"] == [0, 0, 100, 200, 285, 385, 570, 670]


def test_few_points_show_the_maximum_of_their_stretch():
    """A third of 500 ms each: operators 1 and 2, 2 to 4, 4 and 5."""
    found = timeline(chain(), NO_EVENTS, DEVICE, points=4)
    assert pairs(found) == [(0, 640), (166.667, 640), (333.333, 104), (500, 104)]
    assert timeline(chain(), NO_EVENTS, DEVICE, points=7)["ms"] == [0, 0, 100, 200, 300, 400, 500]
    assert timeline(chain(), NO_EVENTS, DEVICE, points=2) == {"ms": [0, 500], "bytes": [640, 640]}


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(SimulationError, match="1 points"):
        timeline(chain(), NO_EVENTS, DEVICE, points=1)
    with pytest.raises(InvalidPlanError):
        timeline(chain(), Plan.build([Event(EventKind.RELEASE, HIDDEN, 2, 2)]), DEVICE)


@pytest.mark.parametrize("name", ["swap_all", "recompute_all", "joint", "capuchin", "vdnn"])
def test_the_peaks_of_policies_are_in_their_timelines(name):
    trace = network(12)
    budget = footprint(trace).device_peak_bytes * 7 // 10
    plan = POLICIES[name]({0: trace}, RTX_A6000, budget)[0]
    found = timeline(trace, plan, RTX_A6000, points=30)
    (simulated,) = simulate([SimulatedJob(trace, plan)], RTX_A6000)
    assert len(found["ms"]) == len(found["bytes"]) == 30
    assert max(found["bytes"]) == simulated.device_peak_bytes
    assert found["ms"][-1] == pytest.approx(simulated.iteration_us / 1e3, abs=1e-3)


# ---- against the slow interpreter ----


class Clock(oracle.Machine):
    """Executes the script of a plan and notes how long there was how much on the device."""

    def __init__(self, trace: Trace, plan: Plan, profile: DeviceProfile) -> None:
        super().__init__(trace, plan, None, False)
        (simulated,) = simulate([SimulatedJob(trace, plan)], profile)
        self.known_us = {each.event: each.end_us + profile.handover_us for each in simulated.transfers}
        self.latency_us = roofline.timed(trace, profile).latency_us
        self.now = 0.0
        self.pieces: list[tuple[float, float, int]] = []  # from, until (µs), bytes

    def until(self, us: float, nbytes: int) -> None:
        self.pieces.append((self.now, us, nbytes))
        self.now = us

    def step(self, moment: oracle.Moment, event: Event | None) -> None:
        super().step(moment, event)
        workspace = int(self.trace.workspace_bytes[moment.operator])
        self.until(self.now + float(self.latency_us[moment.operator]), self.outcome.footprint[-1] + workspace)

    def wait(self, moment: oracle.Moment) -> None:
        if self.known_us.get(moment.event, 0.0) > self.now:
            held = sum(int(self.trace.tensor_bytes[tensor]) for tensor in self.device)
            self.until(self.known_us[moment.event], held)

    def wait_in(self, moment: oracle.Moment, event: Event) -> None:
        self.wait(moment)
        super().wait_in(moment, event)

    def wait_out(self, moment: oracle.Moment, event: Event) -> None:
        self.wait(moment)
        super().wait_out(moment, event)

    def out(self, moment: oracle.Moment, event: Event) -> None:
        """A tensor that is freed at once without a copy leaves before any wait."""
        super().out(moment, event)
        if event.deadline == event.trigger and moment.event not in self.outcome.copies:
            super().wait_out(moment, event)


@st.composite
def timed(draw: st.DrawFn) -> tuple[Trace, Plan, DeviceProfile]:
    """Operators of 0, 1.5 and 20 ms; a transfer of 1000 bytes takes 10 ms."""
    trace, plan = draw(planned())
    profile = replace(DEVICE, out_bytes_per_s=1e5, in_bytes_per_s=1e5, handover_us=draw(st.sampled_from([0.0, 300.0])))
    return trace.with_latencies(trace.latency_us * 1e3, trace.workspace_bytes), plan, profile


def parts(pieces: list[tuple[float, float, int]], low: float, high: float) -> Iterator[int]:
    return (nbytes for begin, end, nbytes in pieces if end >= low and begin <= high)


@given(timed())
def test_every_moment_has_the_bytes_of_the_interpreter(case):
    trace, plan, profile = case
    clock = Clock(trace, plan, profile)
    clock.run()
    found = timeline(trace, plan, profile, points=10_000)
    assert max(found["bytes"]) == footprint(trace, plan).device_peak_bytes == max(piece[2] for piece in clock.pieces)
    assert found["ms"][-1] == pytest.approx(clock.now / 1e3, abs=2e-3)
    for begin, end, nbytes in clock.pieces:
        if end - begin > 10:  # µs: times are rounded
            place = np.searchsorted(found["ms"], (begin + end) / 2e3, "right") - 1
            assert found["bytes"][place] == nbytes


@given(timed(), st.integers(2, 9))
def test_stretches_show_what_is_the_most_in_them(case, points):
    trace, plan, profile = case
    clock = Clock(trace, plan, profile)
    clock.run()
    found = timeline(trace, plan, profile, points)
    assert json.loads(json.dumps(found)) == found
    assert len(found["ms"]) == len(found["bytes"]) <= points
    assert max(found["bytes"]) == footprint(trace, plan).device_peak_bytes
    assert found["ms"] == sorted(found["ms"]) and found["ms"][0] == 0
    for low, high, nbytes in zip(found["ms"], found["ms"][1:], found["bytes"], strict=False):
        surely = list(parts(clock.pieces, low * 1e3 + 2, high * 1e3 - 2)) if high - low > 0.01 else []
        assert nbytes in parts(clock.pieces, low * 1e3 - 2, high * 1e3 + 2)
        assert nbytes >= max(surely, default=0)


def test_a_long_timeline_is_made_quickly_and_small():
    found = timeline(network(400), NO_EVENTS, RTX_A6000)
    assert len(found["ms"]) == 200 and len(json.dumps(found)) < 6000
    assert {type(each) for each in found["ms"]} == {float} and {type(each) for each in found["bytes"]} == {int}
