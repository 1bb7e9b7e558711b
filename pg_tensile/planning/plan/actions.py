"""Actions of (trace, plan), in the order in which a runtime executes them, and the transfers that they add up to.

This is a part of access_sequence.py, which defines the meaning: each action follows from an item and the state before
or after it (residency.py), and stands in a slot of the item's step.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.plan.residency import SLOTS, Item, Items, Location, Slot, States, same_event
from pg_tensile.planning.trace.trace import Bools, Int64s


class ActionKind(IntEnum):
    """Kind of an action, in the order of execution within a step and its gap."""

    PASSIVE_IN = 0
    WAIT_IN = 1
    RUN = 2
    FREE = 3
    WAIT_OUT = 4  # waits for the copy, then frees the tensor
    COPY_OUT = 5
    COPY_IN = 6


class Action(NamedTuple):
    """One thing that a runtime does at a point of an iteration."""

    kind: ActionKind
    step: int
    tensor: int  # -1 for RUN
    event: int  # index into plan.rows; -1 for none


# Kinds that request a copy, and that wait for one; a passive swap-in does both.
REQUESTING = (ActionKind.PASSIVE_IN, ActionKind.COPY_OUT, ActionKind.COPY_IN)
WAITING = (ActionKind.PASSIVE_IN, ActionKind.WAIT_OUT, ActionKind.WAIT_IN)
REQUESTS, WAITS = (np.array([kind in kinds for kind in ActionKind]) for kinds in (REQUESTING, WAITING))


class Meetings(NamedTuple):
    """The points at which the compute requests a transfer or waits for one, in execution order."""

    executed: Int64s  # [2t]: number of steps executed before
    transfer: Int64s  # [2t]
    waits: Bools  # [2t]: else it requests the transfer


class Transfers(NamedTuple):
    """The t copies of an iteration, passive ones included, in the order of their requests."""

    event: Int64s  # [t]: index into plan.rows; -1 for a passive swap-in
    tensor: Int64s  # [t]
    inward: Bools  # [t]: from the host to the device
    request: Int64s  # [t]: index of the action that requests it
    wait: Int64s  # [t]: index of the action that waits for it; the same for a passive swap-in
    wait_step: Int64s  # [t]: step of that action
    executed_before_request: Int64s  # [t]: number of steps
    executed_before_wait: Int64s  # [t]: number of steps

    @property
    def meetings(self) -> Meetings:
        """The requests and the waits of all transfers."""
        order = np.argsort(np.concatenate((self.request, self.wait)), kind="stable")
        executed = np.concatenate((self.executed_before_request, self.executed_before_wait))
        return Meetings(executed[order], order % max(len(self.tensor), 1), order >= len(self.tensor))


class ActionColumns(NamedTuple):
    """All actions of an iteration, in execution order."""

    kind: Int64s
    step: Int64s
    tensor: Int64s
    event: Int64s

    def rows(self) -> list[Action]:
        kinds = tuple(ActionKind)
        rows = zip(*(column.tolist() for column in self), strict=True)
        return [Action(kinds[kind], step, tensor, event) for kind, step, tensor, event in rows]

    def transfers(self) -> Transfers:
        """Return the transfers, each with the actions that request it and wait for it.

        The requests and the waits for one tensor alternate, so the k-th request belongs to the k-th wait.
        """
        request, waits = np.flatnonzero(REQUESTS[self.kind]), np.flatnonzero(WAITS[self.kind])
        wait = np.empty_like(waits)
        wait[np.argsort(self.tensor[request], kind="stable")] = waits[np.argsort(self.tensor[waits], kind="stable")]
        executed = np.cumsum(self.kind == ActionKind.RUN.value)
        return Transfers(
            event=self.event[request],
            tensor=self.tensor[request],
            inward=self.kind[request] != ActionKind.COPY_OUT.value,
            request=request,
            wait=wait,
            wait_step=self.step[wait],
            executed_before_request=executed[request],
            executed_before_wait=executed[wait],
        )


def build_actions(steps: int, items: Items, states: States, copies_out: Bools, returning: Bools) -> ActionColumns:
    """Return the actions of an iteration of `steps` steps.

    `copies_out` is bool[k], the swap-outs that copy; `returning` is bool[k], the last items of the tensors that are
    swapped in passively when the iteration ends.
    """

    def of_items(kind: ActionKind, slot: int, chosen: Bools, of_event: bool = True) -> tuple[Int64s, ...]:
        """Return one action for each chosen item: kind, step, slot, tensor, event."""
        index = np.flatnonzero(chosen)
        step = np.maximum(items.step[index], 0) if slot != Slot.ENDING else np.full(len(index), steps - 1)
        event = items.event[index].astype(np.int64) if of_event else np.full(len(index), -1)
        return np.full(len(index), kind.value), step, np.full(len(index), slot), items.tensor[index], event

    ends = (items.kind == Item.OUT_END) & (states.before == Location.OUT)
    waits = ends & same_event(items, copies_out)
    due = items.key % SLOTS == Slot.DUE
    released = (items.kind == Item.RELEASE) & (states.before == Location.RESIDENT)
    nothing = np.full(steps, -1)
    columns = (
        (np.full(steps, ActionKind.RUN.value), np.arange(steps), np.full(steps, Slot.RUNNING), nothing, nothing),
        of_items(ActionKind.PASSIVE_IN, Slot.BRINGING, states.passive, of_event=False),
        of_items(ActionKind.PASSIVE_IN, Slot.ENDING, returning, of_event=False),
        of_items(ActionKind.WAIT_IN, Slot.WAITING, items.kind == Item.IN_END),
        of_items(ActionKind.COPY_OUT, Slot.AT_ONCE, copies_out),
        of_items(ActionKind.COPY_IN, Slot.ALLOCATING, items.kind == Item.IN),
        of_items(ActionKind.FREE, Slot.LETTING_GO, states.released, of_event=False),
        of_items(ActionKind.WAIT_OUT, Slot.DUE, waits & due),
        of_items(ActionKind.FREE, Slot.DUE, ends & ~waits & due),
        of_items(ActionKind.FREE, Slot.FREEING, released | (ends & ~waits & ~due)),
        of_items(ActionKind.WAIT_OUT, Slot.AT_ONCE, waits & ~due),
    )
    kind, step, slot, tensor, event = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    order = np.lexsort((tensor, event, step * SLOTS + slot))  # stable: a copy out stays before its wait
    return ActionColumns(kind[order], step[order], tensor[order], event[order])
