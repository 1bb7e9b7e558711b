"""Batches of a table, in an order that a resumed job can take up again in the middle of an epoch.

An epoch's order is a pure function of (seed, epoch): the table's blocks of neighbouring rows are permuted, so many of
them as fit 64 MiB make a *window*, and the rows of a window are permuted again. A table that fits one window (most do)
is so permuted completely; the rows of a larger one lie in hash order anyway, which is as good as random. Windows are
brought into their shuffled order, and to the device, as a whole; a batch is a slice of one. Of tables in mapped files
the next window is read ahead by a thread while the current one trains. The order does not depend on where a table
lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pg_tensile.dataset import Table
from pg_tensile.preprocessing import Features

WINDOW_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
MAX_BLOCK_ROWS = 4096


class Batch(NamedTuple):
    """Features and target of some rows, as tensors on the training device."""

    features: Features
    target: Tensor

    @property
    def rows(self) -> int:
        return len(self.target)


def division(rows: int, batch_size: int) -> tuple[int, int]:
    """Batches of an epoch, and rows of the last one, which has the single row that may be left over besides."""
    full, rest = divmod(rows, batch_size)
    if full and rest == 1 and batch_size > 1:
        return full, batch_size + 1
    return (full + 1, rest) if rest else (full, batch_size)


class Batches:
    """The batches of one table. A last batch of a single row is joined to the one before it, because batch
    normalisation cannot train on one row; no row is ever left out. `read_ahead`: prepare windows in a thread."""

    def __init__(self, table: Table, batch_size: int, seed: int, device: torch.device, read_ahead: bool) -> None:
        self._arrays: list[NDArray[Any]] = [*table.features.flat(), table.target]
        self._rows = table.rows
        self._batch_size = batch_size
        self._seed = seed & 0xFFFFFFFFFFFFFFFF
        self._device = device
        self._read_ahead = read_ahead
        self._block_rows = min(max(BLOCK_BYTES // max(table.row_bytes, 1), 1), MAX_BLOCK_ROWS)
        self._window_blocks = max(WINDOW_BYTES // max(table.row_bytes * self._block_rows, 1), 1)
        self.steps, _ = division(self._rows, batch_size)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The shuffled batches of an epoch from `first_step` on."""
        blocks = np.random.default_rng([self._seed, epoch]).permutation(-(-self._rows // self._block_rows))
        windows = [blocks[i : i + self._window_blocks] for i in range(0, len(blocks), self._window_blocks)]
        ends = np.cumsum([self._block_sizes(window).sum() for window in windows])
        position = first_step * self._batch_size
        first = int(np.searchsorted(ends, position, side="right"))
        skip = position - (int(ends[first - 1]) if first else 0)
        loads = ((epoch, number, windows[number]) for number in range(first, len(windows)))
        return self._cut(self._windows(loads), self._batch_size, skip, self.steps - first_step)

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        """All rows in the table's order, in batches of `batch_size`."""
        for start in range(0, self._rows, batch_size):
            yield self._batch(self._to_device([array[start : start + batch_size] for array in self._arrays]))

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
        """The rows of a window in their order, on the device."""
        sizes = self._block_sizes(blocks)
        starts = blocks * self._block_rows
        order = np.random.default_rng([self._seed, epoch, number]).permutation(int(sizes.sum()))
        arrays = self._arrays
        if self._read_ahead:  # from files: read each block from its start to its end
            spans = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
            arrays = [np.concatenate([array[a:b] for a, b in spans]) for array in arrays]
        else:
            order = (np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(order)))[order]
        return self._to_device([array.take(order, 0) for array in arrays])  # twice as fast as torch's indexing

    def _cut(self, windows: Iterator[list[Tensor]], size: int, skip: int, steps: int) -> Iterator[Batch]:
        """`steps` batches of `size` rows from the windows' rows after `skip`; the last takes all that remain."""
        rest: list[Tensor] | None = None
        for window in windows:
            if rest is not None:
                head = size - len(rest[-1])
                joined = [torch.cat([a, b[:head]]) for a, b in zip(rest, window, strict=True)]
                if steps > 1 and len(joined[-1]) == size:
                    yield self._batch(joined)
                    skip, steps = head, steps - 1
                else:
                    window = [torch.cat([a, b[head:]]) for a, b in zip(joined, window, strict=True)]
            while steps > 1 and skip + size <= len(window[-1]):
                yield self._batch([tensor[skip : skip + size] for tensor in window])
                skip, steps = skip + size, steps - 1
            rest = [tensor[skip:] for tensor in window] if skip < len(window[-1]) else None
            skip = 0
        if rest is not None and steps:
            yield self._batch(rest)

    def _to_device(self, arrays: list[NDArray[Any]]) -> list[Tensor]:
        return [torch.from_numpy(array).to(self._device) for array in arrays]

    @staticmethod
    def _batch(tensors: list[Tensor]) -> Batch:
        return Batch(Features(tensors[0], tensors[1], tuple(tensors[2:-1])), tensors[-1])
