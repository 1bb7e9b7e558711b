"""Batches of a table, in an order that a resumed job can continue in the middle of an epoch.

An epoch's order is a pure function of (seed, epoch): the table's blocks of neighbouring rows are permuted, the blocks
that fit 64 MiB form a *window*, and the rows of a window are permuted again. A table that fits one window, as most do,
is thus permuted completely; the rows of a larger one are in hash order, which is as good as random. A window is
shuffled and copied to the device as a whole; a batch is a slice of it, or of neighbouring windows. For tables in mapped
files, a thread reads the next window ahead while the current one is in use. The order does not depend on whether a
table is in memory or in a file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pg_tensile.errors import TrainingError
from pg_tensile.execution.data.dataset import Table
from pg_tensile.execution.data.preprocessing import Features
from pg_tensile.execution.distributed.group import part_of, rank_here

WINDOW_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
MAX_BLOCK_ROWS = 4096


class Batch(NamedTuple):
    """Features and target of some rows, as tensors on the device for which the batches are made.

    `weight`: float32 [rows], or None if every row counts the same. `share`: these rows by those of the whole batch, of
    which other ranks have the rest."""

    features: Features
    target: Tensor
    weight: Tensor | None = None
    share: float = 1.0

    @property
    def targets(self) -> tuple[Tensor, ...]:
        """Arguments of the loss besides the outputs: the target, and the weight if there is one."""
        return (self.target,) if self.weight is None else (self.target, self.weight)

    @property
    def rows(self) -> int:
        return len(self.target)


def division(rows: int, batch_size: int, ranks: int = 1) -> tuple[int, int]:
    """Return the number of batches of an epoch, and the rows of the last one.

    It takes left-over rows that are fewer than two for each rank. Raises TrainingError if a batch has not even one."""
    full, rest = divmod(rows, batch_size)
    if full and 0 < rest < 2 * ranks and batch_size > 1:
        steps, last = full, batch_size + rest
    else:
        steps, last = (full + 1, rest) if rest else (full, batch_size)
    if steps and min(last, batch_size) < ranks:
        hint = "Use a larger batch_size, or fewer ranks."
        raise TrainingError(f"a batch of {min(last, batch_size)} rows cannot be divided among {ranks} ranks", hint=hint)
    return steps, last


class Batches:
    """Batches of one table, or one rank's part of each.

    A last batch of a single row for a rank is joined to the one before it, because batch normalisation cannot train on
    one row. With `read_ahead` a thread prepares the windows."""

    def __init__(
        self,
        table: Table,
        batch_size: int,
        seed: int,
        device: torch.device,
        read_ahead: bool,
        lead: tuple[int, ...] = (),
        full_only: bool = False,
        ranks: int = 1,
    ) -> None:
        """Prepare the batches of `table`; with `full_only`, rows of an epoch that fill no batch are left out.

        The order of the rows does not depend on `ranks`: each rank gets its part of every batch of that order.

        `lead`: rows of the first batches of the first epoch, in total at most those of the table. The remaining rows of
        that epoch are divided like any other epoch."""
        self._arrays: list[NDArray[Any]] = table.arrays
        self._features = len(table.features.flat())
        self._rows = table.rows
        self._batch_size = batch_size
        self._lead = lead
        self._full_only = full_only
        self._seed = seed & 0xFFFFFFFFFFFFFFFF
        self._device = device
        self._read_ahead = read_ahead
        self._ranks, self._rank = ranks, rank_here(ranks)
        self._block_rows = min(max(BLOCK_BYTES // max(table.row_bytes, 1), 1), MAX_BLOCK_ROWS)
        self._window_blocks = max(WINDOW_BYTES // max(table.row_bytes * self._block_rows, 1), 1)

    def steps(self, epoch: int) -> int:
        """Return the number of batches of an epoch (from 0)."""
        if self._full_only:
            return self._rows // self._batch_size
        lead = self._lead if epoch == 0 else ()
        return len(lead) + division(self._rows - sum(lead), self._batch_size, self._ranks)[0]

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Return an iterator over the shuffled batches of an epoch (from 0), starting with batch `first_step`."""
        blocks = np.random.default_rng([self._seed, epoch]).permutation(-(-self._rows // self._block_rows))
        windows = [blocks[i : i + self._window_blocks] for i in range(0, len(blocks), self._window_blocks)]
        ends = np.cumsum([self._block_sizes(window).sum() for window in windows])
        sizes = self._sizes(epoch)
        position = sum(itertools.islice(sizes, first_step))
        first = int(np.searchsorted(ends, position, side="right"))
        skip = position - (int(ends[first - 1]) if first else 0)
        loads = ((epoch, number, windows[number]) for number in range(first, len(windows)))
        return self._cut(self._windows(loads), sizes, skip)

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        """Yield the rank's rows in the table's order, in batches of `batch_size`; the last batch may be smaller."""
        part = part_of(self._rows, self._rank, self._ranks)
        for start in range(part.start, part.stop, batch_size):
            end = min(start + batch_size, part.stop)
            yield self._batch(self._to_device([array[start:end] for array in self._arrays]))

    def covering(self, batch_size: int) -> Iterator[tuple[Batch, int]]:
        """Yield all rows, whatever the rank, in batches of one size, and how many of each batch's last rows are new.

        That is `batch_size`, or the number of rows if that is smaller."""
        batch_size = min(batch_size, self._rows)
        for end in itertools.count(batch_size, batch_size):
            new = batch_size - max(0, end - self._rows)
            if new <= 0:
                return
            end = min(end, self._rows)
            yield self._batch(self._to_device([array[end - batch_size : end] for array in self._arrays])), new

    def _sizes(self, epoch: int) -> Iterator[int]:
        """Yield the number of rows of each batch of an epoch."""
        if self._full_only:
            yield from itertools.repeat(self._batch_size, self._rows // self._batch_size)
            return
        lead = self._lead if epoch == 0 else ()
        steps, last = division(self._rows - sum(lead), self._batch_size, self._ranks)
        yield from lead
        yield from itertools.repeat(self._batch_size, steps - 1)
        yield from (last,) if steps else ()

    def _block_sizes(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum((blocks + 1) * self._block_rows, self._rows) - blocks * self._block_rows

    def _windows(self, loads: Iterator[tuple[int, int, NDArray[np.int64]]]) -> Iterator[list[Tensor]]:
        if not self._read_ahead:
            for load in loads:
                yield self._window(*load)
            return
        with ThreadPoolExecutor(1) as reader:
            ahead = None
            for load in loads:
                following = reader.submit(self._window, *load)
                if ahead is not None:
                    yield ahead.result()
                ahead = following
            if ahead is not None:
                yield ahead.result()

    def _window(self, epoch: int, number: int, blocks: NDArray[np.int64]) -> list[Tensor]:
        """Return the arrays of a window on the device, with the rows shuffled."""
        sizes = self._block_sizes(blocks)
        starts = blocks * self._block_rows
        order = np.random.default_rng([self._seed, epoch, number]).permutation(int(sizes.sum()))
        arrays = self._arrays
        if self._read_ahead:  # the table is a file: read each block sequentially
            spans = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
            arrays = [np.concatenate([array[a:b] for a, b in spans]) for array in arrays]
        else:
            order = (np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(order)))[order]
        return self._to_device([array.take(order, 0) for array in arrays])  # twice as fast as torch's indexing

    def _cut(self, windows: Iterator[list[Tensor]], sizes: Iterator[int], skip: int) -> Iterator[Batch]:
        """Yield batches with the numbers of rows in `sizes`, cut from the windows after skipping `skip` rows.

        Yield only the rank's part of each."""
        parts: list[list[Tensor]] = []  # tensors of a batch that is not complete yet
        missing = next(sizes, 0)
        for window in windows:
            start, rows = skip, len(window[-1])
            skip = 0
            while missing and start < rows:
                end = min(start + missing, rows)
                parts.append([tensor[start:end] for tensor in window])
                start, missing = end, missing - (end - start)
                if not missing:
                    columns = zip(*parts, strict=True)
                    whole = parts[0] if len(parts) == 1 else [torch.cat(tensors) for tensors in columns]
                    yield self._part(whole)
                    parts, missing = [], next(sizes, 0)

    def _to_device(self, arrays: list[NDArray[Any]]) -> list[Tensor]:
        return [torch.from_numpy(array).to(self._device) for array in arrays]

    def _part(self, tensors: list[Tensor]) -> Batch:
        """Return the rank's part of a batch."""
        if self._ranks == 1:
            return self._batch(tensors)
        rows = len(tensors[-1])
        batch = self._batch([tensor[part_of(rows, self._rank, self._ranks)] for tensor in tensors])
        return batch._replace(share=batch.rows / rows)

    def _batch(self, tensors: list[Tensor]) -> Batch:
        target, *weight = tensors[self._features :]
        return Batch(Features.from_flat(tensors[: self._features]), target, weight[0] if weight else None)
