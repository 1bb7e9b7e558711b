"""The coroutine of a background worker, stepped without a server."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pyworker.supervisors import supervisor
from pyworker.supervisors.server import Server
from pyworker.supervisors.supervisor import Wait
from tests.unit.pyworker.supervisors.plpy import Plpy


def test_a_supervisor_is_resumed_where_it_waits_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    async def run(plpy: Any) -> None:
        server = Server(plpy)
        for seconds in (0.0004, 2):
            seen.append(await server.wait(-1, seconds))
        seen.append(server.stopping)

    class Module:
        pass

    Module.run = staticmethod(run)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyworker.supervisors.play", Module)
    monkeypatch.setattr(supervisor, "_supervisor", None)
    plpy = Plpy()
    assert supervisor.step(plpy, "play", 0) == (-1, 1, False)
    assert supervisor.step(plpy, "play", 8) == (-1, 2000, False)
    assert supervisor.step(plpy, "play", 16) == supervisor.DONE
    assert supervisor.step(plpy, "play", 8) == supervisor.DONE
    assert seen == [Wait.TIMEOUT, Wait.STOP, True]
