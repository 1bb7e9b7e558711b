"""The decisions that a plan may take for each tensor and operator, as the mixed-integer program models them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pg_tensile.planning.device.link import swap_us
from pg_tensile.planning.device.profile import DeviceProfile, Direction
from pg_tensile.planning.trace.recomputations import Recomputations
from pg_tensile.planning.trace.trace import Mode, Trace


class GapStep(NamedTuple):
    """One operator of a recomputation. Tensors without bytes are left out."""

    operator: int
    held: frozenset[int]  # tensors of its working set that may be resident before: its own, its inputs, statistics
    bytes: int  # of the whole step: these, scratch and workspace


class GapRecomputation(NamedTuple):
    """A recomputation of a tensor in the gap after some operator."""

    version: int
    us: float
    inputs: frozenset[int]
    steps: tuple[GapStep, ...]


class Choices:
    """The possible decisions for the n operators and the tensors with bytes, in ascending order.

    `first[v]` … `last[v]`: the samples in which v may be resident and of use. `making[v, g]`: the recomputation of v in
    gap g. `starts[v]`: the operators that write v (−1: it exists at the start); a version lasts from one to the next.
    `accesses[v]`: the operators that access v.
    """

    def __init__(self, trace: Trace, profile: DeviceProfile) -> None:
        self.trace = trace
        self.profile = profile
        self._swap_us = [swap_us(trace, direction, profile) for direction in Direction]
        self.last_operator = trace.operator_count - 1
        self.operators = [dict(operator.accesses) for operator in trace.operators]
        self.bytes: list[int] = trace.tensor_bytes.tolist()
        self.tensors = [tensor for tensor, size in enumerate(self.bytes) if size > 0]
        self.persistent: list[bool] = trace.persistent.tolist()
        self.versions = self._versions()
        self._recomputations = Recomputations(trace)
        self.accesses = {
            v: [place for place, accesses in enumerate(self.operators) if v in accesses] for v in self.tensors
        }
        self.starts = {v: [-1] if self.persistent[v] else [] for v in self.tensors}
        for place, accesses in enumerate(self.operators):
            for tensor, mode in accesses.items():
                if mode is not Mode.READ and tensor in self.starts:
                    self.starts[tensor].append(place)
        possible = {
            (v, g): made for v in self.tensors for g in range(self.last_operator) if (made := self._recomputation(v, g))
        }
        until = self._useful_gaps(possible)
        self.making = {key: made for key, made in possible.items() if key[1] <= until[key[0]]}
        self.tensors = [v for v in self.tensors if self.starts[v]]  # others never exist
        self.first = {v: max(0, self.starts[v][0]) for v in self.tensors}
        self.last = {
            v: self.last_operator if self.persistent[v] else max(self.accesses[v][-1], until[v]) for v in self.tensors
        }

    def transfer_us(self, tensor: int, direction: Direction) -> float:
        return self._swap_us[direction][tensor]

    def frozen(self, tensor: int) -> bool:
        """Return whether a tensor is persistent and never written, so that its host copy stays current."""
        return self.persistent[tensor] and len(self.starts[tensor]) == 1

    def _versions(self) -> np.ndarray:
        """Return int64[n, m]: the version of each tensor after each operator; −1 if it does not exist yet."""
        version = np.where(self.trace.persistent, 0, -1)
        rows = []
        for accesses in self.operators:
            version = version.copy()
            for tensor, mode in accesses.items():
                version[tensor] += mode is not Mode.READ
            rows.append(version)
        return np.array(rows)

    def _recomputation(self, tensor: int, gap: int) -> GapRecomputation | None:
        """Return the recomputation of a tensor in a gap, or None if it is refused (docs/library.md, "Plan")."""
        version = self.versions[gap].tolist()
        recomputation = self._recomputations.of(tensor, version[tensor])
        if recomputation is None or not recomputation.inputs_unchanged(version.__getitem__):
            return None
        steps = []
        for step in recomputation.steps:
            sources = frozenset(source.tensor for source in step.inputs if self.bytes[source.tensor])
            held = sources | {tensor}
            steps.append(GapStep(step.operator, held, step.scratch_bytes + sum(self.bytes[v] for v in held)))
        inputs = frozenset(v for step in steps for v in step.held) - {tensor}
        return GapRecomputation(recomputation.version, recomputation.us, inputs, tuple(steps))

    def _useful_gaps(self, possible: dict[tuple[int, int], GapRecomputation]) -> dict[int, int]:
        """Return the last gap in which each tensor may be of use: before its last access, or for a recomputation."""
        until = {v: max(self.accesses[v], default=0) - 1 for v in self.tensors}
        users: dict[int, list[tuple[int, int]]] = {v: [] for v in self.tensors}
        for (v, gap), made in possible.items():
            for other in made.inputs:
                users[other].append((gap, v))
        changed = True
        while changed:
            changed = False
            for v in self.tensors:
                latest = max((gap for gap, user in users[v] if gap <= until[user]), default=-1)
                if latest > until[v]:
                    until[v], changed = latest, True
        return until
