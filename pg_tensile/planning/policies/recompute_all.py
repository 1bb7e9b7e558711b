"""Recomputing everything that can be: tensors are dropped between their accesses and recomputed before the next one.

For tests and comparisons, not for use: it ignores what a recomputation saves or costs. A recomputation whose inputs are
gone recomputes these first, and so on (TENSILE, section III-C). Chains of chains grow without bound, so some tensors
are kept: those whose chain would be longer than a limit, which is halved until the iteration has at most
`STEPS_PER_OPERATOR` recomputed steps for each operator.

A tensor that is kept needs no event: without recomputation, a tensor is alive until the last step that reads it
(docs/library.md, implicit release). So a recompute event is all it takes to drop a tensor, and its absence keeps one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.building_blocks.idle import IdleInterval, idle_intervals
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.trace.lists import Columns, Use
from pg_tensile.planning.trace.recomputations import Recomputations, recomputable_versions
from pg_tensile.planning.trace.trace import Mode, Trace

STEPS_PER_USE = 32  # recomputed steps that one use of one tensor may take
STEPS_PER_OPERATOR = 20  # recomputed steps in one iteration, for each operator of the trace


def plan(traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None) -> dict[int, Plan]:
    """Return plans with a recompute event before each access of a tensor that the preceding operator does not access.

    The event is in the gap before the access. It is left out where a writer of the tensor cannot be executed again:
    because it changes another tensor in place, or because an input is neither resident nor recomputable with the
    content that it read first.
    """
    return {job: _plan(trace) for job, trace in traces.items()}


class _Columns(NamedTuple):
    """The trace as Python lists, which loops read faster."""

    uses: list[list[Use]]  # [n]: of each operator
    dropped: set[tuple[int, int]]  # (operator, tensor): uses after operators that do not use the tensor
    versions: list[int]  # [m]: versions of tensors with bytes that can be recomputed, from version 0 on
    recomputations: Recomputations


def _plan(trace: Trace) -> Plan:
    columns = _columns(trace)
    most = STEPS_PER_OPERATOR * trace.operator_count
    limit = STEPS_PER_USE
    while sum(_step_bounds(columns, chains := _chains(columns, limit))) > most:
        limit //= 2  # ends at 0, where nothing is recomputed
    return Plan.build(_events(trace, columns, chains))


def _columns(trace: Trace) -> _Columns:
    intervals = [IdleInterval(*interval) for interval in idle_intervals(trace).tolist()]
    dropped = {(idle.next_user, idle.tensor) for idle in intervals if idle.next_user > idle.last_user + 1}
    versions = np.where(trace.tensor_bytes > 0, recomputable_versions(trace), 0)
    return _Columns(Columns(trace).uses, dropped, versions.tolist(), Recomputations(trace))


def _chains(columns: _Columns, limit: int) -> list[list[int]]:
    """Return, as [tensor][version], the most steps that recomputing it takes.

    0 means that it is kept, because it cannot be recomputed or because that would take more than `limit` steps.
    """
    chains = [[0] * count for count in columns.versions]
    steps = [0] * len(chains)  # [m]: those of the latest version, without the limit
    for uses in columns.uses:
        inputs = sum(_steps(chains, use.tensor, use.version) for use in uses if use.mode in (Mode.READ, Mode.WRITE))
        for tensor, mode, version in uses:
            written = 0 if mode == Mode.CREATE else version + 1
            if mode != Mode.READ and written < columns.versions[tensor]:
                own = 0 if mode == Mode.CREATE else chains[tensor][version]
                steps[tensor] += 1 + inputs - own
                chains[tensor][written] = steps[tensor] if steps[tensor] <= limit else 0
    return chains


def _steps(chains: list[list[int]], tensor: int, version: int) -> int:
    """Return the most steps that recomputing the version takes; 0 if the tensor is kept."""
    return chains[tensor][version] if version < len(chains[tensor]) else 0


def _step_bounds(columns: _Columns, chains: list[list[int]]) -> list[int]:
    """Return the most steps that each use of a dropped tensor takes."""
    return [
        _steps(chains, tensor, version)
        for operator, uses in enumerate(columns.uses)
        for tensor, _, version in uses
        if (operator, tensor) in columns.dropped
    ]


def _events(trace: Trace, columns: _Columns, chains: list[list[int]]) -> list[Event]:
    """Return all recompute events; in each gap those for the next operator, inputs first."""
    version = [0] * trace.tensor_count  # [m]: after the operators so far
    events: list[Event] = []
    visited: set[int] = set()  # in this gap: resident anyway, or handled by `recompute` already

    def recompute(tensor: int, user: int) -> None:
        if tensor in visited:
            return
        visited.add(tensor)
        if not _steps(chains, tensor, version[tensor]):
            return
        recomputation = columns.recomputations.of(tensor, version[tensor])
        assert recomputation is not None  # else it would have no steps
        if not recomputation.inputs_unchanged(version.__getitem__):
            return
        for source in recomputation.inputs:
            if not source.is_statistic:  # of which copies are changed
                recompute(source.tensor, user)
        events.append(Event(EventKind.RECOMPUTE, tensor, user - 1, user, version[tensor]))

    for operator, uses in enumerate(columns.uses):
        for use in uses:
            if (operator, use.tensor) in columns.dropped:
                recompute(use.tensor, operator)
        visited = {use.tensor for use in uses}
        for use in uses:
            if use.mode in (Mode.WRITE, Mode.STATS):
                version[use.tensor] += 1
    return events
