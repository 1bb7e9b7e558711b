"""The file with the rows of a tuning: whole or not there, and read as it was written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pg_tensile.errors import SpoolError
from pyworker.children.rows_file import RowsWriter, read_frames
from pyworker.wire import Decoder, Frame, FrameType, encode


def frames(rows: int = 3) -> list[Frame]:
    decoder = Decoder()
    for part in encode(FrameType.COLUMNS, 7, header={"columns": []}):
        decoder.feed(part)
    for number in range(rows):
        for part in encode(FrameType.ROWS, 7, header={"rows": number}, buffers=[bytes(number), b"x" * (1 << 20)]):
            decoder.feed(part)
    for part in encode(FrameType.ROWS_END, 7, header={"rows": rows, "fingerprint": "f"}):
        decoder.feed(part)
    return list(decoder)


def write(path: Path, written: list[Frame]) -> RowsWriter:
    writer = RowsWriter(str(path))
    for frame in written:
        writer.add(frame)
    return writer


def contents(found: list[Frame]) -> list[tuple[object, ...]]:
    return [(frame.type, frame.job, frame.header, [bytes(buffer) for buffer in frame.buffers]) for frame in found]


def test_frames_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    writer = write(path, frames())
    assert not path.exists()
    writer.finish()
    assert contents(list(read_frames(str(path)))) == contents(frames())
    assert path.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["rows"]


def test_the_first_of_two_writers_wins_and_one_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    write(path, frames(1)).close()
    assert os.listdir(tmp_path) == []
    first, second = write(path, frames(1)), write(path, frames(2))
    first.finish()
    second.finish()
    assert contents(list(read_frames(str(path)))) == contents(frames(1))


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "none" / "rows"
    write(path, frames()).finish()
    with pytest.raises(SpoolError, match="cannot be read"):
        list(read_frames(str(path)))


@pytest.mark.parametrize("kept", [0, 10, 1000])
def test_a_damaged_file_is_an_error(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "rows"
    write(path, frames()).finish()
    os.truncate(path, kept)
    with pytest.raises(SpoolError, match="end early"):
        list(read_frames(str(path)))
    path.write_bytes(b"nonsense" * 100)
    with pytest.raises(SpoolError, match="cannot be read"):
        list(read_frames(str(path)))
