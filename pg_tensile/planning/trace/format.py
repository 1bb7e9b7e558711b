"""Binary form of a trace: a header (magic, format version, CRC-32, size) and its compressed columns.

The columns have a fixed order, numbers are little-endian, strings are one text with the length of each. Rules of the
allocator follow if they are not the default ones. For any input,
`decode` returns columns or raises TraceError, and allocates no more memory than the sizes that it has checked permit.
check.py then decides whether they are a trace.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DeviceError, TraceError
from pg_tensile.planning.allocator_rules import DEFAULT_RULES, AllocatorRules
from pg_tensile.planning.device_types import DEVICE_TYPES
from pg_tensile.planning.trace.columns import Strings, TraceColumns, starts

MAGIC = b"tensileT"
FORMAT = 1
HEADER = struct.Struct("<8sIIQ")  # magic, format, CRC-32 of the rest, size of the payload before compression
COUNTS = struct.Struct("<5Q")  # device, operators, accesses, tensors, dimensions
RULES = struct.Struct("<4Q")  # AllocatorRules.sizes
MAX_PAYLOAD = 1 << 29
COMPRESSION = 1  # zlib level: on these columns, higher ones take longer and gain little

# Name, element type and length of each column: o(perators), a(ccesses), t(ensors) or d(imensions).
COLUMNS = (
    ("access_count", "<i4", "o"),
    ("access_tensor", "<i4", "a"),
    ("access_mode", "u1", "a"),
    ("phase", "u1", "o"),
    ("random", "u1", "o"),
    ("flops", "<i8", "o"),
    ("operator_bytes", "<i8", "o"),
    ("latency_us", "<f8", "o"),
    ("workspace_bytes", "<i8", "o"),
    ("tensor_bytes", "<i8", "t"),
    ("tensor_kind", "u1", "t"),
    ("shape_count", "<i4", "t"),
    ("shape_sizes", "<i8", "d"),
)
STRINGS = (
    ("target", "o"),
    ("signature", "o"),
    ("module", "o"),
    ("source", "o"),
    ("tensor_name", "t"),
    ("tensor_dtype", "t"),
)


def encode(trace: TraceColumns) -> bytes:
    """Return the binary form of a trace. Raises TraceError unless its operators are in the captured order."""
    if np.any(trace.captured_operator != np.arange(trace.operator_count)):
        raise TraceError("only a captured trace has bytes", "Send the captured trace, and its plan with the order.")
    sizes = (trace.operator_count, len(trace.access_tensor), trace.tensor_count, len(trace.shape_sizes))
    parts = [COUNTS.pack(DEVICE_TYPES.index(trace.device), *sizes)]
    for name, element, _ in COLUMNS:
        parts.append(_planes(_column(trace, name).astype(element)))
    for name, _ in STRINGS:
        strings: Strings = getattr(trace, name)
        text = "".join(strings.values).encode("utf-8", "surrogatepass")
        lengths = np.fromiter(map(len, strings.values), "<i4", len(strings.values))
        parts += [struct.pack("<QQ", len(lengths), len(text)), _planes(lengths), text]
        parts.append(_planes(strings.codes.astype("<i4")))
    if trace.allocator.sizes != DEFAULT_RULES.sizes:
        parts.append(RULES.pack(*trace.allocator.sizes))
    payload = b"".join(parts)
    body = struct.pack("<Q", len(payload)) + zlib.compress(payload, COMPRESSION)
    return struct.pack("<8sII", MAGIC, FORMAT, zlib.crc32(body)) + body


def decode(data: bytes) -> dict[str, Any]:
    """Return the columns that `encode` encoded, by name. Raises TraceError on any other bytes."""
    try:
        return _decode(_payload(data))
    except (ValueError, OverflowError) as error:  # invalid UTF-8, impossible sizes
        raise TraceError("the columns of a trace cannot be read", detail=str(error)) from error


def _column(trace: TraceColumns, name: str) -> NDArray[Any]:
    if name.endswith("_count"):
        return np.diff(getattr(trace, name.replace("_count", "_start")))
    return getattr(trace, name)


def _planes(column: NDArray[Any]) -> bytes:
    """Return the column by byte planes: all first bytes, all second bytes, …

    Small numbers then give long runs of zeros, which compress well.
    """
    return column.view(np.uint8).reshape(len(column), column.itemsize).T.tobytes()


def _payload(data: bytes) -> bytes:
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise TraceError("these bytes are not a trace", detail=f"{len(data)} bytes")
    _, version, checksum, size = HEADER.unpack_from(data)
    if version != FORMAT:
        raise TraceError(f"a trace of format {version} cannot be read", "Use the same pg_tensile on both sides.")
    if zlib.crc32(memoryview(data)[16:]) != checksum:
        raise TraceError("a trace is damaged: its checksum is wrong", "Capture it again.")
    if size > MAX_PAYLOAD:
        raise TraceError("a trace is too large", detail=f"{size} of at most {MAX_PAYLOAD} bytes")
    stream = zlib.decompressobj()
    try:
        payload = stream.decompress(memoryview(data)[HEADER.size :], size + 1)
    except zlib.error as error:
        raise TraceError("a trace is damaged: it cannot be decompressed", detail=str(error)) from error
    if len(payload) != size or not stream.eof or stream.unused_data:
        raise TraceError("a trace is damaged: it has another size than it says")
    return payload


class Reader:
    """Sequential reader of a payload that checks each size against the bytes left before it allocates anything."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.offset = 0

    def take(self, size: int) -> bytes:
        if size > len(self.payload) - self.offset:
            raise TraceError("a trace is damaged: its columns are longer than it is")
        self.offset += size
        return self.payload[self.offset - size : self.offset]

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.take(form.size))

    def numbers(self, element: str, count: int) -> NDArray[Any]:
        kind = np.dtype(element)
        planes = np.frombuffer(self.take(count * kind.itemsize), np.uint8).reshape(kind.itemsize, count)
        return np.ascontiguousarray(planes.T).view(kind).reshape(count)

    def strings(self, count: int) -> Strings:
        values, size = self.unpack(struct.Struct("<QQ"))
        lengths = self.numbers("<i4", values).astype(np.int64)
        text = self.take(size).decode("utf-8", "surrogatepass")
        ends = np.cumsum(lengths)
        codes = self.numbers("<i4", count)
        steps = np.diff(np.maximum.accumulate(np.append(np.int64(-1), codes)))  # a new code is the highest one plus 1
        if np.any(lengths < 0) or int(lengths.sum()) != len(text) or np.any(codes < 0) or np.any(steps > 1):
            raise TraceError("a trace is damaged: its texts do not fit together")
        if int(steps.sum()) != values:
            raise TraceError("a trace is damaged: it has texts that nothing uses")
        begins = ends - lengths
        split = tuple(text[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True))
        if len(set(split)) != len(split):
            raise TraceError("a trace is damaged: it has the same text twice")
        return Strings(codes, split)


