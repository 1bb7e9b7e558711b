"""Plans: which tensors are swapped, recomputed and released, and after which operators (TENSILE, section III-A).

A plan consists of a generation, a list of events and an optional order of the operators; docs/library.md defines
their meaning. Events are stored as the 32-byte rows of the plan table in shared memory, sorted by trigger.
access_sequence.py decides what a plan means on a trace, validation.py whether it may be executed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pg_tensile.errors import PlanError
from pg_tensile.planning.compression.codec import Codec
from pg_tensile.planning.trace.trace import Trace

# Must have the layout of TensilePlanEvent in csrc/state/plan.h.
EVENT_ROW = np.dtype(
    [
        ("kind", "u1"),
        ("codec", "u1"),
        ("zero", "u1", (2,)),
        ("tensor", "<i4"),
        ("version", "<i4"),
        ("trigger", "<i4"),
        ("delay_us", "<i4"),
        ("deadline", "<i4"),
        ("bytes", "<i8"),
    ]
)
MAGIC = b"tensileP"
FORMAT = 2
HEADER = struct.Struct("<8sIIQQQ")  # magic, format, CRC-32 of the rest, generation, number of events, length of order
ORDER = np.dtype("<i4")
MAX_EVENTS = 1 << 24
CODECS = tuple(codec.name.lower() for codec in Codec)  # labels of an event's `codec`, by number


class EventKind(IntEnum):
    """Kind of an event: its action on a tensor after the operator `trigger`, and the meaning of `deadline`."""

    SWAP_OUT = 1  # copies it to the host, unless the copy there is current; its device memory is free after `deadline`
    SWAP_IN = 2  # allocates device memory and copies it there; the operator `deadline` waits for the copy
    RECOMPUTE = 3  # executes its writers again; the operator `deadline` needs it (informative, nothing waits)
    RELEASE = 4  # frees its device memory at once; `deadline` is `trigger`

    @property
    def label(self) -> str:
        """The name in SQL: "swap_out"."""
        return self.name.lower()


class Event(NamedTuple):
    """One action on a tensor. `trigger` and `deadline` are operators, as indices into the plan's order if it has one.

    `version` is used by recompute only, `codec` (an index into CODECS) by swap_out only.
    """

    kind: EventKind
    tensor: int
    trigger: int
    deadline: int
    version: int = 0
    delay_us: int = 0
    codec: int = 0

    def text(self, tensor: str, deadline: int) -> str:
        """Return the event in words, given the words for its tensor and its deadline: "swap out %12, freed after 8"."""
        parts = [f"{self.kind.label.replace('_', ' ')} {tensor}"]
        if self.kind is EventKind.SWAP_OUT:
            codec = CODECS[self.codec] if self.codec < len(CODECS) else f"codec {self.codec}"
            parts += [f"freed after {deadline}"] + [f"coded by {codec}"] * (self.codec > 0)
        elif self.kind is EventKind.SWAP_IN:
            parts.append(f"needed by {deadline}")
        elif self.kind is EventKind.RECOMPUTE:
            parts += [f"version {self.version}"] * (self.version > 0) + [f"needed by {deadline}"]
        return ", ".join(parts + [f"{self.delay_us} µs later"] * (self.delay_us > 0))


class Boundary(NamedTuple):
    """The state between two iterations: the persistent tensors on the device, and those with a current host copy."""

    device: frozenset[int]
    host: frozenset[int]


@dataclass(frozen=True, eq=False)
class Plan:
    """The events of an iteration and, optionally, the order of its operators.

    `rows` is EVENT_ROW[events], read-only and sorted by trigger; rows with the same trigger keep their order. `order`
    is int32[n], the captured indices of the operators in the order of execution; None means the captured order, and an
    order equal to that becomes None. Triggers and deadlines are indices into it. Raises PlanError for rows of unknown
    kind, an impossible generation, or an order that is not a row of operator indices.
    """

    rows: NDArray[Any]
    generation: int = 0
    order: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        rows = np.array(self.rows, dtype=EVENT_ROW, copy=True, ndmin=1)
        kinds = rows["kind"]
        unknown = np.flatnonzero(
            (kinds < EventKind.SWAP_OUT.value) | (kinds > EventKind.RELEASE.value) | rows["zero"].any(axis=1)
        )
        if unknown.size:
            raise PlanError(f"event {unknown[0]} of the plan is of unknown kind {kinds[unknown[0]]}")
        if not 0 <= self.generation < 1 << 63:
            raise PlanError(f"a plan cannot have generation {self.generation}")
        if np.any(np.diff(rows["trigger"].astype(np.int64)) < 0):
            rows = rows[np.argsort(rows["trigger"], kind="stable")]
        rows.flags.writeable = False
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "order", _normal(self.order))

    @classmethod
    def build(cls, events: Iterable[Event], generation: int = 0, order: ArrayLike | None = None) -> Plan:
        """Return the plan of these events; those with the same trigger keep their order.

        Raises PlanError if a number does not fit into a row of the plan table.
        """
        listed = [(e.kind, e.codec, (0, 0), e.tensor, e.version, e.trigger, e.delay_us, e.deadline, 0) for e in events]
        try:
            rows = np.array(listed, dtype=EVENT_ROW)
        except (OverflowError, TypeError, ValueError) as error:
            raise PlanError("an event's numbers do not fit into a row of the plan table", detail=str(error)) from error
        return cls(rows, generation, order)  # type: ignore[arg-type]

    @classmethod
    def from_rows(cls, data: bytes, generation: int = 0, order: bytes = b"") -> Plan:
        """Return the plan of rows and an order as stored in shared memory. Raises PlanError on any other bytes."""
        if len(data) % EVENT_ROW.itemsize:
            raise PlanError(f"a plan of {len(data)} bytes is not a number of rows of {EVENT_ROW.itemsize} bytes")
        if len(order) % ORDER.itemsize:
            raise PlanError(f"an order of {len(order)} bytes is not a number of operators")
        return cls(np.frombuffer(data, EVENT_ROW), generation, np.frombuffer(order, ORDER) if order else None)

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f"<{self.summary}>"

    def __str__(self) -> str:
        """Return a summary and a line for each event. `listing.plan_listing` has names and sizes of tensors as well."""
        order = [] if self.order is None else self.order.tolist()
        lines = [self.summary + (f"; operators in another order: {len(order)}" if order else "")]

        def captured(index: int) -> int:
            return order[index] if 0 <= index < len(order) else index

        for event in self.events:
            text = event.text(f"%{event.tensor}", captured(event.deadline))
            lines.append(f"after {captured(event.trigger)}: {text}")
        return "\n".join(lines)

    @property
    def summary(self) -> str:
        """The number of its events of each kind: "plan 3: 2 swap_out, 2 swap_in"."""
        kinds, counts = np.unique(self.rows["kind"], return_counts=True)
        events = [f"{count} {EventKind(kind).label}" for kind, count in zip(kinds, counts, strict=True)]
        return f"plan {self.generation}: {', '.join(events) or 'no events'}"

    def _identity(self) -> tuple[int, bytes, bytes]:
        return self.generation, self.rows.tobytes(), self.order_bytes

    @property
    def order_bytes(self) -> bytes:
        """The order as stored in shared memory; empty for the captured order."""
        return b"" if self.order is None else self.order.astype(ORDER).tobytes()

    @property
    def events(self) -> Sequence[Event]:
        return EventView(self.rows)

    def with_bytes(self, trace: Trace) -> Plan:
        """Return the plan with the `bytes` of each row set to its tensor's size, for readers of the plan table."""
        rows = self.rows.copy()
        in_trace = (rows["tensor"] >= 0) & (rows["tensor"] < trace.tensor_count)
        rows["bytes"][in_trace] = trace.tensor_bytes[rows["tensor"][in_trace]]
        return Plan(rows, self.generation, self.order)

    def to_bytes(self) -> bytes:
        """Return the binary form: a header of 40 bytes (magic, format, CRC-32, generation, number of events, number of
        operators in the order), the rows and the order."""
        ordered = 0 if self.order is None else len(self.order)
        body = struct.pack("<QQQ", self.generation, len(self.rows), ordered) + self.rows.tobytes() + self.order_bytes
        return struct.pack("<8sII", MAGIC, FORMAT, zlib.crc32(body)) + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """Return the plan that `to_bytes` encoded. Raises PlanError on any other bytes."""
        if len(data) < HEADER.size or not data.startswith(MAGIC):
            raise PlanError("these bytes are not a plan", detail=f"{len(data)} bytes")
        _, version, checksum, generation, count, ordered = HEADER.unpack_from(data)
        if version != FORMAT:
            raise PlanError(f"a plan of format {version} cannot be read", "Use the same pg_tensile on both sides.")
        if zlib.crc32(memoryview(data)[16:]) != checksum:
            raise PlanError("a plan is damaged: its checksum is wrong", "Make the plan again.")
        body = memoryview(data)[HEADER.size :]
        end = count * EVENT_ROW.itemsize
        if count > MAX_EVENTS or len(body) != end + ordered * ORDER.itemsize:
            raise PlanError(f"a plan of {count} events cannot have {len(data)} bytes")
        plan = cls.from_rows(bytes(body[:end]), generation, bytes(body[end:]))
        if plan.rows.tobytes() != body[:end]:
            raise PlanError("the events of a plan are not in the order of their triggers")
        if plan.order_bytes != body[end:]:
            raise PlanError("the order of a plan is that of the captured operators, which has no bytes")
        return plan


class EventView(Sequence[Event]):
    """A view of a plan's rows as events; each event is built on access."""

    def __init__(self, rows: NDArray[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        if isinstance(index, slice):
            return EventView(self.rows[index])
        return _event(self.rows[index].item())

    def __iter__(self) -> Iterator[Event]:
        return map(_event, self.rows.tolist())


def _event(row: tuple[Any, ...]) -> Event:
    kind, codec, _, tensor, version, trigger, delay_us, deadline, _ = row
    return Event(EventKind(kind), tensor, trigger, deadline, version, delay_us, codec)


def _normal(order: ArrayLike | None) -> NDArray[np.int32] | None:
    """Return the order, read-only, or None if it equals the captured order. `check_order` tests it against a trace."""
    if order is None:
        return None
    numbers = np.asarray(order)
    if numbers.size == 0:
        return None
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise PlanError("the order of a plan is not a row of operators")
    if numbers.min() < 0 or numbers.max() > np.iinfo(np.int32).max:
        raise PlanError("the order of a plan names an operator that no trace has")
    operators = numbers.astype(np.int32)
    if np.array_equal(operators, np.arange(len(operators))):
        return None
    operators.flags.writeable = False
    return operators


NO_EVENTS = Plan.build([])
