"""Training columns as numpy arrays, decoded from the frames of one pass over a query's rows.

A `Chunk` holds some rows of all columns, with a 64-bit hash of each row's content; the trainer decodes one from every
frame without copying or visiting single values. docs/internals.md, "Training columns", lists the element types and the
order of the buffers. A column of arrays holds all its elements in one flat array, and the offset of each row in it.

Needs numpy only, so that rows can be received before torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import DataError

SCALAR_TYPES = {
    "bool": "u1",
    "int2": "<i2",
    "int4": "<i4",
    "int8": "<i8",
    "float4": "<f4",
    "float8": "<f8",
    "timestamp": "<i8",  # microseconds since 2000-01-01 UTC
    "text": "<i4",  # code into the column's dictionary
}
ARRAY_TYPES = {
    "bool[]": "u1",
    "uint8[]": "u1",
    "int2[]": "<i2",
    "int4[]": "<i4",
    "int8[]": "<i8",
    "float4[]": "<f4",
    "float8[]": "<f8",
}
INTEGER_TYPES = frozenset({"int2", "int4", "int8"})
TOKEN_TYPES = frozenset({"uint8[]", "int2[]", "int4[]", "int8[]"})

Buffer = bytes | bytearray | memoryview


class Column(NamedTuple):
    """A column of the query. `type` is one of SCALAR_TYPES or ARRAY_TYPES, `sql_type` that of the server."""

    name: str
    type: str
    target: bool = False
    sql_type: str | None = None

    @property
    def is_array(self) -> bool:
        return self.type in ARRAY_TYPES


class Values(NamedTuple):
    """One column of a chunk. The data at a null is undefined."""

    nulls: NDArray[np.bool_]  # [rows]
    data: NDArray[Any]  # scalars: [rows]; arrays: [elements of all rows]
    offsets: NDArray[np.int64] | None = None  # arrays only: [rows + 1], start of each row's elements in `data`
    element_nulls: NDArray[np.bool_] | None = None  # arrays only: [elements], None if no element is null

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of elements in each row [rows], for a column of arrays."""
        assert self.offsets is not None
        return np.diff(self.offsets)


