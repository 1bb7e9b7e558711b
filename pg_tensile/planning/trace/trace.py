"""The trace: one training iteration of a job as operators, tensors and accesses (TENSILE, sections III-A and IV-A).

Forward, backward and optimizer, in execution order; docs/library.md defines the terms. A tensor is one storage. A
trace is immutable and stored in columns, numpy arrays of operators and tensors, so that plans are checked and analysed
without a Python loop over operators; `operators` and `tensors` are its row-wise views. It has a compact binary form
(format.py) for transport and storage, and a fingerprint of its structure. Its parts: rows.py, columns.py, check.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pg_tensile.errors import TraceError
from pg_tensile.planning.allocator_rules import AllocatorRules
from pg_tensile.planning.compression.coding import Coding
from pg_tensile.planning.trace.check import check
from pg_tensile.planning.trace.columns import Bools, Floats, Int8s, Int32s, Int64s, Strings, TraceColumns, starts
from pg_tensile.planning.trace.format import decode, encode
from pg_tensile.planning.trace.rows import Access, Kind, Mode, Operator, Phase, Tensor, View
from pg_tensile.text import duration, size

# The trace, and the types of its rows and columns.
__all__ = (
    "Access", "Bools", "Floats", "Int8s", "Int32s", "Int64s", "Kind", "Mode", "Operator", "Phase", "Strings", "Tensor",
    "Trace", "per_trace",
)  # fmt: skip

Result = TypeVar("Result")
MARKS = {Mode.READ: "", Mode.WRITE: "!", Mode.STATS: "~"}


@dataclass(frozen=True, eq=False)
class Trace(TraceColumns):
    """A training iteration, stored in columns; `build` makes one from rows.

    Every array is read-only. Raises TraceError, which names operator and tensor, if columns contradict each other.
    """

    def __post_init__(self) -> None:
        if self.captured_operator is None:
            object.__setattr__(self, "captured_operator", np.arange(self.operator_count, dtype=np.int32))
        for column in fields(self):
            value = getattr(self, column.name)
            array = value.codes if isinstance(value, Strings) else value
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        check(self)

    @classmethod
    def build(cls, operators: Sequence[Operator], tensors: Sequence[Tensor], device: str = "cpu") -> Trace:
        """Return the trace of `operators`, given in execution order.

        Raises TraceError if operators and tensors contradict each other.
        """
        accesses = [access for operator in operators for access in operator.accesses]
        try:
            return cls(
                device=device,
                access_start=starts([len(operator.accesses) for operator in operators]),
                access_tensor=np.array([access.tensor for access in accesses], np.int32),
                access_mode=np.array([access.mode for access in accesses], np.uint8),
                target=Strings.build(operator.target for operator in operators),
                signature=Strings.build(operator.signature for operator in operators),
                module=Strings.build(operator.module for operator in operators),
                source=Strings.build(operator.source for operator in operators),
                phase=np.array([operator.phase for operator in operators], np.uint8),
                random=np.array([operator.random for operator in operators], np.bool_),
                flops=np.array([operator.flops for operator in operators], np.int64),
                operator_bytes=np.array([operator.bytes for operator in operators], np.int64),
                latency_us=np.array([operator.latency_us for operator in operators], np.float64),
                workspace_bytes=np.array([operator.workspace_bytes for operator in operators], np.int64),
                tensor_bytes=np.array([tensor.bytes for tensor in tensors], np.int64),
                tensor_kind=np.array([tensor.kind for tensor in tensors], np.uint8),
                tensor_name=Strings.build(tensor.name for tensor in tensors),
                tensor_dtype=Strings.build(tensor.dtype for tensor in tensors),
                shape_start=starts([len(tensor.shape) for tensor in tensors]),
                shape_sizes=np.array([size for tensor in tensors for size in tensor.shape], np.int64),
            )
        except (OverflowError, TypeError, ValueError) as error:
            raise TraceError("a number of the trace does not fit into its column", detail=str(error)) from error

    # ---- rows ----

    @property
    def operators(self) -> Sequence[Operator]:
        return View(self.operator, self.operator_count)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return View(self.tensor, self.tensor_count)

    def operator(self, index: int) -> Operator:
        span = slice(*self.access_start[index : index + 2].tolist())
        accesses = zip(self.access_tensor[span].tolist(), map(Mode, self.access_mode[span].tolist()), strict=True)
        return Operator(
            target=self.target[index],
            phase=Phase(self.phase[index]),
            accesses=tuple(Access(tensor, mode) for tensor, mode in accesses),
            random=bool(self.random[index]),
            flops=int(self.flops[index]),
            bytes=int(self.operator_bytes[index]),
            latency_us=float(self.latency_us[index]),
            workspace_bytes=int(self.workspace_bytes[index]),
            signature=self.signature[index],
            module=self.module[index],
            source=self.source[index],
        )

    def tensor(self, index: int) -> Tensor:
        span = slice(*self.shape_start[index : index + 2].tolist())
        return Tensor(
            bytes=int(self.tensor_bytes[index]),
            kind=Kind(self.tensor_kind[index]),
            name=self.tensor_name[index],
            dtype=self.tensor_dtype[index],
            shape=tuple(self.shape_sizes[span].tolist()),
        )

    def writers(self, tensor: int, version: int) -> tuple[int, ...]:
        """Return the operators that produce `version` of a tensor, in execution order.

        These are its creator, unless the tensor is persistent, and the operators that change it up to that version.
        Raises TraceError if the version does not exist.
        """
        if not (0 <= tensor < self.tensor_count and 0 <= version <= self.tensor_writes[tensor]):
            raise TraceError(f"there is no version {version} of tensor {tensor}")
        first = self.writer_start[tensor]
        count = version + (not self.persistent[tensor])
        return tuple(self.writer_operator[first : first + count].tolist())

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that identify the structure: targets, signatures, accesses, phases, kinds and sizes.

        Latencies, workspaces, names, modules and sources are not part of it.
        """
        digest = hashlib.blake2b(digest_size=16)
        for text in (self.target, self.signature):
            digest.update(_numbers(len(value) for value in text.values))
            digest.update("".join(text.values).encode("utf-8", "surrogatepass"))
            digest.update(_numbers(text.codes))
        for column in (self.access_start, self.access_tensor, self.access_mode, self.phase, self.random):
            digest.update(_numbers(column))
        for column in (self.tensor_kind, self.tensor_bytes):
            digest.update(_numbers(column))
        return digest.hexdigest()

    # ---- text ----

    def __repr__(self) -> str:
        return f"<Trace: {self.operator_count} operators, {self.tensor_count} tensors, {self.device}>"

    def __str__(self) -> str:
        """Return a listing: a summary and a line for each operator. `plan_listing` adds the events of a plan."""
        peak = size(int(np.max(self.footprint + self.workspace_bytes)))
        lines = [f"{self.operator_count} operators, {self.tensor_count} tensors, device peak {peak}"]
        lines += map(self.operator_line, range(self.operator_count), self.footprint.tolist())
        return "\n".join(lines)

    def tensor_text(self, tensor: int) -> str:
        """Return a tensor's name, or % and its index if it has none: "fc.weight", "%12"."""
        return self.tensor_name[tensor] or f"%{tensor}"

    def operator_text(self, operator: int) -> str:
        """Return an operator's call: "%7 = aten.relu.default(%6)".

        `!` marks a tensor that is changed in place, `~` running statistics.
        """
        accesses = self.operator(operator).accesses
        created = [self.tensor_text(tensor) for tensor, mode in accesses if mode is Mode.CREATE]
        used = [MARKS[mode] + self.tensor_text(tensor) for tensor, mode in accesses if mode is not Mode.CREATE]
        call = f"{self.target[operator]}({', '.join(used)})"
        return f"{', '.join(created)} = {call}" if created else call

    def operator_line(self, operator: int, device_bytes: int) -> str:
        """Return an operator's line in a listing.

        Its columns are the captured index, the phase, the time, the bytes on the device and the call.
        """
        phase = Phase(self.phase[operator]).name.lower()
        latency = duration(float(self.latency_us[operator]))
        captured, call = self.captured_operator[operator], self.operator_text(operator)
        return f"{captured:>6}  {phase:<9}  {latency:>9}  {size(device_bytes):>9}  {call}"

    # ---- other traces, and bytes ----

    def with_latencies(self, latency_us: ArrayLike, workspace_bytes: ArrayLike | None = None) -> Trace:
        """Return the trace with new latencies (float64[n], µs) and, unless None, workspaces (int64[n], bytes)."""
        workspaces = self.workspace_bytes if workspace_bytes is None else np.array(workspace_bytes, np.int64)
        return replace(self, latency_us=np.array(latency_us, np.float64), workspace_bytes=workspaces)

    def with_coding(self, coding: Coding | None) -> Trace:
        """Return the trace with `coding` for its swaps; None means that no swap is compressed.

        Raises TraceError if the coding does not belong to the trace.
        """
        return replace(self, coding=coding)

    def with_allocator(self, rules: AllocatorRules) -> Trace:
        """Return the trace for a process whose allocator has these rules."""
        return self if rules == self.allocator else replace(self, allocator=rules)

    def to_bytes(self) -> bytes:
        """Return the binary form: magic, format version, CRC-32 and compressed columns.

        Raises TraceError unless the operators are in the captured order.
        """
        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Trace:
        """Return the trace that `to_bytes` encoded. Raises TraceError on any other bytes."""
        return cls(**decode(data))


def _numbers(values: Iterable[int] | NDArray[Any]) -> bytes:
    array = values if isinstance(values, np.ndarray) else np.fromiter(values, np.int64)
    return len(array).to_bytes(8, "little") + array.astype("<i8").tobytes()


def per_trace(function: Callable[[Trace], Result]) -> Callable[[Trace], Result]:
    """Make a function remember its result for each trace object, as long as that lives."""
    known: WeakKeyDictionary[Trace, Result] = WeakKeyDictionary()

    @wraps(function)
    def remembering(trace: Trace) -> Result:
        if trace not in known:
            known[trace] = function(trace)
        return known[trace]

    return remembering
