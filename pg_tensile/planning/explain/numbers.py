"""Explanation of a training job before it runs, in numbers: its memory, time and start, like EXPLAIN for a query.

`explain` turns the traces of a job's graphs, a device and the load of other jobs on it into an `Explanation`; text.py
turns that into lines of text. Bytes are those of the traces, with workspaces as far as they have been measured. This
module does not import torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from pg_tensile.planning.bounds import solved_us
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.device_types import ACCELERATORS
from pg_tensile.planning.explain.beside import Beside, Outlook, outlook
from pg_tensile.planning.explain.request import Admission, Request
from pg_tensile.planning.explain.start import Start, start_of
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.allocator import plan_bytes
from pg_tensile.planning.plan.memory import floor_bytes, footprint_of
from pg_tensile.planning.plan.order import as_executed
from pg_tensile.planning.plan.plan import EventKind, Plan
from pg_tensile.planning.scheduling.decisions import DeviceState, JobState, Planned, Refused
from pg_tensile.planning.scheduling.device_scheduler import DeviceScheduler
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Kind, Phase, Trace

SHOWN = 10  # swapped tensors, and recomputed tensors, that are listed, the largest first


# ---- types -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """An operator of a graph, by its number in the capture."""

    operator: int
    target: str
    phase: str
    module: str

    def __str__(self) -> str:
        """Return the operator's description: "operator 41 (aten.mul.Tensor of encoder.layers.0)"."""
        module = f" of {self.module}" if self.module else ""
        return f"operator {self.operator} ({self.target}{module})"


@dataclass(frozen=True)
class Graph:
    """Size of the training step; `phases` has the number of operators in each."""

    operators: int
    tensors: int
    phases: dict[str, int]


@dataclass(frozen=True)
class Memory:
    """Device memory of all graphs together, without a plan and with the training step's.

    `largest_operator` belongs to the graph whose minimum memory is highest (`least_graph`). The budget is that of the
    job's tensors; `planned_bytes` and `host_bytes` are those of the plan. Both are None where nothing is planned.
    `promised_bytes` is the least with which the job's max_slowdown can be kept, None without one. `tensor_bytes` is
    what is left of the budget for tensors on an accelerator: under the plan, the allocator's pages take the rest.
    `saves_machine_memory` is False on the CPU, where swapped tensors stay in the memory of the machine; else None.
    """

    vanilla_bytes: int
    least_bytes: int
    least_graph: str
    floor_bytes: int
    largest_operator: Operator
    budget_bytes: int | None = None
    budget_of: str | None = None  # device, memory_budget, or the setting of the job's role
    planned_bytes: int | None = None
    host_bytes: int | None = None
    promised_bytes: int | None = None
    saves_machine_memory: bool | None = None
    tensor_bytes: int | None = None


@dataclass(frozen=True)
class Time:
    """Time of a training step in µs, without a plan and, if there is one, with it.

    `bound_us`: no plan within the budget takes less; None if that is not known. `slowdown` is `planned_us` over
    `vanilla_us`, and `max_slowdown` the largest that the scheduler accepts, None for any.
    """

    vanilla_us: float
    planned_us: float | None = None
    stall_us: float | None = None
    recompute_us: float | None = None
    bound_us: float | None = None
    slowdown: float | None = None
    max_slowdown: float | None = None


@dataclass(frozen=True)
class LinkUse:
    """Bytes of an iteration in one direction, the rate, and the fraction of time that they occupy the link."""

    bytes: int
    bytes_per_s: float
    load: float


@dataclass(frozen=True)
class Tensor:
    """A tensor, and the operator that creates it, None if it is persistent."""

    tensor: int
    name: str
    kind: str
    bytes: int
    made_by: Operator | None


@dataclass(frozen=True)
class SwappedTensor(Tensor):
    """A tensor with the operators before and after each of its stays on the host; the last one may be open."""

    away: list[list[Operator]]


