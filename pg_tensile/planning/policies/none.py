"""No events: tensors are freed when nothing needs them any more. The "vanilla" of all comparisons."""

from __future__ import annotations

from collections.abc import Mapping

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.trace.trace import Trace


def plan(traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None) -> dict[int, Plan]:
    """Return an empty plan for every job."""
    return dict.fromkeys(traces, NO_EVENTS)