def _decode(payload: bytes) -> dict[str, Any]:
    reader = Reader(payload)
    device, operators, accesses, tensors, dimensions = reader.unpack(COUNTS)
    if device >= len(DEVICE_TYPES):
        raise TraceError("a trace is damaged: it is of an unknown device")
    counts = {"o": operators, "a": accesses, "t": tensors, "d": dimensions}
    columns: dict[str, Any] = {name: reader.numbers(element, counts[per]) for name, element, per in COLUMNS}
    columns |= {name: reader.strings(counts[per]) for name, per in STRINGS}
    rules = _rules(reader) if reader.offset != len(payload) else DEFAULT_RULES
    if reader.offset != len(payload):
        raise TraceError("a trace is damaged: it is longer than its columns")
    if np.any(columns["random"] > 1):
        raise TraceError("a trace is damaged: an operator is random or it is not")
    columns["random"] = columns["random"].astype(np.bool_)
    for name in ("access", "shape"):
        columns[f"{name}_start"] = starts(columns.pop(f"{name}_count"))
    return columns | {"device": DEVICE_TYPES[device], "allocator": rules}


def _rules(reader: Reader) -> AllocatorRules:
    try:
        block, small, small_page, large_page = reader.unpack(RULES)
        return AllocatorRules(block, small, small_page, large_page)
    except DeviceError as error:
        raise TraceError("a trace is damaged: its allocator is impossible", detail=error.detail) from error
