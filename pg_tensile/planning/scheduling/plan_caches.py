"""Planners and plans that are cached between two rounds of a device's scheduling."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from pg_tensile.errors import PlanError
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.job_planner.planner import JobPlanner, identity
from pg_tensile.planning.memory_flow.groups import Group, bytes_to_groups, counted_groups, cut_alike
from pg_tensile.planning.memory_flow.simulation import SimulatedFlow, simulate_memory_flow, with_requests
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies.tensile import rounds
from pg_tensile.planning.policies.tensile.rounds import Limits
from pg_tensile.planning.scheduling.decisions import DeviceState
from pg_tensile.planning.simulator.alone import evaluate
from pg_tensile.planning.trace.trace import Trace

MOST_TENSILE_RESULTS = 16  # cached results of the policy tensile
MOST_FLOWS = 256  # cached groups of plans, and simulations of memory that flows
ITERATIONS = 9  # of each job that are simulated; the first three do not count
MOST_GROUPS_SIMULATED = 2000  # of all jobs in one simulation: some 0.1 s


def _never() -> bool:
    return False


class PlanCaches:
    """Caches of one device: they save time and change nothing."""

    def __init__(self) -> None:
        self._planners: dict[Hashable, JobPlanner] = {}
        self._tensile: dict[Hashable, dict[int, Plan]] = {}
        self._groups: dict[Hashable, tuple[Group, ...]] = {}
        self._flows: dict[Hashable, SimulatedFlow | None] = {}
        self._used: set[Hashable] = set()
        self._over = _never

    def planner(self, trace: Trace, device: DeviceState, share: float = 1.0) -> JobPlanner:
        """Return the cached planner of a trace that owns `share` of the link."""
        key = identity(trace), device.profile, device.most_events
        self._used.add(key)
        if key not in self._planners:
            self._planners[key] = JobPlanner(
                trace, device.profile, most_events=device.most_events, over=lambda: self._over()
            )
        return self._planners[key].sharing(share)

    def tensile_plans(
        self, traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int, limits: Mapping[int, Limits]
    ) -> dict[int, Plan]:
        """Return the plans of the paper's algorithm (policy tensile) by job."""
        key = (tuple((job, identity(trace), limits[job]) for job, trace in traces.items()), profile, budget_bytes)
        if key not in self._tensile:
            if len(self._tensile) >= MOST_TENSILE_RESULTS:
                self._tensile.clear()
            self._tensile[key] = rounds.plan_limited(traces, profile, budget_bytes, limits)
        return self._tensile[key]

    def groups(self, planner: JobPlanner, plan: Plan, cut: int | bytes) -> tuple[Group, ...]:
        """Return the groups of a step under a plan, with the times of their requests and of waiting for transfers.

        `cut`: how many there are on the way to the peak, at most; or the rows of groups with the same steps. Raises
        PlanError if those are groups of other steps, or of other sizes."""
        key = identity(planner.trace), planner.profile, planner.share, plan, cut
        if key not in self._groups:
            if len(self._groups) >= MOST_FLOWS:
                self._groups.clear()
            sequence = AccessSequence(planner.trace, plan)
            stalled_us = evaluate(sequence, planner.link).stalled_us
            if isinstance(cut, int):
                self._groups[key] = with_requests(counted_groups(sequence, cut, stalled_us))
            else:
                given = bytes_to_groups(cut)
                groups = cut_alike(given, sequence, stalled_us)
                if tuple(group._replace(us=0.0) for group in groups) != given:
                    raise PlanError("the groups take other memory than they took")
                self._groups[key] = with_requests(groups)
        return self._groups[key]

    def flow(
        self, jobs: Mapping[int, Sequence[Group]], budget_bytes: int, contention: float, beside: int
    ) -> SimulatedFlow | None:
        """Return how long jobs take whose memory flows within the budget; None if they cannot all run."""
        key = tuple((job, tuple(groups)) for job, groups in jobs.items()), budget_bytes, contention, beside
        if key not in self._flows:
            if len(self._flows) >= MOST_FLOWS:
                self._flows.clear()
            self._flows[key] = simulate_memory_flow(
                jobs, budget_bytes, contention, ITERATIONS, beside, MOST_GROUPS_SIMULATED
            )
        return self._flows[key]

    def begin_round(self, over: Callable[[], bool] = _never) -> None:
        """Begin a round, in which planners raise AbandonedError once `over` returns True."""
        self._used.clear()
        self._over = over

    def end_round(self) -> None:
        """Drop the planners that the round has not used."""
        self._over = _never
        self._planners = {key: planner for key, planner in self._planners.items() if key in self._used}
