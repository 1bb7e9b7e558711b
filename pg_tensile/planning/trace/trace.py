"""The trace: one training iteration of a job as operators, tensors and accesses (TENSILE, sections III-A and IV-A).

Forward, backward and optimizer, in execution order; docs/library.md defines the terms. A tensor is one storage. A
trace is immutable and stored in columns, numpy arrays of operators and tensors, so that plans are checked and analysed
without a Python loop over operators; `operators` and `tensors` are its row-wise views. It has a compact binary form
(format.py) for transport and storage, and a fingerprint of its structure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pg_tensile.errors import TraceError

if TYPE_CHECKING:
    from pg_tensile.planning.compression.coding import Coding

MAX_BYTES = 1 << 60  # total of all tensors, so that no sum of bytes overflows
MAX_COUNT = 1 << 26  # of operators, tensors, accesses and dimensions, each
DEVICES = ("cpu", "cuda")
PLACEHOLDER = "placeholder"
OUTPUT = "output"

Int8s = NDArray[np.uint8]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Mode(IntEnum):
    """Mode of an operator's access to a tensor, in ascending strength; only the strongest one is recorded."""

    READ = 0
    STATS = 1  # updates it, but no other output of the operator depends on its old value: running statistics
    WRITE = 2
    CREATE = 3


class Kind(IntEnum):
    """Purpose of a tensor; those up to CONSTANT are persistent: they exist before and after the iteration."""

    PARAMETER = 0
    OPTIMIZER_STATE = 1
    BUFFER = 2
    CONSTANT = 3
    INPUT = 4
    ACTIVATION = 5
    GRADIENT = 6
    TEMPORARY = 7


class Phase(IntEnum):
    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2


class Access(NamedTuple):
    tensor: int
    mode: Mode


class Operator(NamedTuple):
    """One call of a PyTorch operator, the placeholder or the output; its position in the trace is its index."""

    target: str  # "aten.convolution.default", "placeholder", "output"
    phase: Phase
    accesses: tuple[Access, ...]
    random: bool = False
    flops: int = 0
    bytes: int = 0  # read and written, from the sizes of the operands
    latency_us: float = 0.0  # estimated or measured; 0 if not yet known
    workspace_bytes: int = 0  # the allocator's high-water mark during the call minus the outputs
    signature: str = ""  # operand types and scalar arguments; equal signatures mean equal work
    module: str = ""  # "features.conv1"
    source: str = ""  # "model.py:41"


class Tensor(NamedTuple):
    """One storage."""

    bytes: int
    kind: Kind
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()


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
        return Strings(number[code], tuple(self.values[each] for each in used[appearance].tolist()))


