"""Device memory besides tensors that jobs have measured: what the catalogue keeps, and what later jobs expect.

Workers execute SQL of the tests (stage.py), as they do when their trainer reports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.stage import Stage
from tests.server.support import MLP, value
from tests.server.test_traces import FIRST, literal, trace

MEASURED = "SELECT tensile_worker._job_overheads() AS measured"


@pytest.fixture
def jobs(stage: Stage) -> Iterator[list[int]]:
    stage.conn.execute("DELETE FROM tensile_internal.traces")
    jobs = [stage.job(), stage.job("n")]
    yield jobs
    for job in jobs:
        stage.cancel(job)
    use(stage, "m", MLP)


def measured(stage: Stage, job: int) -> list[dict[str, Any]]:
    answer: list[dict[str, Any]] = json.loads(stage.order(job, MEASURED)[0]["measured"])
    return answer


def use(stage: Stage, model: str, architecture: dict[str, Any]) -> None:
    sql = "UPDATE tensile_internal.models SET architecture = %s WHERE name = %s"
    stage.conn.execute(sql, (json.dumps(architecture), model))


def test_what_a_trainer_has_measured_replaces_what_was_expected(stage: Stage, jobs: list[int]) -> None:
    job, other = jobs
    report = {"overhead_bytes": 500, "overhead_measured": True, "limited_by": "allocator"}
    shown = "SELECT overhead_bytes, overhead_measured, limited_by FROM tensile.traces WHERE job = %s"
    trace(stage, job, device="cuda:0", torch="2.13.0")
    assert stage.alice.execute(shown, (job,)).fetchone() == (FIRST["overhead_bytes"], False, None)
    assert measured(stage, other) == []
    stage.woken("scheduler", lambda: stage.order(job, f"SELECT tensile_worker._job_overhead({literal(report)})"))
    assert stage.alice.execute(shown, (job,)).fetchone() == (500, True, "allocator")
    listed = "SELECT overhead_bytes FROM tensile_internal._schedule_jobs()"
    assert stage.order("scheduler", listed) == [{"overhead_bytes": 500}]
    alike = {"device": "cuda:0", "torch": "2.13.0", "network": "mlp"}
    assert measured(stage, other) == [alike | {"bytes": 500}]
    trace(stage, other, device="cuda:0", torch="2.13.0", overhead_bytes=700, overhead_measured=True)
    assert measured(stage, job) == [alike | {"bytes": 700}], "the most counts"
    trace(stage, other, device="cuda:0", torch="2.12.0", overhead_bytes=700, overhead_measured=True)
    assert [entry["torch"] for entry in measured(stage, job)] == ["2.12.0", "2.13.0"]


@pytest.mark.parametrize(
    ("architecture", "network"),
    [
        ({"type": "tabular"}, "tabular"),
        ({"type": "ensemble"}, "tabular"),
        ({"type": "ensemble", "members": ["linear", "mlp"]}, "mlp"),
    ],
)
def test_an_ensemble_counts_as_its_network(
    stage: Stage, jobs: list[int], architecture: dict[str, Any], network: str
) -> None:
    job, other = jobs
    use(stage, "m", architecture)
    trace(stage, job, device="cuda:0", torch="2.13.0", overhead_measured=True)
    assert [entry["network"] for entry in measured(stage, other)] == [network]


def test_code_of_users_counts_for_its_own_model_only(stage: Stage, jobs: list[int]) -> None:
    job, other = jobs
    use(stage, "m", {"type": "python", "source": ""})
    trace(stage, job, device="cuda:0", torch="2.13.0", overhead_bytes=1 << 20, overhead_measured=True)
    assert [entry["bytes"] for entry in measured(stage, job)] == [1 << 20]
    assert measured(stage, other) == []
    assert value(stage.conn, "SELECT tensile_internal._measured_overheads(NULL)") == [], "nor for the predictor"


def test_impossible_numbers_count_for_no_other_job(stage: Stage, jobs: list[int]) -> None:
    job, other = jobs
    trace(stage, job, device="cuda:0", torch="2.13.0", overhead_bytes=5 << 30, overhead_measured=True)
    assert measured(stage, other) == []
    trace(stage, job, device="cuda:0", torch="2.13.0", overhead_bytes=4 << 30, overhead_measured=True)
    assert [entry["bytes"] for entry in measured(stage, other)] == [4 << 30]


def test_devices_of_a_cluster_are_not_this_machines(stage: Stage, jobs: list[int]) -> None:
    job, other = jobs
    trace(stage, job, device=f"ray:{job}", torch="2.13.0", overhead_measured=True)
    assert measured(stage, other) == []
