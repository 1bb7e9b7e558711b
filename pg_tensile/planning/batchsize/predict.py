"""What a batch size would be like within a budget: the best plan that we know, and its simulated timeline.

The paper predicts from its own scheme, which swaps feature maps and never stalls. Our planner swaps, recomputes and
waits, whatever costs the least, so the last word on each size is its plan's timeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pg_tensile.errors import BudgetError, TensileError
from pg_tensile.planning.batchsize.choose import Candidate
from pg_tensile.planning.batchsize.no_stall import Unstalled, largest_without_stall
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies.joint.planner import Candidate as Planned
from pg_tensile.planning.policies.joint.planner import JobPlanner
from pg_tensile.planning.policies.joint.sweep import Shortage
from pg_tensile.planning.trace.trace import Floats, Trace

PASSES = 1  # of the planner for each size: enough to compare them


class Correction(NamedTuple):
    """What iterations really take, from those of some batch sizes: `sizes` ascending, and beside each what was
    simulated and measured (µs). Below the smallest the difference stays as there (the paper's Δ of eq. (3): what an
    iteration takes besides its operators), above the largest the ratio; in between the ratio lies on a line over the
    size's logarithm."""

    sizes: tuple[int, ...] = ()
    simulated_us: tuple[float, ...] = ()
    measured_us: tuple[float, ...] = ()

    def __call__(self, size: int, simulated_us: float) -> float:
        """The µs expected of a batch of `size` rows."""
        if not self.sizes:
            return simulated_us
        if size < self.sizes[0]:
            return simulated_us + max(0.0, self.measured_us[0] - self.simulated_us[0])
        ratios = np.array(self.measured_us) / np.maximum(self.simulated_us, roofline.SMALLEST_US)
        return simulated_us * float(np.interp(np.log(size), np.log(self.sizes), ratios))


class Predictor:
    """`predictor(size) -> Candidate`: the plan of `joint` for a batch of `size` rows and its simulated iteration.

    `trace_at(size)`: its trace (`BatchTraces.trace_at`). `latencies(trace)`: float64[n] µs (`Curves.predict`, or a
    latency model's; None: the roofline's). `budget_bytes`: of device memory, None: the device's. `least_bytes(size)`:
    what the job's other graphs need with that batch. `share` of the link and `most_events` are `JobPlanner`'s.
    `correction`: of simulated iterations, none until some were measured."""

    def __init__(
        self,
        trace_at: Callable[[int], Trace],
        profile: DeviceProfile,
        budget_bytes: int | None = None,
        latencies: Callable[[Trace], Floats] | None = None,
        least_bytes: Callable[[int], int] | None = None,
        share: float = 1.0,
        most_events: int | None = None,
        passes: int | None = PASSES,
    ) -> None:
        self.trace_at = trace_at
        self.profile = profile
        self.budget_bytes = profile.memory_bytes if budget_bytes is None else budget_bytes
        self.latencies = latencies
        self.least_bytes = least_bytes
        self.share = share
        self.most_events = most_events
        self.passes = passes
        self.correction = Correction()

    def timed_trace(self, size: int) -> Trace:
        """The trace of that size with predicted latencies."""
        trace = self.trace_at(size)
        if self.latencies is None:
            return roofline.timed(trace, self.profile)
        return trace.with_latencies(np.maximum(self.latencies(trace), roofline.SMALLEST_US))

    def largest_without_stall(self, least: int, most: int) -> Unstalled | None:
        """Algorithm 2: where `choose` looks first. None: swapping feature maps does not make `least` rows fit."""
        return largest_without_stall(self.timed_trace, self.profile, self.budget_bytes, least, most)

    def plan(self, size: int) -> Plan:
        """The plan that `predictor(size)` means. Raises BudgetError."""
        planner = JobPlanner(self.timed_trace(size), self.profile, self.share, self.most_events)
        planned = planner.best(self.budget_bytes, self.passes)
        if isinstance(planned, Shortage):
            raise BudgetError(self.budget_bytes, planner.least_bytes, planner.largest_operator())
        return planned.plan

    def __call__(self, size: int) -> Candidate:
        try:
            trace = self.timed_trace(size)
        except TensileError as error:
            return _infeasible(size, 0, error.message)
        others = self.least_bytes(size) if self.least_bytes is not None else 0
        if others > self.budget_bytes:
            return _infeasible(size, others, "evaluation does not fit")
        planner = JobPlanner(trace, self.profile, self.share, self.most_events)
        if planner.least_bytes > self.budget_bytes:
            return _infeasible(size, planner.least_bytes, f"the most memory is needed by {planner.largest_operator()}")
        planned = planner.best(self.budget_bytes, self.passes)
        if isinstance(planned, Shortage):
            return _infeasible(size, 0, "every plan within the budget has too many events")
        nbytes = max(planned.device_peak_bytes, others)
        us = self.correction(size, planned.us)
        rate = size / us * 1e6 if us > 0 else math.inf
        return Candidate(size, True, us, planned.stall_us, rate, nbytes, _described(planned))


def _infeasible(size: int, nbytes: int, reason: str) -> Candidate:
    return Candidate(size, False, 0.0, 0.0, 0.0, nbytes, reason)


def _described(planned: Planned) -> str:
    """What a plan does, in words."""
    moved = planned.out_bytes + planned.in_bytes
    parts = [f"moves {moved:,} bytes"] * (moved > 0) + [f"recomputes {planned.recomputes}"] * (planned.recomputes > 0)
    return " and ".join(parts) or "needs no plan"
