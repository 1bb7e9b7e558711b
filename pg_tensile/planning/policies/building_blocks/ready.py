"""Times at which the data of each operator is on the device, if feature maps are swapped.

This is Algorithm 1 of AccUDNN (sections 3.3 and 3.4) on our traces, with an operator for each layer of the paper.
Feature maps that are not pinned are swapped out after their last read in forward, and come back in the order in which
backward reads them. One stream allocates operators' outputs, their workspaces and feature maps that come back, in their
order and as early as memory allows. Constraint (6) demands that nothing stalls: all data of an operator is ready when
the preceding operator has ended.

Beyond the paper: a feature map comes back after it has left, which means after its copy, and copies out wait for each
other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies.swap_all import Absences, swaps
from pg_tensile.planning.trace.trace import Floats, Int64s, Kind, Mode, Phase, Trace

TOLERANCE_US = 1e-6


class FeatureMap(NamedTuple):
    """An activation between its last read in forward (`since`) and its first in backward (`until`)."""

    tensor: int
    since: int
    until: int
    bytes: int


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
        self._ends_us: list[float] = np.cumsum(trace.latency_us).tolist()
        self._made, self._dead = _made(trace), _dead(trace)

    @cached_property
    def least_memory(self) -> Int64s:
        """Least memory during each operator: int64[n], bytes, workspaces included.

        All feature maps are off the device as long as they can be. The maximum is the least that the scheme needs,
        M_peak.
        """
        found = footprint(self.trace, self.plan_of(self.maps))
        memory: Int64s = found.bytes + self.trace.workspace_bytes
        return memory

    @property
    def least_bytes(self) -> int:
        return int(self.least_memory.max())

    def plan_of(self, maps: Collection[FeatureMap]) -> Plan:
        """Return a plan that swaps each map out right after its last access in forward, and in right before backward's
        first."""
        columns = np.array([each[:3] for each in maps], np.int64).reshape(-1, 3)
        return swaps(self.trace, Absences(*columns.T))

    def ready(self, budget_bytes: int, pinned: Collection[int] = ()) -> Ready:
        """Return t_ready of every operator (Algorithm 1). `budget_bytes` is for everything on the device."""
        going, coming = self._transfers(pinned)
        made, dead = self._made, self._dead
        workspace: list[int] = self.trace.workspace_bytes.tolist()
        used = int(self.trace.tensor_bytes[self.trace.persistent].sum())
        gone_us: dict[int, float] = {}  # feature map → end of its copy out
        frees: list[tuple[float, int]] = []  # (µs, bytes) freed so far; not in the order of time
        out_us = now = 0.0
        ready: list[float] = []
        for operator, end_us in enumerate(self._ends_us):
            needed = made[operator] + workspace[operator] + sum(each.bytes for each in coming.get(operator, ()))
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
            for each in coming.get(operator, ()):
                now = max(now, gone_us[each.tensor]) + self.profile.transfer_us(each.bytes, Direction.IN)
            used += needed
            ready.append(now)
            frees.append((end_us, dead[operator] + workspace[operator]))
            for each in going.get(operator, ()):
                out_us = max(out_us, end_us) + self.profile.transfer_us(each.bytes, Direction.OUT)
                gone_us[each.tensor] = out_us
                frees.append((out_us, each.bytes))
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
            for each in waited:
                between = memory[each.since + 1 : each.until]
                if between.max() + each.bytes <= budget_bytes:
                    between += each.bytes
                    pinned.add(each.tensor)
                    if len(pinned) - before >= len(waited) / 4:
                        break
            if len(pinned) == before:
                return Pinning(frozenset(pinned), ready)

    def _waited_for(self, ready: Ready, pinned: Collection[int]) -> list[FeatureMap]:
        """Return the swapped feature maps that stalled operators read, in the order of backward.

        A stalled operator that reads none waits for memory, which no pinning provides: while the lane is busy, the same
        number of bytes leaves, whatever they belong to.
        """
        stalled = set(ready.stalled)
        waited = (each for each in self.maps if each.until in stalled and each.tensor not in pinned)
        return sorted(waited, key=lambda each: (each.until, each.tensor))

    def _transfers(self, pinned: Collection[int]) -> tuple[dict[int, list[FeatureMap]], dict[int, list[FeatureMap]]]:
        """Return the feature maps that leave after each operator, and those that come back for each."""
        going: dict[int, list[FeatureMap]] = {}
        coming: dict[int, list[FeatureMap]] = {}
        for each in self.maps:
            if each.tensor not in pinned:
                going.setdefault(each.since, []).append(each)
                coming.setdefault(each.until, []).append(each)
        return going, coming


def feature_maps(trace: Trace) -> list[FeatureMap]:
    """Return the activations that backward reads again with at least one operator in between, by tensor."""
    order = trace.access_by_tensor
    tensor, at = trace.access_tensor[order].astype(np.int64), trace.access_operator[order].astype(np.int64)
    forward = trace.phase[at] == Phase.FORWARD
    pairs = (tensor[:-1] == tensor[1:]) & forward[:-1] & ~forward[1:] & (at[1:] > at[:-1] + 1)
    pairs &= (trace.tensor_kind[tensor[:-1]] == Kind.ACTIVATION) & (trace.tensor_bytes[tensor[:-1]] > 0)
    found: dict[int, FeatureMap] = {}
    for place in np.flatnonzero(pairs).tolist():
        number = int(tensor[place])
        found.setdefault(
            number, FeatureMap(number, int(at[place]), int(at[place + 1]), int(trace.tensor_bytes[number]))
        )
    return list(found.values())


def _made(trace: Trace) -> list[int]:
    """Return the bytes that each operator creates, as [n]."""
    made = np.zeros(trace.operator_count, np.int64)
    creates = trace.access_mode == Mode.CREATE
    np.add.at(made, trace.access_operator[creates], trace.tensor_bytes[trace.access_tensor[creates]])
    return [int(each) for each in made]


def _dead(trace: Trace) -> list[int]:
    """Return the bytes that nothing needs after each operator, as [n]."""
    dead = np.zeros(trace.operator_count + 1, np.int64)
    transient = ~trace.persistent
    np.add.at(dead, trace.tensor_last[transient], trace.tensor_bytes[transient])
    return [int(each) for each in dead[:-1]]
