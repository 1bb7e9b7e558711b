"""Recomputation of tensors: the versions for which it is possible, its operators, their inputs, time and memory.

A version of a tensor is recomputed by its writers: the operator that creates it and those that change it up to that
version, executed in order. Persistent tensors and inputs have no creator in the iteration. A writer that also changes
another tensor in place must not be executed twice. Its other outputs are discarded, and running statistics that it
updates are copied first, so that only a copy changes. Inputs have to be resident, with the versions that the writers
read (docs/library.md, "Plan").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import chain
from typing import NamedTuple

import numpy as np

from pg_tensile.planning.trace.columns import frozen
from pg_tensile.planning.trace.trace import Bools, Int8s, Int64s, Kind, Mode, Trace, per_trace


@per_trace
def recomputable_versions(trace: Trace) -> Int64s:
    """Return int64[m]: the number of versions of each tensor, from version 0 on, that its writers can recompute."""
    changes = np.bincount(trace.access_operator[trace.access_mode == Mode.WRITE.value], minlength=trace.operator_count)
    tensor, mode = _writer_accesses(trace)
    refused = changes[trace.writer_operator] > (mode == Mode.WRITE.value)
    refusals = np.cumsum(refused)  # of all tensors, up to and including each writer
    before = refusals - refused
    possible = refusals == before[trace.writer_start[tensor]]
    possible &= ~trace.persistent[tensor] & (trace.tensor_kind[tensor] != Kind.INPUT.value)
    return frozen(np.bincount(tensor[possible], minlength=trace.tensor_count))


@per_trace
def scratch_bytes(trace: Trace) -> Int64s:
    """Return int64[W]: bytes that each writer allocates besides its tensor when it recomputes it, without workspace.

    These are the outputs that are discarded and the copies of running statistics.
    """
    allocating = _allocates(trace.access_mode)
    allocated = np.zeros(trace.operator_count, np.int64)
    np.add.at(allocated, trace.access_operator[allocating], trace.tensor_bytes[trace.access_tensor[allocating]])
    tensor, mode = _writer_accesses(trace)
    return frozen(allocated[trace.writer_operator] - np.where(_allocates(mode), trace.tensor_bytes[tensor], 0))


def _allocates(mode: Int8s) -> Bools:
    return (mode == Mode.CREATE.value) | (mode == Mode.STATS.value)


def _writer_accesses(trace: Trace) -> tuple[Int64s, Int8s]:
    """Return the tensor and the mode of each writer's access, as [W] like `trace.writer_operator`."""
    tensor, mode = trace.access_tensor[trace.access_by_tensor], trace.access_mode[trace.access_by_tensor]
    writes = mode != Mode.READ.value
    return tensor[writes].astype(np.int64), mode[writes]


class Input(NamedTuple):
    """A tensor that a recomputed operator reads, or updates a copy of."""

    tensor: int
    version: int  # that the operator has read
    is_statistic: bool


class Step(NamedTuple):
    """One operator of a recomputation."""

    operator: int
    inputs: tuple[Input, ...]
    scratch_bytes: int  # besides the tensor and the inputs: discarded outputs, copies of statistics, workspace


class Recomputation(NamedTuple):
    """The operators that recompute one version of a tensor, in order."""

    tensor: int
    version: int
    steps: tuple[Step, ...]
    us: float  # latency of all operators
    inputs: tuple[Input, ...]  # of all operators

    @property
    def scratch_bytes(self) -> int:
        """The most bytes that one of the operators takes besides the tensor and the inputs."""
        return max(step.scratch_bytes for step in self.steps)

    def inputs_unchanged(self, version_of: Callable[[int], int]) -> bool:
        """Return whether the inputs still have the versions that the operators have read.

        `version_of`: returns the version of a tensor where the recomputation is to take place. Statistics may have
        another one, because their values have no effect on the tensor.
        """
        for tensor, version, is_statistic in self.inputs:
            if not is_statistic and version_of(tensor) != version:
                return False
        return True


class Recomputations:
    """The recomputations of a trace's tensors; results are cached."""

    def __init__(self, trace: Trace, excluded: Collection[int] = ()) -> None:
        """Find out what can be recomputed. `excluded`: tensors that are not to be."""
        versions = recomputable_versions(trace).copy()
        versions[list(excluded)] = 0
        writer_bytes = scratch_bytes(trace) + trace.workspace_bytes[trace.writer_operator]
        self._versions: list[int] = versions.tolist()
        self._writers: list[int] = trace.writer_operator.tolist()
        self._first_writer: list[int] = trace.writer_start.tolist()
        self._scratch_bytes: list[int] = writer_bytes.tolist()
        self._us: list[float] = trace.latency_us.tolist()
        self._first_access: list[int] = trace.access_start.tolist()
        columns = (trace.access_tensor, trace.access_version, trace.access_mode)
        self._accesses = list(zip(*(column.tolist() for column in columns), strict=True))
        self._cache: dict[tuple[int, int], Recomputation | None] = {}

    def of(self, tensor: int, version: int) -> Recomputation | None:
        """Return the recomputation of a tensor's version, or None if it is impossible wherever it takes place."""
        key = (tensor, version)
        if key not in self._cache:
            self._cache[key] = self._of(tensor, version) if 0 <= version < self._versions[tensor] else None
        return self._cache[key]

    def us(self, tensor: int, version: int) -> float:
        """Return the latency of a recomputation in µs; infinity if it is impossible."""
        recomputation = self.of(tensor, version)
        return math.inf if recomputation is None else recomputation.us

    def _of(self, tensor: int, version: int) -> Recomputation:
        first = self._first_writer[tensor]
        steps = []
        for writer in range(first, first + version + 1):
            operator = self._writers[writer]
            accesses = self._accesses[self._first_access[operator] : self._first_access[operator + 1]]
            inputs = (
                Input(source, seen, mode == Mode.STATS)
                for source, seen, mode in accesses
                if mode <= Mode.STATS and source != tensor
            )
            steps.append(Step(operator, tuple(inputs), self._scratch_bytes[writer]))
        us = sum([self._us[step.operator] for step in steps])
        return Recomputation(tensor, version, tuple(steps), us, tuple(chain(*(step.inputs for step in steps))))
