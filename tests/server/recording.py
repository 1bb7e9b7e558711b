"""Record the frames that a worker sends for a query, and decode them as the trainer does (execution.data.columns).

The trainer is recorder.py.
"""

from __future__ import annotations

import datetime as dt
import pickle
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from pg_tensile.execution.data.columns import Chunk, Column, columns_from_header, concatenate, decode, decode_dictionary
from pyworker.wire import FrameType
from scripts.cluster import child_python
from tests.server.support import Connection


class Recording(NamedTuple):
    """The decoded frames of one pass over a query."""

    columns: list[Column]
    rows: Chunk
    frame_rows: list[int]
    frame_bytes: list[int]
    dictionaries: dict[str, list[str]]
    fingerprint: str

    def values(self, name: str) -> list[Any]:
        """Return the column's values as Python objects: None for null, lists for arrays."""
        index = [column.name for column in self.columns].index(name)
        column, values = self.columns[index], self.rows.columns[index]
        data: list[Any] = values.data.tolist()
        if column.type == "text":
            strings = self.dictionaries[name] or [""]  # a null's code is undefined
            data = [strings[code] for code in data]
        if values.offsets is None:
            return [None if null else value for null, value in zip(values.nulls, data, strict=True)]
        if values.element_nulls is not None:
            data = [None if null else value for null, value in zip(values.element_nulls, data, strict=True)]
        pairs = zip(values.nulls, values.offsets[:-1], values.offsets[1:], strict=True)
        return [None if null else data[start:stop] for null, start, stop in pairs]


class Recorder:
    """Feed queries to the recording trainer."""

    def __init__(self, cluster: Any, conn: Connection, folder: Path) -> None:
        self.cluster = cluster
        self.conn = conn
        self.folder = folder

    def job(self, query: str, target: str) -> int:
        row = self.conn.execute("SELECT train_model('recorder', %s, %s)", (query, target)).fetchone()
        assert row is not None
        return int(row[0])

    def end(self, job: int) -> tuple[str, str, str | None, str | None]:
        """Return SQLSTATE, message, hint and detail of the job, which has to fail."""
        with pytest.raises(psycopg.Error):
            self.conn.execute("SELECT wait_for_job(%s, '60 s')", (job,))
        row = self.conn.execute(
            "SELECT sqlstate, error, hint, detail FROM tensile.jobs WHERE job = %s", (job,)
        ).fetchone()
        assert row is not None
        return row

    def __call__(self, query: str, target: str = "y") -> Recording:
        job = self.job(query, target)
        _, message, _, detail = self.end(job)
        assert message == "recorded", (message, detail)
        return decode_frames(pickle.loads((self.folder / f"{job}.pickle").read_bytes()))


def decode_frames(frames: list[tuple[int, dict[str, Any], list[bytes]]]) -> Recording:
    types = [frame[0] for frame in frames]
    rows_frames = types.count(FrameType.ROWS)
    assert types == [FrameType.JOB, FrameType.COLUMNS, *[FrameType.ROWS] * rows_frames, FrameType.ROWS_END]
    columns = columns_from_header(frames[1][1]["columns"])
    chunks = [decode(columns, header["rows"], buffers) for _, header, buffers in frames[2:-1]]
    _, header, buffers = frames[-1]
    assert header["rows"] == sum(chunk.rows for chunk in chunks)
    text = [column.name for column in columns if column.type == "text"]
    assert len(buffers) == 2 * len(text)
    return Recording(
        columns,
        concatenate(chunks) if chunks else decode(columns, 0, empty_buffers(columns)),
        [chunk.rows for chunk in chunks],
        [sum(len(buffer) for buffer in buffers) for _, _, buffers in frames[2:-1]],
        {name: decode_dictionary(*buffers[2 * i : 2 * i + 2]) for i, name in enumerate(text)},
        header["fingerprint"],
    )


def empty_buffers(columns: list[Column]) -> list[bytes]:
    return [b""] * (1 + sum(4 if column.is_array else 2 for column in columns))


def install_recorder(cluster: Any, folder: Path) -> Path:
    """Create a folder that the server's user may write; return the script in it that replaces the children's Python."""
    folder.mkdir()
    shutil.copy(Path(__file__).parent / "recorder.py", folder)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{child_python()}" "{folder}/recorder.py" "{folder}"\n')
    script.chmod(0o755)
    shutil.chown(folder, cluster.os_user)
    return script


EPOCH = dt.datetime(2000, 1, 1)


def microseconds(value: dt.datetime | dt.date) -> int:
    if not isinstance(value, dt.datetime):
        value = dt.datetime.combine(value, dt.time())
    if value.tzinfo is not None:
        value = value.astimezone(dt.UTC).replace(tzinfo=None)
    return (value - EPOCH) // dt.timedelta(microseconds=1)
