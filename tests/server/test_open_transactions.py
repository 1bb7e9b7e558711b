"""Rows that open transactions hold: the processes that serve all jobs pass over them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.stage import CONTROLLER, processes
from tests.server.support import Wait, register, value

CLUSTER_SETTINGS = {"pg_tensile.job_retention": "1d"}

QUERY = "'SELECT 1.0 AS x, 2.0 AS y'"
JOB = f"SELECT train_model('m', {QUERY}, 'y')"
TUNING = f"SELECT tune_model('m', {QUERY}, 'y')"
VERSION = """
    INSERT INTO tensile_internal.model_versions (model_id, version, task, preprocessing, architecture, weight_bytes,
                                                 reference)
    SELECT id, 1, 'regression', '{"target": {"name": "y"}, "features": [{"name": "x", "kind": "numeric"}]}', '{}', 1,
           '{"columns": [{"counts": [1, 1]}]}' FROM tensile_internal.models
"""
#: By row that an open transaction holds: what makes it, what holds it, and the call of a process that serves all jobs
HELD = {
    "queued": (
        JOB,
        "SELECT cancel_job(job) FROM tensile.jobs",
        "SELECT job FROM tensile_internal._queue_next() WHERE NOT is_held",
    ),
    "queued, by the model": (
        JOB,
        "SELECT set_model_retention('m', 3)",
        "SELECT job FROM tensile_internal._queue_next() WHERE NOT is_held",
    ),
    "starting": (
        JOB,
        "SELECT set_job_priority(job, 3) FROM tensile.jobs",
        "SELECT tensile_internal._job_starting(job) FROM tensile.jobs",
    ),
    "orphan": (
        f"{JOB}; UPDATE tensile_internal.jobs SET state = 'running'",
        "SELECT drop_model('m')",
        "SELECT tensile_internal._reap(job, 'r', true) FROM tensile.jobs",
    ),
    "terminated": (
        f"{JOB}; UPDATE tensile_internal.jobs SET state = 'running'",
        "SELECT cancel_job(job) FROM tensile.jobs",
        "SELECT tensile_internal._reap_terminated(job, 'r') FROM tensile.jobs",
    ),
    "waiting": (
        f"{JOB}; UPDATE tensile_internal.jobs SET state = 'waiting'",
        "SELECT cancel_job(job) FROM tensile.jobs",
        "SELECT tensile_internal._job_waits(job, 'r') FROM tensile.jobs",
    ),
    "expired": (
        f"{JOB}; UPDATE tensile_internal.jobs SET state = 'cancelled', ended_at = '2001-01-01'",
        "SELECT set_job_priority(job, 3) FROM tensile.jobs",
        "SELECT tensile_internal._forget_jobs()",
    ),
    "schedule": (
        f"SELECT schedule_training('m', {QUERY}, 'y', every => '1 day');"
        " UPDATE tensile_internal.schedules SET next_run = '2001-01-01'",
        "SELECT unschedule_training('m')",
        "SELECT tensile_internal._run_schedule(id) FROM tensile_internal.schedules",
    ),
    "evaluation": (
        f"{VERSION}; UPDATE tensile_internal.models SET deployed_version = 1;"
        f" SELECT schedule_evaluation('m', {QUERY}, every => '1 day');"
        " UPDATE tensile_internal.evaluation_schedules SET next_run = '2001-01-01'",
        "SELECT unschedule_evaluation('m')",
        "SELECT tensile_internal._run_evaluation(id) FROM tensile_internal.evaluation_schedules",
    ),
    "tuning": (
        TUNING,
        "SELECT cancel_tuning(id) FROM tensile_internal.tunings",
        "SELECT tensile_internal._advance_tuning(id, 1) FROM tensile_internal.tunings",
    ),
    "tuning, by the model": (
        TUNING,
        "SELECT set_model_retention('m', 3)",
        "SELECT tensile_internal._advance_tuning(id, 1) FROM tensile_internal.tunings",
    ),
    "drift": (
        VERSION,
        "SELECT drop_model_version('m', 1)",
        "SELECT tensile_internal._count_drift(version_id, 2, '{1, 1}') FROM tensile.model_versions",
    ),
}
EVERYTHING = """
    SELECT (SELECT jsonb_agg(to_jsonb(j) ORDER BY id) FROM tensile_internal.jobs j),
           (SELECT jsonb_agg(to_jsonb(s)) FROM tensile_internal.schedules s),
           (SELECT jsonb_agg(to_jsonb(s)) FROM tensile_internal.evaluation_schedules s),
           (SELECT jsonb_agg(to_jsonb(t)) FROM tensile_internal.tunings t),
           (SELECT jsonb_agg(to_jsonb(t)) FROM tensile_internal.trials t),
           (SELECT jsonb_agg(to_jsonb(d)) FROM tensile_internal.drift_counts d)
"""


@pytest.fixture
def idle(module_cluster: Any, wait_until: Wait) -> Iterator[Any]:
    """A cluster whose controller is stopped, outside of a transaction, so that only the test calls its functions."""
    with module_cluster.connect() as conn:
        wait_until(lambda: CONTROLLER in processes(conn))
        pid, _ = processes(conn)[CONTROLLER]

        def stopped() -> bool:
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            if value(conn, "SELECT xact_start IS NULL FROM pg_stat_activity WHERE pid = %s", pid):
                return True
            os.kill(pid, signal.SIGCONT)
            return False

        wait_until(stopped)
        try:
            yield module_cluster
            conn.execute(
                "DELETE FROM tensile_internal.tunings; DELETE FROM tensile_internal.jobs;"
                " DELETE FROM tensile_internal.models"
            )
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(("prepare", "hold", "call"), HELD.values(), ids=HELD)
def test_an_open_transaction_holds_nobody_else_up(idle: Any, prepare: str, hold: str, call: str) -> None:
    with idle.connect() as conn, idle.connect() as other:
        register(conn, "m")
        conn.execute(prepare)
        before = conn.execute(EVERYTHING).fetchone()
        conn.execute("SET statement_timeout = '20 s'")
        with other.transaction(force_rollback=True):
            other.execute(hold)
            answer = conn.execute(call).fetchall()
            assert answer in ([], [(None,)], [("",)], [(False,)])
            assert conn.execute(EVERYTHING).fetchone() == before
        assert conn.execute(call).fetchall() != answer or conn.execute(EVERYTHING).fetchone() != before