class Chunk(NamedTuple):
    """Some rows of all columns."""

    hashes: NDArray[np.uint64]  # [rows]
    columns: list[Values]

    @property
    def rows(self) -> int:
        return len(self.hashes)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of the chunk."""
        arrays = [self.hashes] + [array for values in self.columns for array in values if array is not None]
        return sum(array.nbytes for array in arrays)


def columns_from_header(header: Sequence[dict[str, Any]]) -> list[Column]:
    """Return the columns that a feed announces.

    Raises DataError if a type is unknown, or unless there are exactly one target and at least one feature."""
    columns = [Column(item["name"], item["type"], bool(item.get("target")), item.get("sql_type")) for item in header]
    for column in columns:
        if column.type not in SCALAR_TYPES and column.type not in ARRAY_TYPES:
            raise DataError(f'column "{column.name}" has the unknown element type {column.type}')
    if sum(column.target for column in columns) != 1:
        raise DataError("the query must have exactly one target column")
    if len(columns) < 2:
        raise DataError("the query has no column besides the target", hint="Select at least one feature column.")
    return columns


def decode(columns: Sequence[Column], rows: int, buffers: Sequence[Buffer]) -> Chunk:
    """Return the chunk in one frame's buffers: the row hashes, then the buffers of each column.

    Hashes and values are views of the buffers. Raises DataError if they do not fit the columns."""
    remaining = iter(buffers)
    try:
        hashes = np.frombuffer(next(remaining), np.uint64)
        chunk = Chunk(hashes, [_decode_column(column, rows, remaining) for column in columns])
    except (StopIteration, RuntimeError, ValueError) as error:
        raise DataError("rows came with buffers that do not fit their columns", detail=str(error)) from error
    if chunk.rows != rows or next(remaining, None) is not None:
        raise DataError("rows came with more or fewer buffers than their columns have")
    return chunk


def _decode_column(column: Column, rows: int, buffers: Any) -> Values:
    nulls = _bits(next(buffers), rows)
    if not column.is_array:
        data = np.frombuffer(next(buffers), SCALAR_TYPES[column.type])
        if len(data) != rows:
            raise ValueError(f'column "{column.name}" has {len(data)} values for {rows} rows')
        return Values(nulls, data)
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(np.frombuffer(next(buffers), "<i4"), out=offsets[1:])
    elements = int(offsets[-1])
    bitmap = next(buffers)
    data = np.frombuffer(next(buffers), ARRAY_TYPES[column.type])
    if len(data) != elements:
        raise ValueError(f'column "{column.name}" has {len(data)} elements instead of {elements}')
    element_nulls = _bits(bitmap, elements) if _any_bit(bitmap, elements) else None
    return Values(nulls, data, offsets, element_nulls)


def _bits(bitmap: Buffer, count: int) -> NDArray[np.bool_]:
    """Return the first `count` bits, least significant first, as booleans."""
    return np.unpackbits(_bytes(bitmap, count), count=count, bitorder="little").view(np.bool_)


def _any_bit(bitmap: Buffer, count: int) -> bool:
    return bool(_bytes(bitmap, count).any())


def _bytes(bitmap: Buffer, count: int) -> NDArray[np.uint8]:
    data = np.frombuffer(bitmap, np.uint8)
    if len(data) != (count + 7) // 8:
        raise ValueError(f"a null bitmap has {len(data)} bytes for {count} values")
    return data


def decode_dictionary(lengths: Buffer, text: Buffer) -> list[str]:
    """Return the strings of a text column by code, from int32 lengths in bytes and the concatenated UTF-8 text."""
    ends = np.cumsum(np.frombuffer(lengths, "<i4"), dtype=np.int64).tolist()
    data = bytes(text)
    return [data[start:end].decode("utf-8") for start, end in zip([0, *ends], ends, strict=False)]


def concatenate(chunks: Sequence[Chunk]) -> Chunk:
    """Return the rows of all chunks, in order; there must be at least one chunk."""
    if len(chunks) == 1:
        return chunks[0]
    hashes = np.concatenate([chunk.hashes for chunk in chunks])
    columns = zip(*(chunk.columns for chunk in chunks), strict=True)
    return Chunk(hashes, [_concatenate_values(parts) for parts in columns])


def _concatenate_values(parts: Sequence[Values]) -> Values:
    nulls = np.concatenate([part.nulls for part in parts])
    data = np.concatenate([part.data for part in parts])
    if parts[0].offsets is None:
        return Values(nulls, data)
    lengths = np.concatenate([part.lengths for part in parts])
    element_nulls = None
    if any(part.element_nulls is not None for part in parts):
        missing = [np.zeros(len(p.data), np.bool_) if p.element_nulls is None else p.element_nulls for p in parts]
        element_nulls = np.concatenate(missing)
    return Values(nulls, data, np.concatenate([[0], np.cumsum(lengths)]), element_nulls)


def cut(chunk: Chunk, start: int, stop: int) -> Chunk:
    """Return rows `start` to `stop` (exclusive) as views."""
    if start == 0 and stop == chunk.rows:
        return chunk
    return Chunk(chunk.hashes[start:stop], [_cut_values(values, start, stop) for values in chunk.columns])


def _cut_values(values: Values, start: int, stop: int) -> Values:
    if values.offsets is None:
        return Values(values.nulls[start:stop], values.data[start:stop])
    first, last = int(values.offsets[start]), int(values.offsets[stop])
    element_nulls = None if values.element_nulls is None else values.element_nulls[first:last]
    offsets = values.offsets[start : stop + 1] - first
    return Values(values.nulls[start:stop], values.data[first:last], offsets, element_nulls)


def take(chunk: Chunk, index: NDArray[np.intp]) -> Chunk:
    """Return copies of the rows at `index`, in that order."""
    return Chunk(chunk.hashes[index], [_take_values(values, index) for values in chunk.columns])


def _take_values(values: Values, index: NDArray[np.intp]) -> Values:
    if values.offsets is None:
        return Values(values.nulls[index], values.data[index])
    lengths = values.lengths
    if len(lengths) and (lengths == lengths[0]).all():  # the usual case, which needs no index for each element
        width = int(lengths[0])
        shape = (len(lengths), width)
        nulls = None if values.element_nulls is None else values.element_nulls.reshape(shape)[index].ravel()
        offsets = np.arange(len(index) + 1, dtype=np.int64) * width
        return Values(values.nulls[index], values.data.reshape(shape)[index].ravel(), offsets, nulls)
    offsets = np.concatenate([[0], np.cumsum(lengths[index])])
    elements = np.repeat(values.offsets[index] - offsets[:-1], lengths[index]) + np.arange(offsets[-1])
    nulls = None if values.element_nulls is None else values.element_nulls[elements]
    return Values(values.nulls[index], values.data[elements], offsets, nulls)


def float_values(values: Values) -> NDArray[np.float64]:
    """Return a column's values as float64 [rows]; null and ±infinity become NaN."""
    x = values.data.astype(np.float64)
    x[values.nulls | ~np.isfinite(x)] = np.nan
    return x


def float_elements(values: Values) -> NDArray[np.float64]:
    """Return all elements of a column of arrays as float64; null becomes NaN."""
    x = values.data.astype(np.float64)
    if values.element_nulls is not None:
        x[values.element_nulls] = np.nan
    return x
