"""Programs: one iteration under a plan as a flat tuple of instructions, with all lookups done beforehand.

A tensor has an index in the trace, and a key: its number among all tensors of an executor, whose graphs share the
persistent ones. Instructions refer to keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pg_tensile.errors import OutOfDeviceMemoryError
from pg_tensile.execution.runtime.functions import Function
from pg_tensile.planning.memory_flow.groups import Group
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.actions import ActionKind
from pg_tensile.planning.plan.codecs import staging_bytes
from pg_tensile.planning.plan.following import swapped_persistents
from pg_tensile.planning.plan.memory import Arena
from pg_tensile.planning.trace.trace import Int64s

# Codes besides the kinds of actions
ALLOCATE = len(ActionKind)  # device memory for a COPY_IN that follows later
BEGIN_GROUP = ALLOCATE + 1  # asks for the memory of the steps that follow; `tensor` is the group's number


class Work(NamedTuple):
    """The operator call that a RUN executes."""

    function: Function
    operator: int  # index in the captured trace
    created: Mapping[int, int]  # key → bytes of the tensors resident from here on
    bytes: int  # of these and of `scratch`
    scratch: int  # bytes that are discarded after the footprint is sampled


class Instruction(NamedTuple):
    """One action of the program.

    `keeps` is set if the tensor freed here is swapped in again later: its emptied storage object and its values are
    kept then, and dropped otherwise. `event` is the index into the plan, −1 if none."""

    code: int  # an ActionKind, ALLOCATE or BEGIN_GROUP
    step: int
    tensor: int = -1  # key
    work: Work | None = None
    keeps: bool = False
    event: int = -1
    delay_us: int = 0
    codec: int = 0  # of a COPY_OUT


class Program:
    """One iteration of S steps under a plan, from the state that it was compiled for.

    `first_change` is the first step that changes a persistent tensor, S if none does; `arena` the layout of the host
    copies that have no home (host_memory.py); `keys` the key of each tensor of the trace; `groups` those of a plan
    whose memory flows, before which the program asks for it (memory_flow.py). All that iterations look up is computed
    by the constructor; only the sequence's footprint, for the check of the budget, is computed once it is used."""

    def __init__(
        self,
        sequence: AccessSequence,
        instructions: tuple[Instruction, ...],
        arena: Arena,
        first_change: int,
        keys: Sequence[int],
        groups: Sequence[Group] = (),
    ) -> None:
        trace, plan = sequence.trace, sequence.plan
        self.sequence = sequence
        self.instructions = instructions
        self.arena = arena
        self.first_change = first_change
        self.groups = tuple(groups)
        # keys of the persistent tensors that between two iterations are on the device, have a current host copy, or
        # are off the device
        self.device = frozenset(keys[tensor] for tensor in sequence.boundary.device)
        self.host = frozenset(keys[tensor] for tensor in sequence.boundary.host)
        self.away = frozenset(keys[tensor] for tensor in np.flatnonzero(trace.persistent).tolist()) - self.device
        self.homes = {keys[tensor]: int(trace.tensor_bytes[tensor]) for tensor in swapped_persistents(trace, plan)}
        self.offsets = {  # in the arena of each host copy, by key and the step after which the copy begins
            (keys[tensor], copy.first): copy.offset for tensor, row in arena.offsets.items() for copy in row
        }
        self.recomputes = int(np.count_nonzero(sequence.step_event >= 0))  # steps that belong to recompute events
        self.staging_bytes = staging_bytes(trace, plan)  # device memory for the staging of compressed copies
        self.tensor_bytes = dict(zip(keys, trace.tensor_bytes.tolist(), strict=True))  # by key

    def operator_label(self, step: int) -> str:
        return self.sequence.trace.operator_label(int(self.sequence.steps[step]))

    def work(self, step: int) -> Work:
        works = (instruction.work for instruction in self.instructions if instruction.step == step)
        return next(work for work in works if work is not None)

    def check_budget(self, budget_bytes: int, workspace_bytes: Int64s) -> None:
        """Raise OutOfDeviceMemoryError for the first step above the budget, or above the most that its group may take.

        `workspace_bytes`: int64[operators]."""
        needed = self._device_bytes(workspace_bytes)
        limits = np.minimum(budget_bytes, self._most_bytes())
        over = np.flatnonzero(needed > limits)
        if over.size:
            step = int(over[0])
            requested = self.work(step).bytes + int(workspace_bytes[self.sequence.operators[step]])
            raise OutOfDeviceMemoryError(
                self.operator_label(step), requested, int(needed[step]) - requested, int(limits[step])
            )

    def _most_bytes(self) -> Int64s:
        """Return int64[s]: the most that each step's group may take, or more than any device has."""
        most = np.full(len(self.sequence.steps), np.iinfo(np.int64).max)
        for group in self.groups:
            most[group.first : group.last + 1] = group.most_bytes
        return most

    def device_peak_bytes(self, workspace_bytes: Int64s) -> int:
        return int(np.max(self._device_bytes(workspace_bytes)))

    def _device_bytes(self, workspace_bytes: Int64s) -> Int64s:
        """Return the device memory of each step."""
        return self.sequence.footprint + workspace_bytes[self.sequence.operators] + self.staging_bytes
