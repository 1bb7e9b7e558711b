"""Meaning of a plan on a trace: steps, residency, copies, actions, and the first problem.

This module alone implements the semantics of docs/library.md ("Steps", "Plan"). Validation, peak analysis, the
simulator and the runtime's compiler all use it, so they cannot disagree. The tensor access sequence of TENSILE (section
IV-A) is extended by the events of the plan (residency.py) and by the operators that are recomputed (steps.py);
messages.py words the problems.

One step and its gap, in the order of execution (`Slot` in residency.py names the parts):

    step k                                     gap after step k                                             step k + 1
    -------------------------------------------|------------------------------|-----------------------------|---------
    swap-ins with        operator k   sample   dead tensors, swap-outs due,   swap-ins triggered at k take
    deadline k are       runs         of the   releases; swap-outs triggered  memory and start their copies;
    waited for                        bytes    at k start their copies        recomputations become steps
                                               memory only falls              memory only rises
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from pg_tensile.errors import InvalidPlanError
from pg_tensile.planning.plan.actions import Action, ActionColumns, Transfers, build_actions
from pg_tensile.planning.plan.messages import (
    Cause,
    Problem,
    describe_fault,
    describe_item,
    describe_loss,
    describe_uncopied,
)
from pg_tensile.planning.plan.order import as_executed
from pg_tensile.planning.plan.plan import Boundary, Plan
from pg_tensile.planning.plan.residency import (
    SLOTS,
    Item,
    Location,
    Slot,
    boundary_flags,
    build_items,
    find_wrong,
    same_event,
    track,
)
from pg_tensile.planning.plan.steps import FaultyEvent, Layout, find_fault, lay_out
from pg_tensile.planning.trace.recomputations import scratch_bytes
from pg_tensile.planning.trace.trace import Bools, Int32s, Int64s, Trace


class Copies(NamedTuple):
    """The swap events that move bytes, in plan order."""

    event: Int64s
    tensor: Int64s
    bytes: Int64s


class HostCopies(NamedTuple):
    """The h copies on the host, each from the gap after step `first` until the wait before step `last`.

    A copy with `last` < `first` is kept across the end of the iteration, one with `last` = `first` all the time.
    """

    tensor: Int64s  # [h]
    first: Int64s  # [h]
    last: Int64s  # [h]


class AccessSequence:
    """The meaning of `plan` on the captured `trace`, from `initial_state`; None means the plan's own boundary state.

    The attribute `trace` is the trace as executed: in the plan's order (order.py), if it has one. Operators are indices
    into it unless stated otherwise. With `passive`, an access to a tensor that is only on the host is preceded by a
    passive swap-in instead of being a problem. `problem` is the first problem, or None. If there is one, every other
    result except `boundary` raises InvalidPlanError, and so does `boundary` if an event names an unknown tensor or
    operator. The constructor raises InvalidPlanError for an order that the trace does not permit.
    """

    def __init__(self, trace: Trace, plan: Plan, initial_state: Boundary | None = None, passive: bool = False) -> None:
        self.captured_trace = trace
        self.trace = trace = as_executed(trace, plan)
        self.plan = plan
        self.initial_state = initial_state
        self.passive = passive
        fault = find_fault(trace, plan)
        layout = fault or lay_out(trace, plan)
        self._fault = layout if isinstance(layout, FaultyEvent) else None
        if isinstance(layout, Layout):
            self._layout = layout
            self._items = build_items(trace, plan, layout)
            self._off_device, self._copied = boundary_flags(trace, self._items)
            self._states = track(trace, self._items, ~self._off_device, self._initial(), passive)
        self.problem = self._first_problem()

    # ---- states between iterations ----

    @cached_property
    def boundary(self) -> Boundary:
        """The state in which an iteration of the plan starts and ends."""
        if self._fault is not None:
            self.check()
        persistent = self.trace.persistent
        return Boundary(_set(persistent & ~self._off_device), _set(persistent & self._copied))

    def check(self) -> None:
        """Raise InvalidPlanError if there is a problem."""
        if self.problem is not None:
            operator, _, tensor, event, message = self.problem
            captured = operator if operator < 0 else int(self.trace.captured_operator[operator])
            detail = None if event < 0 else f"event {event}: {self.plan.events[event]}"
            hint = "The plan does not fit the trace: make it again."
            raise InvalidPlanError(message, hint, detail, captured, tensor, event)

    def _initial(self) -> tuple[Bools, Bools]:
        """Return two bool[m]: the tensors on the device, and those with a current host copy, at the start."""
        persistent = self.trace.persistent
        if self.initial_state is None:
            return persistent & ~self._off_device, persistent & self._copied
        device, host = (np.zeros(self.trace.tensor_count, np.bool_) for _ in range(2))
        for flags, tensors in zip((device, host), self.initial_state, strict=True):
            named = np.fromiter(tensors, np.int64, len(tensors))
            if np.any((named < 0) | (named >= len(flags))) or not persistent[named].all():
                raise InvalidPlanError("an initial state names a tensor that is not a persistent one of the trace")
            flags[named] = True
        return device, host

    # ---- problems ----

    def _first_problem(self) -> Problem | None:
        if self._fault is not None:
            return describe_fault(self.trace, self.plan, self._fault, -1)
        wrongs: list[tuple[int, Problem | int]] = []  # by key: a fault, or an item
        for faulty in self._layout.faults:
            step = int(self._layout.event_step[faulty.event])
            wrongs.append((step * SLOTS + Slot.RECOMPUTING, describe_fault(self.trace, self.plan, faulty, step)))
        wrong = np.flatnonzero(find_wrong(self._items, self._states, self.passive))
        if wrong.size:
            item = int(wrong[np.argmin(self._items.key[wrong])])
            wrongs.append((int(self._items.key[item]), item))
        if wrongs:
            first = min(wrongs, key=lambda wrong: wrong[0])[1]
            return first if isinstance(first, Problem) else self._describe(first)
        uncopied = np.flatnonzero(self._uncopied())
        if uncopied.size:
            return describe_uncopied(self.trace, self.plan, self._unworded(int(uncopied[0])))
        lost = np.flatnonzero(self._lost())
        if lost.size:
            return describe_loss(
                self.trace, int(self._items.tensor[lost[0]]), self._item_operator(int(lost[0])),
                bool(self._states.current_after[lost[0]]), len(self._layout.operator) - 1,
            )  # fmt: skip
        return None

    def _lost(self) -> Bools:
        """Return bool[k]: last items of persistent tensors that end off the device, but are required there or have no
        current host copy."""
        items, states = self._items, self._states
        end = states.last & self.trace.persistent[items.tensor]
        back = ~self._off_device[items.tensor] & (not self.passive)
        return end & (states.after == Location.ABSENT) & (back | ~states.current_after)

    def _uncopied(self) -> Bools:
        """Return bool[k]: swap-outs with a codec that copy nothing; none if an initial state was given."""
        if self.initial_state is not None or self.passive:
            return np.zeros(len(self._items.kind), np.bool_)
        coded = np.append(self.plan.rows["codec"] > 0, False)  # the last one for items without event (-1)
        return (self._items.kind == Item.OUT) & self._states.current_before & coded[self._items.event]

    def _unworded(self, item: int) -> Problem:
        """Return the location of an item as a problem whose message is still empty."""
        items = self._items
        return Problem(
            self._item_operator(item), int(items.step[item]), int(items.tensor[item]), int(items.event[item]), ""
        )

    def _describe(self, item: int) -> Problem:
        items = self._items
        start = int(np.searchsorted(items.tensor, items.tensor[item]))
        changed = np.flatnonzero(items.kind[start:item] == Item.WRITE)
        cause = Cause(
            int(items.kind[item - 1]),
            self._item_operator(item - 1),
            int(items.event[item - 1]),
            self._item_operator(start + int(changed[-1])) if changed.size else -1,
        )
        state, outdated = int(self._states.before[item]), bool(items.outdated[item])
        problem = self._unworded(item)
        return describe_item(self.trace, self.plan, problem, int(items.kind[item]), state, outdated, cause)

    def _item_operator(self, item: int) -> int:
        """Return the operator of an item: that of its step, or its event's trigger in a gap; -1 for START."""
        step, event = int(self._items.step[item]), int(self._items.event[item])
        if step < 0:
            return -1
        if event >= 0 and self._items.key[item] % SLOTS >= Slot.FREEING:
            return int(self.plan.rows["trigger"][event])
        return int(self._layout.operator[step])

    # ---- steps and memory ----

    @property
    def steps(self) -> Int32s:
        """int32[s]: the operator executed in each step."""
        self.check()
        return self._layout.operator

    @property
    def operators(self) -> Int32s:
        """int32[s]: the operator executed in each step, by its captured index."""
        return self.trace.captured_operator[self.steps]

    @property
    def step_event(self) -> Int32s:
        """int32[s]: the recompute event of each step; -1 for an operator's own step."""
        self.check()
        return self._layout.event

    @property
    def operator_step(self) -> Int64s:
        """int64[n]: the step of each operator's own execution."""
        self.check()
        return self._layout.operator_step

    @cached_property
    def scratch_bytes(self) -> Int64s:
        """int64[s]: bytes that a recompute step allocates besides its tensor: discarded outputs, scratch statistics."""
        self.check()
        recomputed = self._layout.recompute_steps
        scratch = np.zeros(len(self._layout.operator), np.int64)
        if recomputed.step.size:
            scratch[recomputed.step] = scratch_bytes(self.trace)[recomputed.writer]
        return scratch

    @cached_property
    def _intervals(self) -> tuple[Int64s, Int64s, Int64s]:
        self.check()
        items, states = self._items, self._states
        begins = (items.kind == Item.CREATE) | (items.kind == Item.RECOMPUTE) | (items.kind == Item.IN) | states.passive
        begins |= (items.kind == Item.START) & ((states.after != Location.ABSENT) | states.released)
        on_device = (states.before == Location.RESIDENT) | (states.before == Location.OUT)
        freed = ((items.kind == Item.RELEASE) | (items.kind == Item.OUT_END)) & on_device
        kept = states.last & (states.after == Location.RESIDENT)
        ends = freed | states.released | kept
        first = np.maximum(items.step[begins], 0) + (items.kind[begins] == Item.IN)
        last = np.where(kept[ends], len(self._layout.operator) - 1, np.maximum(items.step[ends], 0))
        return items.tensor[begins], first, last

    @property
    def interval_tensor(self) -> Int64s:
        """int64[i]: the tensor of each residency interval, which spans samples interval_first … interval_last."""
        return self._intervals[0]

    @property
    def interval_first(self) -> Int64s:
        """int64[i]: the first step whose sample includes the tensor."""
        return self._intervals[1]

    @property
    def interval_last(self) -> Int64s:
        """int64[i]: the last step whose sample includes the tensor."""
        return self._intervals[2]

    @cached_property
    def footprint(self) -> Int64s:
        """int64[s]: bytes on the device after each step, transfers in flight included (TENSILE, Algorithm 1)."""
        tensor, first, last = self._intervals
        change = np.zeros(len(self._layout.operator) + 1, np.int64)
        np.add.at(change, first, self.trace.tensor_bytes[tensor])
        np.subtract.at(change, last + 1, self.trace.tensor_bytes[tensor])
        return np.cumsum(change[:-1]) + self.scratch_bytes

    # ---- transfers and actions ----

    @cached_property
    def _copies_out(self) -> Bools:
        """bool[k]: swap-outs of a tensor without a current host copy, which have to copy."""
        return (self._items.kind == Item.OUT) & ~self._states.current_before

    @cached_property
    def copies(self) -> Copies:
        """The swap events that move bytes."""
        self.check()
        chosen = np.flatnonzero(self._copies_out | (self._items.kind == Item.IN))
        chosen = chosen[np.argsort(self._items.event[chosen], kind="stable")]
        tensor = self._items.tensor[chosen]
        return Copies(self._items.event[chosen].astype(np.int64), tensor, self.trace.tensor_bytes[tensor])

    @property
    def host_copies(self) -> HostCopies:
        """The copies on the host, as arcs of the cycle of steps; valid if the boundary state is the initial state."""
        self.check()
        items, states = self._items, self._states
        copying = self._copies_out
        setters = copying | (items.kind == Item.START) | (items.kind == Item.CREATE) | (items.kind == Item.WRITE)
        begins = np.flatnonzero(setters)
        used = np.where((items.kind == Item.IN_END) | states.passive, items.step, 0)
        used += np.where((items.kind == Item.OUT_END) & same_event(items, copying), items.step + 1, 0)
        last = np.maximum.reduceat(used, begins)
        tensor = items.tensor[begins]
        ends = np.append(np.diff(tensor) != 0, True)  # host copies that are current at the end
        first_of = np.append(0, np.flatnonzero(ends)[:-1] + 1)  # the START item of each tensor
        kept = ends & self.trace.persistent[tensor]
        last[kept] = last[first_of[tensor[kept]]]
        held = copying[begins] | (kept & (items.kind[begins] == Item.START) & self._copied[tensor])
        first = np.maximum(items.step[begins], 0)
        return HostCopies(
            tensor[held],
            first[held],
            np.where(items.kind[begins] == Item.START, 0, last % len(self._layout.operator))[held],
        )

    def actions(self) -> list[Action]:
        """Return all actions in execution order."""
        return self.action_columns().rows()

    def action_columns(self) -> ActionColumns:
        """Return all actions in execution order, as columns."""
        self.check()
        items, states = self._items, self._states
        returning = states.last & (states.after == Location.ABSENT) & self.trace.persistent[items.tensor]
        returning &= ~self._off_device[items.tensor] & states.current_after
        return build_actions(len(self._layout.operator), items, states, self._copies_out, returning)

    @cached_property
    def transfers(self) -> Transfers:
        """The copies of the iteration, each with the actions that request it and wait for it."""
        return self.action_columns().transfers()


def boundary(trace: Trace, plan: Plan) -> Boundary:
    """Return the state in which an iteration of `plan` starts and ends.

    Raises InvalidPlanError if an event names an unknown tensor or operator.
    """
    return AccessSequence(trace, plan).boundary


def _set(flags: Bools) -> frozenset[int]:
    return frozenset(np.flatnonzero(flags).tolist())