@dataclass(frozen=True)
class RecomputedTensor(Tensor):
    """A tensor with the time of a recomputation, its operators, and the next user of each version."""

    us: float
    by: list[Operator]
    needed_by: list[Operator]


@dataclass(frozen=True)
class Tensors:
    """Number and bytes of the swapped or recomputed tensors, and the largest of them."""

    tensors: int
    bytes: int
    largest: list[Any]


@dataclass(frozen=True)
class PlanUse:
    """Effects of the plan besides its memory and time; `link` is by direction."""

    link: dict[str, LinkUse]
    swapped: Tensors
    recomputed: Tensors


@dataclass(frozen=True)
class NoPlan:
    """Absence of a plan, and the scheduler's reason (None if the job is refused)."""

    unplanned: str | None


@dataclass(frozen=True)
class Explanation:
    """Explanation of a job, in bytes, µs and fractions from 0 to 1.

    `graph`, `memory` and `time` are None if the step could not be captured. `plan` is None for an eager job as well.
    `beside` is None if no jobs run, if the job would not start now, or if planning all of them would take too long.
    """

    request: Request
    profile: str
    admission: Admission
    start: Start
    graph: Graph | None = None
    memory: Memory | None = None
    time: Time | None = None
    plan: PlanUse | NoPlan | None = None
    beside: Beside | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as a JSON object, in which numbers that are not known are absent."""
        return {
            **{key: value for key, value in self.request._asdict().items() if value is not None},
            "captured": self.graph is not None,
            "profile": self.profile,
            "admission": self.admission.totals(),
            **({} if self.graph is None else {"graph": _to_json(self.graph)}),
            **({} if self.memory is None else {"memory": _to_json(self.memory)}),
            **({} if self.time is None else {"time": _to_json(self.time)}),
            **({} if self.plan is None else _to_json(self.plan)),
            **({} if self.beside is None else {"beside": _to_json(self.beside)}),
            "start": _to_json(self.start),
        }


def _to_json(value: Any) -> Any:
    """Return the JSON value; fields that may be left out are absent while they are None."""
    if is_dataclass(value):
        items = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: _to_json(item) for field, item in items if item is not None or field.default is MISSING}
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    return {key: _to_json(item) for key, item in value.items()} if isinstance(value, dict) else value


# ---- explaining ------------------------------------------------------------------------------------------------------


def explain(
    request: Request,
    traces: Mapping[str, Trace],
    profile: DeviceProfile,
    admission: Admission,
    bound_limit_s: float = 0.0,
    running: Sequence[JobState] = (),
    over: Callable[[], bool] = lambda: False,
    memory_flow: bool = False,
) -> Explanation:
    """Return the explanation of a job.

    `traces` are the job's graphs by name, with latencies, the training step first; empty if none could be captured.
    `bound_limit_s`: seconds for which a solver may look for the bound of the plan's time; 0 means that none is wanted.
    `running` are the device's jobs that run, with their latest latencies and a grant; how the job would do beside them
    is left out if `over` returns True while they are planned. `memory_flow`: memory may flow between them.
    """
    scheduler = DeviceScheduler()
    alone = DeviceState(
        request.device,
        profile,
        admission.budget_bytes,
        host_bytes=admission.host_bytes,
        most_events=admission.most_events,
    )
    graph = memory = time = plan = largest = unplanned = None
    job = _eager(request)
    least, told = request.claim_bytes, request._replace(max_slowdown=None)
    if traces:
        train = next(iter(traces.values()))
        memory, graph = _memory(traces), _graph(train)
        largest = str(memory.largest_operator)
        (vanilla,) = simulate([SimulatedJob(train)], profile)
        time = Time(vanilla.iteration_us)
        if request.policy != "none":
            job = _captured(request, train, memory)
            memory, time, plan = _planned(request, job, memory, time, scheduler, alone, bound_limit_s)
            least = memory.promised_bytes or memory.least_bytes
            told = request if memory.promised_bytes else told
            unplanned = plan.unplanned if isinstance(plan, NoPlan) else None
        elif request.memory_budget is not None:  # which its first step must not exceed
            least = max(least, memory.vanilla_bytes)
    prospects = Outlook(admission)
    start = start_of(told, least, admission, largest, unplanned)
    if running and start.when != "never" and request.open_job is None:
        device = replace(alone, inference_bytes=admission.inference_bytes, memory_flow=memory_flow)
        prospects = outlook(scheduler, device, job, running, admission, over)
        start = start_of(told, least, prospects.admission, largest, unplanned, prospects.obstacle, prospects.beside)
    return Explanation(request, profile.name, prospects.admission, start, graph, memory, time, plan, prospects.beside)


def _eager(request: Request) -> JobState:
    most, overhead = request.memory_budget, request.overhead_bytes
    return JobState(0, None, request.claim_bytes, policy="none", overhead_bytes=overhead, most_bytes=most)


def _captured(request: Request, train: Trace, memory: Memory) -> JobState:
    return JobState(
        0,
        train,
        memory.least_bytes,
        str(memory.largest_operator),
        request.policy,
        overhead_bytes=request.overhead_bytes,
        most_bytes=request.memory_budget,
        max_slowdown=request.max_slowdown,
        swap_share=1.0 if request.swap_share is None else request.swap_share,
    )


def _planned(
    request: Request,
    job: JobState,
    memory: Memory,
    time: Time,
    scheduler: DeviceScheduler,
    device: DeviceState,
    bound_limit_s: float,
) -> tuple[Memory, Time, PlanUse | NoPlan]:
    """Return memory, time and plan by the scheduler's decision for the job alone on the device."""
    train = job.trace
    assert train is not None
    room = device.budget_bytes - request.overhead_bytes
    budget = room if request.memory_budget is None else min(room, request.memory_budget)
    saves = False if request.device.rpartition(":")[2] == "cpu" else None  # "cpu", or "ray:cpu"
    budget_of = "device" if budget == room else request.budget_name or "memory_budget"
    memory = replace(memory, budget_bytes=budget, budget_of=budget_of, saves_machine_memory=saves)
    decision = scheduler.schedule(device, [job]).decisions[job.job]
    if isinstance(decision, Refused) and decision.max_slowdown is not None:
        memory = replace(memory, promised_bytes=decision.least_bytes)
    if not isinstance(decision, Planned):
        return memory, time, NoPlan(getattr(decision, "reason", None))
    if request.max_slowdown is not None:
        memory = replace(memory, promised_bytes=scheduler.needs(device, [job])[job.job])
    memory = replace(memory, planned_bytes=decision.planned_bytes, host_bytes=decision.host_bytes)
    if train.device in ACCELERATORS:
        lost = decision.planned_bytes - footprint_of(AccessSequence(train, decision.plan)).device_peak_bytes
        memory = replace(memory, tensor_bytes=max(0, budget - lost))
    executed = as_executed(train, decision.plan)
    swapped, recomputed = swapped_tensors(executed, decision.plan), recomputed_tensors(executed, decision.plan)
    bound_us = None
    if bound_limit_s > 0 and len(decision.plan):
        bound_us = solved_us(executed, device.profile, max(budget, decision.planned_bytes), bound_limit_s)
    time = replace(_time(decision), bound_us=bound_us, max_slowdown=request.max_slowdown)
    return memory, time, PlanUse(_link(decision, device.profile), swapped, recomputed)


