"""A trace by columns: its arrays, those derived from them, and the labels of operators and tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pg_tensile.planning.allocator_rules import DEFAULT_RULES, AllocatorRules
from pg_tensile.planning.compression.coding import Coding
from pg_tensile.planning.trace.rows import Kind, Mode

Int8s = NDArray[np.uint8]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Strings:
    """A dictionary-encoded column of strings: a code for each row, numbered in the order of first appearance."""

    codes: Int32s
    values: tuple[str, ...]

    @classmethod
    def build(cls, strings: Iterable[str]) -> Strings:
        numbers: dict[str, int] = {}
        codes = [numbers.setdefault(string, len(numbers)) for string in strings]
        return cls(np.array(codes, np.int32), tuple(numbers))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __getitem__(self, row: int) -> str:
        return self.values[self.codes[row]]

    def take(self, rows: Int64s) -> Strings:
        """Return the column of the selected rows."""
        used, first, code = np.unique(self.codes[rows], return_index=True, return_inverse=True)
        appearance = np.argsort(first)
        number = np.empty(len(used), np.int32)
        number[appearance] = np.arange(len(used))
        return Strings(number[code], tuple(self.values[value] for value in used[appearance].tolist()))


@dataclass(frozen=True, eq=False)
class TraceColumns:
    """The columns of a trace.

    n is the number of operators, A of accesses, m of tensors, D of the dimensions of all shapes.
    """

    device: str  # the device of the capture, one of DEVICE_TYPES
    access_start: Int64s  # [n + 1]: the accesses of operator i are access_start[i] … access_start[i + 1] - 1
    access_tensor: Int32s  # [A]
    access_mode: Int8s  # [A]
    target: Strings  # [n], like the next three
    signature: Strings
    module: Strings
    source: Strings
    phase: Int8s  # [n], like all up to workspace_bytes
    random: Bools
    flops: Int64s
    operator_bytes: Int64s
    latency_us: Floats
    workspace_bytes: Int64s
    tensor_bytes: Int64s  # [m]
    tensor_kind: Int8s  # [m]
    tensor_name: Strings  # [m]
    tensor_dtype: Strings  # [m]
    shape_start: Int64s  # [m + 1]
    shape_sizes: Int64s  # [D]
    # [n]: index of each operator in the captured trace (order.py); the default None is replaced by arange(n)
    captured_operator: Int32s = None  # type: ignore[assignment]
    # Effect of compressing its swaps; None means that no swap is compressed. Not part of fingerprint and bytes
    coding: Coding | None = None
    allocator: AllocatorRules = DEFAULT_RULES  # of the process that executes it. Not part of the fingerprint

    @property
    def operator_count(self) -> int:
        return len(self.phase)

    @property
    def tensor_count(self) -> int:
        return len(self.tensor_bytes)

    def operator_label(self, operator: int) -> str:
        """Return the operator's label in messages, by captured index: "operator 41 (aten.mul.Tensor)"."""
        return f"operator {self.captured_operator[operator]} ({self.target[operator]})"

    def tensor_label(self, tensor: int) -> str:
        """Return the tensor's label in messages: "tensor 17 (features.conv1.weight)"."""
        name = self.tensor_name[tensor]
        return f"tensor {tensor} ({name})" if name else f"tensor {tensor}"

    # ---- columns derived from the others ----

    @cached_property
    def access_operator(self) -> Int32s:
        """int32[A]: the operator of each access."""
        return frozen(np.repeat(np.arange(self.operator_count, dtype=np.int32), np.diff(self.access_start)))

    @cached_property
    def access_by_tensor(self) -> Int64s:
        """int64[A]: indices of all accesses, sorted by tensor, those of one tensor in execution order."""
        return frozen(np.argsort(self.access_tensor, kind="stable"))

    @cached_property
    def tensor_start(self) -> Int64s:
        """int64[m + 1]: the accesses of tensor t are access_by_tensor[tensor_start[t] : tensor_start[t + 1]]."""
        return frozen(starts(np.bincount(self.access_tensor, minlength=self.tensor_count)))

    @cached_property
    def access_version(self) -> Int32s:
        """int32[A]: the version that each access sees; for WRITE and STATS the one before the change, 0 for CREATE."""
        order, start = self.access_by_tensor, self.tensor_start
        changes = np.isin(self.access_mode[order], (Mode.WRITE, Mode.STATS))
        before = starts(changes)  # changes of all tensors up to here
        version = np.empty(len(order), np.int32)
        version[order] = before[:-1] - np.repeat(before[start[:-1]], np.diff(start))
        return frozen(version)

    @cached_property
    def tensor_writes(self) -> Int32s:
        """int32[m]: the number of changes of each tensor after its creation, which is its last version."""
        changes = np.isin(self.access_mode, (Mode.WRITE, Mode.STATS))
        return frozen(np.bincount(self.access_tensor[changes], minlength=self.tensor_count).astype(np.int32))

    @cached_property
    def tensor_first(self) -> Int32s:
        """int32[m]: the first operator that accesses each tensor; n for a tensor without accesses."""
        return self._edge(self.tensor_start[:-1])

    @cached_property
    def tensor_last(self) -> Int32s:
        """int32[m]: the last operator that accesses each tensor; n for a tensor without accesses."""
        return self._edge(self.tensor_start[1:] - 1)

    def _edge(self, indices: Int64s) -> Int32s:
        operators = np.append(self.access_operator[self.access_by_tensor], np.int32(self.operator_count))
        used = np.diff(self.tensor_start) > 0
        return frozen(operators[np.where(used, indices, len(operators) - 1)])

    @cached_property
    def accessed_bytes(self) -> Int64s:
        """int64[n]: bytes of the tensors that each operator accesses."""
        return frozen(np.diff(starts(self.tensor_bytes[self.access_tensor])[self.access_start]))

    @cached_property
    def working_set_bytes(self) -> Int64s:
        """int64[n]: bytes that each operator needs on the device: the tensors that it accesses and its workspace."""
        return frozen(self.accessed_bytes + self.workspace_bytes)

    @property
    def largest_operator(self) -> int:
        """The operator with the largest working set."""
        return int(np.argmax(self.working_set_bytes))

    @cached_property
    def persistent(self) -> Bools:
        """bool[m]: the tensors that exist before and after the iteration."""
        return frozen(self.tensor_kind <= Kind.CONSTANT)

    @cached_property
    def footprint(self) -> Int64s:
        """int64[n]: bytes of the tensors that exist while each operator is executed without a plan."""
        first = np.where(self.persistent, 0, self.tensor_first)
        last = np.where(self.persistent, self.operator_count - 1, self.tensor_last)
        change = np.zeros(self.operator_count + 1, np.int64)
        np.add.at(change, first, self.tensor_bytes)
        np.subtract.at(change, last + 1, self.tensor_bytes)
        return frozen(np.cumsum(change[:-1]))

    @cached_property
    def writer_operator(self) -> Int32s:
        """int32[W]: the operators that create or change a tensor, sorted by tensor, then in execution order."""
        order = self.access_by_tensor
        return frozen(self.access_operator[order][self.access_mode[order] != Mode.READ])

    @cached_property
    def writer_start(self) -> Int64s:
        """int64[m + 1]: the writers of tensor t are writer_operator[writer_start[t] : writer_start[t + 1]]."""
        writing = self.access_tensor[self.access_mode != Mode.READ]
        return frozen(starts(np.bincount(writing, minlength=self.tensor_count)))


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array after making it read-only."""
    array.flags.writeable = False
    return array


def starts(counts: ArrayLike) -> Int64s:
    """Return the start of each of consecutive groups, followed by the end of the last one."""
    counts = np.asarray(counts, np.int64)
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts
