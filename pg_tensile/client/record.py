"""The complete record of a job, read in one transaction: the input of reports and trace files (tools/report)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.client.connection import Connection, no_such_job
from pg_tensile.client.evaluation import Evaluation, evaluate
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.simulator.simulator import SimulatedJob, Timeline, simulate
from pg_tensile.planning.trace.trace import Trace

Row = dict[str, Any]

JOB = """
    SELECT j.*, coalesce(t.device, '') AS device, t.policy AS planned_policy, t.vanilla_bytes, t.least_bytes,
           t.largest_operator, t.overhead_bytes, t.persistent_bytes, t.parameters, t.captured_at,
           coalesce(j.architecture, m.architecture) AS architecture, k.number AS trial, t.alone_us,
           (SELECT format('%%s of "%%s", of %%s rows', round(d.psi::numeric, 2), d.column_name, d.rows)
            FROM tensile.model_versions v JOIN tensile.drift d USING (model, version)
            WHERE v.job = j.job AND d.drifted IS NOT NULL ORDER BY d.psi DESC, d.column_name LIMIT 1) AS drift
    FROM tensile.jobs j LEFT JOIN tensile.trials k ON k.job = j.job
         LEFT JOIN tensile.traces t ON t.job = j.job LEFT JOIN tensile.models m ON m.model_id = j.model_id
    WHERE j.job = %s
"""
VERSIONS = """
    SELECT 'PostgreSQL' AS name, current_setting('server_version') AS version
    UNION ALL SELECT 'pg_tensile', extversion FROM pg_catalog.pg_extension WHERE extname = 'pg_tensile'
"""
NOT_NUMBERS = ("job", "trace", "average", "profile", "events", "plan_order", "groups")
# The jobs of a device whose memory flows, and the memory that they share
FLOW_JOBS = """
    SELECT job, j.model
    FROM tensile.plans f JOIN tensile.jobs j USING (job) JOIN tensile.traces t USING (job)
    WHERE t.device = %s AND f.groups <> '' AND j.ended_at IS NULL ORDER BY job
"""
FLOW_BYTES = """
    SELECT budget_bytes - inference_bytes - granted_bytes + flowing_bytes AS shared_bytes, flowing_jobs
    FROM tensile.devices WHERE name = %s AND flowing_jobs > 1
"""
SETTINGS = """
    SELECT name, current_setting(name) AS value FROM pg_catalog.pg_settings
    WHERE starts_with(name, 'pg_tensile.') ORDER BY name
"""


@dataclass(frozen=True, eq=False)
class Planned:
    """The newest plan of a job, with the job's newest trace. Arrays have one entry for each of the s steps of an
    iteration under the plan.

    `trace` has the moving averages of the measured latencies; `numbers` are the columns of tensile.plans
    (iteration_us, vanilla_us, planned_bytes, granted_bytes, host_bytes, out_bytes, in_bytes, stall_us, recomputes).
    """

    trace: Trace
    plan: Plan
    profile: DeviceProfile  # of the device, with the share of its link that the plan counts on
    operators: NDArray[np.int32]  # [s] operator that each step executes
    planned_bytes: NDArray[np.int64]  # [s] on the device, workspaces included
    vanilla_bytes: NDArray[np.int64]  # [s] at the same operators without a plan
    numbers: Row
    groups: bytes = b""  # of a job whose memory flows, rows of GROUP_ROW; empty if its grant is constant

    def timeline(self) -> Timeline:
        """Simulate an iteration under the plan, alone on the link.

        Raises InvalidPlanError if the job has sent another trace since the plan was made."""
        return simulate([SimulatedJob(self.trace, self.plan)], self.profile)[0]

    def vanilla(self) -> Timeline:
        """Simulate an iteration without a plan."""
        return simulate([SimulatedJob(self.trace)], self.profile)[0]


class MemoryFlowPlan(NamedTuple):
    """The plan of a job whose memory flows."""

    job: int
    model: str
    planned: Planned


class MemoryFlowRecord(NamedTuple):
    """Jobs whose memory flows between them: those that the role may see, and the number of the others."""

    nbytes: int
    jobs: list[MemoryFlowPlan]
    hidden_jobs: int = 0


@dataclass(frozen=True, eq=False)
class JobRecord:
    """A job in one snapshot of the database.

    `planned` is None for a job without a plan: it is executed eagerly, it still waits for a plan, or the plan of a
    later job of the same model has replaced it (the database keeps only the last one)."""

    read_at: datetime
    job: Row  # of tensile.jobs and, once captured, tensile.traces; with the model's present architecture
    progress: Row | None  # of tensile.progress; None if the job has ended
    ranks: list[Row]  # of tensile.ranks, by rank; empty if the job has ended, or trains here
    metrics: list[Row]  # of tensile.epoch_metrics, by epoch and split
    latency: list[Row]  # of tensile.latency, by operator; operators that never ran have None
    tensors: list[Row]  # of tensile.tensors, by tensor
    log: list[Row]  # of tensile.scheduler_log, of this job, oldest first
    planned: Planned | None
    settings: dict[str, str]  # pg_tensile.*, as the connection has them now
    versions: dict[str, str]
    evaluation: Evaluation | None = None  # None if no rows were given
    memory_flow: MemoryFlowRecord | None = None  # with other jobs; None if the job's memory does not flow now


def read_job(connection: Connection, job: int, query: str | None = None) -> JobRecord:
    """Return the record of a job, read in one read-only transaction; the version that the job has trained is evaluated
    on the rows of `query`, unless that is None.

    Raises ServerError if the job does not exist, the role may not see it or it has no version to evaluate, and
    psycopg.Error."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")

        def rows(sql: str) -> list[Row]:
            return connection.execute(sql, (job,)).fetchall()

        jobs = rows(JOB)
        if not jobs:
            raise no_such_job(job)
        now = connection.execute("SELECT clock_timestamp() AS now").fetchone()
        assert now is not None
        progress = rows("SELECT * FROM tensile.progress WHERE job = %s")
        log = rows("SELECT * FROM tensile.scheduler_log WHERE job = %s ORDER BY id")
        return JobRecord(
            read_at=now["now"],
            job=jobs[0],
            progress=progress[0] if progress else None,
            ranks=rows("SELECT * FROM tensile.ranks WHERE job = %s ORDER BY rank"),
            metrics=rows("SELECT * FROM tensile.epoch_metrics WHERE job = %s ORDER BY epoch, split"),
            latency=rows("SELECT * FROM tensile.latency WHERE job = %s ORDER BY operator"),
            tensors=rows("SELECT * FROM tensile.tensors WHERE job = %s ORDER BY tensor"),
            log=log,
            planned=_planned(connection, job, log),
            settings={row["name"]: row["value"] for row in connection.execute(SETTINGS)},
            versions={row["name"]: row["version"] for row in connection.execute(VERSIONS)},
            evaluation=None if query is None else evaluate(connection, jobs[0], query),
            memory_flow=_memory_flow(connection, jobs[0]),
        )


