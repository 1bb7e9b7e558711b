"""Explanation of a training job before it runs, as lines of text, ASCII except for names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from pg_tensile.planning.explain.numbers import (
    Explanation,
    Memory,
    Operator,
    PlanUse,
    RecomputedTensor,
    SwappedTensor,
    Tensor,
    Tensors,
)
from pg_tensile.planning.explain.start import LaterStart, Start
from pg_tensile.text import duration, size

COMPARED = 6  # batch sizes shown, including the chosen one
GRAPHS = {  # note at the least memory, by the graph that needs it
    "train": "",
    "train_last": "for the last batch of an epoch",
    "evaluate": "for validation",
    "evaluate_last": "for the last batch of validation",
}
NOTICEABLE = 5e-4  # fraction of a step's time from which a part of it is shown


class _Line(NamedTuple):
    """A line of text. `topic` is empty if the line continues the topic above; numbers are right-aligned in a column."""

    topic: str
    label: str
    number: str = ""
    note: str = ""


def render(explanation: Explanation) -> list[str]:
    """Return the explanation as lines of text."""
    request, start = explanation.request, explanation.start
    title = f'Train "{request.model}" ({request.architecture}) on {request.device}, policy {request.policy}'
    epochs = (
        f"{_count(request.epochs, 'epoch')} of {_count(request.steps, 'step')} of {_count(request.batch_size, 'row')}"
    )
    sections = (_subject_lines, _choice_lines, _memory_lines, _time_lines, _link_lines)
    lines = [f"{title}: {epochs}", *_aligned([line for section in sections for line in section(explanation)])]
    if isinstance(explanation.plan, PlanUse):
        lines += _tensor_lines("Swapped", explanation.plan.swapped, _absences)
        lines += _tensor_lines("Recomputed", explanation.plan.recomputed, _recomputation)
    return [*lines, f"  {'Start':<11} {start.when}{_wait(start)}: {start.why}"]


def _wait(start: Start) -> str:
    """Return the wait as text, ", in at most 5 min", if the job starts later, else nothing."""
    if not isinstance(start, LaterStart):
        return ""
    if start.wait_s is None:
        return ", at an unknown time"
    for unit, length in (("h", 3600), ("min", 60)):
        if start.wait_s >= 2 * length:
            return f", in at most {ceil(start.wait_s / length):,} {unit}"
    return f", in at most {ceil(start.wait_s):,} s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# ---- the job ---------------------------------------------------------------------------------------------------------


def _subject_lines(explanation: Explanation) -> list[_Line]:
    request, graph = explanation.request, explanation.graph
    skipped = f", {request.skipped_rows:,} without a target" if request.skipped_rows else ""
    rows = f"{request.training_rows:,} to train on, {request.validation_rows:,} to validate with{skipped}"
    split = [] if request.split is None or not request.validation_rows else [_Line("Split", _split(request.split))]
    state = f"{size(request.state_bytes)} with gradients and optimizer state"
    warnings = [_Line("Warning", warning) for warning in request.warnings or ()]
    reason = [_Line("", request.architecture_reason)] if request.architecture_reason else []
    lines = [
        _Line("Rows", rows),
        *split,
        *warnings,
        _Line("Model", f"{_count(request.parameters, 'parameter')}, {state}"),
        *reason,
    ]
    if graph is not None:
        phases = ", ".join(f"{count:,} {phase}" for phase, count in graph.phases.items() if count)
        lines.append(_Line("Graph", f"{graph.operators:,} operators ({phases}), {graph.tensors:,} tensors"))
    else:
        lines.append(_Line("Graph", f"not captured: {request.uncaptured}"))
    if request.ranks is not None:
        lines.append(_Line("Ranks", _ranks(request.ranks)))
    if request.approximate is not None:
        lines.append(_Line("", f"approximate: {request.approximate}"))
    return lines


def _ranks(ranks: Mapping[str, Any]) -> str:
    """Return where the ranks would run: "2, each with 1 CPU, on 10.0.0.1 (8 CPUs), 10.0.0.2 (8 CPUs)"."""
    ((kind, amount),) = ranks["takes"].items()
    nodes = ", ".join(f"{node['node']} ({_processors(node[kind], kind)})" for node in ranks["nodes"])
    where = f"on {nodes}" if nodes else "and no node has them"
    return f"{ranks['count']:,}, each with {_processors(amount, kind)}, {where}"


def _processors(number: float, kind: str) -> str:
    return f"{number:g} {kind}{'' if number == 1 else 's'}"


def _split(split: Mapping[str, Any]) -> str:
    """Return the division of the rows in words."""
    column = split["column"]
    return {
        "random": "random, by a hash of each row",
        "time": f'by time: rows validate from {split["threshold"]} on (column "{column}")',
        "group": f'by group: all rows of a group are on one side (column "{column}")',
        "query": "the rows of the validation query validate",
    }[split["by"]]


def _choice_lines(explanation: Explanation) -> list[_Line]:
    """Return the chosen batch size and those that it was compared with; without a choice, the learning rate."""
    request = explanation.request
    choice = request.choice
    if choice is None:
        if request.learning_rate is None:
            return []
        stops = f", until {_count(request.patience, 'epoch')} bring nothing better" if request.patience else ""
        return [_Line("Training", f"learning rate {request.learning_rate:.4g}{stops}")]
    scaled = "" if choice["law"] == "none" else f", scaled ({choice['law']}) from {choice['base_rate']:g} for 64 rows"
    lines = [_Line("Batch size", f"{choice['batch_size']:,} rows, learning rate {choice['learning_rate']:.4g}{scaled}")]
    for index, candidate in enumerate(choice["candidates"][:COMPARED]):
        label = f"{candidate['batch_size']:,} rows{'' if index else ', chosen'}"
        lines.append(_Line("", label, *_candidate(candidate)))
    return lines


def _candidate(candidate: Mapping[str, Any]) -> tuple[str, str]:
    """Return number and note of a batch size."""
    if not candidate["feasible"]:
        return "", f"does not fit: {candidate['reason']}"
    note = f"{duration(candidate['iteration_us'])} a step, {size(candidate['device_bytes'])}: {candidate['reason']}"
    return f"{candidate['samples_per_s']:,.0f} rows/s", note.removesuffix(": ")


# ---- memory ----------------------------------------------------------------------------------------------------------


def _memory_lines(explanation: Explanation) -> list[_Line]:
    request, memory = explanation.request, explanation.memory
    if request.policy == "none":
        state = "parameters, gradients and optimizer state; more once the first step has been measured"
        given = request.memory_budget is not None and request.claim_bytes != request.state_bytes
        source = (request.budget_name or "memory_budget") if given else state
        reserved = _Line("Memory", "reserved", size(request.claim_bytes), source)
        if memory is None:
            return [reserved, _Line("", "peak", "", "not known before it runs")]
        note = "of the captured step; eagerly executed it may differ"
        return [reserved, _Line("", "peak", size(memory.vanilla_bytes), note)]
    if memory is None:
        return []
    lines = [_Line("Memory", "without a plan", size(memory.vanilla_bytes))]
    if memory.planned_bytes is not None:
        lines.append(_Line("", "planned", size(memory.planned_bytes), _within(memory, memory.planned_bytes)))
    if memory.tensor_bytes is not None and memory.tensor_bytes != memory.budget_bytes:
        assert memory.budget_bytes is not None
        note = f"of the {size(memory.budget_bytes)}: under this plan, the allocator's pages take the rest"
        lines.append(_Line("", "for tensors", size(memory.tensor_bytes), note))
    lines.append(_Line("", "least possible", size(memory.least_bytes, True), GRAPHS[memory.least_graph]))
    if memory.promised_bytes is not None:
        note = f"for a plan that costs at most {request.max_slowdown:.4g}x"
        lines.append(_Line("", "least promised", size(memory.promised_bytes, True), note))
    lines.append(_Line("", "largest operator", size(memory.floor_bytes, True), str(memory.largest_operator)))
    if memory.host_bytes:
        lines.append(_Line("", "on the host", size(memory.host_bytes)))
    if memory.saves_machine_memory is False and (memory.host_bytes or request.memory_budget is not None):
        lines.append(_Line("", "of the machine", "", "swaps save none on cpu: the tensors stay in its memory"))
    if not request.workspaces:
        lines.append(_Line("", "workspaces", "", "not counted here: the job measures them when it starts"))
    return lines


def _within(memory: Memory, planned_bytes: int) -> str:
    """Return how the planned bytes compare with those without a plan, and with the budget."""
    assert memory.budget_bytes is not None
    limit = f"the {size(memory.budget_bytes)} of {'the device' if memory.budget_of == 'device' else memory.budget_of}"
    if planned_bytes == memory.vanilla_bytes:
        return f"the same, within {limit}"
    within = "within" if planned_bytes <= memory.budget_bytes else "more than"
    return f"{planned_bytes / memory.vanilla_bytes:.0%}, {within} {limit}"


# ---- time ------------------------------------------------------------------------------------------------------------


def _time_lines(explanation: Explanation) -> list[_Line]:
    time, plan = explanation.time, explanation.plan
    if time is None:
        return []
    calibrated = explanation.request.calibrated
    origin = "predicted by calibrated models" if calibrated else "estimated: SELECT calibrate_device() to learn"
    lines = [_Line("Time a step", "without a plan", duration(time.vanilla_us), origin)]
    if isinstance(plan, PlanUse) and (plan.swapped.tensors or plan.recomputed.tensors):
        assert time.planned_us is not None and time.recompute_us is not None and time.stall_us is not None
        change = round(time.planned_us / time.vanilla_us - 1, 3)
        parts = {"recomputing": time.recompute_us, "waiting for the link": time.stall_us}
        spent = [f"{duration(us)} {what}" for what, us in parts.items() if us >= NOTICEABLE * time.vanilla_us]
        note = f"{change:+.1%}{': ' if spent else ''}{', '.join(spent)}"
        lines.append(_Line("", "planned", duration(time.planned_us), note))
        promise = "by the plan; any is accepted: option max_slowdown"
        if time.max_slowdown is not None:
            promise = f"by the plan, at most {time.max_slowdown:.4g}x (max_slowdown)"
        lines.append(_Line("", "slowdown", f"{time.slowdown:.2f}x", promise))
        if time.bound_us is not None:
            lines.append(_Line("", "no plan below", duration(time.bound_us), _distance(time.planned_us, time.bound_us)))
    beside = explanation.beside
    if beside is not None and beside.planned_us is not None and beside.slowdown is not None:
        link = "" if beside.link_share == 1 else f" and {beside.link_share:.0%} of the link"
        note = f"{beside.slowdown:.2f}x with {size(beside.planned_bytes)}{link}, as long as the running jobs run"
        lines.append(_Line("", "beside others", duration(beside.planned_us), note))
        if beside.flow is not None:
            lines.append(_Line("", f"would run {beside.flow}"))
    return lines


def _distance(planned_us: float, bound_us: float) -> str:
    """Return how a plan compares with the best one that the bound leaves possible."""
    excess = planned_us / bound_us - 1
    if excess < NOTICEABLE:
        return "no other plan is faster"
    return f"the plan is within {ceil(excess * 100)}% of the best there can be"


def _link_lines(explanation: Explanation) -> list[_Line]:
    plan, compression = explanation.plan, explanation.request.compression
    if not isinstance(plan, PlanUse) or not plan.swapped.tensors:
        return []
    lines = []
    for topic, (direction, use) in zip(("Link a step", ""), plan.link.items(), strict=True):
        note = f"{use.load:.0%} of its {size(use.bytes_per_s)}/s"
        lines.append(_Line(topic, direction, size(use.bytes), note))
    if compression is not None:
        which = "with the best codec" if compression == "auto" else f"with {compression}"
        lines.append(_Line("", f"compressed {which} where that pays: known when the job has counted zeros, not before"))
    return lines


def _aligned(lines: Sequence[_Line]) -> list[str]:
    labels = max((len(line.label) for line in lines if line.number), default=0)
    numbers = max((len(line.number) for line in lines), default=0)
    text = []
    for line in lines:
        body = line.label
        if line.number or line.note:
            body = f"{line.label:<{labels}}  {line.number:>{numbers}}  {line.note}"
        text.append(f"  {line.topic:<11} {body}".rstrip())
    return text


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _tensor_lines(topic: str, group: Tensors, history: Callable[[Any], str]) -> list[str]:
    """Return the largest tensors of a group as a table: bytes, name, and `history` of each."""
    if not group.tensors:
        return []
    rest = f"; the largest {len(group.largest)}:" if len(group.largest) < group.tensors else ":"
    lines = [f"  {topic:<11} {_count(group.tensors, 'tensor')}, {size(group.bytes)}{rest}"]
    rows = [(size(tensor.bytes), _name(tensor), history(tensor)) for tensor in group.largest]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return lines + [f"    {row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows]


def _name(tensor: Tensor) -> str:
    """Return the kind of a tensor, and its name, the operator that creates it, or its index."""
    kind, creator = tensor.kind.replace("_", " "), tensor.made_by
    if tensor.name:
        return f"{kind} {tensor.name}"
    if creator is None:
        return f"{kind} {tensor.tensor}"
    module = f" of {creator.module}" if creator.module else ""
    return f"{kind} from {_short(creator)}{module}"


def _short(operator: Operator) -> str:
    return f"{operator.operator} {_base(operator.target)}"


def _base(target: str) -> str:
    """Return the base name of a target: "aten.convolution.default" → "convolution"."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def _absences(tensor: SwappedTensor) -> str:
    """Return the operators between which a tensor is only on the host."""
    parts = []
    for out, *back in tensor.away:
        parts.append(f"out after {_short(out)}" + "".join(f", in before {_short(operator)}" for operator in back))
    return "; ".join(parts)


def _recomputation(tensor: RecomputedTensor) -> str:
    writers = ", ".join(_base(operator.target) for operator in tensor.by)
    users = ", ".join(_short(operator) for operator in tensor.needed_by)
    return f"again by {writers} ({duration(tensor.us)}) for {users}"
