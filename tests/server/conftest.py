"""Fixtures of the tests that order scheduler and workers about (stage.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.stage import Stage, Wait
from tests.server.support import value


@pytest.fixture(scope="module")
def stage(new_cluster: Callable[..., Any], wait_until: Wait) -> Iterator[Stage]:
    stage = Stage(new_cluster({"pg_tensile.plan_events": 1024, "pg_tensile.device_memory": "1GB"}), wait_until)
    yield stage
    stage.close()


@pytest.fixture
def job(stage: Stage) -> Iterator[int]:
    job = stage.job()
    yield job
    if value(stage.conn, "SELECT ended_at IS NULL FROM tensile.jobs WHERE id = %s", job):
        stage.end(job)