def _memory_flow(connection: Connection, job: Row) -> MemoryFlowRecord | None:
    """Return the jobs between which memory flows, this one among them; None if its grant is constant."""
    if job["ended_at"] is not None or not job["device"]:
        return None
    sizes = connection.execute(FLOW_BYTES, (job["device"],)).fetchall()
    listed = connection.execute(FLOW_JOBS, (job["device"],)).fetchall()
    if not sizes or job["job"] not in [row["job"] for row in listed]:
        return None
    log = "SELECT * FROM tensile.scheduler_log WHERE job = %s ORDER BY id"
    plans = [
        MemoryFlowPlan(row["job"], row["model"], planned)
        for row in listed
        if (planned := _planned(connection, row["job"], connection.execute(log, (row["job"],)).fetchall())) is not None
    ]
    hidden = max(0, sizes[0]["flowing_jobs"] - len(listed))
    return MemoryFlowRecord(sizes[0]["shared_bytes"], plans, hidden)


def _planned(connection: Connection, job: int, log: list[Row]) -> Planned | None:
    row = connection.execute(
        "SELECT f.*, t.traces[1] AS trace, coalesce(t.profile, p.profile) AS profile,"
        " (SELECT array_agg(average_us ORDER BY operator) FROM tensile.latency l WHERE l.job = f.job) AS average"
        " FROM tensile.plans f JOIN tensile.traces t USING (job)"
        " LEFT JOIN tensile.device_profiles p ON p.device = t.device WHERE f.job = %s",
        (job,),
    ).fetchone()
    if row is None or row["trace"] is None or row["profile"] is None:
        return None
    trace = Trace.from_bytes(row["trace"])
    average = np.array(row["average"] or [], np.float64)
    if len(average) == trace.operator_count:
        measured = np.isfinite(average) & (average >= 0)
        trace = trace.with_latencies(np.where(measured, average, trace.latency_us))
    numbers = {name: row[name] for name in row if name not in NOT_NUMBERS}
    arrays = [np.array(numbers.pop(name)) for name in ("operators", "planned", "vanilla")]
    return Planned(
        trace,
        Plan.from_rows(row["events"], row["generation"], row["plan_order"]),
        _with_share(DeviceProfile.from_json(row["profile"]), log, row["generation"]),
        arrays[0].astype(np.int32),
        arrays[1].astype(np.int64),
        arrays[2].astype(np.int64),
        numbers,
        row["groups"],
    )


def _with_share(profile: DeviceProfile, log: list[Row], generation: int) -> DeviceProfile:
    """Return the profile with the share of the link that the plan of that generation counts on."""
    planned = [line for line in log if line["event"] == "planned" and line["generation"] == generation]
    share = float(planned[-1]["details"]["link_share"]) if planned else 1.0
    return profile.with_share(share)