@dataclass(frozen=True, eq=False)
class Trace:
    """A training iteration, stored in columns; `build` makes one from rows.

    n is the number of operators, A of accesses, m of tensors, D of the dimensions of all shapes. Every array is
    read-only. Raises TraceError, which names operator and tensor, if columns contradict each other.
    """

    device: str  # "cpu" or "cuda": the device of the capture
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
    # Compression of its swaps; None means that no swap is compressed. Not part of fingerprint and bytes
    coding: Coding | None = None

    def __post_init__(self) -> None:
        if self.captured_operator is None:
            object.__setattr__(self, "captured_operator", np.arange(self.operator_count, dtype=np.int32))
        for column in fields(self):
            value = getattr(self, column.name)
            array = value.codes if isinstance(value, Strings) else value
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        _check(self)

    @classmethod
    def build(cls, operators: Sequence[Operator], tensors: Sequence[Tensor], device: str = "cpu") -> Trace:
        """Return the trace of `operators`, given in execution order.

        Raises TraceError if operators and tensors contradict each other.
        """
        accesses = [access for operator in operators for access in operator.accesses]
        try:
            return cls(
                device=device,
                access_start=_starts([len(operator.accesses) for operator in operators]),
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
                shape_start=_starts([len(tensor.shape) for tensor in tensors]),
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
        return _frozen(np.repeat(np.arange(self.operator_count, dtype=np.int32), np.diff(self.access_start)))

    @cached_property
    def access_by_tensor(self) -> Int64s:
        """int64[A]: indices of all accesses, sorted by tensor, those of one tensor in execution order."""
        return _frozen(np.argsort(self.access_tensor, kind="stable"))

    @cached_property
    def tensor_start(self) -> Int64s:
        """int64[m + 1]: the accesses of tensor t are access_by_tensor[tensor_start[t] : tensor_start[t + 1]]."""
        return _frozen(_starts(np.bincount(self.access_tensor, minlength=self.tensor_count)))

    @cached_property
    def access_version(self) -> Int32s:
        """int32[A]: the version that each access sees; for WRITE and STATS the one before the change, 0 for CREATE."""
        order, start = self.access_by_tensor, self.tensor_start
        changes = np.isin(self.access_mode[order], (Mode.WRITE, Mode.STATS))
        before = _starts(changes)  # changes of all tensors up to here
        version = np.empty(len(order), np.int32)
        version[order] = before[:-1] - np.repeat(before[start[:-1]], np.diff(start))
        return _frozen(version)

    @cached_property
    def tensor_writes(self) -> Int32s:
        """int32[m]: the number of changes of each tensor after its creation, which is its last version."""
        changes = np.isin(self.access_mode, (Mode.WRITE, Mode.STATS))
        return _frozen(np.bincount(self.access_tensor[changes], minlength=self.tensor_count).astype(np.int32))

    @cached_property
    def tensor_first(self) -> Int32s:
        """int32[m]: the first operator that accesses each tensor; n for a tensor without accesses."""
        return self._edge(self.tensor_start[:-1])

    @cached_property
    def tensor_last(self) -> Int32s:
        """int32[m]: the last operator that accesses each tensor; n for a tensor without accesses."""
        return self._edge(self.tensor_start[1:] - 1)

    def _edge(self, places: Int64s) -> Int32s:
        operators = np.append(self.access_operator[self.access_by_tensor], np.int32(self.operator_count))
        used = np.diff(self.tensor_start) > 0
        return _frozen(operators[np.where(used, places, len(operators) - 1)])

    @cached_property
    def persistent(self) -> Bools:
        """bool[m]: the tensors that exist before and after the iteration."""
        return _frozen(self.tensor_kind <= Kind.CONSTANT)

    @cached_property
    def writer_operator(self) -> Int32s:
        """int32[W]: the operators that create or change a tensor, sorted by tensor, then in execution order."""
        order = self.access_by_tensor
        return _frozen(self.access_operator[order][self.access_mode[order] != Mode.READ])

    @cached_property
    def writer_start(self) -> Int64s:
        """int64[m + 1]: the writers of tensor t are writer_operator[writer_start[t] : writer_start[t + 1]]."""
        writing = self.access_tensor[self.access_mode != Mode.READ]
        return _frozen(_starts(np.bincount(writing, minlength=self.tensor_count)))

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

    def with_latencies(self, latency_us: ArrayLike, workspace_bytes: ArrayLike | None = None) -> Trace:
        """Return the trace with new latencies (float64[n], µs) and, unless None, workspaces (int64[n], bytes)."""
        workspaces = self.workspace_bytes if workspace_bytes is None else np.array(workspace_bytes, np.int64)
        return replace(self, latency_us=np.array(latency_us, np.float64), workspace_bytes=workspaces)

    def with_coding(self, coding: Coding | None) -> Trace:
        """Return the trace with `coding` for its swaps; None means that no swap is compressed.

        Raises TraceError if the coding does not belong to the trace.
        """
        return replace(self, coding=coding)

    def to_bytes(self) -> bytes:
        """Return the binary form: magic, format version, CRC-32 and compressed columns."""
        from pg_tensile.planning.trace.format import encode  # it imports this module

        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Trace:
        """Return the trace that `to_bytes` encoded. Raises TraceError on any other bytes."""
        from pg_tensile.planning.trace.format import decode

        return decode(data)


Row = TypeVar("Row")


class View(Sequence[Row]):
    """A view of a trace's rows; each row is built on access."""

    def __init__(self, row: Callable[[int], Row], count: int) -> None:
        self._row = row
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        rows = range(self._count)[index]
        return [self._row(place) for place in rows] if isinstance(rows, range) else self._row(rows)

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, range(self._count))


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def _starts(counts: ArrayLike) -> Int64s:
    """Return the start of each of consecutive groups, followed by the end of the last one."""
    counts = np.asarray(counts, np.int64)
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _numbers(values: Iterable[int] | NDArray[Any]) -> bytes:
    array = values if isinstance(values, np.ndarray) else np.fromiter(values, np.int64)
    return len(array).to_bytes(8, "little") + array.astype("<i8").tobytes()


# ---- invariants of every trace ----


def _check(trace: Trace) -> None:
    """Raise TraceError for the first violated invariant."""
    _check_shapes(trace)
    _check_numbers(trace)
    _check_ends(trace)
    _check_accesses(trace)
    if trace.coding is not None:
        from pg_tensile.planning.compression.coding import check_coding  # it imports this module

        check_coding(trace.coding, trace.tensor_count)


