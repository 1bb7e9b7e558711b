"""Memory of the ranks but the first: they follow the plans that are made for rank 0.

A rank's graphs are those of rank 0 with at most one row less, so its plans are valid for them. Where one does not fit,
because the rank's device needs larger workspaces, the rank makes a plan of its own within the same memory: plans may
differ among ranks (execution/distributed/).
"""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import replace
from typing import Any

from pg_tensile.errors import DeviceError, OutOfDeviceMemoryError, PlanError
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.training.graphs import Graphs
from pg_tensile.execution.training.steps import Grant, PlannedSteps
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.trace.trace import Trace
from pyworker.children.memory import MemoryClient
from pyworker.wire import Frame, FrameType


class FollowingMemory(MemoryClient):
    """Memory of a rank whose traces nobody plans for."""

    def _send_trace(self, header: dict[str, Any], traces: dict[str, Trace]) -> None:
        self._sent = traces
        self._channel.send(FrameType.PROGRESS, {"phase": "waiting"})

    def _measure_overhead(self, device: Device) -> bool:
        super()._measure_overhead(device)
        return False  # no other plan would come

    def _grant(self, frame: Frame) -> Grant | None:
        grant = super()._grant(frame)
        if grant is None or not self._sent:
            return grant
        trace = self._sent["train"]
        plan = grant.plan.with_bytes(trace)
        try:
            validate(trace, plan)
        except PlanError:
            plan = self._own_plan(trace, grant)
        self._newest = grant._replace(plan=plan)
        return self._newest

    def _begin_steps(self, graphs: Graphs, device: Device, grant: Grant) -> PlannedSteps | None:
        steps = super()._begin_steps(graphs, device, grant)
        if steps is None:
            own = grant._replace(plan=self._own_plan(graphs.train.trace, grant))
            steps = super()._begin_steps(graphs, device, own)
        if steps is None:
            message = f"the {grant.granted_bytes:,} bytes that suffice for rank 0 do not suffice for another rank"
            raise DeviceError(message, hint="Use devices of one kind, or a smaller batch_size.")
        return steps

    def renegotiate(self, shortage: OutOfDeviceMemoryError) -> None:
        """Make a plan with the workspaces that are known now. Raises BudgetError."""
        steps, grant = self._steps, self._newest
        assert steps is not None and grant is not None
        own = grant._replace(plan=self._own_plan(steps.traces()["train"], grant))
        self._compiling.append((own.plan.generation, steps.offer(own)))
        wait([future for _, future in self._compiling])
        self._compiling[-1][1].result()
        self._finish_compilations()

    def _own_plan(self, trace: Trace, grant: Grant) -> Plan:
        plan = JobPlanner(trace, self.profile, grant.link_share).within(grant.granted_bytes).plan
        return replace(plan, generation=grant.plan.generation)
