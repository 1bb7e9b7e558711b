"""The trainer's end of its connection: what it reports while it waits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from pg_tensile.planning.latency.load import LoadMeter
from pyworker.children import channel
from pyworker.children.channel import Channel
from pyworker.connection import Connection
from pyworker.wire import Frame, FrameType


class Silent:
    """A connection that is sent a PLAN after three signs of life."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.closed = False

    def queue(self, type: FrameType, job: int, header: dict[str, Any]) -> None:
        assert type == FrameType.PROGRESS
        self.reports.append(header)

    def flush(self) -> bool:
        return True

    def recv(self, seconds: float) -> Frame | None:
        return Frame(FrameType.PLAN, 1, 0, {}, []) if len(self.reports) == 3 else None


class Meter:
    def __init__(self, *loads: float) -> None:
        self._loads = iter(loads)

    def read(self) -> float:
        return next(self._loads)


def test_a_job_that_waits_for_memory_reports_the_load_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "REPORT_INTERVAL_S", 0.0)
    connection = Silent()
    ours = Channel(cast(Connection, connection), cast(ThreadPoolExecutor, None))
    ours.load = cast(LoadMeter, Meter(0.25, 0.123456))
    ours._report_phase("capturing")
    assert ours.wait_for_frame("waiting", {FrameType.PLAN}).type == FrameType.PLAN
    assert connection.reports == [
        {"phase": "capturing"},
        {"phase": "waiting", "utilisation": 0.25},
        {"phase": "waiting", "utilisation": 0.123},
    ]
