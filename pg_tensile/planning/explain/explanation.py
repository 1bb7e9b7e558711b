"""Explanation of a training job before it runs: its memory, time and start, like EXPLAIN for a query.

`explain` turns the traces of a job's graphs, a device and the load of other jobs on it into plain numbers; `render`
turns those into lines of text. Bytes are those of the traces, with workspaces as far as they have been measured. This
module does not import torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.memory import floor_bytes, footprint
from pg_tensile.planning.plan.order import as_executed
from pg_tensile.planning.plan.plan import EventKind, Plan
from pg_tensile.planning.policies.building_blocks.keep import least_bytes
from pg_tensile.planning.scheduling.decisions import DeviceState, JobState, Planned
from pg_tensile.planning.scheduling.device_scheduler import DeviceScheduler
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Kind, Phase, Trace
from pg_tensile.text import duration, size

COMPARED = 6  # batch sizes shown, including the chosen one
SHOWN = 10  # swapped tensors, and recomputed tensors, that are listed, the largest first
GRAPHS = {  # note at the least memory, by the graph that needs it
    "train": "",
    "train_last": "for the last batch of an epoch",
    "evaluate": "for validation",
    "evaluate_last": "for the last batch of validation",
}
NOTICEABLE = 5e-4  # fraction of a step's time from which a part of it is shown


class Request(NamedTuple):
    """The requested job.

    `parameters` is the number of the model's parameters; `state_bytes` counts parameters, gradients and optimizer
    state, `claim_bytes` is the grant of an eager job, and `overhead_bytes` the device memory of the job's process.
    `open_job` is a job that trains the model at present, for at most `open_job_s` more seconds (None if unknown).
    `uncaptured` is the reason why there are no graphs. `calibrated` means that latencies come from the device's models,
    `workspaces` that the traces have them, and `approximate` is the reason why the numbers are not the device's.
    `choice` is that of the batch size, if it was left open: `batch_size, learning_rate, law, base_rate, candidates`
    (fields of batchsize.Candidate, the chosen one first). `compression` of swaps is auto or a codec; None means none.
    """

    model: str
    architecture: str
    device: str
    policy: str
    epochs: int
    batch_size: int
    steps: int  # per epoch
    training_rows: int
    validation_rows: int
    skipped_rows: int
    parameters: int
    state_bytes: int
    claim_bytes: int
    overhead_bytes: int = 0
    memory_budget: int | None = None
    open_job: int | None = None
    open_job_s: float | None = None
    uncaptured: str | None = None
    calibrated: bool = False
    workspaces: bool = True
    approximate: str | None = None
    choice: Mapping[str, Any] | None = None
    compression: str | None = None


class Ahead(NamedTuple):
    """A running or waiting job for which another one may have to wait.

    `remaining_s` is an upper bound, counted from now if the job runs, from its start if it waits; None if unknown.
    """

    running: bool
    least_bytes: int
    remaining_s: float | None


class Admission(NamedTuple):
    """The state of a device on which the admission of a job depends.

    Of the device's memory, `budget_bytes` are for all jobs together, `inference_bytes` of them for predictions, and
    `least_bytes` is the least that the `running` jobs need. `host_bytes` limits the copies on the host, `most_events`
    a plan. `ahead` lists the running jobs, and the waiting ones that come first, in their order.
    """

    budget_bytes: int
    inference_bytes: int = 0
    running: int = 0
    waiting: int = 0
    least_bytes: int = 0
    host_bytes: int = 1 << 62
    most_events: int | None = None
    ahead: tuple[Ahead, ...] = ()

    def totals(self) -> dict[str, Any]:
        """Return the fields without the details of other jobs (`ahead`)."""
        return {name: value for name, value in self._asdict().items() if name != "ahead"}


# ---- numbers ---------------------------------------------------------------------------------------------------------


def explain(
    request: Request, traces: Mapping[str, Trace], profile: DeviceProfile, admission: Admission
) -> dict[str, Any]:
    """Return the explanation of a job as JSON values, in bytes, µs and fractions from 0 to 1; `render` prints it.

    `traces` are the job's graphs by name, with latencies, the training step first; empty if none could be captured.
    """
    found: dict[str, Any] = {key: value for key, value in request._asdict().items() if value is not None}
    found |= {"captured": bool(traces), "profile": profile.name, "admission": admission.totals()}
    eager = request.policy == "none"
    train = next(iter(traces.values()), None)
    if train is not None:
        found["graph"] = _graph(train)
        found["memory"] = _memory(traces)
        (vanilla,) = simulate([SimulatedJob(train)], profile)
        found["time"] = {"vanilla_us": vanilla.iteration_us}
    least = request.claim_bytes if eager or train is None else found["memory"]["least_bytes"]
    if train is not None and not eager:
        _add_plan(found, request, train, profile, admission)
    found["start"] = _start(request, least, admission, found)
    return found


def _add_plan(
    found: dict[str, Any], request: Request, train: Trace, profile: DeviceProfile, admission: Admission
) -> None:
    """Add the scheduler's decision for the job alone on the device; without a plan, only the reason (`unplanned`)."""
    memory = found["memory"]
    device = DeviceState(
        request.device, profile, admission.budget_bytes, 0, admission.host_bytes, admission.most_events
    )
    job = JobState(
        0,
        train,
        memory["least_bytes"],
        describe(memory["largest_operator"]),
        request.policy,
        overhead_bytes=request.overhead_bytes,
        most_bytes=request.memory_budget,
    )
    room = admission.budget_bytes - request.overhead_bytes
    budget = room if request.memory_budget is None else min(room, request.memory_budget)
    memory |= {"budget_bytes": budget, "budget_of": "device" if budget == room else "memory_budget"}
    decision = DeviceScheduler().schedule(device, [job]).decisions[0]
    if not isinstance(decision, Planned):
        found["unplanned"] = getattr(decision, "reason", None)
        return
    memory |= {"planned_bytes": decision.planned_bytes, "host_bytes": decision.host_bytes}
    found["time"] = _time(decision)
    found["link"] = _link(decision, profile)
    executed = as_executed(train, decision.plan)
    found["swapped"] = _swapped(executed, decision.plan)
    found["recomputed"] = _recomputed(executed, decision.plan)


