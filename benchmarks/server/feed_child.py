"""The trainer of feed.py: receives one job's rows as the trainer does, and measures instead of training.

`feed_child.py array`: until the query's numbers lie in one float32 array [rows, columns], NaN where they are null.
`feed_child.py prepared`: until the trainer's own tables are ready: ordered by content, split, standardised. The clock
starts before the handshake, a few milliseconds before the worker feeds. The result is the job's error message.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution.data.columns import Chunk, columns_from_header, decode
from pg_tensile.execution.data.dataset import RowStore, prepare
from pg_tensile.execution.data.fitting import fit
from pg_tensile.execution.data.splits import Split
from pyworker import child
from pyworker.connection import Connection
from pyworker.wire import Frame, FrameType


class Measured(Exception):
    """The result, as JSON."""

    hint = None


def receive(connection: Connection) -> Frame:
    frame = connection.recv()
    assert frame is not None
    return frame


class GrowingMatrix:
    """A float32 array [rows, columns] that doubles when it is full; memory is not touched before it is used."""

    def __init__(self, columns: int, capacity: int = 1 << 19) -> None:
        self._matrix = np.empty((capacity, columns), np.float32)
        self._rows = 0

    def append(self, chunk: Chunk) -> None:
        end = self._rows + chunk.rows
        if end > len(self._matrix):
            larger = np.empty((2 * end, self._matrix.shape[1]), np.float32)
            larger[: self._rows] = self._matrix[: self._rows]
            self._matrix = larger
        rows = self._matrix[self._rows : end]
        for index, values in enumerate(chunk.columns):
            rows[:, index] = values.data
            if values.nulls.any():
                rows[values.nulls, index] = np.nan
        self._rows = end

    def finish(self) -> NDArray[np.float32]:
        return self._matrix[: self._rows]


def measure_array(connection: Connection, started: float) -> dict[str, Any]:
    receive(connection)  # JOB
    columns = columns_from_header(receive(connection).header["columns"])
    growing = GrowingMatrix(len(columns))
    while (frame := receive(connection)).type == FrameType.ROWS:
        growing.append(decode(columns, frame.header["rows"], frame.buffers))
    matrix = growing.finish()
    seconds = time.perf_counter() - started
    sums = np.nansum(matrix, axis=0, dtype=np.float64).tolist()
    return {"seconds": seconds, "rows": len(matrix), "sums": sums}


def measure_prepared(connection: Connection, started: float) -> dict[str, Any]:
    spec = receive(connection).header
    columns = columns_from_header(receive(connection).header["columns"])
    cache, spool = spec["dataset_cache_bytes"], spec["spool_directory"]
    store = RowStore(columns, cache, spool)
    while (frame := receive(connection)).type == FrameType.ROWS:
        store.add(frame.header["rows"], frame.buffers)
    store.finish(frame.header["rows"], frame.header["fingerprint"], frame.buffers)
    dataset = prepare(store, fit(store, Split.of(spec)), cache, spool)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "rows": dataset.training.rows + dataset.validation.rows}


def main() -> None:
    started = time.perf_counter()
    measure = measure_array if sys.argv[1] == "array" else measure_prepared

    def run(connection: Connection, hello: dict[str, Any]) -> None:
        raise Measured(json.dumps(measure(connection, started)))

    child.main(run)


if __name__ == "__main__":
    main()
