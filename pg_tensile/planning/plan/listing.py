"""Plans and traces as text: listings of an iteration, and the difference between two plans.

A listing has a line for each operator and, below it, the events that the operator triggers, in the manner of an
assembler listing: `print(plan_listing(trace, plan))`.
"""

from __future__ import annotations

import difflib
from collections import defaultdict

import numpy as np

from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.order import as_executed
from pg_tensile.planning.plan.plan import CODECS, NO_EVENTS, Event, EventKind, Plan
from pg_tensile.planning.trace.trace import Mode, Phase, Trace
from pg_tensile.text import duration, size

MARKS = {Mode.READ: "", Mode.CREATE: "", Mode.WRITE: "!", Mode.STATS: "~"}


def tensor_text(trace: Trace, tensor: int) -> str:
    """Return a tensor's name, or % and its index if it has none: "fc.weight", "%12"."""
    return trace.tensor_name[tensor] or f"%{tensor}"


def operator_text(trace: Trace, operator: int) -> str:
    """Return an operator's call: "%7 = aten.relu.default(%6)". `!` marks a tensor that is changed in place, `~` running
    statistics."""
    accesses = trace.operator(operator).accesses
    created = [tensor_text(trace, tensor) for tensor, mode in accesses if mode is Mode.CREATE]
    others = [MARKS[mode] + tensor_text(trace, tensor) for tensor, mode in accesses if mode is not Mode.CREATE]
    call = f"{trace.target[operator]}({', '.join(others)})"
    return f"{', '.join(created)} = {call}" if created else call


def event_text(trace: Trace, event: Event) -> str:
    """Return an event of a plan on the trace as it is executed: "swap out fc.weight, 24.5 MB, freed after 8"."""
    words = [event.kind.label.replace("_", " "), tensor_text(trace, event.tensor)]
    parts = [" ".join(words), size(int(trace.tensor_bytes[event.tensor]))]
    deadline = int(trace.captured_operator[event.deadline])
    if event.kind is EventKind.SWAP_OUT:
        parts += [f"freed after {deadline}"] + ([f"coded by {CODECS[event.codec]}"] if event.codec else [])
    elif event.kind is EventKind.SWAP_IN:
        parts.append(f"needed by {deadline}")
    elif event.kind is EventKind.RECOMPUTE:
        parts += [f"version {event.version}"] * (event.version > 0) + [f"needed by {deadline}"]
    return ", ".join(parts + [f"{event.delay_us} µs later"] * (event.delay_us > 0))


def trace_listing(trace: Trace) -> str:
    """Return a listing of a trace: each operator with its phase, time, device bytes and call."""
    return plan_listing(trace, NO_EVENTS)


def plan_listing(trace: Trace, plan: Plan, brief: bool = False) -> str:
    """Return a listing of an iteration under a plan, operators in the order of their execution.

    The columns are the operator's captured index, its phase, its time, the bytes on the device while it runs, and its
    call; the events that it triggers follow. `brief` leaves out operators without events. Raises InvalidPlanError if
    the plan does not fit the trace.
    """
    executed = as_executed(trace, plan)
    memory = footprint(trace, plan)
    # from the end, because an operator's first step is its own and the others repeat it
    device_bytes = dict(zip(memory.steps[::-1].tolist(), memory.bytes[::-1].tolist(), strict=True))
    triggered: dict[int, list[str]] = defaultdict(list)
    for event in plan.events:
        triggered[event.trigger].append(event_text(executed, event))
    lines = [summary(trace, plan)]
    for index in range(executed.operator_count):
        if brief and index not in triggered:
            continue
        captured = int(executed.captured_operator[index])
        phase = Phase(executed.phase[index]).name.lower()
        latency, memory_use = duration(float(executed.latency_us[index])), size(device_bytes[captured])
        lines.append(f"{captured:>6}  {phase:<9}  {latency:>9}  {memory_use:>9}  {operator_text(executed, index)}")
        lines += [f"{'':>6}    {text}" for text in triggered[index]]
    return "\n".join(lines)


def summary(trace: Trace, plan: Plan) -> str:
    """Return one line about an iteration: its operators and tensors, the plan's events, the device peak."""
    text = f"{trace.operator_count} operators, {trace.tensor_count} tensors"
    peak = footprint(trace, plan).device_peak_bytes
    if not len(plan):
        return f"{text}, device peak {size(peak)}"
    kinds, counts = np.unique(plan.rows["kind"], return_counts=True)
    events = ", ".join(
        f"{count} {EventKind(kind).label}" for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True)
    )
    without = size(footprint(trace).device_peak_bytes)
    return f"{text}; plan {plan.generation}: {events}; device peak {size(peak)}, {without} without the plan"


def plan_difference(trace: Trace, old: Plan, new: Plan) -> str:
    """Return the events that differ between two plans of a trace, as a unified diff without context; "" if none do."""

    def listed(plan: Plan) -> list[str]:
        executed = as_executed(trace, plan)
        return [
            f"after {int(executed.captured_operator[event.trigger])}: {event_text(executed, event)}"
            for event in plan.events
        ]

    names = f"plan {old.generation}", f"plan {new.generation}"
    return "\n".join(difflib.unified_diff(listed(old), listed(new), *names, n=0, lineterm=""))