def _graph(trace: Trace) -> dict[str, Any]:
    count = np.bincount(trace.phase, minlength=len(Phase)).tolist()
    phases = {phase.name.lower(): count[phase] for phase in Phase}
    return {"operators": trace.operator_count, "tensors": trace.tensor_count, "phases": phases}


def _memory(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """Return the memory of all graphs together.

    `largest_operator` belongs to the graph whose minimum memory is highest (`least_graph`).
    """
    least = {name: least_bytes(trace) for name, trace in traces.items()}
    hungriest = max(least, key=lambda name: least[name])
    return {
        "vanilla_bytes": max(footprint(trace).device_peak_bytes for trace in traces.values()),
        "least_bytes": least[hungriest],
        "least_graph": hungriest,
        "floor_bytes": floor_bytes(traces[hungriest]),
        "largest_operator": _operator(traces[hungriest], _largest_operator(traces[hungriest])),
    }


def _largest_operator(trace: Trace) -> int:
    """Return the operator with the largest working set."""
    accessed = np.concatenate(([0], np.cumsum(trace.tensor_bytes[trace.access_tensor])))
    return int(np.argmax(np.diff(accessed[trace.access_start]) + trace.workspace_bytes))


def _operator(trace: Trace, operator: int) -> dict[str, Any]:
    return {
        "operator": int(trace.captured_operator[operator]),
        "target": trace.target[operator],
        "phase": Phase(trace.phase[operator]).name.lower(),
        "module": trace.module[operator],
    }


def _time(planned: Planned) -> dict[str, Any]:
    assert planned.iteration_us is not None and planned.vanilla_us is not None
    computing = planned.iteration_us - planned.stall_us
    return {
        "vanilla_us": planned.vanilla_us,
        "planned_us": planned.iteration_us,
        "stall_us": planned.stall_us,
        "recompute_us": max(0.0, computing - planned.vanilla_us),
    }


def _link(planned: Planned, profile: DeviceProfile) -> dict[str, Any]:
    """Return, for each direction, the bytes of an iteration, the rate, and the fraction of time that they occupy it."""
    assert planned.iteration_us is not None
    lanes = {"out": (planned.out_bytes, profile.out_bytes_per_s), "in": (planned.in_bytes, profile.in_bytes_per_s)}
    seconds = planned.iteration_us / 1e6
    return {
        way: {"bytes": nbytes, "bytes_per_s": rate, "load": nbytes / rate / seconds}
        for way, (nbytes, rate) in lanes.items()
    }


def _tensor(trace: Trace, tensor: int) -> dict[str, Any]:
    return {
        "tensor": tensor,
        "name": trace.tensor_name[tensor],
        "kind": Kind(trace.tensor_kind[tensor]).name.lower(),
        "bytes": int(trace.tensor_bytes[tensor]),
        "made_by": _operator(trace, trace.writers(tensor, 0)[0]) if not trace.persistent[tensor] else None,
    }


def _largest(trace: Trace, tensors: Sequence[int]) -> list[int]:
    return sorted(tensors, key=lambda tensor: (-int(trace.tensor_bytes[tensor]), tensor))[:SHOWN]


def _swapped(trace: Trace, plan: Plan) -> dict[str, Any]:
    """Return the number and bytes of swapped tensors, and the largest with the operators around each idle interval.

    `trace` is in the plan's order.
    """
    absences: dict[int, list[list[int]]] = defaultdict(list)
    returns: dict[int, list[int]] = defaultdict(list)
    for event in plan.events:
        if event.kind == EventKind.SWAP_IN:
            returns[event.tensor].append(event.deadline)
    for event in plan.events:
        if event.kind == EventKind.SWAP_OUT:
            back = returns[event.tensor]
            later = [operator for operator in back if operator > event.trigger] or back  # across the end of the step
            absences[event.tensor].append([event.trigger, min(later)] if later else [event.trigger])
    shown = []
    for tensor in _largest(trace, list(absences)):
        away = [[_operator(trace, operator) for operator in absence] for absence in absences[tensor]]
        shown.append(_tensor(trace, tensor) | {"away": away})
    nbytes = sum(int(trace.tensor_bytes[tensor]) for tensor in absences)
    return {"tensors": len(absences), "bytes": nbytes, "largest": shown}


def _recomputed(trace: Trace, plan: Plan) -> dict[str, Any]:
    """Return the number and bytes of recomputed tensors, and the largest with their writers and next users.

    `trace` is in the plan's order.
    """
    remade: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in plan.events:
        if event.kind == EventKind.RECOMPUTE:
            remade[event.tensor].append((event.version, event.deadline))
    shown = []
    for tensor in _largest(trace, list(remade)):
        writers = trace.writers(tensor, max(version for version, _ in remade[tensor]))
        us = float(trace.latency_us[list(writers)].sum())
        needed = [_operator(trace, operator) for _, operator in remade[tensor]]
        by = [_operator(trace, operator) for operator in writers]
        shown.append(_tensor(trace, tensor) | {"us": us, "by": by, "needed_by": needed})
    nbytes = sum(int(trace.tensor_bytes[tensor]) for tensor in remade)
    return {"tensors": len(remade), "bytes": nbytes, "largest": shown}


def _start(request: Request, least: int, admission: Admission, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return `when` the job would start (now, later or never) and `why`, in words.

    If later, `wait_s` is an upper bound in seconds, None if unknown. The rule is the scheduler's (device_scheduler.py):
    a job starts if its least memory and that of the running jobs fit into the device's budget.
    """
    need = least + request.overhead_bytes
    budget = admission.budget_bytes
    largest = found.get("memory", {}).get("largest_operator")
    because = f"; the most is needed by {describe(largest)}" if largest else ""
    if request.memory_budget is not None and least > request.memory_budget:
        why = f"it needs at least {size(least, True)}, more than its memory_budget of {size(request.memory_budget)}"
        return {"when": "never", "why": why + because}
    if need > budget:
        return {
            "when": "never",
            "why": f"it needs at least {size(need, True)}, {request.device} has {size(budget)}{because}",
        }
    if found.get("unplanned"):
        return {"when": "never", "why": found["unplanned"]}
    if request.open_job is not None:
        why = f"the model is being trained by job {request.open_job}"
        return {"when": "later", "why": why, "wait_s": request.open_job_s}
    others = "1 running job" if admission.running == 1 else f"{admission.running} running jobs"
    taken = admission.least_bytes + admission.inference_bytes
    parts = [f"{others} at least {size(admission.least_bytes)}"] if admission.running else []
    parts += [f"predictions {size(admission.inference_bytes)}"] if admission.inference_bytes else []
    why = f"it needs at least {size(need, True)} of the {size(budget)} of {request.device}"
    why = ", ".join([why, *parts]) + (f"; waiting already: {admission.waiting}" if admission.waiting else "")
    if taken + need <= budget:
        return {"when": "now", "why": why}
    return {"when": "later", "why": why, "wait_s": _wait_s(need, admission)}


def _wait_s(need: int, admission: Admission) -> float | None:
    """Return an upper bound, in seconds, on the wait of a job that needs `need` bytes.

    Jobs ahead of it start in their order, as soon as enough of the running ones have ended. None if a job must end
    first whose end is unknown.
    """
    running = [job for job in admission.ahead if job.running]
    free = admission.budget_bytes - admission.inference_bytes - sum(job.least_bytes for job in running)
    ends = [(_or_never(job.remaining_s), job.least_bytes) for job in running]
    heapify(ends)
    now = 0.0
    for job in (*(job for job in admission.ahead if not job.running), Ahead(False, need, None)):
        while free < job.least_bytes:
            if not ends or ends[0][0] == inf:
                return None
            end, freed = heappop(ends)
            now = max(now, end)
            free += freed
        free -= job.least_bytes
        heappush(ends, (now + _or_never(job.remaining_s), job.least_bytes))
    return now


def _or_never(seconds: float | None) -> float:
    return inf if seconds is None else seconds


# ---- text ------------------------------------------------------------------------------------------------------------


def describe(operator: Mapping[str, Any]) -> str:
    """Return the description of an operator: "operator 41 (aten.mul.Tensor of encoder.layers.0)"."""
    module = f" of {operator['module']}" if operator["module"] else ""
    return f"operator {operator['operator']} ({operator['target']}{module})"


def _short(operator: Mapping[str, Any]) -> str:
    return f"{operator['operator']} {_base(operator['target'])}"


def _base(target: str) -> str:
    """Return the base name of a target: "aten.convolution.default" → "convolution"."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


class _Line(NamedTuple):
    """A line of text. `topic` is empty if the line continues the topic above; numbers are right-aligned in a column."""

    topic: str
    label: str
    number: str = ""
    note: str = ""


def render(explanation: Mapping[str, Any]) -> list[str]:
    """Return the explanation as lines of text, ASCII except for names."""
    e = explanation
    title = f'Train "{e["model"]}" ({e["architecture"]}) on {e["device"]}, policy {e["policy"]}'
    epochs = f"{_count(e['epochs'], 'epoch')} of {_count(e['steps'], 'step')} of {_count(e['batch_size'], 'row')}"
    lines = [f"{title}: {epochs}"]
    lines += _aligned([*_subject(e), *_choice_lines(e), *_memory_lines(e), *_time_lines(e), *_link_lines(e)])
    lines += _tensor_lines("Swapped", e.get("swapped"), _away)
    lines += _tensor_lines("Recomputed", e.get("recomputed"), _made)
    lines.append(f"  {'Start':<11} {e['start']['when']}{_wait(e['start'])}: {e['start']['why']}")
    return lines


def _wait(start: Mapping[str, Any]) -> str:
    """Return the wait as text, ", in at most 5 min", if the job starts later, else nothing."""
    if start["when"] != "later":
        return ""
    seconds = start["wait_s"]
    if seconds is None:
        return ", nobody can tell when"
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f", in at most {ceil(seconds / length):,} {unit}"
    return f", in at most {ceil(seconds):,} s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _subject(e: Mapping[str, Any]) -> list[_Line]:
    skipped = f", {e['skipped_rows']:,} without a target" if e["skipped_rows"] else ""
    lines = [_Line("Rows", f"{e['training_rows']:,} to train on, {e['validation_rows']:,} to validate with{skipped}")]
    state = f"{size(e['state_bytes'])} with gradients and optimizer state"
    lines.append(_Line("Model", f"{_count(e['parameters'], 'parameter')}, {state}"))
    if e["captured"]:
        graph = e["graph"]
        phases = ", ".join(f"{count:,} {phase}" for phase, count in graph["phases"].items() if count)
        lines.append(_Line("Graph", f"{graph['operators']:,} operators ({phases}), {graph['tensors']:,} tensors"))
    else:
        lines.append(_Line("Graph", f"not captured: {e['uncaptured']}"))
    if "approximate" in e:
        lines.append(_Line("", f"approximate: {e['approximate']}"))
    return lines


def _choice_lines(e: Mapping[str, Any]) -> list[_Line]:
    """Return the chosen batch size, and those that it was compared with."""
    if "choice" not in e:
        return []
    choice = e["choice"]
    scaled = "" if choice["law"] == "none" else f", scaled ({choice['law']}) from {choice['base_rate']:g} for 64 rows"
    lines = [_Line("Batch size", f"{choice['batch_size']:,} rows, learning rate {choice['learning_rate']:.4g}{scaled}")]
    for place, candidate in enumerate(choice["candidates"][:COMPARED]):
        if candidate["feasible"]:
            rate, note = f"{candidate['samples_per_s']:,.0f} rows/s", f"{duration(candidate['iteration_us'])} a step"
            note = f"{note}, {size(candidate['device_bytes'])}: {candidate['reason']}".removesuffix(": ")
        else:
            rate, note = "", f"does not fit: {candidate['reason']}"
        label = f"{candidate['batch_size']:,} rows{'' if place else ', chosen'}"
        lines.append(_Line("", label, rate, note))
    return lines


def _memory_lines(e: Mapping[str, Any]) -> list[_Line]:
    if e["policy"] == "none":
        lines = [_Line("Memory", "reserved", size(e["claim_bytes"]), _claim(e))]
        known = "of the captured step; eagerly executed it may differ" if e["captured"] else "not known before it runs"
        peak = size(e["memory"]["vanilla_bytes"]) if e["captured"] else ""
        return [*lines, _Line("", "peak", peak, known)]
    if not e["captured"]:
        return []
    memory = e["memory"]
    lines = [_Line("Memory", "without a plan", size(memory["vanilla_bytes"]))]
    if "planned_bytes" in memory:
        lines.append(_Line("", "planned", size(memory["planned_bytes"]), _within(memory)))
    lines.append(_Line("", "least possible", size(memory["least_bytes"], True), GRAPHS[memory["least_graph"]]))
    lines.append(_Line("", "largest operator", size(memory["floor_bytes"], True), describe(memory["largest_operator"])))
    if memory.get("host_bytes"):
        lines.append(_Line("", "on the host", size(memory["host_bytes"])))
    if not e["workspaces"]:
        lines.append(_Line("", "workspaces", "", "not counted here: the job measures them when it starts"))
    return lines


def _claim(e: Mapping[str, Any]) -> str:
    return "memory_budget" if "memory_budget" in e else "parameters, gradients and optimizer state"


def _within(memory: Mapping[str, Any]) -> str:
    limit = "memory_budget" if memory["budget_of"] == "memory_budget" else "the device"
    if memory["planned_bytes"] == memory["vanilla_bytes"]:
        return f"the same, within the {size(memory['budget_bytes'])} of {limit}"
    share = memory["planned_bytes"] / memory["vanilla_bytes"]
    within = "within" if memory["planned_bytes"] <= memory["budget_bytes"] else "more than"
    return f"{share:.0%}, {within} the {size(memory['budget_bytes'])} of {limit}"


def _time_lines(e: Mapping[str, Any]) -> list[_Line]:
    if "time" not in e:
        return []
    time = e["time"]
    origin = "predicted by calibrated models" if e["calibrated"] else "estimated: SELECT tensile.calibrate() to learn"
    lines = [_Line("Time a step", "without a plan", duration(time["vanilla_us"]), origin)]
    if _has_events(e):
        more = round(time["planned_us"] / time["vanilla_us"] - 1, 3)
        parts = {"recomputing": time["recompute_us"], "waiting for the link": time["stall_us"]}
        spent = [f"{duration(us)} {what}" for what, us in parts.items() if us >= NOTICEABLE * time["vanilla_us"]]
        note = f"{more:+.1%}{': ' if spent else ''}{', '.join(spent)}"
        lines.append(_Line("", "planned", duration(time["planned_us"]), note))
    return lines


def _has_events(e: Mapping[str, Any]) -> bool:
    return any(e.get(group, {}).get("tensors") for group in ("swapped", "recomputed"))


def _link_lines(e: Mapping[str, Any]) -> list[_Line]:
    if not e.get("swapped", {}).get("tensors"):
        return []
    lines = [
        _Line(
            "" if place else "Link a step",
            way,
            size(lane["bytes"]),
            f"{lane['load']:.0%} of its {size(lane['bytes_per_s'])}/s",
        )
        for place, (way, lane) in enumerate(e["link"].items())
    ]
    if "compression" in e:
        which = "with the best codec" if e["compression"] == "auto" else f"with {e['compression']}"
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


def _tensor_lines(topic: str, group: Mapping[str, Any] | None, history: Any) -> list[str]:
    """Return the largest tensors of a group as a table: bytes, name, and `history` of each."""
    if not group or not group["tensors"]:
        return []
    shown = group["largest"]
    rest = f"; the largest {len(shown)}:" if len(shown) < group["tensors"] else ":"
    lines = [f"  {topic:<11} {_count(group['tensors'], 'tensor')}, {size(group['bytes'])}{rest}"]
    rows = [(size(tensor["bytes"]), _name(tensor), history(tensor)) for tensor in shown]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return lines + [f"    {row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows]


def _name(tensor: Mapping[str, Any]) -> str:
    """Return the kind of a tensor, and its name, the operator that creates it, or its index."""
    kind, made = tensor["kind"].replace("_", " "), tensor["made_by"]
    if tensor["name"]:
        return f"{kind} {tensor['name']}"
    if made is None:
        return f"{kind} {tensor['tensor']}"
    module = f" of {made['module']}" if made["module"] else ""
    return f"{kind} from {_short(made)}{module}"


def _away(tensor: Mapping[str, Any]) -> str:
    """Return the operators between which a tensor is only on the host."""
    parts = []
    for absence in tensor["away"]:
        back = f", in before {_short(absence[1])}" if len(absence) > 1 else ""
        parts.append(f"out after {_short(absence[0])}{back}")
    return "; ".join(parts)


def _made(tensor: Mapping[str, Any]) -> str:
    made = ", ".join(_base(operator["target"]) for operator in tensor["by"])
    needed = ", ".join(_short(operator) for operator in tensor["needed_by"])
    return f"again by {made} ({duration(tensor['us'])}) for {needed}"
