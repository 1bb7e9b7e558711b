"""Meaning of `delay_us` on a device that runs ahead (docs/library.md, "runtime/").

The host gives work to such a device long before it is executed, so it cannot start a copy by the clock. Instead the
copy is requested later in the program: in the gap of the latest step that starts, by the trace's latencies, before the
delay has passed. Allocation and deadline stay where the plan puts them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pg_tensile.planning.plan.actions import Action, ActionKind
from pg_tensile.planning.plan.execution import AccessSequence
from pg_tensile.planning.plan.plan import EventKind

_COPIES = (ActionKind.COPY_OUT, ActionKind.COPY_IN)


def delayed_steps(sequence: AccessSequence, actions: Sequence[Action]) -> dict[int, int]:
    """Return the step in whose gap each delayed copy is requested, by event; events without delay are left out.

    A copy is requested in the last gap before its deadline at the latest. Each lane stays first in, first out: a copy
    is not requested before an earlier one of its lane, unless its deadline requires it. Without latencies nothing is
    delayed."""
    rows = sequence.plan.rows
    latency = sequence.trace.latency_us[sequence.steps]
    if not rows["delay_us"].any() or not latency.any():
        return {}
    end = np.cumsum(latency)
    begin = end - latency
    delayed = {}
    lane_at = dict.fromkeys(EventKind, 0)
    for action in actions:
        if action.kind not in _COPIES:
            continue
        row = rows[action.event]
        due = end[action.step] + row["delay_us"]
        wanted = int(np.searchsorted(begin, due, "left")) - 1
        latest = int(sequence.operator_step[row["deadline"]]) - 1
        kind = EventKind(row["kind"])
        step = max(action.step, min(max(wanted, lane_at[kind]), latest))
        lane_at[kind] = max(lane_at[kind], step)
        if step > action.step:
            delayed[action.event] = step
    return delayed