def _graph(trace: Trace) -> Graph:
    counts = np.bincount(trace.phase, minlength=len(Phase)).tolist()
    return Graph(trace.operator_count, trace.tensor_count, {phase.name.lower(): counts[phase] for phase in Phase})


def _memory(traces: Mapping[str, Trace]) -> Memory:
    least = {name: least_bytes(trace) for name, trace in traces.items()}
    hungriest = max(least, key=lambda name: least[name])
    return Memory(
        max(plan_bytes(trace) for trace in traces.values()),
        least[hungriest],
        hungriest,
        floor_bytes(traces[hungriest]),
        _operator(traces[hungriest], traces[hungriest].largest_operator),
    )


def _operator(trace: Trace, operator: int) -> Operator:
    phase = Phase(trace.phase[operator]).name.lower()
    return Operator(int(trace.captured_operator[operator]), trace.target[operator], phase, trace.module[operator])


def _operators(trace: Trace, operators: Iterable[int]) -> list[Operator]:
    return [_operator(trace, operator) for operator in operators]


def _time(planned: Planned) -> Time:
    assert planned.iteration_us is not None and planned.vanilla_us is not None
    computing = planned.iteration_us - planned.stall_us
    recompute_us = max(0.0, computing - planned.vanilla_us)
    slowdown = planned.iteration_us / planned.vanilla_us if planned.vanilla_us else 1.0
    return Time(planned.vanilla_us, planned.iteration_us, planned.stall_us, recompute_us, slowdown=slowdown)