def _check_shapes(trace: Trace) -> None:
    operators, tensors = trace.operator_count, trace.tensor_count
    for length, names in (
        (
            operators,
            "target signature module source random flops operator_bytes latency_us workspace_bytes captured_operator",
        ),
        (tensors, "tensor_kind tensor_name tensor_dtype"),
    ):
        for name in names.split():
            if getattr(trace, name).shape != (length,):
                raise TraceError(f"column {name} of the trace has the wrong length")
    for start, rows, items in (
        (trace.access_start, operators, trace.access_tensor),
        (trace.shape_start, tensors, trace.shape_sizes),
    ):
        if len(start) != rows + 1 or start[0] != 0 or start[-1] != len(items) or np.any(np.diff(start) < 0):
            raise TraceError("the operators' accesses or the tensors' shapes do not fit together")
    if len(trace.access_mode) != len(trace.access_tensor):
        raise TraceError("the accesses of the trace do not fit together")
    if max(operators, tensors, len(trace.access_tensor), len(trace.shape_sizes)) > MAX_COUNT:
        raise TraceError(f"a trace has at most {MAX_COUNT} operators, tensors and accesses")


def _check_numbers(trace: Trace) -> None:
    if trace.device not in DEVICES:
        raise TraceError(f"a trace is of the device cpu or cuda, not of {trace.device!r}")
    if np.any(trace.phase > max(Phase)) or np.any(trace.tensor_kind > max(Kind)):
        raise TraceError("the trace has an operator of unknown phase or a tensor of unknown kind")
    for name in ("flops", "operator_bytes", "latency_us", "workspace_bytes", "tensor_bytes", "shape_sizes"):
        values = getattr(trace, name)
        wrong = np.flatnonzero(~((values >= 0) & (values <= MAX_BYTES)))
        if wrong.size:
            place = int(wrong[0])
            label = {"tensor_bytes": trace.tensor_label, "shape_sizes": "dimension {}".format}.get(
                name, trace.operator_label
            )
            raise TraceError(f"{label(place)} cannot have {name} = {values[place]}")
    if float(np.sum(trace.tensor_bytes, dtype=np.float64)) > MAX_BYTES:
        raise TraceError("the tensors of the trace have more bytes together than can be counted")


def _check_ends(trace: Trace) -> None:
    last = trace.operator_count - 1
    if last < 1 or trace.target[0] != PLACEHOLDER or trace.target[last] != OUTPUT:
        raise TraceError("a trace begins with the operator placeholder and ends with the operator output")
    if trace.tensor_count == 0:
        raise TraceError("a trace has at least one tensor: what the iteration returns")


def _check_accesses(trace: Trace) -> None:
    """Check the accesses: known tensors, each at most once per operator, and CREATE exactly where it is required."""
    if np.any((trace.access_tensor < 0) | (trace.access_tensor >= trace.tensor_count)):
        raise _access_error(trace, (trace.access_tensor < 0) | (trace.access_tensor >= trace.tensor_count), "unknown")
    order = trace.access_by_tensor
    tensor, operator, mode = trace.access_tensor[order], trace.access_operator[order], trace.access_mode[order]
    first = np.diff(tensor, prepend=-1) != 0
    creates = mode == Mode.CREATE
    persistent, made_by_first = trace.persistent[tensor], operator == 0
    for wrong, what in (
        (mode > max(Mode), "accesses {} in an unknown mode"),
        (~first & (np.diff(operator, prepend=-1) == 0), "accesses {} twice"),
        (creates & persistent, "creates {}, which is persistent"),
        (~creates & ~persistent & first, "accesses {} before it is created"),
        (creates & ~persistent & ~first, "creates {}, which exists already"),
        (made_by_first & ~creates, "(the placeholder) accesses {} without creating it"),
        (creates & (made_by_first != (trace.tensor_kind[tensor] == Kind.INPUT)),
         "creates {}, but the placeholder creates inputs, all inputs and nothing else"),
        ((operator == trace.operator_count - 1) & (mode != Mode.READ), "(the output) does more than read {}"),
    ):  # fmt: skip
        if wrong.any():
            unsorted = np.zeros(len(order), np.bool_)
            unsorted[order] = wrong
            raise _access_error(trace, unsorted, what)
    unused = np.flatnonzero((np.diff(trace.tensor_start) == 0) & ~trace.persistent)
    if unused.size:
        raise TraceError(f"no operator of the trace creates {trace.tensor_label(int(unused[0]))}")


def _access_error(trace: Trace, wrong: Bools, what: str) -> TraceError:
    access = int(np.flatnonzero(wrong)[0])
    operator, tensor = int(trace.access_operator[access]), int(trace.access_tensor[access])
    if what == "unknown":
        return TraceError(f"{trace.operator_label(operator)} accesses tensor {tensor}, which the trace does not have")
    return TraceError(f"{trace.operator_label(operator)} {what.format(trace.tensor_label(tensor))}")
