"""Messages for plans that are not valid on a trace, in a user's words.

access_sequence.py finds the first problem; this module describes it: the operator, the tensor, and why the tensor is
not in the required state.
"""

from __future__ import annotations

from typing import NamedTuple

from pg_tensile.planning.plan.plan import CODECS, EventKind, Plan
from pg_tensile.planning.plan.residency import Item, Location
from pg_tensile.planning.plan.steps import MAX_RECOMPUTED, Fault, FaultyEvent
from pg_tensile.planning.trace.trace import Trace


class Problem(NamedTuple):
    """A problem at `operator` and `step`, -1 if the plan as a whole is wrong; `tensor` and `event` are -1 for none."""

    operator: int
    step: int
    tensor: int
    event: int
    message: str


class Cause(NamedTuple):
    """The previous item of the tensor, which explains its state."""

    item: int  # one of Item
    operator: int  # -1 if nothing has happened in this iteration
    event: int
    writer: int  # the last operator that changed the tensor; -1 for none


def describe_fault(trace: Trace, plan: Plan, faulty: FaultyEvent, step: int) -> Problem:
    """Return the problem of an event whose numbers are wrong; `step` is the one after which it would take place."""
    event, fault = faulty
    kind, tensor, trigger, deadline, version, delay_us, codec = plan.events[event]
    last = trace.operator_count - 1
    has_trigger = fault not in (Fault.TENSOR, Fault.TRIGGER)
    name = trace.tensor_label(tensor) if fault is not Fault.TENSOR else ""
    what = f"event {event} ({kind.label})"
    after = f"{what} after {trace.operator_label(trigger)}" if has_trigger else what
    expected = {
        EventKind.SWAP_OUT: f"between its trigger and {last}",
        EventKind.RELEASE: "its trigger",
    }.get(kind, f"after its trigger and at most {last}")
    message = {
        Fault.TENSOR: f"{what} names tensor {tensor}, but the trace has {trace.tensor_count} tensors",
        Fault.TRIGGER: f"{what} has trigger operator {trigger}, but the trace has {last + 1} operators",
        Fault.DEADLINE: f"{after} has deadline operator {deadline}, which must be {expected}",
        Fault.DELAY: f"{after} has a delay of {delay_us} µs",
        Fault.CODEC: f"{after} has the unknown codec {codec}: {', '.join(CODECS)} are 0 to {len(CODECS) - 1}",
        Fault.CODED: f"{after} has codec {codec}, but only a swap_out codes what it copies",
        Fault.TOO_MUCH: f"the plan recomputes too much: more than {MAX_RECOMPUTED} accesses up to {after}",
        Fault.PERSISTENT: f"{after} recomputes {name}, which is persistent: no operator creates it",
        Fault.INPUT: f"{after} recomputes {name}, which is an input: the placeholder cannot be repeated",
        Fault.NOT_YET: f"{after} recomputes {name}, which does not exist yet",
        Fault.VERSION: f"{after} makes version {version} of {name}, which does not have that version there",
        Fault.WRITER: f"{after} recomputes {name}, but one of its writers changes another tensor in place",
    }[fault]
    return Problem(trigger if has_trigger else -1, step, -1 if fault is Fault.TENSOR else tensor, event, message)


def describe_item(
    trace: Trace, plan: Plan, problem: Problem, item: int, state: int, outdated: bool, cause: Cause
) -> Problem:
    """Return `problem` with its message: `item` met the tensor in `state`, to which `cause` led.

    With `outdated`, a recomputation needs another version of the tensor than the present one.
    """
    tensor = trace.tensor_label(problem.tensor)
    history = _history(trace, problem.tensor, cause)
    leaving, coming = state in (Location.OUT, Location.PENDING), state == Location.IN
    if item in (Item.READ, Item.WRITE):
        verb = "changes" if item == Item.WRITE else "reads"
        why = f"which {history}"
        if outdated:
            why = "which another operator has changed since"
        elif leaving:
            why = "which is being swapped out"
        elif coming:
            why = "whose swap-in is not due yet"
        doer = f"{trace.operator_label(problem.operator)} {verb}"
        if problem.event >= 0:
            doer = f"event {problem.event} (recompute) repeats {trace.operator_label(problem.operator)}, which reads"
        return problem._replace(message=f"{doer} {tensor}, {why}")
    kind = EventKind(int(plan.rows["kind"][problem.event]))
    trigger = trace.operator_label(int(plan.rows["trigger"][problem.event]))
    event = f"event {problem.event} ({kind.label}) after {trigger}"
    if leaving:
        why = "is being swapped out already"
    elif coming:
        why = "is being swapped in already"
    elif item in (Item.OUT, Item.RELEASE):
        why = history
    elif cause.writer >= 0:
        why = f"has no current copy on the host: {trace.operator_label(cause.writer)} changed it after the last one"
    else:
        why = "has no copy on the host"
    return problem._replace(message=f"{event} is about {tensor}, which {why}")


def describe_uncopied(trace: Trace, plan: Plan, problem: Problem) -> Problem:
    """Return `problem` with its message: a swap-out that has a codec but copies nothing."""
    after = f"event {problem.event} (swap_out) after {trace.operator_label(problem.operator)}"
    codec = CODECS[int(plan.rows["codec"][problem.event])]
    why = "whose copy on the host is current: nothing is copied"
    return problem._replace(message=f"{after} has codec {codec} for {trace.tensor_label(problem.tensor)}, {why}")


def describe_loss(trace: Trace, tensor: int, operator: int, on_host: bool, step: int) -> Problem:
    """Return the problem of a persistent tensor that ends off the device.

    If it has a current host copy (`on_host`), it is required on the device; else it is lost. `operator` is that of its
    last item, -1 for the start of the iteration; `step` is the last step.
    """
    last = trace.operator_label(operator) if operator >= 0 else "the start of the iteration"
    name = trace.tensor_label(tensor)
    if on_host:
        message = f"{name} is on the device when an iteration starts but not when it ends: it went after {last}"
    else:
        message = f"{name} is lost: it went after {last} without a current copy on the host"
    return Problem(trace.operator_count - 1, step, tensor, -1, message)


def _history(trace: Trace, tensor: int, cause: Cause) -> str:
    """Return the reason why a tensor is absent."""
    if cause.item == Item.START and not trace.persistent[tensor]:
        return "does not exist yet"
    after = trace.operator_label(cause.operator) if cause.operator >= 0 else "the start of the iteration"
    if cause.item == Item.START:
        return "is not on the device when the iteration starts"
    if cause.item == Item.RELEASE:
        return f"was released after {after} and not made again"
    return f"was swapped out after {after} and not brought back"
