"""The file of the rows: complete at any time."""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pg_tensile.errors import OptionError
from pg_tensile.tools.bench.row import Row
from pg_tensile.tools.bench.row_file import RowFile

FIRST, SECOND = (Row("net", "joint", "host", 8, rounds_taken=taken) for taken in (0, 1))


def taken(path: Path) -> list[int]:
    return [json.loads(line)["rounds_taken"] for line in path.read_text().splitlines()]


def test_the_rows_take_the_place_of_the_former(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    file = RowFile(str(path))
    file.keep([FIRST, FIRST])
    assert taken(path) == [0, 0] and not file.has_rounds
    before = path.open()
    file.keep([SECOND])
    assert taken(path) == [1] and file.has_rounds
    assert len(before.readlines()) == 2  # of the former file, which nothing has changed
    before.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.json"]


def test_rows_that_cannot_be_written_leave_the_former(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    file = RowFile(str(path))
    file.write([SECOND])

    def full(*arguments: Any) -> Any:
        opened = real(*arguments)
        opened.writelines = lambda lines: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        return opened

    real = builtins.open
    monkeypatch.setattr("pg_tensile.tools.bench.row_file.open", full, raising=False)
    with pytest.raises(OptionError, match="No space left on device"):
        file.write([FIRST])
    assert taken(path) == [1] and [entry.name for entry in tmp_path.iterdir()] == ["rows.json"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "rows.json"
    link.symlink_to(target)
    RowFile(str(link)).write([SECOND])
    assert link.is_symlink() and taken(target) == [1]


def test_a_pipe_gets_the_last_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    kept_open = os.open(path, os.O_RDWR)  # so that neither end waits for the other
    file = RowFile(str(path))
    file.keep([FIRST])
    file.write([SECOND])
    found = os.read(kept_open, 1 << 16)
    os.close(kept_open)
    assert [json.loads(line)["rounds_taken"] for line in found.splitlines()] == [1]
