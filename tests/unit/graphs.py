"""Random traces and plans for tests: hypothesis strategies, and the same from a plain `random.Random`.

`traces()` draws small iterations with everything a trace can have. `valid_plans(trace)` draws plans that are valid by
construction: for every interval between two needs of a tensor it decides whether the tensor leaves the device and how
it comes back, without calling the code under test. `broken(trace, plan)` changes a valid plan, which nearly always
loses data (tests/unit/oracle.py decides). Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.order import dependencies
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Tensor, Trace

READ, STATS, WRITE, CREATE = Mode.READ, Mode.STATS, Mode.WRITE, Mode.CREATE
SIZES = (0, 1, 7, 64, 100, 512, 1000, 4096)
CREATED = (Kind.ACTIVATION, Kind.ACTIVATION, Kind.GRADIENT, Kind.TEMPORARY)


# ---- traces ----


def random_trace(random: Random, most_operators: int = 12, most_tensors: int = 14) -> Trace:
    """Draw a trace: operators with any number of reads, outputs, in-place writes and statistics; persistent tensors of
    every kind, some only read, some never used; tensors without bytes; all phases."""
    tensors = [_tensor(random, kind) for kind in random.choices(list(Kind)[:4], k=random.randint(0, 4))]
    persistent = len(tensors)
    inputs = random.randint(0, 2) + (not tensors)
    tensors += [_tensor(random, Kind.INPUT) for _ in range(inputs)]
    created = tuple(Access(tensor, Mode.CREATE) for tensor in range(persistent, len(tensors)))
    operators = [Operator("placeholder", Phase.FORWARD, created)]
    frozen = {tensor for tensor in range(persistent) if random.random() < 0.4}
    count = random.randint(1, most_operators - 2)
    for number in range(count):
        phase = Phase(min(2, number * 4 // count))
        accesses = _accesses(random, tensors, frozen)
        if len(tensors) < most_tensors and (len(accesses) != 1 or accesses[0].mode is not Mode.WRITE):
            for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
                accesses.append(Access(len(tensors), Mode.CREATE))
                tensors.append(_tensor(random, random.choice(CREATED)))
        if not accesses:
            accesses = [Access(random.randrange(len(tensors)), Mode.READ)]
        operators.append(
            Operator(
                f"op{number}", phase, tuple(accesses), random=random.random() < 0.2,
                latency_us=random.choice((0.0, 1.5, 20.0)), workspace_bytes=random.choice((0, 0, 256)),
                module=random.choice(("", "block")), signature=random.choice(("", "f32[4]")),
            )
        )  # fmt: skip
    returned = random.sample(range(len(tensors)), k=min(len(tensors), random.randint(1, 2)))
    operators.append(Operator("output", Phase.OPTIMIZER, tuple(Access(tensor, Mode.READ) for tensor in returned)))
    return Trace.build(operators, tensors, random.choice(("cpu", "cuda")))


def _tensor(random: Random, kind: Kind) -> Tensor:
    size = random.choice(SIZES)
    return Tensor(size, kind, random.choice(("", "t", "w")), "u8", (size,))


def _accesses(random: Random, tensors: list[Tensor], frozen: set[int]) -> list[Access]:
    """Draw accesses of an operator to existing tensors, more often to recent ones, as in a chain of layers."""
    recent = range(max(0, len(tensors) - 4), len(tensors))
    created = [tensor for tensor in recent if tensors[tensor].kind > Kind.INPUT]
    if created and random.random() < 0.25:  # like relu_ after batch norm
        return [Access(random.choice(created), Mode.WRITE)]
    pool = list(dict.fromkeys(random.choices([*range(len(tensors)), *recent], k=random.randint(0, 4))))
    accesses = []
    for tensor in pool:
        mode = random.choice((*[Mode.READ] * 6, Mode.WRITE, Mode.STATS))
        if mode is Mode.STATS and tensors[tensor].kind is not Kind.BUFFER and random.random() < 0.7:
            mode = Mode.READ
        accesses.append(Access(tensor, Mode.READ if tensor in frozen else mode))
    return accesses


def dice() -> st.SearchStrategy[Random]:
    """Draw a generator for many decisions: hypothesis prefers small sizes and gives up on long sequences of draws."""
    return st.integers(0, 2**32 - 1).map(Random)


@st.composite
def traces(draw: st.DrawFn, most_operators: int = 12, most_tensors: int = 14) -> Trace:
    operators = draw(st.integers(3, most_operators))
    return random_trace(draw(dice()), operators, most_tensors)


def random_order(random: Random, trace: Trace) -> list[int]:
    """Draw a valid order of the operators: one of those that are ready comes next."""
    needs = dependencies(trace)
    missing = np.diff(needs.predecessor_start).tolist()
    ready, order = [operator for operator, count in enumerate(missing) if not count], []
    while ready:
        order.append(ready.pop(random.randrange(len(ready))))
        for later in needs.successors[slice(*needs.successor_start[order[-1] :][:2])].tolist():
            missing[later] -= 1
            ready += [] if missing[later] else [later]
    return order


# ---- a small trace for examples ----

# A chain of three, forward and backward, and an update. Operators: 0 placeholder, 1 a = f(x, w), 2 norm: b = g(a) with
# running statistics, 3 relu_ changes b, 4 c = h(b), 5 backward of h: reads c and b, makes d; 6 of g: reads a and d,
# makes e; 7 sgd changes w, reads e; 8 log reads w; 9 output reads c
W, F, S, X, A, B, C, D, E = range(9)


def chain() -> Trace:
    """Build a trace of nine tensors (W … E) and ten operators, as above."""
    tensors = [
        Tensor(10, Kind.PARAMETER, "fc.weight"),
        Tensor(11, Kind.PARAMETER, "fc.frozen"),
        Tensor(12, Kind.BUFFER, "bn.mean"),
        Tensor(13, Kind.INPUT, "x"),
        *(Tensor(20 + number, Kind.ACTIVATION, name) for number, name in enumerate("abcde")),
    ]
    rows: list[tuple[str, list[tuple[int, Mode]]]] = [
        ("placeholder", [(X, CREATE)]),
        ("f", [(X, READ), (W, READ), (A, CREATE)]),
        ("norm", [(A, READ), (S, STATS), (B, CREATE)]),
        ("relu_", [(B, WRITE)]),
        ("h", [(B, READ), (F, READ), (C, CREATE)]),
        ("h_backward", [(C, READ), (B, READ), (D, CREATE)]),
        ("g_backward", [(A, READ), (D, READ), (E, CREATE)]),
        ("sgd", [(W, WRITE), (E, READ)]),
        ("log", [(W, READ), (F, READ)]),
        ("output", [(C, READ)]),
    ]
    operators = [
        Operator(target, Phase.FORWARD, tuple(Access(*access) for access in accesses)) for target, accesses in rows
    ]
    return Trace.build(operators, tensors)


# ---- valid plans ----


class Need(NamedTuple):
    """A place where a tensor must be resident: at an operator (`rank` < 0), or for the recompute event of that rank in
    the gap after it."""

    operator: int
    rank: float = -1.0

    @property
    def in_gap(self) -> bool:
        return self.rank >= 0

    @property
    def last_trigger(self) -> int:
        """The latest trigger of a swap-in for this need."""
        return self.operator - 1

    @property
    def last_deadline(self) -> int:
        return self.operator


@dataclass
class Segment:
    """A version of a tensor, from the operator that writes it (-1: the start) to the next that does."""

    tensor: int
    version: int
    written: int
    ends: Need | None  # the next write; None: the end of the iteration
    needs: list[Need] = field(default_factory=list)


@dataclass
class Style:
    """Probabilities: that an idle interval is used, and for what."""

    leave: float = 0.6
    swap: float = 1.0
    recompute: float = 1.0
    eager: bool = False  # off the device for as long as possible


MIXED = Style()
SWAP_ALL = Style(leave=1.0, recompute=0.0, eager=True)
RECOMPUTE_ALL = Style(leave=1.0, swap=0.0, eager=True)


class Planner:
    """Build a valid plan. Segments are decided from the last one written to the first: a recompute needs tensors that
    were written earlier, which are then still undecided. In a gap, recompute events stand in the order in which
    their tensors were written; an event's rank is its position among them."""

    def __init__(self, random: Random, trace: Trace, style: Style) -> None:
        self.random = random
        self.trace = trace
        self.style = style
        self.last = trace.operator_count - 1
        self.events: list[tuple[int, float, Event]] = []  # trigger, rank, event
        self.segments: dict[tuple[int, int], Segment] = {}
        self.operators = list(trace.operators)
        for tensor in range(trace.tensor_count):
            self._split(tensor)

    def _split(self, tensor: int) -> None:
        """Add the segments of a tensor, with the needs of the operators."""
        segment = Segment(tensor, 0, -1, None)
        self.segments[tensor, 0] = segment
        for index, operator in enumerate(self.operators):
            for access in operator.accesses:
                if access.tensor != tensor:
                    continue
                if access.mode is Mode.CREATE:
                    segment.written = index
                elif access.mode is Mode.READ:
                    segment.needs.append(Need(index))
                else:
                    segment.ends = Need(index)
                    segment.needs.append(Need(index))
                    segment = Segment(tensor, segment.version + 1, index, None)
                    self.segments[tensor, segment.version] = segment

    def plan(self) -> Plan:
        persistent = self.trace.persistent
        self.off = {
            tensor
            for tensor in range(self.trace.tensor_count)
            if persistent[tensor] and self.style.swap and self.random.random() < self.style.leave
        }
        # A tensor that nothing writes keeps its host copy, if it has swap events.
        self.copied: set[int] = set()
        for segment in sorted(self.segments.values(), key=self._turn):
            self._decide(segment)
        self.events.sort(key=lambda placed: placed[:2])
        return Plan.build([event for _, _, event in self.events])

    # ---- one segment ----

    def _turn(self, segment: Segment) -> tuple[int, bool]:
        """Return the key of the order of decisions. A recompute copies statistics, so they come after its results."""
        return -segment.written, self._by_statistics(segment)

    def _by_statistics(self, segment: Segment) -> bool:
        return segment.written >= 0 and Access(segment.tensor, Mode.STATS) in self.operators[segment.written].accesses

    def _decide(self, segment: Segment) -> None:
        tensor = segment.tensor
        persistent = bool(self.trace.persistent[tensor])
        frozen = persistent and not self.trace.tensor_writes[tensor]
        needs = sorted(set(segment.needs))
        current = segment.written < 0 and (frozen or tensor in self.copied)
        swaps_before = len(self.events)
        here = Need(segment.written) if segment.written >= 0 else Need(0, -0.5)  # it may leave from there on
        if segment.written < 0 and persistent and tensor in self.off:
            deadline = self._arrive(tensor, 0, needs[0] if needs else Need(self.last))
            here = Need(deadline, -0.5)
            current = True
            if needs:
                here, needs = max(here, needs[0]), needs[1:]
        for need in needs:
            current = self._between(segment, here, need, current)
            here = need
        if persistent and segment.ends is None:
            if tensor in self.off:
                current = self._leave_for_good(segment, here, current)
            elif self.random.random() < 0.3:
                current = self._between(segment, here, Need(self.last, 1e9), current, at_end=True)
            if current and (not frozen or len(self.events) > swaps_before):
                self.copied.add(tensor)
        elif not persistent and segment.ends is None:
            self._die(segment, here, current)

    def _between(self, segment: Segment, here: Need, need: Need, current: bool, at_end: bool = False) -> bool:
        """Decide the interval between two needs; return True if a current host copy exists after it."""
        ways = []
        if self.random.random() < self.style.leave:
            if here.operator <= need.last_trigger - at_end and self.random.random() < self.style.swap:
                ways.append("swap")
            if self.random.random() < self.style.recompute and not at_end:
                gaps = self._recompute_gaps(segment, here, need)
                ways += ["recompute"] if gaps else []
        if not ways:
            return current
        if self.random.choice(ways) == "swap":
            return self._swap(segment, here, need, current)
        gap = max(gaps) if self.style.eager else self.random.choice(gaps)
        self._recompute(segment, gap, need)
        if here.operator < gap or not here.in_gap:  # else it is freed without an event
            return self._goes_before_recompute(segment, here, gap, current)
        return current

    def _swap(self, segment: Segment, here: Need, need: Need, current: bool) -> bool:
        tensor = segment.tensor
        at_end = need.rank >= 1e9
        latest = need.last_trigger
        gone = here.operator if self.style.eager else self.random.randint(here.operator, latest)
        how = self.random.choice(("out", "out", "release", "nothing")) if current and gone <= latest else "out"
        if how == "release":
            self._add(Event(EventKind.RELEASE, tensor, gone, gone), self._after(here, gone))
        elif how == "out":
            gone = self._swap_out(segment, here, gone, latest)
        self._arrive(tensor, gone, Need(self.last) if at_end else need, self._after(here, gone) + 0.1)
        return True

    def _swap_out(self, segment: Segment, here: Need, gone: int, latest: int) -> int:
        """Add a swap-out that frees at about `gone`, not after `latest`; return the operator after which it frees."""
        if not self.style.eager and self.random.random() < 0.5:
            deadline = min(gone + 1, latest) if gone == here.operator and here.in_gap else gone
            begin = self._earliest(segment, here)
            if begin < deadline and (deadline > here.operator or not here.in_gap):
                trigger = self.random.randint(begin, deadline - 1)
                delay = self.random.choice((0, 0, 30))
                event = Event(EventKind.SWAP_OUT, segment.tensor, trigger, deadline, delay_us=delay)
                self._add(event, self._after(here, trigger))
                return deadline
        self._add(Event(EventKind.SWAP_OUT, segment.tensor, gone, gone), self._after(here, gone))
        return gone

    def _earliest(self, segment: Segment, here: Need) -> int:
        """Return the first gap in which an asynchronous swap-out may begin: reads may overlap it, but no other event of
        the tensor and no write."""
        busy = [
            max(event.trigger, event.deadline) if event.kind is not EventKind.RECOMPUTE else event.trigger + 1
            for _, _, event in self.events
            if event.tensor == segment.tensor and event.trigger <= here.operator
        ]
        return min(here.operator, max([segment.written, 0, *busy])) if busy else max(segment.written, 0)

    def _arrive(self, tensor: int, earliest: int, need: Need, rank: float = 0.0) -> int:
        """Add a swap-in for `need`, triggered at `earliest` or later; return its deadline."""
        trigger = need.last_trigger if self.style.eager else self.random.randint(earliest, need.last_trigger)
        deadline = self.random.randint(trigger + 1, need.last_deadline)
        event = Event(EventKind.SWAP_IN, tensor, trigger, deadline, delay_us=self.random.choice((0, 0, 10)))
        self._add(event, rank if trigger == earliest else self.random.choice((0.0, 1e6)))
        return deadline

    def _leave_for_good(self, segment: Segment, here: Need, current: bool) -> bool:
        """Free a persistent tensor that is not resident at the end of the iteration; return True."""
        gone = here.operator if self.style.eager else self.random.randint(here.operator, self.last)
        how = self.random.choice(("out", "release", "nothing")) if current else "out"
        if how == "release":
            self._add(Event(EventKind.RELEASE, segment.tensor, gone, gone), self._after(here, gone))
        elif how == "out":
            self._swap_out(segment, here, gone, self.last)
        return True

    def _die(self, segment: Segment, here: Need, current: bool) -> None:
        """Add nothing, or valid but useless events, after the last need of a tensor that is not persistent."""
        if self.random.random() < 0.8:
            return
        gone = self.random.randint(here.operator, self.last)
        if self.random.random() < 0.5:
            self._add(Event(EventKind.RELEASE, segment.tensor, gone, gone), self._after(here, gone))
        elif self.style.swap:
            gone = self._swap_out(segment, here, gone, self.last)
            if gone < self.last and self.random.random() < 0.5:
                self._arrive(segment.tensor, gone, Need(self.last), self._after(here, gone) + 0.1)

    # ---- recomputation ----

    def _recompute_gaps(self, segment: Segment, here: Need, need: Need) -> list[int]:
        """Return the gaps in which the tensor can be recomputed: its writers' inputs have not changed."""
        tensor, trace = segment.tensor, self.trace
        if trace.persistent[tensor] or trace.tensor_kind[tensor] == Kind.INPUT or self._by_statistics(segment):
            return []
        reads = []
        for writer in trace.writers(tensor, segment.version):
            seen = self._versions(writer)
            for read, mode in self.operators[writer].accesses:
                if read != tensor and mode is Mode.WRITE:
                    return []
                if read != tensor and mode in (Mode.READ, Mode.STATS):
                    reads.append((read, seen[read] + (mode is Mode.STATS)))
        last = need.operator if need.in_gap else need.operator - 1
        gaps = range(here.operator + here.in_gap, last + 1)
        return [gap for gap in gaps if all(self._versions(gap + 1)[read] == version for read, version in reads)]

    def _versions(self, operator_index: int) -> dict[int, int]:
        """Return the version of every tensor before an operator."""
        versions = dict.fromkeys(range(self.trace.tensor_count), 0)
        for operator in self.operators[:operator_index]:
            for tensor, mode in operator.accesses:
                versions[tensor] += mode in (Mode.WRITE, Mode.STATS)
        return versions

    def _recompute(self, segment: Segment, gap: int, need: Need) -> None:
        tensor, rank = segment.tensor, float(segment.written)
        deadline = need.operator if need.operator > gap else self.last
        self._add(Event(EventKind.RECOMPUTE, tensor, gap, deadline, version=segment.version), rank)
        for writer in self.trace.writers(tensor, segment.version):
            seen = self._versions(writer)
            for read, mode in self.operators[writer].accesses:
                if read != tensor and mode in (Mode.READ, Mode.STATS):
                    version = seen[read] + (mode is Mode.STATS)
                    self.segments[read, version].needs.append(Need(gap, rank))

    def _goes_before_recompute(self, segment: Segment, here: Need, gap: int, current: bool) -> bool:
        """Free a tensor that is recomputed in `gap`: without an event, by a release or by a swap-out. Return True if a
        current host copy exists."""
        latest = gap - 1 if here.in_gap or self.random.random() < 0.5 else gap
        if latest < here.operator or self.random.random() < 0.4:
            return current
        gone = self.random.randint(here.operator, latest)
        if self.style.swap and self.random.random() < 0.3 and gone < gap:
            self._swap_out(segment, here, gone, gap - 1)
            return True
        rank = self._after(here, gone) if gone < gap else -1.0
        self._add(Event(EventKind.RELEASE, segment.tensor, gone, gone), rank)
        return current

    def _after(self, here: Need, gap: int) -> float:
        """Return a rank in `gap` after the need `here`."""
        return here.rank + 0.25 if here.in_gap and here.operator == gap else -0.5

    def _add(self, event: Event, rank: float) -> None:
        self.events.append((event.trigger, rank, event))


