"""`pg-tensile trace`: an iteration of a job as trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Lanes: the compute, the executor's requests and waits, and the link's two directions; besides, a counter of the device
memory at each step, and an arrow from each swap-out to the swap-in that reads its copy. A job with ranks has a lane of
its collectives, as rank 0 measures them, and while it is open a lane for each rank with its last report. The format is
Chrome's "Trace Event Format", JSON object form; times are in µs.

One iteration is shown, in the steady state of the newest plan, which all others repeat. Times are rounded to an eighth
of a µs, a whole number of nanoseconds: readers that count those find equal ends and starts, and no overlap in a lane.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pg_tensile.planning.device.profile import Direction
from pg_tensile.planning.latency.collectives import exchanges, rank_count, reduced_bytes
from pg_tensile.planning.memory_flow.groups import bytes_to_groups
from pg_tensile.planning.plan.actions import WAITING, ActionKind
from pg_tensile.planning.trace.trace import Kind, Phase
from pg_tensile.text import NONE
from pg_tensile.tools.report.facts import json_value
from pg_tensile.tools.report.iteration import Instruction, Iteration, iteration_of, short, tensor_name
from pg_tensile.tools.report.markup import clean

if TYPE_CHECKING:
    from pg_tensile.client.record import JobRecord

Event = dict[str, Any]

PROCESS = 1
COMPUTE, EXECUTOR, OUT, IN, GROUPS, COLLECTIVES, FIRST_RANK = 1, 2, 3, 4, 5, 6, 7  # thread ids of the lanes
THREADS = {COMPUTE: "compute", EXECUTOR: "swap executor", OUT: "link out", IN: "link in"}
INSTRUCTIONS = {
    ActionKind.COPY_OUT: "request out",
    ActionKind.COPY_IN: "request in",
    ActionKind.PASSIVE_IN: "bring in",
    ActionKind.WAIT_OUT: "wait for out",
    ActionKind.WAIT_IN: "wait for in",
    ActionKind.FREE: "free",
}
REPORTED = ("rank", "node", "device", "state", "step", "samples_per_s", "device_bytes")
NOTE = "one iteration in the steady state of the plan, with the link to itself, simulated with measured latencies"


def render(record: JobRecord) -> str:
    """Return the JSON text. Raises NoIterationError if the job has no plan, or none that fits its trace."""
    iteration = iteration_of(record)
    events = [*_names(record), *_compute(iteration), *_executor(iteration), *_link(iteration), *_memory(iteration)]
    events += [*_groups(record, iteration), *_collectives(iteration), *_ranks(record, iteration)]
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _about(record, iteration)}
    # Perfetto shows escape sequences literally, so letters are not escaped (ensure_ascii=False)
    return clean(json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))) + "\n"


def _about(record: JobRecord, iteration: Iteration) -> Event:
    timeline = iteration.timeline
    return {
        "note": NOTE,
        "job": record.job["job"],
        "model": record.job["model"],
        "state": record.job["state"],
        "generation": iteration.plan.generation,
        "read_at": json_value(record.read_at),
        "iteration_us": timeline.iteration_us,
        "stall_us": timeline.stall_us,
        "planned_bytes": int(iteration.planned_bytes.max()),
        "vanilla_bytes": int(iteration.vanilla_bytes.max()),
        "out_bytes": timeline.bytes_out,
        "in_bytes": timeline.bytes_in,
        "versions": json_value(record.versions),
    }


def _names(record: JobRecord) -> Iterator[Event]:
    name = f"job {record.job['job']}: {record.job['model']}"
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "tid": COMPUTE, "ts": 0, "args": {"name": name}}
    for thread, title in THREADS.items():
        yield from _lane(thread, title)


def _lane(thread: int, title: str) -> Iterator[Event]:
    """Yield the name of a lane, and its place among the others."""
    event = {"ph": "M", "pid": PROCESS, "tid": thread, "ts": 0}
    yield event | {"name": "thread_name", "args": {"name": title}}
    yield event | {"name": "thread_sort_index", "args": {"sort_index": thread}}


def _ticks(us: float) -> float:
    return round(us * 8) / 8


def _slice(thread: int, category: str, name: str, start_us: float, end_us: float, args: Event) -> Event:
    """Return a complete event, one with a duration."""
    start = _ticks(start_us)
    times = {"ts": start, "dur": _ticks(end_us) - start}
    return {"ph": "X", "pid": PROCESS, "tid": thread, "cat": category, "name": name, **times, "args": args}


def _compute(iteration: Iteration) -> Iterator[Event]:
    trace, timeline = iteration.trace, iteration.timeline
    targets, modules, sources = trace.target, trace.module, trace.source
    names = [short(target) for target in targets.values]
    begin = np.maximum(timeline.step_start_us, np.append(0.0, timeline.step_end_us[:-1]))  # rounded times may overlap
    columns = (timeline.steps, begin, timeline.step_end_us, iteration.planned_bytes, iteration.repeated)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    phases = [Phase(phase).name.lower() for phase in trace.phase.tolist()]
    for step, (operator, start_us, end_us, held, repeated) in enumerate(rows):
        args = {"step": step, "operator": operator, "target": targets[operator], "phase": phases[operator]}
        args |= {"module": modules[operator], "source": sources[operator], "device_bytes": held}
        category = "computed again" if repeated else phases[operator]
        yield _slice(COMPUTE, category, names[targets.codes[operator]], start_us, end_us, args)


def _executor(iteration: Iteration) -> Iterator[Event]:
    for instruction in iteration.instructions:
        name = f"{INSTRUCTIONS[instruction.kind]}: {tensor_name(iteration.trace, instruction.tensor)}"
        args = _tensor(iteration, instruction.tensor, instruction.event) | {"step": instruction.step}
        if instruction.kind in WAITING:
            yield _slice(EXECUTOR, "wait", name, instruction.start_us, instruction.end_us, args)
        else:
            yield _instant(instruction, name, args)


def _instant(instruction: Instruction, name: str, args: Event) -> Event:
    category = "free" if instruction.kind is ActionKind.FREE else "request"
    event = {"ph": "i", "s": "t", "pid": PROCESS, "tid": EXECUTOR, "cat": category, "name": name}
    return event | {"ts": _ticks(instruction.start_us), "args": args}


def _link(iteration: Iteration) -> Iterator[Event]:
    """Yield the transfers, a swap-in followed by both ends of the arrow from its swap-out, if any."""
    copies: dict[int, Event] = {}  # tensor → the transfer that made its newest host copy
    arrows = 0
    for transfer in iteration.timeline.transfers:
        thread = OUT if transfer.direction == Direction.OUT else IN
        name = tensor_name(iteration.trace, transfer.tensor)
        args = _tensor(iteration, transfer.tensor, transfer.event)
        slice_event = _slice(thread, "swap", name, transfer.start_us, transfer.end_us, args)
        yield slice_event
        if thread == OUT:
            copies[transfer.tensor] = slice_event
        elif transfer.tensor in copies:
            arrows += 1
            yield _arrow("s", arrows, copies[transfer.tensor])
            yield _arrow("f", arrows, slice_event) | {"bp": "e"}


def _arrow(phase: str, number: int, end: Event) -> Event:
    """Return one end of an arrow, at the start of a transfer."""
    end_point = {key: end[key] for key in ("pid", "tid", "ts")}
    return {"ph": phase, "id": number, "cat": "swapped", "name": "swapped", **end_point}


def _memory(iteration: Iteration) -> Iterator[Event]:
    """Yield a sample at the start of each step, as in tensile.footprint."""
    rows = zip(iteration.timeline.step_start_us.tolist(), iteration.planned_bytes.tolist(), strict=True)
    for start_us, held in rows:
        event = {"ph": "C", "pid": PROCESS, "tid": COMPUTE, "name": "device memory"}
        yield event | {"ts": _ticks(start_us), "args": {"bytes": held}}


def _groups(record: JobRecord, iteration: Iteration) -> Iterator[Event]:
    """Yield the groups of a job whose memory flows, without the time for which it waits for memory."""
    groups = () if record.planned is None else bytes_to_groups(record.planned.groups)
    if groups:
        yield from _lane(GROUPS, "memory that flows")
    timeline = iteration.timeline
    for number, group in enumerate(groups):
        start_us, end_us = timeline.step_start_us[group.first], timeline.step_end_us[group.last]
        args = {"group": number, "most_bytes": group.most_bytes, "rest_bytes": group.rest_bytes}
        yield _slice(GROUPS, "group", f"group {number}", float(start_us), float(end_us), args)


def _collectives(iteration: Iteration) -> Iterator[Event]:
    """Yield the all-reduces, each from its beginning to the end of the wait for it, with the bytes that it averages.

    One that begins before the last one is waited for is shown from then on: the network has one at a time."""
    trace, timeline = iteration.trace, iteration.timeline
    step_of = {operator: step for step, operator in enumerate(timeline.steps.tolist())}
    end_us = 0.0
    for number, exchange in enumerate(exchanges(trace)):
        if not number:
            yield from _lane(COLLECTIVES, "collectives")
        step = step_of[exchange.begin]
        args = {"step": step, "operator": exchange.begin, "ranks": rank_count(trace, exchange.begin)}
        args |= {"bytes": reduced_bytes(trace, exchange.begin)}
        start_us = max(end_us, float(timeline.step_end_us[step]))
        end_us = float(timeline.step_end_us[step_of[exchange.wait]])
        yield _slice(COLLECTIVES, "collective", "all-reduce", start_us, end_us, args)


def _ranks(record: JobRecord, iteration: Iteration) -> Iterator[Event]:
    """Yield the last report of each rank, over the whole iteration: reports are rarer than iterations."""
    for report in record.ranks:
        thread = FIRST_RANK + report["rank"]
        yield from _lane(thread, f"rank {report['rank']}")
        args = {name: json_value(report[name]) for name in REPORTED}
        yield _slice(thread, "rank", report["state"] or NONE, 0.0, iteration.timeline.iteration_us, args)


def _tensor(iteration: Iteration, tensor: int, event: int) -> Event:
    trace = iteration.trace
    return {
        "tensor": tensor,
        "name": trace.tensor_name[tensor],
        "kind": Kind(trace.tensor_kind[tensor]).name.lower(),
        "bytes": int(trace.tensor_bytes[tensor]),
        "event": event,
    }
