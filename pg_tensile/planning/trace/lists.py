"""A trace as Python lists, for planning loops: they read elements of lists faster than elements of arrays."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.trace.recomputations import Recomputations
from pg_tensile.planning.trace.trace import Kind, Mode, Trace


class Use(NamedTuple):
    """One access of an operator to a tensor."""

    tensor: int
    mode: int
    version: int  # the one that the access sees


class Columns:
    """The columns of a trace of n operators and m tensors as lists.

    `memory` is the footprint without a plan; `made` marks tensors created by an operator other than the placeholder;
    `recomputations` are those of all tensors but running statistics.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.operators = trace.operator_count
        self.us: list[float] = trace.latency_us.tolist()  # [n]
        self.workspace: list[int] = trace.workspace_bytes.tolist()  # [n]
        self.memory: list[int] = trace.footprint.tolist()  # [n]: without workspaces
        self.bytes: list[int] = trace.tensor_bytes.tolist()  # [m]
        self.persistent: list[bool] = trace.persistent.tolist()  # [m]
        self.made: list[bool] = (~trace.persistent & (trace.tensor_kind != Kind.INPUT)).tolist()  # [m]
        self.uses: list[list[Use]] = [[] for _ in range(self.operators)]  # [n]
        self.accesses: list[list[int]] = [[] for _ in range(trace.tensor_count)]  # [m]: operators, ascending
        self.writes: list[list[int]] = [[] for _ in range(trace.tensor_count)]  # [m]: operators that change it
        self.makers: list[list[int]] = [
            [] for _ in range(trace.tensor_count)
        ]  # [m]: operators that create or change it
        created = np.zeros(self.operators, np.int64)
        creates = trace.access_mode == Mode.CREATE
        np.add.at(created, trace.access_operator[creates], trace.tensor_bytes[trace.access_tensor[creates]])
        self.created: list[int] = created.tolist()  # [n]: bytes that each operator creates
        self.statistics: set[int] = set()  # tensors with a STATS access
        self._read(trace)
        self.recomputations = Recomputations(trace, self.statistics)
        self.positions = [[2 * operator for operator in accesses] for accesses in self.accesses]  # [m]: see idle.py

    def _read(self, trace: Trace) -> None:
        rows = zip(
            trace.access_operator.tolist(),
            trace.access_tensor.tolist(),
            trace.access_mode.tolist(),
            trace.access_version.tolist(),
            strict=True,
        )
        read, stats, create = Mode.READ.value, Mode.STATS.value, Mode.CREATE.value
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

    @cached_property
    def leaving(self) -> list[list[int]]:
        """[n]: tensors that an operator uses and the next one does not, but a later one, or one of the next iteration.

        So an interval in which they may be off the device begins there."""
        leaving: list[list[int]] = [[] for _ in range(self.operators)]
        for tensor, accesses in enumerate(self.accesses):
            for sooner, later in pairwise(accesses):
                if later > sooner + 1:
                    leaving[sooner].append(tensor)
            if accesses and self.persistent[tensor]:
                leaving[accesses[-1]].append(tensor)
        return leaving

    @cached_property
    def changed(self) -> list[list[int]]:
        """[n]: tensors that an operator changes in place."""
        changed: list[list[int]] = [[] for _ in range(self.operators)]
        for tensor, writes in enumerate(self.writes):
            for operator in writes:
                changed[operator].append(tensor)
        return changed

    def version_before(self, tensor: int, operator: int) -> int:
        """Return the version that the tensor has when `operator` begins."""
        writes = self.writes[tensor]
        return bisect_left(writes, operator) if writes else 0
