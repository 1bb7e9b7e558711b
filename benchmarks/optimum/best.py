"""The fastest plan for a small trace within a budget, and a proved bound for all others."""

from __future__ import annotations

import contextlib
import math
import time
from typing import NamedTuple

from benchmarks.optimum.program import Decisions, Program
from benchmarks.optimum.realise import realise
from pg_tensile.errors import BudgetError, InvalidPlanError, TensileError
from pg_tensile.planning.bounds import check_budget, least_us
from pg_tensile.planning.building_blocks.transfer_times import schedule
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.job_planner.candidate import Candidate
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import footprint_of
from pg_tensile.planning.plan.plan import NO_EVENTS, EventKind, Plan
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Trace

MOST_OPERATORS = 80  # the program grows with operators × tensors
ATTEMPTS = (
    3  # solutions tried: others of equal time, or of a smaller budget if a plan needs more than the program assumes
)
SOLVING = 0.8  # the solver's share of the time left; the rest is for the plan
TOLERANCE = 1e-5  # relative inaccuracy of the solver's arithmetic and of its proof


class TraceTooLargeError(TensileError):
    """A trace has more operators than the program can handle."""


class Optimum(NamedTuple):
    """The fastest plan found, and a proved bound.

    `plan` takes `us` an iteration in the simulator; no plan within the budget takes less than `bound_us`. `proved`: the
    program was solved to its end, so the bound is as high as it gets. The plan is an optimum if `gap` is 0.
    """

    plan: Plan
    us: float
    bound_us: float
    proved: bool

    @property
    def gap(self) -> float:
        """The largest possible loss of the plan against the optimum, as a fraction of the bound."""
        return 0.0 if _is_close(self.us, self.bound_us) else self.us / self.bound_us - 1


def best(trace: Trace, profile: DeviceProfile, budget_bytes: int, limit_s: float = 60.0) -> Optimum:
    """Return the fastest plan found for one job alone on the device, in its steady state, workspaces included.

    The search stops after `limit_s` seconds of wall clock in all; the bound holds in any case. Raises BudgetError if no
    plan was found within the budget, TraceTooLargeError.

    The plan is the fastest of those decided by the program's solutions and of the policy joint's, which is the solver's
    first solution: what the program leaves out (program.py) may make another one faster.
    """
    if trace.operator_count > MOST_OPERATORS:
        raise TraceTooLargeError(
            f"a trace of {trace.operator_count} operators is too large for the program of the optimum",
            hint=f"Use a smaller model, of at most {MOST_OPERATORS} operators, or bounds.least_us.",
        )
    check_budget(trace, budget_bytes)
    ends_at = time.monotonic() + limit_s
    trace = roofline.timed(trace, profile)
    search = _Found(trace, profile, budget_bytes, ends_at)
    search.offer(NO_EVENTS)
    planner = JobPlanner(trace, profile)
    joint = planner.best(budget_bytes)
    if isinstance(joint, Candidate):
        search.offer(joint.plan)
    bound_us, proved, limit = least_us(trace, profile, budget_bytes, SOLVING * limit_s), False, budget_bytes
    for attempt in range(ATTEMPTS):
        left_s = ends_at - time.monotonic()
        if _is_close(search.us, bound_us) or left_s <= 0:
            break
        program = Program(trace, profile, limit)
        is_first = search.us < math.inf and attempt == 0
        solved = program.solve(SOLVING * left_s, attempt, Decisions.of(trace, search.plan) if is_first else None)
        if attempt == 0:
            bound_us, proved = max(bound_us, solved.bound * (1 - TOLERANCE)), solved.proved
        if solved.values is None:
            break
        decisions = program.decisions(solved.values)
        excess = min(search.offer(realise(program.choices, decisions, early), True) for early in (True, False))
        limit -= max(0, excess)
        if not solved.proved:
            break
    if search.us == math.inf:
        raise BudgetError(budget_bytes, planner.least_bytes, planner.largest_operator())
    if not _is_close(search.us, bound_us):
        search.offer(search.plan, polish=True)
    return Optimum(search.plan, search.us, min(bound_us, search.us), proved or _is_close(search.us, bound_us))


def _is_close(us: float, bound_us: float) -> bool:
    """Return whether a plan cannot be improved, as far as the bound is exact."""
    return us <= bound_us * (1 + 3 * TOLERANCE)


class _Found:
    """The fastest plan so far, and its time."""

    def __init__(self, trace: Trace, profile: DeviceProfile, budget_bytes: int, ends_at: float) -> None:
        self.trace, self.profile, self.budget, self.ends_at = trace, profile, budget_bytes, ends_at
        self.plan, self.us = NO_EVENTS, float("inf")

    def offer(self, plan: Plan, polish: bool = False) -> int:
        """Keep a plan, or the same with other transfer times, if it is valid, within the budget and faster.

        Returns the bytes by which it exceeds the budget.
        """
        try:
            sequence = AccessSequence(self.trace, plan)
            excess = footprint_of(sequence).device_peak_bytes - self.budget
        except InvalidPlanError:
            return 0
        if excess <= 0:
            for candidate in (plan, schedule(sequence, self.profile, self.budget)):
                if polish:
                    self._polish(candidate)
                self._take(candidate, self._us(candidate))
        return excess

    def _polish(self, plan: Plan) -> None:
        """Move the triggers of transfers one by one as long as that helps."""
        us = self._us(plan)
        index = since = 0
        while since < len(plan) and time.monotonic() < self.ends_at:
            better, us = self._moved(plan, index, us)
            since = 0 if better is not plan else since + 1
            plan, index = better, (index + 1) % len(plan)
        self._take(plan, us)

    def _moved(self, plan: Plan, index: int, us: float) -> tuple[Plan, float]:
        """Return the fastest plan with another trigger for one event, and its time.

        The event is moved to the end or the beginning of each gap.
        """
        events = list(plan.events)
        event = events.pop(index)
        if event.kind not in (EventKind.SWAP_OUT, EventKind.SWAP_IN):
            return plan, us
        for trigger in range(event.deadline + (event.kind is EventKind.SWAP_OUT)):
            moved = event._replace(trigger=trigger)
            for reordered in ([*events, moved], [moved, *events]):
                changed = Plan.build(reordered)
                with contextlib.suppress(InvalidPlanError):
                    other_us = self._us(changed)
                    if other_us < us * (1 - TOLERANCE):
                        plan, us = changed, other_us
        return plan, us

    def _us(self, plan: Plan) -> float:
        """Return the time of an iteration, infinite if the plan exceeds the budget. Raises InvalidPlanError."""
        if footprint_of(AccessSequence(self.trace, plan)).device_peak_bytes > self.budget:
            return math.inf
        return simulate([SimulatedJob(self.trace, plan)], self.profile)[0].iteration_us

    def _take(self, plan: Plan, us: float) -> None:
        if us < self.us:
            self.plan, self.us = plan, us
