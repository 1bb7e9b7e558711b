"""What planning asks of a trace again and again, as Python lists, which loops read faster than arrays."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.trace.trace import Kind, Mode, Trace


class Use(NamedTuple):
    """One access of an operator."""

    tensor: int
    mode: int
    version: int  # that the access sees


class Columns:
    """A trace of n operators and m tensors. Memory is that of the trace without a plan."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.operators = trace.operator_count
        self.us: list[float] = trace.latency_us.tolist()  # [n]
        self.workspace: list[int] = trace.workspace_bytes.tolist()  # [n]
        self.memory: list[int] = footprint(trace).bytes.tolist()  # [n]: samples, without workspaces
        self.bytes: list[int] = trace.tensor_bytes.tolist()  # [m]
        self.persistent: list[bool] = trace.persistent.tolist()  # [m]
        self.made: list[bool] = (~trace.persistent & (trace.tensor_kind != Kind.INPUT)).tolist()  # [m]
        self.uses: list[list[Use]] = [[] for _ in range(self.operators)]
        self.accesses: list[list[int]] = [[] for _ in range(trace.tensor_count)]  # [m]: operators, ascending
        self.writes: list[list[int]] = [[] for _ in range(trace.tensor_count)]  # [m]: operators that change it in place
        self.makers: list[list[int]] = [
            [] for _ in range(trace.tensor_count)
        ]  # [m]: operators that create or change it
        created = np.zeros(self.operators, np.int64)
        creates = trace.access_mode == Mode.CREATE
        np.add.at(created, trace.access_operator[creates], trace.tensor_bytes[trace.access_tensor[creates]])
        self.created: list[int] = created.tolist()  # [n]: bytes
        self.statistics: set[int] = set()  # tensors with a STATS access
        self._writers: dict[tuple[int, int], tuple[int, ...]] = {}
        self._read(trace)
        self.places = [[2 * operator for operator in accesses] for accesses in self.accesses]  # [m]: needs.py

    def _read(self, trace: Trace) -> None:
        rows = zip(
            trace.access_operator.tolist(),
            trace.access_tensor.tolist(),
            trace.access_mode.tolist(),
            trace.access_version.tolist(),
            strict=True,
        )
        read, stats, write, create = Mode.READ.value, Mode.STATS.value, Mode.WRITE.value, Mode.CREATE.value
        for operator, tensor, mode, version in rows:
            self.uses[operator].append(Use(tensor, mode, version))
            self.accesses[tensor].append(operator)
            if mode == read:
                continue
            self.makers[tensor].append(operator)
            if mode != create:
                self.writes[tensor].append(operator)
            if mode == stats:
                self.statistics.add(tensor)
        changed = np.bincount(trace.access_operator[trace.access_mode == write], minlength=self.operators)
        self._changed: list[int] = changed.tolist()

    def version_before(self, tensor: int, operator: int) -> int:
        """Its version when `operator` begins."""
        writes = self.writes[tensor]
        return bisect_left(writes, operator) if writes else 0

    def writers(self, tensor: int, version: int) -> tuple[int, ...]:
        """The operators that make this version, in order; none if they cannot be executed again: the tensor is an
        input, persistent or a running statistic, or one of them changes another tensor."""
        key = (tensor, version)
        if key not in self._writers:
            self._writers[key] = self._find_writers(tensor, version)
        return self._writers[key]

    def writers_us(self, tensor: int, version: int) -> float:
        """What they take; infinity if there are none."""
        writers = self.writers(tensor, version)
        return sum([self.us[writer] for writer in writers]) if writers else math.inf

    def _find_writers(self, tensor: int, version: int) -> tuple[int, ...]:
        if not self.made[tensor] or tensor in self.statistics:
            return ()
        writers = tuple(self.makers[tensor][: version + 1])
        repeatable = all(self._changed[writer] <= (number > 0) for number, writer in enumerate(writers))
        return writers if repeatable else ()
