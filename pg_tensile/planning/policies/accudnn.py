"""AccUDNN (Guo et al.): all feature maps are swapped except those that would make the backward pass wait.

This is the memory optimizer of AccUDNN, section 3, on its own; batchsize/ chooses the batch size. A feature map is
swapped out after its last read in forward and swapped in as early as memory allows. Constraint (6) identifies those
that cannot be back in time: they are pinned, as many as fit. Where they do not all fit, or where copies out take longer
than forward, the job waits; the paper would take a smaller batch. The method plans a single job, so each job gets its
share of the budget.

`Layerwise` is Algorithm 1 (sections 3.3 and 3.4) on our traces, with an operator for each layer of the paper. Feature
maps that are not pinned come back in the order in which backward reads them. One stream allocates operators' outputs,
their workspaces and feature maps that come back, in their order and as early as memory allows. Constraint (6) demands
that nothing stalls: all data of an operator is ready when the preceding operator has ended. Beyond the paper, a feature
map comes back after it has left, which means after its copy, and copies out wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.building_blocks.idle import IdleInterval, idle_intervals
from pg_tensile.planning.building_blocks.shares import check_shares, shares
from pg_tensile.planning.building_blocks.swaps import swaps
from pg_tensile.planning.building_blocks.transfer_times import schedule
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.trace.lists import Columns
from pg_tensile.planning.trace.trace import Floats, Int64s, Kind, Phase, Trace

TOLERANCE_US = 1e-6


def plan(traces: Mapping[int, Trace], profile: DeviceProfile, budget_bytes: int | None) -> dict[int, Plan]:
    """Return a plan for each job within its part of the budget, as given by `shares`.

    `budget_bytes`: None means the device's memory. Raises BudgetError with the smallest budget with which every job's
    part is enough when all its feature maps are swapped.
    """
    jobs = {job: Layerwise(roofline.timed(trace, profile), profile) for job, trace in traces.items()}
    check_shares(traces, {job: layers.least_memory for job, layers in jobs.items()}, profile, budget_bytes)
    granted = shares(traces, profile, budget_bytes)
    return {job: _plan(layers, granted[job]) for job, layers in jobs.items()}


def _plan(layers: Layerwise, budget_bytes: int) -> Plan:
    pinning = layers.pinning(budget_bytes)
    assert pinning is not None  # `plan` has checked that the least bytes fit
    swapped = [idle for idle in layers.maps if idle.tensor not in pinning.pinned]
    sequence = AccessSequence(layers.trace, layers.plan_of(swapped))
    return schedule(sequence, layers.profile, budget_bytes)


class Ready(NamedTuple):
    """When each operator may start, and whether it stalls; µs since the iteration began.

    `ready_us` [n]: when operator i may start, infinity if never. `start_us` [n]: when the preceding operator has ended
    if nothing stalls. `stalled`: operators that violate constraint (6).
    """

    ready_us: Floats
    start_us: Floats
    stalled: tuple[int, ...]


class Pinning(NamedTuple):
    """Feature maps that stay on the device (`pinned`, tensors), and the times with them (`ready`)."""

    pinned: frozenset[int]
    ready: Ready


class Layerwise:
    """The paper's scheme for one trace with latencies."""

    def __init__(self, trace: Trace, profile: DeviceProfile) -> None:
        self.trace = trace
        self.profile = profile
        self.maps = feature_maps(trace)
        columns = Columns(trace)
        self._bytes, self._created, self._dead = columns.bytes, columns.created, _dead_bytes(trace)
        self._ends_us: list[float] = np.cumsum(trace.latency_us).tolist()

    @cached_property
    def least_memory(self) -> Int64s:
        """Least memory during each operator: int64[n], bytes, workspaces included.

        All feature maps are off the device as long as they can be. The maximum is the least that the scheme needs,
        M_peak.
        """
        memory: Int64s = footprint(self.trace, self.plan_of(self.maps)).bytes + self.trace.workspace_bytes
        return memory

    @property
    def least_bytes(self) -> int:
        return int(self.least_memory.max())

    def plan_of(self, maps: Collection[IdleInterval]) -> Plan:
        """Return a plan that swaps each map out right after its last access in forward, and in right before backward's
        first."""
        return swaps(self.trace, np.array(maps, np.int64).reshape(-1, 3))

    def ready(self, budget_bytes: int, pinned: Collection[int] = ()) -> Ready:
        """Return t_ready of every operator (Algorithm 1). `budget_bytes` is for everything on the device."""
        going, coming = self._transfers(pinned)
        created, dead = self._created, self._dead
        workspace: list[int] = self.trace.workspace_bytes.tolist()
        used = int(self.trace.tensor_bytes[self.trace.persistent].sum())
        gone_us: dict[int, float] = {}  # feature map → end of its copy out
        frees: list[tuple[float, int]] = []  # (µs, bytes) freed so far; not in the order of time
        out_us = now = 0.0
        ready: list[float] = []
        for operator, end_us in enumerate(self._ends_us):
            needed = (
                created[operator]
                + workspace[operator]
                + sum(self._bytes[tensor] for tensor in coming.get(operator, ()))
            )
            if used + needed > budget_bytes:
                frees.sort()
                count = 0
                while count < len(frees) and (frees[count][0] <= now or used + needed > budget_bytes):
                    now = max(now, frees[count][0])
                    used -= frees[count][1]
                    count += 1
                del frees[:count]
                if used + needed > budget_bytes:
                    return self._judged([*ready, *[np.inf] * (len(self._ends_us) - operator)])
            for tensor in coming.get(operator, ()):
                now = max(now, gone_us[tensor]) + self.profile.transfer_us(self._bytes[tensor], Direction.IN)
            used += needed
            ready.append(now)
            frees.append((end_us, dead[operator] + workspace[operator]))
            for tensor in going.get(operator, ()):
                out_us = max(out_us, end_us) + self.profile.transfer_us(self._bytes[tensor], Direction.OUT)
                gone_us[tensor] = out_us
                frees.append((out_us, self._bytes[tensor]))
        return self._judged(ready)

    def _judged(self, ready: Sequence[float]) -> Ready:
        ready_us, start_us = np.array(ready), np.array([0.0, *self._ends_us[:-1]])
        late = ready_us > start_us * (1 + 1e-12) + TOLERANCE_US
        late[0] = False  # no operator before it could hide its allocation
        return Ready(ready_us, start_us, tuple(np.flatnonzero(late).tolist()))

    def pinning(self, budget_bytes: int) -> Pinning | None:
        """Return the outcome of the step of Algorithm 2 for one batch size.

        It pins feature maps that stalled operators wait for, as long as there is room and anything stalls. Each round
        pins the first quarter of them, because those behind may stall for the same reason. None if an iteration does
        not fit even with all feature maps swapped.
        """
        if self.least_bytes > budget_bytes:
            return None
        memory = self.least_memory.copy()
        pinned: set[int] = set()
        while True:
            ready = self.ready(budget_bytes, pinned)
            before, waited = len(pinned), self._waited_for(ready, pinned)
            for tensor, since, until in waited:
                between, size = memory[since // 2 + 1 : until // 2], self._bytes[tensor]
                if between.max() + size <= budget_bytes:
                    between += size
                    pinned.add(tensor)
                    if len(pinned) - before >= len(waited) / 4:
                        break
            if len(pinned) == before:
                return Pinning(frozenset(pinned), ready)

    def _waited_for(self, ready: Ready, pinned: Collection[int]) -> list[IdleInterval]:
        """Return the swapped feature maps that stalled operators read, in the order of backward.

        A stalled operator that reads none waits for memory, which no pinning provides: while the lane is busy, the same
        number of bytes leaves, whatever they belong to.
        """
        stalled = set(ready.stalled)
        waited = (idle for idle in self.maps if idle.next_user in stalled and idle.tensor not in pinned)
        return sorted(waited, key=lambda idle: (idle.until, idle.tensor))

    def _transfers(self, pinned: Collection[int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Return the feature maps (tensors) that leave after each operator, and those that come back for each."""
        going: dict[int, list[int]] = {}
        coming: dict[int, list[int]] = {}
        for idle in self.maps:
            if idle.tensor not in pinned:
                going.setdefault(idle.last_user, []).append(idle.tensor)
                coming.setdefault(idle.next_user, []).append(idle.tensor)
        return going, coming


def feature_maps(trace: Trace) -> list[IdleInterval]:
    """Return the activations that backward reads again with at least one operator in between, by tensor.

    Each is idle from its last use in forward to its first in backward.
    """
    intervals = idle_intervals(trace)
    tensor, since, until = intervals.T[0], intervals.T[1] // 2, intervals.T[2] // 2
    chosen = (trace.tensor_kind[tensor] == Kind.ACTIVATION) & (until > since + 1)
    forward = trace.phase == Phase.FORWARD
    chosen &= forward[since] & ~forward[until % trace.operator_count]
    first = {interval[0]: IdleInterval(*interval) for interval in reversed(intervals[chosen].tolist())}
    return list(reversed(first.values()))


def _dead_bytes(trace: Trace) -> list[int]:
    """Return the bytes that nothing needs after each operator, as [n]."""
    dead = np.zeros(trace.operator_count + 1, np.int64)
    transient = ~trace.persistent
    np.add.at(dead, trace.tensor_last[transient], trace.tensor_bytes[transient])
    return list(map(int, dead[:-1]))
