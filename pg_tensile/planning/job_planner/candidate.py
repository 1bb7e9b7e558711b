"""Plans that may be chosen, with their simulated cost, and which of two is better."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pg_tensile.planning.device_types import ACCELERATORS
from pg_tensile.planning.job_planner.prices import ExtraCosts, Prices
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.allocator import device_bytes
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.trace.trace import Trace

EXACT = 1e-9  # relative; times that differ by less count as equal


@dataclass(frozen=True)
class Candidate:
    """A plan for one job on `trace`, and its iterations.

    `footprint_bytes` is the peak of its tensors, with workspaces and staging; `us` is the time of one iteration, of
    which the job waits `stall_us`; `out_bytes` and `in_bytes` pass the link, and `recomputes` operators are executed
    again.
    """

    trace: Trace = field(repr=False, compare=False)
    plan: Plan
    footprint_bytes: int
    us: float
    stall_us: float
    out_bytes: int
    in_bytes: int
    recomputes: int

    @cached_property
    def device_peak_bytes(self) -> int:
        """The device memory that the plan has to be granted."""
        if self.trace.device not in ACCELERATORS:
            return self.footprint_bytes
        return device_bytes(AccessSequence(self.trace, self.plan))

    @property
    def transfers(self) -> bool:
        """Whether the plan uses the link."""
        return self.out_bytes + self.in_bytes > 0


class Outcome(NamedTuple):
    """A candidate, and the pass that it comes from: its prices, and its events without the times of transfers."""

    candidate: Candidate
    prices: Prices
    sequence: AccessSequence
    extra_costs: ExtraCosts


def rank(outcome: Outcome) -> tuple[float, int]:
    """Return a sort key: the faster candidate first, of equally fast ones the one with fewer events."""
    return outcome.candidate.us, len(outcome.candidate.plan)


def is_better(first: Candidate, second: Candidate) -> bool:
    """Return whether `first` takes less time, or has fewer events in the same time."""
    return first.us < second.us * (1 - EXACT) or (
        first.us <= second.us * (1 + EXACT) and len(first.plan) < len(second.plan)
    )
