"""A slow and simple interpreter of plans, with dictionaries (docs/library.md).

It does not use plan/access_sequence.py. `run` executes (trace, plan) by the rules on symbolic values: the result of an
operator is a hash of the operator and of the values that it has read, so that errors propagate. It raises `Broken`
where a rule is broken, an operator sees another value than without a plan, or the iteration does not end in the state
in which it began. `perform` executes actions literally, without rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pg_tensile.planning.plan.actions import Action, ActionKind
from pg_tensile.planning.plan.plan import Boundary, Event, EventKind, Plan
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Trace

Value = int
LOST: Value = -1  # memory that nothing has written


class Broken(Exception):
    """A broken rule, and the operator (-1: the plan as a whole)."""

    def __init__(self, operator: int, message: str) -> None:
        super().__init__(message)
        self.operator = operator


class Moment(NamedTuple):
    """An entry of the script of an iteration: the kind, its event (-1: none) and the operator."""

    what: str  # wait_in, step, let_go, wait_out, release, out, in, check
    event: int
    operator: int


@dataclass
class Outcome:
    steps: list[int] = field(default_factory=list)
    footprint: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)  # events that moved bytes
    passive: list[tuple[int, int]] = field(default_factory=list)  # step, tensor
    final: Boundary = field(default_factory=lambda: Boundary(frozenset(), frozenset()))


def start_value(tensor: int) -> Value:
    return hash(("start", tensor))


def written(operator: int, tensor: int, reads: Sequence[Value]) -> Value:
    return hash((operator, tensor, *reads))


def results(operator: int, accesses: Sequence[Access], seen: dict[int, Value]) -> dict[int, Value]:
    """Return the values of the tensors that an operator creates or changes. Statistics affect only themselves."""
    reads = [seen[tensor] for tensor, mode in accesses if mode in (Mode.READ, Mode.WRITE)]
    values = {}
    for tensor, mode in accesses:
        if mode is Mode.STATS:
            values[tensor] = written(operator, tensor, [*reads, seen[tensor]])
        elif mode is not Mode.READ:
            values[tensor] = written(operator, tensor, reads)
    return values


def reference(trace: Trace) -> tuple[list[dict[int, Value]], dict[int, Value]]:
    """Return the values that each operator sees and the final values of all tensors, with unlimited memory."""
    values = {tensor: start_value(tensor) for tensor in range(trace.tensor_count)}
    views = []
    for index, operator in enumerate(trace.operators):
        seen = {tensor: values[tensor] for tensor, mode in operator.accesses if mode is not Mode.CREATE}
        views.append(seen)
        values |= results(index, operator.accesses, seen)
    return views, values


# ---- the plan, by the rules ----


def own_boundary(trace: Trace, plan: Plan) -> Boundary:
    """Derive the state between two iterations from the script."""
    script = make_script(trace, plan)
    device, host = set(), set()
    for tensor in range(trace.tensor_count):
        if not trace.persistent[tensor]:
            continue
        moments = [moment for moment in script if concerns(trace, plan, moment, tensor)]
        moments = [moment for moment in moments if moment.what != "wait_in"]
        if not moments or moments[0].what != "in":
            device.add(tensor)
        marks = [mark for moment in moments for mark in (marks_of(trace, moment, tensor))]
        if "write" in marks:
            changes = [mark for mark in marks if mark in ("write", "out")]
            if changes[-1] == "out":
                host.add(tensor)
        elif "out" in marks or "in" in marks:
            host.add(tensor)
    return Boundary(frozenset(device), frozenset(host))


def marks_of(trace: Trace, moment: Moment, tensor: int) -> list[str]:
    if moment.what in ("out", "in"):
        return [moment.what]
    if moment.what == "step" and moment.event < 0:
        modes = [mode for accessed, mode in trace.operators[moment.operator].accesses if accessed == tensor]
        return ["write"] if modes and modes[0] in (Mode.WRITE, Mode.STATS) else []
    return []


def concerns(trace: Trace, plan: Plan, moment: Moment, tensor: int) -> bool:
    """True if a moment needs or creates the tensor."""
    if moment.what in ("let_go", "check"):
        return False
    if moment.what != "step":
        return plan.events[moment.event].tensor == tensor
    target = plan.events[moment.event].tensor if moment.event >= 0 else None
    for accessed, mode in trace.operators[moment.operator].accesses:
        if accessed == tensor and (target is None or accessed == target or mode in (Mode.READ, Mode.STATS)):
            return True
    return False


def makes(trace: Trace, plan: Plan, moment: Moment, tensor: int) -> bool:
    if moment.what == "step":
        return Access(tensor, Mode.CREATE) in trace.operators[moment.operator].accesses
    return moment.what == "in"


def make_script(trace: Trace, plan: Plan) -> list[Moment]:
    """Return the moments of an iteration in order; events with invalid numbers are skipped."""
    events = list(enumerate(plan.events))
    script: list[Moment] = []
    for operator in range(trace.operator_count):
        for number, event in events:
            if event.kind is EventKind.SWAP_IN and event.deadline == operator:
                script.append(Moment("wait_in", number, operator))
        script += [Moment("step", -1, operator), Moment("let_go", -1, operator)]
        for number, event in events:
            if event.kind is EventKind.SWAP_OUT and event.trigger < event.deadline == operator:
                script.append(Moment("wait_out", number, operator))
        stretch: list[tuple[int, Event]] = []
        for number, event in events:
            if event.trigger != operator:
                continue
            if event.kind is EventKind.RECOMPUTE:
                script += gap(stretch)
                stretch = []
                script += recompute(trace, number, event)
            else:
                stretch.append((number, event))
        script += gap(stretch)
    return script


def gap(stretch: list[tuple[int, Event]]) -> list[Moment]:
    """Order events between two recompute events: those that free memory go first."""
    script = []
    for number, event in stretch:
        if event.kind is EventKind.RELEASE:
            script.append(Moment("release", number, event.trigger))
        elif event.kind is EventKind.SWAP_OUT:
            script.append(Moment("out", number, event.trigger))
    for number, event in stretch:
        if event.kind is EventKind.SWAP_OUT and event.deadline == event.trigger:
            script.append(Moment("wait_out", number, event.trigger))
    swap_ins = [(number, event) for number, event in stretch if event.kind is EventKind.SWAP_IN]
    return script + [Moment("in", number, event.trigger) for number, event in swap_ins]


def recompute(trace: Trace, number: int, event: Event) -> list[Moment]:
    script = [Moment("check", number, event.trigger)]
    if repeatable(trace, event) is None:
        for writer in trace.writers(event.tensor, event.version):
            script += [Moment("step", number, writer), Moment("let_go", -1, writer)]
    return script


def version_there(trace: Trace, tensor: int, operator: int) -> int:
    """Count the changes of the tensor by operators up to this one; -1: it does not exist yet."""
    modes = [mode for row in trace.operators[: operator + 1] for accessed, mode in row.accesses if accessed == tensor]
    changes = sum(mode in (Mode.WRITE, Mode.STATS) for mode in modes)
    return changes if trace.persistent[tensor] or Mode.CREATE in modes else -1


def repeatable(trace: Trace, event: Event) -> str | None:
    """Return why a recompute event can never be executed, None if it can."""
    if trace.persistent[event.tensor] or trace.tensor_kind[event.tensor] == Kind.INPUT:
        return "no operator that can be repeated creates it"
    if version_there(trace, event.tensor, event.trigger) != event.version or event.version < 0:
        return "another version"
    for writer in trace.writers(event.tensor, event.version):
        for accessed, mode in trace.operators[writer].accesses:
            if mode is Mode.WRITE and accessed != event.tensor:
                return "writes another tensor"
    return None


def check_numbers(trace: Trace, plan: Plan) -> None:
    for event in plan.events:
        later = event.kind in (EventKind.SWAP_IN, EventKind.RECOMPUTE)
        good = 0 <= event.tensor < trace.tensor_count and event.delay_us >= 0
        good &= 0 <= event.trigger <= event.deadline < trace.operator_count
        good &= event.deadline > event.trigger if later else True
        good &= event.kind is not EventKind.RELEASE or event.deadline == event.trigger
        if not good:
            raise Broken(-1, f"numbers of {event}")


class Machine:
    """The memory of a device and of the host while a script is executed."""

    def __init__(self, trace: Trace, plan: Plan, initial: Boundary | None, passive: bool) -> None:
        check_numbers(trace, plan)
        self.trace, self.plan, self.passive = trace, plan, passive
        self.script = make_script(trace, plan)
        self.boundary = own_boundary(trace, plan)
        begin = self.boundary if initial is None else initial
        self.device: dict[int, Value] = {tensor: start_value(tensor) for tensor in begin.device}
        self.host: dict[int, Value] = {tensor: start_value(tensor) for tensor in begin.host}  # current copies only
        self.arriving: set[int] = set()
        self.leaving: set[int] = set()
        self.views, self.finals = reference(trace)
        self.outcome = Outcome()
        self.operators = list(trace.operators)

    def run(self) -> Outcome:
        for index, moment in enumerate(self.script):
            event = self.plan.events[moment.event] if moment.event >= 0 else None
            if moment.what == "step":
                self.step(moment, event)
            elif moment.what == "let_go":
                self.let_go(index)
            else:
                assert event is not None
                getattr(self, moment.what)(moment, event)
        self.end()
        return self.outcome

    def fail(self, moment: Moment, why: str) -> None:
        raise Broken(moment.operator, f"{moment}: {why}")

    # ---- steps ----

    def step(self, moment: Moment, event: Event | None) -> None:
        operator = moment.operator
        accesses, target = self.operators[operator].accesses, None if event is None else event.tensor
        scratch, seen = 0, {}
        for tensor, mode in accesses:
            own = target is None or tensor == target
            if mode is Mode.CREATE:
                if own and tensor in self.device:
                    self.fail(moment, "created while it is resident")
                scratch += 0 if own else int(self.trace.tensor_bytes[tensor])
            elif mode is Mode.STATS and not own:  # a copy of their current values
                scratch += int(self.trace.tensor_bytes[tensor])
                seen[tensor] = self.access(moment, tensor, False)
            else:
                seen[tensor] = self.access(moment, tensor, target is None and mode is not Mode.READ)
                if seen[tensor] != self.views[operator][tensor]:
                    self.fail(moment, f"sees another value of {tensor}")
        values = results(operator, accesses, seen)
        for tensor, value in values.items():
            if target is None or tensor == target:
                self.device[tensor] = value
                if target is None:
                    self.host.pop(tensor, None)
        self.outcome.steps.append(operator)
        self.outcome.footprint.append(sum(int(self.trace.tensor_bytes[t]) for t in self.device) + scratch)

    def access(self, moment: Moment, tensor: int, change: bool) -> Value:
        if tensor in self.arriving:
            self.fail(moment, f"{tensor} has not arrived")
        if change and tensor in self.leaving:
            self.fail(moment, f"{tensor} is being copied out")
        if tensor not in self.device:
            if not (self.passive and tensor in self.host):
                self.fail(moment, f"{tensor} is not resident")
            self.device[tensor] = self.host[tensor]
            self.outcome.passive.append((len(self.outcome.steps), tensor))
        return self.device[tensor]

    def let_go(self, index: int) -> None:
        """Free dead tensors: nothing needs them before they are created again or the iteration ends."""
        for tensor in list(self.device):
            if tensor in self.arriving or tensor in self.leaving:
                continue
            coming = (moment for moment in self.script[index:] if concerns(self.trace, self.plan, moment, tensor))
            following = next(coming, None)
            if following is None:
                dead = tensor not in self.boundary.device
            else:
                dead = makes(self.trace, self.plan, following, tensor)
            if dead:
                del self.device[tensor]

    # ---- events ----

    def wait_in(self, moment: Moment, event: Event) -> None:
        self.arriving.discard(event.tensor)

    def wait_out(self, moment: Moment, event: Event) -> None:
        self.leaving.discard(event.tensor)
        self.device.pop(event.tensor, None)

    def free(self, moment: Moment, event: Event) -> bool:
        """Check the conditions of swap-out and release; return False if the tensor is not resident (passive only)."""
        tensor = event.tensor
        if tensor in self.arriving or tensor in self.leaving:
            self.fail(moment, "in flight")
        if tensor not in self.device and not (self.passive and tensor in self.host):
            self.fail(moment, "not resident")
        return tensor in self.device

    def release(self, moment: Moment, event: Event) -> None:
        if self.free(moment, event):
            del self.device[event.tensor]

    def out(self, moment: Moment, event: Event) -> None:
        if self.free(moment, event) and event.tensor not in self.host:
            self.host[event.tensor] = self.device[event.tensor]
            self.outcome.copies.append(moment.event)
        self.leaving.add(event.tensor)

    def check(self, moment: Moment, event: Event) -> None:
        why = repeatable(self.trace, event)
        if why:
            self.fail(moment, why)

    # `in` is a keyword
    def __getattr__(self, name: str):
        if name == "in":
            return self.come
        raise AttributeError(name)

    def come(self, moment: Moment, event: Event) -> None:
        tensor = event.tensor
        if tensor in self.device or tensor in self.arriving:
            self.fail(moment, "already resident")
        if tensor in self.leaving or tensor not in self.host:
            self.fail(moment, "no host copy to swap in")
        self.device[tensor] = self.host[tensor]
        self.arriving.add(tensor)
        self.outcome.copies.append(moment.event)

    def end(self) -> None:
        last = self.trace.operator_count - 1
        for tensor in range(self.trace.tensor_count):
            if not self.trace.persistent[tensor]:
                continue
            if tensor not in self.device and tensor not in self.host:
                raise Broken(last, f"{tensor} is lost")
            if tensor in self.boundary.device and tensor not in self.device:
                if not self.passive:
                    raise Broken(last, f"{tensor} is on the host at the end")
                self.device[tensor] = self.host[tensor]
                self.outcome.passive.append((len(self.outcome.steps), tensor))
            for memory in (self.device, self.host):
                if tensor in memory and memory[tensor] != self.finals[tensor]:
                    raise Broken(last, f"{tensor} has another value")
        kept = {tensor for tensor in self.host if self.trace.persistent[tensor]}
        if not kept >= self.boundary.host or set(self.device) != self.boundary.device:
            raise Broken(last, "the iteration ends in another state")
        self.outcome.final = Boundary(frozenset(self.device), frozenset(kept))


def run(trace: Trace, plan: Plan, initial: Boundary | None = None, passive: bool = False) -> Outcome:
    """Execute one iteration. Raises Broken."""
    return Machine(trace, plan, initial, passive).run()


# ---- actions, literally ----


def perform(trace: Trace, plan: Plan, actions: Sequence[Action], steps: Sequence[int], begin: Boundary) -> Outcome:
    """Execute actions as a runtime does. Raises Broken if an operator sees another value than without a plan."""
    device = {tensor: start_value(tensor) for tensor in begin.device}
    host = {tensor: start_value(tensor) for tensor in begin.host}
    views, finals = reference(trace)
    arriving: dict[int, Value] = {}
    outcome = Outcome()
    recomputing = step_events(trace, plan, steps)
    for kind, step, tensor, event in actions:
        if kind is ActionKind.RUN:
            assert step == len(outcome.steps)
            run_step(trace, plan, steps[step], recomputing[step], device, views, outcome)
        elif kind is ActionKind.PASSIVE_IN:
            assert tensor not in device
            device[tensor] = host[tensor]
            outcome.passive.append((len(outcome.steps), tensor))
        elif kind is ActionKind.COPY_IN:
            assert tensor not in device
            arriving[tensor] = host[tensor]
            device[tensor] = LOST  # until WAIT_IN
            outcome.copies.append(event)
        elif kind is ActionKind.WAIT_IN:
            device[tensor] = arriving.pop(tensor)
        elif kind is ActionKind.COPY_OUT:
            host[tensor] = device[tensor]
            outcome.copies.append(event)
        elif kind is ActionKind.WAIT_OUT:
            assert device.pop(tensor) == host[tensor]  # unchanged since the copy
        else:
            del device[tensor]
    assert not arriving
    for tensor, value in device.items():
        if value != finals[tensor]:
            raise Broken(trace.operator_count - 1, f"{tensor} has another value at the end")
    current = {t for t, value in host.items() if trace.persistent[t] and value == finals[t]}
    outcome.final = Boundary(frozenset(device), frozenset(current))
    return outcome


def step_events(trace: Trace, plan: Plan, steps: Sequence[int]) -> list[int]:
    """Return the recompute event of every step, -1 for the operator itself."""
    owners = [moment.event for moment in make_script(trace, plan) if moment.what == "step"]
    assert len(owners) == len(steps)
    return owners


def run_step(
    trace: Trace, plan: Plan, operator: int, event: int, device: dict[int, Value], views: list[dict[int, Value]],
    outcome: Outcome,
) -> None:  # fmt: skip
    accesses = trace.operators[operator].accesses
    target = None if event < 0 else plan.events[event].tensor
    seen, scratch = {}, 0
    for tensor, mode in accesses:
        own = target is None or tensor == target
        if not own and mode is not Mode.READ:
            scratch += int(trace.tensor_bytes[tensor])
            if mode is Mode.STATS:
                seen[tensor] = device[tensor]
        elif mode is not Mode.CREATE:
            seen[tensor] = device.get(tensor, LOST)
            if seen[tensor] != views[operator][tensor]:
                raise Broken(operator, f"{tensor} has another value")
    for tensor, value in results(operator, accesses, seen).items():
        if target is None or tensor == target:
            device[tensor] = value
    outcome.steps.append(operator)
    outcome.footprint.append(sum(int(trace.tensor_bytes[tensor]) for tensor in device) + scratch)
