"""Conversion of a solution of the program to a plan."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.optimum.choices import Choices
from benchmarks.optimum.program import Decisions
from pg_tensile.planning.plan.plan import Event, EventKind, Plan


def realise(choices: Choices, decisions: Decisions, early: bool) -> Plan:
    """Return the plan that does what the decisions say.

    With `early`, swap-outs start as soon as a tensor is resident and swap-ins as soon as it becomes so; otherwise
    transfers start when the solution copies their first byte. The plan may still need more memory between the
    recomputations of a gap, or more time, than the program accounts for; or be invalid.
    """
    events = [event for tensor in choices.tensors for event in _Tensor(choices, decisions, tensor, early).events()]
    return Plan.build(sorted(events, key=lambda event: (event.trigger, *_rank(choices, event))))


def _rank(choices: Choices, event: Event) -> tuple[int, int, int]:
    """Return the rank of an event in its gap.

    Swap-outs and swap-ins are ordered by deadline, recomputations in the order of their tensors' last writers.
    """
    if event.kind is EventKind.RECOMPUTE:
        return 2, choices.making[event.tensor, event.trigger].steps[-1].operator, event.tensor
    return int(event.kind is EventKind.SWAP_IN), event.deadline, event.tensor


class _Tensor:
    """Events of one tensor."""

    def __init__(self, choices: Choices, decisions: Decisions, tensor: int, early: bool) -> None:
        self.tensor = tensor
        self.first, self.last = choices.first[tensor], choices.last[tensor]
        self.there = {i for v, i in decisions.resident if v == tensor}
        self.made = {gap: choices.making[tensor, gap].version for v, gap in decisions.made if v == tensor}
        self.starts = choices.starts[tensor]
        self.persistent = choices.persistent[tensor]
        self.frozen = choices.frozen(tensor)
        read = {gap for v, gap in decisions.made if tensor in choices.making[v, gap].inputs}
        self.needs = sorted({*choices.accesses[tensor], *read})
        self.end = choices.last_operator
        self.out, self.into = (
            () if early else sorted(gap for v, gap in places if v == tensor)
            for places in (decisions.out, decisions.into)
        )
        rises = [g for g in range(self.first, self.last) if g not in self.there and g + 1 in self.there]
        # swap-ins: gap → operator before which they end
        self.comes = {gap: self._arrival(gap) for gap in rises if gap not in self.made}

    def _arrival(self, gap: int) -> int:
        """Return the operator before which a swap-in of a gap has to end."""
        gone = next((i for i in range(gap + 1, self.last + 1) if i not in self.there), self.last + 1)
        return min(next((need for need in self.needs if need > gap), self.end), gone - 1)

    def events(self) -> Iterator[Event]:
        for gap, version in self.made.items():
            yield Event(EventKind.RECOMPUTE, self.tensor, gap, gap + 1, version)
        for gap, arrival in self.comes.items():
            begins = next((begun for begun in self.into if begun >= gap), gap)
            yield Event(EventKind.SWAP_IN, self.tensor, min(begins, arrival - 1), arrival)
        for gap in range(self.first, self.last):
            if gap in self.there and gap + 1 not in self.there and self._back(gap):
                yield self._swap_out(gap)
        if self.persistent and not self.frozen and 0 not in self.there:  # off the device between two iterations
            gone = max(self.there)
            if gone == self.last or not self._back(gone):
                yield self._swap_out(gone)

    def _back(self, gap: int) -> bool:
        """Return whether a version that is freed in a gap is swapped in again."""
        changes = next((start for start in self.starts if start > gap), self.end)
        return any(gap < come < changes for come in self.comes)

    def _swap_out(self, gap: int) -> Event:
        """Return the swap-out that is freed in `gap`.

        It copies at the earliest when the version is written or resident again.
        """
        here = gap
        while here > 0 and here - 1 in self.there and here not in self.starts and here - 1 not in self.made:
            here -= 1
        here = max(here, self.comes.get(here - 1, 0))
        begins = next((begun - 1 for begun in self.out if begun > here), here)
        return Event(EventKind.SWAP_OUT, self.tensor, min(max(begins, here), gap), gap)
