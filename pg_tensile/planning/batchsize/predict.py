"""Prediction of a batch size within a budget: the best plan found for it, and its simulated timeline.

The paper predicts from its own scheme, which swaps feature maps and never stalls. Our planner swaps, recomputes and
waits, whichever costs least, so each size is judged by the timeline of its plan.
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
from pg_tensile.planning.job_planner.candidate import Candidate as Planned
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.job_planner.sweep import Shortage
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.trace.trace import Floats, Trace

PASSES = 1  # of the planner for each size: enough to compare sizes


class Correction(NamedTuple):
    """Mapping from simulated to real iteration times, derived from measurements at some batch sizes.

    `sizes` are ascending; `simulated_us` and `measured_us` hold one time for each. Below the smallest size the
    difference there applies (Δ in the paper's eq. (3): the time of an iteration besides its operators), above the
    largest its ratio; in between the ratio is interpolated linearly over the logarithm of the size.
    """

    sizes: tuple[int, ...] = ()
    simulated_us: tuple[float, ...] = ()
    measured_us: tuple[float, ...] = ()

    def __call__(self, size: int, simulated_us: float) -> float:
        """Return the expected µs of an iteration with a batch of `size` rows."""
        if not self.sizes:
            return simulated_us
        if size < self.sizes[0]:
            return simulated_us + max(0.0, self.measured_us[0] - self.simulated_us[0])
        ratios = np.array(self.measured_us) / np.maximum(self.simulated_us, roofline.SMALLEST_US)
        return simulated_us * float(np.interp(np.log(size), np.log(self.sizes), ratios))


class Predictor:
    """Predictor of batch sizes: `predictor(size)` plans a batch with `joint` and simulates its iteration.

    `trace_at(size)` returns the trace of `size` rows (`BatchTraces.trace_at`). `latencies(trace)` returns float64[n] µs
    (`Curves.predict`, or those of a latency model; None means the roofline's). `budget_bytes` is device memory, None
    means all of the device's. `least_bytes(size)` is the memory that the job's other graphs need with that batch.
    `share` of the link and `most_events` are those of `JobPlanner`, `passes` limits its passes. `correction` corrects
    simulated iterations; it is empty until some have been measured.
    """

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
        """Return the trace of that size with predicted latencies."""
        trace = self.trace_at(size)
        if self.latencies is None:
            return roofline.timed(trace, self.profile)
        return trace.with_latencies(np.maximum(self.latencies(trace), roofline.SMALLEST_US))

    def largest_without_stall(self, least: int, most: int) -> Unstalled | None:
        """Run Algorithm 2, whose result `choose` takes as one of its `first` sizes.

        Returns None if not even `least` rows fit with all feature maps swapped.
        """
        return largest_without_stall(self.timed_trace, self.profile, self.budget_bytes, least, most)

    def plan(self, size: int) -> Plan:
        """Return the plan on which `predictor(size)` is based. Raises BudgetError if no plan fits the budget."""
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
        least = self.least_bytes(size) if self.least_bytes is not None else 0
        if least > self.budget_bytes:
            return _infeasible(size, least, "evaluation does not fit")
        planner = JobPlanner(trace, self.profile, self.share, self.most_events)
        if planner.least_bytes > self.budget_bytes:
            return _infeasible(size, planner.least_bytes, f"the most memory is needed by {planner.largest_operator()}")
        planned = planner.best(self.budget_bytes, self.passes)
        if isinstance(planned, Shortage):
            return _infeasible(size, 0, "every plan within the budget has too many events")
        nbytes = max(planned.device_peak_bytes, least)
        us = self.correction(size, planned.us)
        rate = size / us * 1e6 if us > 0 else math.inf
        return Candidate(size, True, us, planned.stall_us, rate, nbytes, _described(planned))


def _infeasible(size: int, nbytes: int, reason: str) -> Candidate:
    return Candidate(size, False, 0.0, 0.0, 0.0, nbytes, reason)


def _described(planned: Planned) -> str:
    """Describe in words what a plan does."""
    moved = planned.out_bytes + planned.in_bytes
    parts = [f"moves {moved:,} bytes"] * (moved > 0) + [f"recomputes {planned.recomputes}"] * (planned.recomputes > 0)
    return " and ".join(parts) or "needs no plan"
