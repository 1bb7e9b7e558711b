"""Residency: the items that affect each tensor while (trace, plan) is executed, and its state before and after each.

Each tensor has a sequence of items (it is created, read, written, swapped, …), sorted by position among the steps. As
long as there is no problem, the state after an item follows from the item, from whether a swap of the tensor is in
flight, and from the kind of the next item (a tensor that is not needed before it is recomputed or swapped in is freed).
So all states are computed at once, by sorting and by sums over segments, without a loop over operators; and the first
item that its state does not permit is the first problem. This is a part of access_sequence.py, which defines
the meaning.

A tensor that operator 1 creates and operator 7 reads, swapped out with trigger 2 and deadline 4, and swapped in with
trigger 5 and deadline 7. Its swaps begin and end in the gaps between the steps:

    step       1        2        3        4            5       6         7
    item       CREATE      OUT               OUT_END      IN      IN_END READ
    location   RESIDENT    OUT ............. ABSENT       IN .... RESIDENT
    counts     yes      yes      yes      yes          no      yes       yes
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.planning.plan.plan import EventKind, Plan
from pg_tensile.planning.plan.steps import Layout, version_after
from pg_tensile.planning.trace.trace import Bools, Int8s, Int32s, Int64s, Mode, Trace


class Item:
    """Kind of an item, that is of one thing that happens to a tensor.

    Plain numbers, as those of `Location` and `Slot`: numpy compares an array with a member of an IntEnum in five times
    the time.
    """

    START = 0  # the iteration begins
    CREATE = 1
    READ = 2
    WRITE = 3
    OUT = 4  # a swap-out begins
    OUT_END = 5  # the deadline of a swap-out
    RELEASE = 6
    IN = 7  # a swap-in begins
    IN_END = 8  # the deadline of a swap-in
    RECOMPUTE = 9  # the first writer of a recompute event
    KEEP = 10  # the last writer of a recompute event that has several


class Location:
    """Location of a tensor, with the swap that is in flight."""

    ABSENT = 0
    RESIDENT = 1
    OUT = 2  # resident, a swap-out in flight
    IN = 3  # a swap-in in flight
    PENDING = 4  # absent, within a swap-out that has nothing to copy (passive only)


class Slot:
    """Position within a step and the gap after it, in order of execution, for items and actions.

        step k                         gap after step k                                                     step k + 1
        ------------------------------|--------------------------------------------------------------------|-----------
        BRINGING    WAITING  RUNNING   LETTING_GO  DUE       FREEING  AT_ONCE   ALLOCATING  RECOMPUTING    BRINGING ...
        PASSIVE_IN  WAIT_IN  RUN       FREE        WAIT_OUT  FREE     COPY_OUT  COPY_IN     (no action)
                                                   FREE               WAIT_OUT

    Below the slots are the kinds of actions in them. ENDING follows the gap of the last step.
    """

    BRINGING = 0  # a tensor that only the host has is swapped in for the step (passive only)
    WAITING = 1  # the deadline of a swap-in
    RUNNING = 2  # the operator, or a part of a recomputation
    LETTING_GO = 3  # a tensor that is not needed any more is released implicitly
    DUE = 4  # the deadline of a swap-out, unless it is the swap-out's own trigger
    FREEING = 5  # a release; the trigger of a swap-out
    AT_ONCE = 6  # a swap-out copies; it also ends if its deadline is its trigger
    ALLOCATING = 7  # the trigger of a swap-in
    RECOMPUTING = 8  # a recompute event; the steps that it adds follow this gap
    ENDING = 9  # a persistent tensor that only the host has is swapped in (passive only)


SLOTS = 16  # for each step


class Items(NamedTuple):
    """All k items, sorted by tensor and key; those of every tensor begin with START."""

    tensor: Int64s  # [k]
    key: Int64s  # [k]: step * SLOTS + slot; -1 for START
    kind: Int8s  # [k]
    event: Int32s  # [k]: -1 for an operator's own access
    outdated: Bools  # [k]: a recomputation needs another version than the present one

    @property
    def step(self) -> Int64s:
        return self.key // SLOTS


ITEM_OF_MODE = np.array([Item.READ, Item.WRITE, Item.WRITE, Item.CREATE], np.uint8)
LOCATION_AFTER = np.full(Item.KEEP + 1, Location.RESIDENT, np.uint8)  # by item
LOCATION_AFTER[[Item.START, Item.OUT_END, Item.RELEASE]] = Location.ABSENT
LOCATION_AFTER[[Item.OUT, Item.IN]] = Location.OUT, Location.IN


class States(NamedTuple):
    """The state before and after each of k items, provided that there is no earlier problem."""

    before: Int8s  # [k]: Location
    after: Int8s  # [k]: Location
    current_before: Bools  # [k]: whether the host copy is current
    current_after: Bools  # [k]
    passive: Bools  # [k]: swapped in passively for this item
    released: Bools  # [k]: released implicitly after this item
    last: Bools  # [k]: the tensor's last item


def build_items(trace: Trace, plan: Plan, layout: Layout) -> Items:
    """Return the items of every tensor: START, its accesses, those of its events, and the reads of recompute steps."""
    rows, recompute = plan.rows, layout.recompute_steps
    tensor = rows["tensor"].astype(np.int64)
    gap, due = layout.event_step * SLOTS, layout.operator_step[rows["deadline"]] * SLOTS
    swap_out, swap_in, release = (
        np.flatnonzero(rows["kind"] == kind.value)
        for kind in (EventKind.SWAP_OUT, EventKind.SWAP_IN, EventKind.RELEASE)
    )
    at_once = rows["deadline"][swap_out] == rows["trigger"][swap_out]
    out_end = np.where(at_once, gap[swap_out] + Slot.AT_ONCE, due[swap_out] + Slot.DUE)
    freeing = np.sort(np.concatenate((swap_out, release)))  # in plan order, which the stable sort below keeps
    first, last = np.flatnonzero(recompute.first), np.flatnonzero(recompute.last & ~recompute.first)
    # The readers of statistics copy them.
    reads = np.flatnonzero((recompute.access_mode == Mode.READ.value) | (recompute.access_mode == Mode.STATS.value))
    reader, running = recompute.access_row[reads], recompute.step * SLOTS + Slot.RUNNING
    access = trace.access_by_tensor
    parts: tuple[tuple[NDArray[Any], NDArray[Any], int | NDArray[Any], NDArray[Any] | None], ...] = (
        (np.arange(trace.tensor_count), np.full(trace.tensor_count, -1), Item.START, None),
        (trace.access_tensor[access], layout.operator_step[trace.access_operator[access]] * SLOTS + Slot.RUNNING,
         ITEM_OF_MODE[trace.access_mode[access]], None),
        (tensor[freeing], gap[freeing] + Slot.FREEING,
         np.where(rows["kind"][freeing] == EventKind.RELEASE.value, Item.RELEASE, Item.OUT), freeing),
        (tensor[swap_out], out_end, Item.OUT_END, swap_out),
        (tensor[swap_in], gap[swap_in] + Slot.ALLOCATING, Item.IN, swap_in),
        (tensor[swap_in], due[swap_in] + Slot.WAITING, Item.IN_END, swap_in),
        (tensor[recompute.event[first]], running[first], Item.RECOMPUTE, recompute.event[first]),
        (tensor[recompute.event[last]], running[last], Item.KEEP, recompute.event[last]),
        (recompute.access_tensor[reads], running[reader], Item.READ, recompute.event[reader]),
    )  # fmt: skip
    tensors = np.concatenate([part[0] for part in parts]).astype(np.int64)
    keys = np.concatenate([part[1] for part in parts])
    kinds = np.concatenate([np.broadcast_to(part[2], len(part[0])).astype(np.uint8) for part in parts])
    events = np.concatenate([np.full(len(part[0]), -1) if part[3] is None else part[3] for part in parts])
    order = np.argsort(tensors * ((len(layout.operator) + 1) * SLOTS) + keys, kind="stable")
    outdated = np.zeros(len(tensors), np.bool_)
    if reads.size:
        trigger = rows["trigger"][recompute.event[reader]].astype(np.int64)
        now = version_after(trace, recompute.access_tensor[reads].astype(np.int64), trigger)
        outdated[-len(reads) :] = now != recompute.access_version[reads]
        outdated[-len(reads) :] &= recompute.access_mode[reads] == Mode.READ.value
    return Items(tensors[order], keys[order], kinds[order], events[order].astype(np.int32), outdated[order])


def same_event(items: Items, chosen: Bools) -> Bools:
    """Return bool[k]: the items of the events that the chosen items (bool[k]) belong to."""
    events = np.zeros(int(items.event.max(initial=-1)) + 2, np.bool_)  # the last one for items without event (-1)
    events[items.event[chosen]] = True
    return events[items.event]


def boundary_flags(trace: Trace, items: Items) -> tuple[Bools, Bools]:
    """Return two bool[m], meaningful for persistent tensors: off the device, and with a current host copy, at the
    boundary.

    A tensor is off the device if its first item is a swap-in. Its host copy is current if a copy out follows its last
    write, or if it is never written and has any swap.
    """
    begins = np.flatnonzero(items.kind == Item.START)  # one per tensor
    off_device = np.append(items.kind, Item.START)[begins + 1] == Item.IN
    swapped = np.zeros(trace.tensor_count, np.bool_)
    swapped[items.tensor[(items.kind == Item.OUT) | (items.kind == Item.IN)]] = True
    setters = (items.kind == Item.OUT) | (items.kind == Item.WRITE) | (items.kind == Item.START)
    latest = np.maximum.accumulate(np.where(setters, np.arange(len(setters)), 0))
    ends = np.append(begins[1:], len(items.kind)) - 1
    copied = np.where(trace.tensor_writes > 0, items.kind[latest[ends]] == Item.OUT, swapped)
    return off_device, copied


def track(trace: Trace, items: Items, wanted: Bools, initial: tuple[Bools, Bools], passive: bool) -> States:
    """Return the states of all items, provided that none is a problem.

    `wanted` is bool[m], the persistent tensors that must be on the device at the end. `initial` is two bool[m]: the
    tensors on the device, and those with a current host copy, at the start. With `passive`, an access swaps in a tensor
    that is only on the host.
    """
    kind, tensor = items.kind, items.tensor
    device, host = initial
    starts = kind == Item.START
    last = np.append(starts[1:], True)
    recreates = np.append((kind == Item.CREATE) | (kind == Item.IN) | (kind == Item.RECOMPUTE), False)[1:]
    needed = np.where(last, (wanted & trace.persistent)[tensor], ~recreates)  # by the next item or at the end

    out = np.cumsum((kind == Item.OUT).astype(np.int64) - (kind == Item.OUT_END)) > 0
    after = LOCATION_AFTER[kind]
    after[starts & device[tensor]] = Location.RESIDENT
    after[(after == Location.RESIDENT) & out] = Location.OUT
    released = (after == Location.RESIDENT) & ~needed
    after[released] = Location.ABSENT
    before = np.concatenate(([np.uint8(Location.ABSENT)], after[:-1]))

    setters = starts | (kind == Item.CREATE) | (kind == Item.WRITE) | (kind == Item.OUT)
    value = (kind == Item.OUT) | (starts & host[tensor])
    current_after = value[np.maximum.accumulate(np.where(setters, np.arange(len(kind)), 0))]
    current_before = np.concatenate(([False], current_after[:-1]))

    brought = np.zeros(len(kind), np.bool_)
    if passive:
        missing = (before == Location.ABSENT) & current_before
        pending = np.flatnonzero(missing & (kind == Item.OUT))  # nothing to copy, and nothing to free yet
        after[pending] = Location.PENDING
        before[pending + 1] = Location.PENDING
        access = (kind == Item.READ) | (kind == Item.WRITE)
        brought = access & (missing | (before == Location.PENDING))
    return States(before, after, current_before, current_after, brought, released, last)


def find_wrong(items: Items, states: States, passive: bool) -> Bools:
    """Return bool[k]: the items that their state does not permit."""
    kind, before = items.kind, states.before
    absent, coming = before == Location.ABSENT, before == Location.IN
    leaving = (before == Location.OUT) | (before == Location.PENDING)
    access = (kind == Item.READ) | (kind == Item.WRITE)
    frees = (kind == Item.OUT) | (kind == Item.RELEASE)
    nothing_to_free = absent & ~(states.current_before & passive)
    return (
        (access & (absent & ~states.passive | coming))
        | ((kind == Item.WRITE) & leaving)
        | (frees & (coming | leaving | nothing_to_free))
        | ((kind == Item.IN) & ~(absent & states.current_before))
        | ((kind == Item.RECOMPUTE) & ~absent)
        | items.outdated
    )
