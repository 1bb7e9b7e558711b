"""Training and validation tables, built from one pass over a query's rows; batches are cut from them.

Phases: `RowStore.add` takes chunks as they arrive, in any order of the scan. When half of the cache is full, they
become a *run*: sorted by row hash and moved to a packed file. `finish` sorts the rest; from then on `RowStore.blocks`
returns all rows in hash order, any number of times: the runs are cut at the same hash values and merged block by block,
so the result depends neither on the arrival order nor on the number of runs. `fitting.fit` reads the blocks twice (and
a few times more to divide them by a column), `prepare` once more to fill the tables.

Order and split depend on content and seed alone: rows are ordered by the hash of their content and dictionary codes by
their strings, and splits.py assigns each row to training or validation.

Memory: at most about one and a half times the cache, plus a block. Tables larger than the cache are packed files, too.
All files are mapped into memory and have no name from the start, so none is left behind however the process ends; their
space is reserved first, because a full disk under a mapping kills the process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pg_tensile.errors import DataError, SpoolError
from pg_tensile.execution.data.columns import (
    Buffer,
    Chunk,
    Column,
    Values,
    concatenate,
    cut,
    decode,
    decode_dictionary,
    take,
)
from pg_tensile.execution.data.fitting import FittedPreprocessing
from pg_tensile.execution.data.hashing import mix
from pg_tensile.execution.data.preprocessing import Features

HASHES = 1 << 64
BLOCK_BYTES = 16 << 20
MIN_RUN_BYTES = 4 << 20  # even for a smaller cache, because every run costs a file and a part of every block
BLOCK_ROWS = (1024, 1 << 17)
ALIGNMENT = 64
SAMPLED_ROWS = 100_000  # validation rows from which calibration and intervals are derived


class RowStore:
    """All rows of one pass over a query.

    `cache_bytes` limits the memory for them; further rows are written to files in `spool_directory`. `poll` is called
    before each block is read and may raise to stop reading."""

    def __init__(
        self,
        columns: Sequence[Column],
        cache_bytes: int,
        spool_directory: str,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        self.columns = tuple(columns)
        self.rows = 0
        self.fingerprint = ""
        self.dictionaries: list[list[str] | None] = [None] * len(self.columns)  # by column; strings are sorted
        self.spooled = False
        self._cache_bytes = cache_bytes
        self._spool_directory = spool_directory
        self.poll = poll
        self._pending: list[Chunk] = []
        self._pending_bytes = 0
        self._runs: list[Chunk] = []  # each sorted by hash
        self._ranks: list[NDArray[np.int32] | None] = [None] * len(self.columns)  # code by appearance → sorted code

    def add(self, rows: int, buffers: Sequence[Buffer]) -> None:
        """Add the next rows, given as the buffers of one frame; views of the buffers are kept."""
        chunk = decode(self.columns, rows, buffers)
        self._pending.append(chunk)
        self._pending_bytes += chunk.nbytes
        self.rows += rows
        if self._pending_bytes > max(self._cache_bytes // 2, MIN_RUN_BYTES):
            self._finish_run(spool=True)

    def finish(self, rows: int, fingerprint: str, dictionary_buffers: Sequence[Buffer]) -> None:
        """End the pass after `rows` rows.

        `dictionary_buffers` are lengths and bytes of each text column's strings, in order of first appearance. Raises
        DataError if rows are missing or there are none."""
        if rows != self.rows:
            raise DataError(f"{self.rows} rows came, but {rows} were announced")
        if rows == 0:
            raise DataError("the query returned no rows", hint="Check the query's WHERE clause and joins.")
        self.fingerprint = fingerprint
        text = [index for index, column in enumerate(self.columns) if column.type == "text"]
        for number, index in enumerate(text):
            strings = decode_dictionary(*dictionary_buffers[2 * number : 2 * number + 2])
            order = sorted(range(len(strings)), key=strings.__getitem__)
            ranks = np.empty(len(strings) + 1, np.int32)
            ranks[order] = np.arange(len(strings), dtype=np.int32)
            ranks[-1] = -1  # nulls
            self._ranks[index] = ranks
            self.dictionaries[index] = [strings[code] for code in order]
        if self._pending:
            self._finish_run(spool=False)

    def blocks(self) -> Iterator[Chunk]:
        """Yield all rows in hash order, in blocks independent of their arrival; text as sorted codes, null = −1.

        The hashes in the blocks tell equal rows apart."""
        data_bytes = sum(values.data.nbytes for run in self._runs for values in run.columns)
        row_bytes = data_bytes // self.rows + 1
        limit = min(max(BLOCK_BYTES // row_bytes, BLOCK_ROWS[0]), BLOCK_ROWS[1])
        starts = [0] * len(self._runs)
        stops = [run.rows for run in self._runs]
        last, copies = np.uint64(0), 0  # the last row's hash, and how many rows have had it
        for parts in self._cut_runs(starts, stops, 0, HASHES, limit):
            self.poll()
            block = concatenate(parts)
            if len(parts) > 1:
                block = take(block, np.argsort(block.hashes, kind="stable"))
            numbers = _numbers_of_copies(block.hashes, last, copies)
            last, copies = block.hashes[-1], int(numbers[-1]) + 1
            hashes = block.hashes ^ (mix(numbers) ^ mix(np.zeros(1, np.uint64)))  # a single row keeps its hash
            yield Chunk(hashes, [self._sorted_codes(i, values) for i, values in enumerate(block.columns)])

    def _cut_runs(self, starts: list[int], stops: list[int], low: int, high: int, limit: int) -> Iterator[list[Chunk]]:
        """Yield rows starts[i] to stops[i] of all runs i in hash order, at most `limit` rows at once.

        These rows have hashes from `low` to below `high`. Each item has the rows of each run, not merged."""
        rows = sum(stops) - sum(starts)
        if rows == 0:
            return
        if rows <= limit:
            yield [cut(run, a, b) for run, a, b in zip(self._runs, starts, stops, strict=True) if a < b]
        elif high - low == 1:  # many copies of one row
            for run, start, stop in zip(self._runs, starts, stops, strict=True):
                for first in range(start, stop, limit):
                    yield [cut(run, first, min(first + limit, stop))]
        else:
            middle = (low + high) // 2
            cuts = [int(np.searchsorted(run.hashes, np.uint64(middle))) for run in self._runs]
            yield from self._cut_runs(starts, cuts, low, middle, limit)
            yield from self._cut_runs(cuts, stops, middle, high, limit)

    def _sorted_codes(self, index: int, values: Values) -> Values:
        ranks = self._ranks[index]
        if ranks is None:
            return values
        return Values(values.nulls, ranks[np.where(values.nulls, -1, values.data)])

    def _finish_run(self, spool: bool) -> None:
        run = concatenate(self._pending)
        self._pending, self._pending_bytes = [], 0
        run = take(run, np.argsort(run.hashes, kind="stable"))
        if spool:
            self.spooled = True
            run = self._spool(run)
        self._runs.append(run)

    def _spool(self, run: Chunk) -> Chunk:
        arrays = [run.hashes] + [array for values in run.columns for array in values if array is not None]
        spooled = allocate([(array.shape, array.dtype) for array in arrays], self._spool_directory)
        for source, target in zip(arrays, spooled, strict=True):
            target[...] = source
        copies = iter(spooled)
        hashes = next(copies)
        fields: Any = [[None if array is None else next(copies) for array in values] for values in run.columns]
        return Chunk(hashes, [Values(*arrays) for arrays in fields])


def _numbers_of_copies(hashes: NDArray[np.uint64], last: np.uint64, copies: int) -> NDArray[np.uint64]:
    """Return the number of each row among those of its hash, from 0; `hashes` are sorted.

    `copies` rows with the hash `last` have come before."""
    is_first = np.concatenate([[True], hashes[1:] != hashes[:-1]])
    firsts = np.flatnonzero(is_first)
    numbers = np.arange(len(hashes)) - firsts[np.cumsum(is_first) - 1]
    if hashes[0] == last:
        numbers[: firsts[1] if len(firsts) > 1 else None] += copies
    return numbers.astype(np.uint64)


class Table(NamedTuple):
    """Preprocessed rows: features as numpy arrays and the target, float32 [rows] or int64 labels [rows].

    `weight`: float32 [rows], or None if every row counts the same."""

    features: Features
    target: NDArray[Any]
    weight: NDArray[np.float32] | None = None

    @property
    def rows(self) -> int:
        return len(self.target)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(_row_bytes(array) for array in self.arrays)

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """Flat features, the target, and the weight if there is one."""
        weight = [] if self.weight is None else [self.weight]
        return [*self.features.flat(), self.target, *weight]


@dataclass(frozen=True)
class Dataset:
    """Training and validation tables of a run, in hash order.

    `validation_times` [rows]: of the first SAMPLED_ROWS validation rows, if the rows are divided by time."""

    training: Table
    validation: Table
    fingerprint: str
    spooled: bool  # the tables are mapped files, not memory
    validation_times: NDArray[np.int64] | None = None


def together(first: Table, second: Table) -> Table:
    """Return the rows of both tables, copied to memory."""
    arrays = [np.concatenate(pair) for pair in zip(first.arrays, second.arrays, strict=True)]
    width = len(first.features.flat())
    return Table(Features.from_flat(arrays[:width]), *arrays[width:])


def taken(table: Table, chosen: Any) -> Table:
    """Return the chosen rows of a table; `chosen` is an index of numpy."""
    arrays = [array[chosen] for array in table.arrays]
    width = len(table.features.flat())
    return Table(Features.from_flat(arrays[:width]), *arrays[width:])


def head(table: Table, rows: int) -> Table:
    """Return the first rows of a table."""
    return taken(table, slice(rows))


def prepare(store: RowStore, fitted: FittedPreprocessing, cache_bytes: int, spool_directory: str) -> Dataset:
    """Preprocess all rows with a target and divide them into the training and the validation table.

    The tables are in mapped files in `spool_directory` if both together exceed `cache_bytes`."""
    preprocessing = fitted.preprocessing
    counts = (fitted.training_rows, fitted.validation_rows)
    layout = preprocessing.layout()
    if fitted.weights is not None:
        layout.append(((), np.float32))
    total = sum(counts) * sum(np.dtype(dtype).itemsize * int(np.prod(shape)) for shape, dtype in layout)
    directory = spool_directory if total > cache_bytes else None
    flat = [allocate([((rows, *shape), dtype) for shape, dtype in layout], directory) for rows in counts]
    filled = [0, 0]
    times: list[NDArray[np.int64]] = []
    for block in store.blocks():
        block = fitted.with_target(block)
        features = preprocessing.apply(fitted.inputs(block))
        target = fitted.encode_target(block)
        arrays = [*features.flat(), target]
        if fitted.weights is not None:
            arrays.append(fitted.weights.of(block, target))
        validation = fitted.division.validation_rows(block)
        if fitted.division.by == "time" and filled[1] < SAMPLED_ROWS:
            assert fitted.roles.split is not None
            times.append(block.columns[fitted.roles.split].data[validation].astype(np.int64))
        for side, chosen in enumerate((np.flatnonzero(~validation), np.flatnonzero(validation))):
            end = filled[side] + len(chosen)
            for part, source in zip(flat[side], arrays, strict=True):
                part[filled[side] : end] = source[chosen]
            filled[side] = end
    width = len(preprocessing.layout()) - 1  # of the features
    tables = [Table(Features.from_flat(arrays[:width]), *arrays[width:]) for arrays in flat]
    sampled = np.concatenate(times)[:SAMPLED_ROWS] if times else None
    return Dataset(tables[0], tables[1], store.fingerprint, directory is not None, sampled)


def allocate(shapes: Sequence[tuple[tuple[int, ...], DTypeLike]], directory: str | None) -> list[NDArray[Any]]:
    """Return uninitialised arrays of these shapes and types.

    They are in memory if `directory` is None, else all in one mapped file without a name in `directory`. Raises
    SpoolError if the space for the file cannot be reserved."""
    if directory is None:
        return [np.empty(shape, dtype) for shape, dtype in shapes]
    sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes]
    starts = np.concatenate([[0], np.cumsum([size + -size % ALIGNMENT for size in sizes])]).tolist()
    length = max(starts[-1], 1)
    try:
        with tempfile.TemporaryFile(prefix="pgsql_tmp", dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, length)
            mapping = mmap.mmap(file.fileno(), length)
    except OSError as error:
        raise SpoolError(
            f"could not spool {length} bytes of training data: {error.strerror}",
            hint="Free disk space, raise the dataset cache, or select fewer rows or columns.",
        ) from error
    return [
        np.frombuffer(mapping, dtype, int(np.prod(shape)), start).reshape(shape)
        for (shape, dtype), start in zip(shapes, starts, strict=False)
    ]


def _row_bytes(array: NDArray[Any]) -> int:
    return int(array.itemsize * np.prod(array.shape[1:]))
