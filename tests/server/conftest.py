"""Fixtures of several files: a stage (stage.py), where tests direct scheduler and workers, and a lab (pressure.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.pressure import Lab
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


@pytest.fixture(scope="module")
def module_cluster(request: pytest.FixtureRequest, new_cluster: Callable[..., Any]) -> Iterator[Any]:
    """Cluster of a test module, with the settings of its CLUSTER_SETTINGS, if it has any."""
    cluster = new_cluster(getattr(request.module, "CLUSTER_SETTINGS", None))
    yield cluster
    cluster.end()


@pytest.fixture(scope="session")
def shared_lab(new_cluster: Callable[..., Any], wait_until: Wait) -> Iterator[Lab]:
    cluster = new_cluster()
    lab = Lab(cluster, wait_until)
    yield lab
    lab.conn.close()
    cluster.end()


@pytest.fixture(scope="module")
def lab(shared_lab: Lab) -> Lab:
    """The lab of this xdist worker, with its first settings and without jobs."""
    shared_lab.reset()
    return shared_lab
