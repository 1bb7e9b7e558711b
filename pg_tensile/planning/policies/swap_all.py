"""Swapping every tensor out after each access and in before the next: the least memory that swapping alone can reach.

A floor for tests and comparisons, not for use: no transfer overlaps with computation. Parameters and optimizer states
are swapped as well, across the end of the iteration. At each operator, only the tensors that it accesses are resident
(and those that no operator accesses).
"""

from __future__ import annotations

from collections.abc import Mapping

from pg_tensile.planning.building_blocks.coded import coded
from pg_tensile.planning.building_blocks.idle import idle_intervals
from pg_tensile.planning.building_blocks.swaps import swaps
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.trace.trace import Trace


@coded
def plan(traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None) -> dict[int, Plan]:
    """Return plans that swap each tensor out after every access that another one follows, and in right before that one.

    A swap-out frees on the spot. A swap-in is triggered in the gap before the next access, also between consecutive
    operators. Tensors without bytes or accesses stay where they are.
    """
    return {job: swaps(trace, idle_intervals(trace)) for job, trace in traces.items()}
