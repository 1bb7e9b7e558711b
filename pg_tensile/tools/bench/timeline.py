"""Device memory over the time of one iteration, for plots (plots.py): the simulator's, reduced to few points."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pg_tensile.errors import SimulationError
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.actions import ActionKind
from pg_tensile.planning.plan.memory import footprint_of
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Trace


class Level(NamedTuple):
    """Bytes on the device until `end_us`, from the end of the level before on."""

    end_us: float
    bytes: int


def timeline(trace: Trace, plan: Plan, profile: DeviceProfile, points: int = 200) -> dict[str, list[Any]]:
    """Return {"ms": [...], "bytes": [...]}, at most `points` (≥ 2) of each, ready for JSON.

    bytes[k] are on the device from ms[k] until ms[k + 1]; the last point is the end of the iteration.

    The iteration is one of `plan`'s steady state, alone on the link. If it has more levels than points, these divide it
    into equal intervals, each of which shows its maximum, ends included, so the largest is always the device peak.
    Raises InvalidPlanError, and SimulationError for fewer than two points or senseless numbers.
    """
    if points < 2:
        raise SimulationError(f"a timeline cannot have {points} points", hint="Ask for two or more.")
    all_levels = levels(trace, plan, profile)
    end = np.array([level.end_us for level in all_levels])
    begin = np.concatenate(([0.0], end[:-1]))
    held = [level.bytes for level in all_levels]
    if len(all_levels) >= points:
        edges = np.linspace(0.0, end[-1], points)
        first, after = np.searchsorted(end, edges[:-1], "left"), np.searchsorted(begin, edges[1:], "right")
        held = [max(held[low:high]) for low, high in zip(first.tolist(), after.tolist(), strict=True)]
        begin = edges[:-1]
    ms = [round(us / 1e3, 3) for us in (*begin.tolist(), float(end[-1]))]
    return {"ms": ms, "bytes": [*held, held[-1]]}


def levels(trace: Trace, plan: Plan, profile: DeviceProfile) -> list[Level]:
    """Return all levels of an iteration, no two equal ones in a row.

    While an operator runs, the level is the sample of its step and its workspace. While the compute waits for a copy,
    it is what is resident in that gap, which is no more than in the step after it. Raises InvalidPlanError.
    """
    (simulated,) = simulate([SimulatedJob(trace, plan)], profile)
    sequence = AccessSequence(trace, plan)
    sample, size = footprint_of(sequence).bytes, trace.tensor_bytes.tolist()
    running = (sample + sequence.trace.workspace_bytes[sequence.steps]).tolist()
    staying = (sample - sequence.scratch_bytes).tolist()
    step_end_us, waits = simulated.step_end_us.tolist(), sequence.transfers.wait.tolist()
    # When the compute learns that a copy has ended, by the action that waits for it.
    known_us = {wait: copy.end_us + profile.handover_us for wait, copy in zip(waits, simulated.transfers, strict=True)}
    listed: list[Level] = []
    held = 0

    def add(end_us: float, nbytes: int) -> None:
        latest_us = max(end_us, listed[-1].end_us if listed else 0.0)  # the simulator sums in another order
        if listed and listed[-1].bytes == nbytes:
            listed.pop()
        listed.append(Level(latest_us, nbytes))

    for index, (kind, step, tensor, _) in enumerate(sequence.actions()):  # in a steady state no swap-in is passive
        if kind is ActionKind.RUN:
            add(step_end_us[step], running[step])
            held = staying[step]
        elif kind is ActionKind.COPY_IN:
            held += size[tensor]
        elif index in known_us and known_us[index] > listed[-1].end_us:
            add(known_us[index], held)
        if kind is ActionKind.FREE or kind is ActionKind.WAIT_OUT:
            held -= size[tensor]
    return listed
