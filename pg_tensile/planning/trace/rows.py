"""A trace by rows: its operators with their accesses, and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar, overload

PLACEHOLDER = "placeholder"  # the target of the first operator, which creates the inputs
OUTPUT = "output"  # the target of the last operator, which reads what the iteration returns


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
        return [self._row(row) for row in rows] if isinstance(rows, range) else self._row(rows)

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, range(self._count))