def random_plan(random: Random, trace: Trace, style: Style = MIXED) -> Plan:
    return Planner(random, trace, style).plan()


@st.composite
def valid_plans(draw: st.DrawFn, trace: Trace) -> Plan:
    style = draw(st.sampled_from([MIXED, MIXED, MIXED, SWAP_ALL, RECOMPUTE_ALL, RECOMPUTE_ALL, Style(leave=0.2)]))
    return random_plan(draw(dice()), trace, style)


@st.composite
def planned(draw: st.DrawFn, most_operators: int = 12, most_tensors: int = 14) -> tuple[Trace, Plan]:
    """Draw a trace and a valid plan for it."""
    trace = draw(traces(most_operators, most_tensors))
    return trace, draw(valid_plans(trace))


# ---- plans that are not valid ----


def mutate(random: Random, trace: Trace, plan: Plan) -> Plan:
    """Drop, double, move or change an event, or add one; this mostly loses data."""
    events = list(plan.events)
    last = trace.operator_count - 1
    if not events or random.random() < 0.1:
        trigger = random.randint(0, last)
        tensor = random.randrange(trace.tensor_count)
        version = random.randint(0, int(trace.tensor_writes[tensor]))
        kind = random.choice(list(EventKind))
        deadline = trigger if kind is EventKind.RELEASE else random.randint(trigger, last)
        events.insert(random.randint(0, len(events)), Event(kind, tensor, trigger, deadline, version))
        return Plan.build(events)
    index = random.randrange(len(events))
    event = events.pop(index)
    change = random.choice(("drop", "drop", "trigger", "deadline", "kind", "tensor", "version", "order", "double"))
    if change == "trigger":
        move = random.choice((-2, -1, 1, 2))
        follow = move if event.deadline == event.trigger else 0
        event = event._replace(trigger=event.trigger + move, deadline=event.deadline + follow)
    elif change == "deadline":
        event = event._replace(deadline=event.deadline + random.choice((-2, -1, 1, 2)))
    elif change == "kind":
        event = event._replace(kind=random.choice(list(EventKind)))
    elif change == "tensor":
        event = event._replace(tensor=random.randrange(-1, trace.tensor_count + 1))
    elif change == "version":
        event = event._replace(version=event.version + random.choice((-1, 1)))
    elif change == "double":
        events.insert(index, event)
    if change != "drop":
        events.insert(random.randint(0, len(events)) if change == "order" else index, event)
    return Plan.build(events)


@st.composite
def broken(draw: st.DrawFn, trace: Trace, plan: Plan) -> Plan:
    """Apply one to three mutations to a valid plan; very rarely it stays valid."""
    random = draw(dice())
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        plan = mutate(random, trace, plan)
    return plan


def live_tensors(sequence: AccessSequence, step: int) -> list[int]:
    """Return the tensors that are resident at a step, in ascending order."""
    live = (sequence.interval_first <= step) & (step <= sequence.interval_last)
    return sorted(sequence.interval_tensor[live].tolist())