def _link(planned: Planned, profile: DeviceProfile) -> dict[str, LinkUse]:
    assert planned.iteration_us is not None
    seconds = planned.iteration_us / 1e6
    directions = {"out": (planned.out_bytes, profile.out_bytes_per_s), "in": (planned.in_bytes, profile.in_bytes_per_s)}
    return {name: LinkUse(nbytes, rate, nbytes / rate / seconds) for name, (nbytes, rate) in directions.items()}


# ---- tensors ---------------------------------------------------------------------------------------------------------


def swapped_tensors(trace: Trace, plan: Plan) -> Tensors:
    """Return the swapped tensors, the largest with the operators around each idle interval.

    `trace` is in the plan's order.
    """
    absences: dict[int, list[list[int]]] = defaultdict(list)
    returns: dict[int, list[int]] = defaultdict(list)
    for event in plan.events:
        if event.kind == EventKind.SWAP_IN:
            returns[event.tensor].append(event.deadline)
    for event in plan.events:
        if event.kind == EventKind.SWAP_OUT:
            deadlines = returns[event.tensor]
            later = [operator for operator in deadlines if operator > event.trigger]
            later = later or deadlines  # across the end of the step
            absences[event.tensor].append([event.trigger, min(later)] if later else [event.trigger])
    shown = [
        SwappedTensor(*_tensor(trace, tensor), [_operators(trace, absence) for absence in absences[tensor]])
        for tensor in _largest(trace, absences)
    ]
    return Tensors(len(absences), _total_bytes(trace, absences), shown)


def recomputed_tensors(trace: Trace, plan: Plan) -> Tensors:
    """Return the recomputed tensors, the largest with their writers and next users.

    `trace` is in the plan's order.
    """
    events: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by tensor: version and deadline
    for event in plan.events:
        if event.kind == EventKind.RECOMPUTE:
            events[event.tensor].append((event.version, event.deadline))
    shown = []
    for tensor in _largest(trace, events):
        writers = trace.writers(tensor, max(version for version, _ in events[tensor]))
        us = float(trace.latency_us[list(writers)].sum())
        users = _operators(trace, (deadline for _, deadline in events[tensor]))
        shown.append(RecomputedTensor(*_tensor(trace, tensor), us, _operators(trace, writers), users))
    return Tensors(len(events), _total_bytes(trace, events), shown)


def _tensor(trace: Trace, tensor: int) -> tuple[int, str, str, int, Operator | None]:
    """Return the fields of `Tensor`."""
    creator = None if trace.persistent[tensor] else _operator(trace, trace.writers(tensor, 0)[0])
    kind = Kind(trace.tensor_kind[tensor]).name.lower()
    return tensor, trace.tensor_name[tensor], kind, int(trace.tensor_bytes[tensor]), creator


def _largest(trace: Trace, tensors: Iterable[int]) -> list[int]:
    return sorted(tensors, key=lambda tensor: (-int(trace.tensor_bytes[tensor]), tensor))[:SHOWN]


def _total_bytes(trace: Trace, tensors: Iterable[int]) -> int:
    return sum(int(trace.tensor_bytes[tensor]) for tensor in tensors)
