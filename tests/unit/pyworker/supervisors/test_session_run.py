"""Waiting for a trainer of a session."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pyworker.supervisors import session_run
from pyworker.supervisors.evaluation import Result
from pyworker.supervisors.failures import Failure
from pyworker.wire import Frame, FrameType
from tests.unit.pyworker.supervisors.plpy import Plpy


class SilentChild:
    """A trainer whose frames are given."""

    def __init__(self, frames: Iterator[Frame | None]) -> None:
        self._frames = frames

    async def receive(self, seconds: float) -> Frame | None:
        return next(self._frames)


def finish(monkeypatch: pytest.MonkeyPatch, kind: str, frames: Iterator[Frame | None]) -> list[str]:
    """Wait for a result where each frame, or the wait for none, takes ten seconds; return the notices."""
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(session_run, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    plpy = Plpy()
    server: Any = session_run.Session(plpy)
    child: Any = SilentChild(frames)
    asyncio.run(session_run._finish(server, child, kind, Result()))
    return plpy.lines


LAST = Frame(FrameType.RESULT, 0, 0, {"rows": [], "last": True}, [])


def test_a_long_export_tells_so_at_times_that_double(monkeypatch):
    lines = finish(monkeypatch, "export_model", iter([*[None] * 30, LAST]))
    assert [line.split(" for ")[1] for line in lines] == ["30 s", "60 s", "120 s", "240 s"]
    assert finish(monkeypatch, "evaluate", iter([*[None] * 100, LAST])) == []


def test_an_export_has_a_limit(monkeypatch):
    with pytest.raises(Failure, match="not finished within 600 s") as caught:
        finish(monkeypatch, "export_model", itertools.repeat(None))
    assert caught.value.sqlstate == "54000" and "tensile or torch" in str(caught.value.hint)
