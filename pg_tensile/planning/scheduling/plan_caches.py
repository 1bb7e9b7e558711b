"""Planners and plans that are cached between two rounds of a device's scheduling."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies.joint.planner import JobPlanner, identity
from pg_tensile.planning.policies.tensile import rounds
from pg_tensile.planning.policies.tensile.rounds import Limits
from pg_tensile.planning.scheduling.decisions import DeviceState
from pg_tensile.planning.trace.trace import Trace

MOST_TENSILE_RESULTS = 16  # cached results of the policy tensile


class PlanCaches:
    """Caches of one device: they save time and change nothing."""

    def __init__(self) -> None:
        self._planners: dict[Hashable, JobPlanner] = {}
        self._tensile: dict[Hashable, dict[int, Plan]] = {}
        self._used: set[Hashable] = set()

    def planner(self, trace: Trace, device: DeviceState, share: float = 1.0) -> JobPlanner:
        """Return the cached planner of a trace that owns `share` of the link."""
        key = identity(trace), device.profile, device.most_events
        self._used.add(key)
        if key not in self._planners:
            self._planners[key] = JobPlanner(trace, device.profile, most_events=device.most_events)
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

    def begin_round(self) -> None:
        self._used.clear()

    def end_round(self) -> None:
        """Drop the planners that the round has not used."""
        self._planners = {key: planner for key, planner in self._planners.items() if key in self._used}
