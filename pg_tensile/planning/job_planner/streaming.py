"""Streaming: some tensors stay on the device, all others pass through it. For graphs that use each parameter once.

In a prediction every parameter is idle for nearly the whole iteration, so no idle interval is much longer than another,
and each resident byte saves the link the same traffic. What remains to be decided is how much stays, and how much room
is left for swap-ins that run ahead of the operators. Several divisions of the memory are tried, and the simulator picks
the fastest. Nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pg_tensile.planning.building_blocks.idle import idle_intervals
from pg_tensile.planning.building_blocks.keep import relaxed
from pg_tensile.planning.building_blocks.swaps import swaps
from pg_tensile.planning.building_blocks.transfer_times import schedule
from pg_tensile.planning.device.profile import Direction
from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.trace.trace import Floats

LEVELS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.4, 0.2)  # fractions of the memory above the minimum that resident tensors fill


def streamed(planner: JobPlanner, budget_bytes: int) -> Candidate | None:
    """Return the fastest of these plans within the budget, or None if none fits.

    `budget_bytes`: device peak, workspaces included.
    """
    return min(
        _candidates(planner, budget_bytes), key=lambda candidate: (candidate.us, len(candidate.plan)), default=None
    )


def _candidates(planner: JobPlanner, budget_bytes: int) -> Iterator[Candidate]:
    spare = budget_bytes - planner.least_bytes
    if spare < 0:
        return
    trace = planner.trace
    everything = AccessSequence(trace, swaps(trace, idle_intervals(trace)))
    nbytes = trace.tensor_bytes[everything.plan.rows["tensor"]].astype(np.float64)
    for cost_us in (_transfer_us(planner, everything), nbytes):  # many small copies take longer than their bytes say
        for level in LEVELS if spare else LEVELS[:1]:
            plan = relaxed(everything, planner.least_bytes + int(level * spare), cost_us)
            candidate = planner.candidate(schedule(AccessSequence(trace, plan), planner.link, budget_bytes))
            if candidate.device_peak_bytes <= budget_bytes:
                yield candidate


def _transfer_us(planner: JobPlanner, sequence: AccessSequence) -> Floats:
    """Return float64[events]: the time of each event's copy (as a swap-in) in µs, 0 where nothing is copied."""
    cost_us = np.zeros(len(sequence.plan))
    for event, _, size in zip(*(column.tolist() for column in sequence.copies), strict=True):
        cost_us[event] = planner.link.transfer_us(size, Direction.IN)
    return cost_us
