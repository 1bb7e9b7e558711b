"""A plan on its trace as text: a listing of the iteration.

A listing has a line for each operator and, below it, the events that the operator triggers, in the manner of an
assembler listing: `print(plan_listing(trace, plan))`. A trace alone is listed by `print(trace)`, a plan by
`print(plan)`.
"""

from __future__ import annotations

from collections import defaultdict

from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.order import as_executed
from pg_tensile.planning.plan.plan import Event, Plan
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.text import size


def event_text(trace: Trace, event: Event) -> str:
    """Return an event of a plan on the trace as it is executed: "swap out fc.weight, 24.5 MB, freed after 8"."""
    tensor = f"{trace.tensor_text(event.tensor)}, {size(int(trace.tensor_bytes[event.tensor]))}"
    return event.text(tensor, int(trace.captured_operator[event.deadline]))


def plan_listing(trace: Trace, plan: Plan, brief: bool = False) -> str:
    """Return a listing of an iteration under a plan, operators in the order of their execution.

    Each line is that of `Trace.operator_line`; the events that the operator triggers follow. `brief` leaves out
    operators without events. Raises InvalidPlanError if the plan does not fit the trace.
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
        lines.append(executed.operator_line(index, device_bytes[int(executed.captured_operator[index])]))
        lines += [f"{'':>6}    {text}" for text in triggered[index]]
    return "\n".join(lines)


def summary(trace: Trace, plan: Plan) -> str:
    """Return one line about an iteration: its operators and tensors, the plan's events, the device peak."""
    text = f"{trace.operator_count} operators, {trace.tensor_count} tensors"
    peak = footprint(trace, plan).device_peak_bytes
    if not len(plan):
        return f"{text}, device peak {size(peak)}"
    without = size(footprint(trace).device_peak_bytes)
    return f"{text}; {plan.summary}; device peak {size(peak)}, {without} without the plan"
