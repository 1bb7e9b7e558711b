"""A snapshot of a server's activity, read in one round trip: devices, open jobs and, derived from them, the queue.

The query is one prepared statement with one row. It reads open jobs only, and no column of their plans and traces that
is stored out of line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from pg_tensile.client.connection import Connection

WAITING = ("waiting", "queued", "interrupted")  # states of waiting: for device memory, for a slot, for the next attempt

SNAPSHOT = """
    SELECT extract(epoch FROM clock_timestamp())::float8 AS at,
           extract(epoch FROM current_setting('pg_tensile.ageing', true)::interval)::float8 AS ageing_s,
           pg_has_role('pg_read_all_stats', 'USAGE') AS sees_all,
           (SELECT json_agg(d) FROM (
                SELECT name, total_bytes, budget_bytes, granted_bytes, in_use_bytes, inference_bytes, jobs,
                       out_bytes_per_s, in_bytes_per_s, utilisation, flowing_jobs, flowing_bytes
                FROM tensile.devices ORDER BY name) d) AS devices,
           (SELECT json_agg(o) FROM (
                SELECT p.job, left(p.model, 200) AS model, p.owner, j.kind, p.state, left(p.reason, 2000) AS reason,
                       j.priority, coalesce(t.policy, j.policy) AS policy, t.device,
                       coalesce(j.chosen_batch_size, j.batch_size) AS batch_size, j.attempts,
                       extract(epoch FROM j.submitted_at)::float8 AS submitted_at,
                       extract(epoch FROM j.started_at)::float8 AS started_at,
                       extract(epoch FROM j.not_before)::float8 AS not_before,
                       extract(epoch FROM p.heartbeat)::float8 AS heartbeat_at,
                       p.pid, p.phase, p.epoch, p.epochs, p.step, p.steps, p.loss, p.samples_per_s,
                       extract(epoch FROM p.time_left)::float8 AS time_left_s,
                       extract(epoch FROM p.least_time_left)::float8 AS least_time_left_s,
                       p.slowdown, p.max_slowdown, p.measured_slowdown,
                       p.device_bytes, p.device_peak_bytes, f.planned_bytes, f.granted_bytes, t.vanilla_bytes,
                       p.bytes_swapped, p.stall_us / 1e6::float8 AS stall_s, p.passive_swap_ins, p.plan_generation
                FROM tensile.progress p
                     JOIN tensile.jobs j ON j.job = p.job
                     LEFT JOIN tensile.traces t ON t.job = p.job
                     LEFT JOIN tensile.plans f ON f.job = p.job
                ORDER BY p.job) o) AS jobs,
           (SELECT json_agg(a) FROM (
                SELECT left(d.model, 200) AS model, d.version, d.column_name, d.psi, d.threshold,
                       extract(epoch FROM d.at)::float8 AS at
                FROM tensile.drift_alarms d
                     JOIN tensile.models m ON m.model = d.model AND m.deployed_version = d.version
                ORDER BY d.psi DESC, d.model) a) AS drifted,
           (SELECT json_agg(t) FROM (
                SELECT tuning, left(model, 200) AS model, owner, state, trials, ended, running, pruned, metric,
                       best_trial, best_value, extract(epoch FROM started_at)::float8 AS started_at
                FROM tensile.tunings WHERE ended_at IS NULL ORDER BY tuning) t) AS tunings
"""
EPOCHS = """
    SELECT o.job, m.epoch::float8 AS done, m.loss, extract(epoch FROM m.at)::float8 AS at
    FROM unnest(%s::bigint[]) o (job) CROSS JOIN LATERAL (
        SELECT x.epoch, x.loss, x.at FROM tensile.epoch_metrics x
        WHERE x.job = o.job AND x.split = 'training' ORDER BY x.epoch DESC LIMIT 200) m
    ORDER BY o.job, m.epoch
"""


@dataclass(frozen=True)
class Device:
    """A row of tensile.devices; None means not known yet."""

    name: str
    total_bytes: int | None
    budget_bytes: int | None
    granted_bytes: int  # granted to jobs
    in_use_bytes: int  # held by jobs between their steps
    inference_bytes: int  # taken by the predictor
    jobs: int  # of all roles
    out_bytes_per_s: float | None
    in_bytes_per_s: float | None
    utilisation: float | None  # load by other programs, 0 to 1
    flowing_jobs: int = 0  # whose memory flows
    flowing_bytes: int = 0  # which they hold now; a part of granted_bytes


@dataclass(frozen=True)
class Job:
    """An open job. Live numbers are None until its trainer has reported them; moments are in seconds since 1970."""

    job: int
    model: str
    owner: str
    kind: str  # train or calibrate
    state: str
    reason: str | None
    priority: int
    policy: str | None
    device: str | None
    batch_size: int | None  # None: to be chosen
    attempts: int
    submitted_at: float
    started_at: float | None
    not_before: float | None  # earliest start of the next attempt of an interrupted job
    heartbeat_at: float | None
    pid: int | None
    phase: str | None
    epoch: int | None  # from 1
    epochs: int
    step: int | None  # of this epoch's `steps`, done so far
    steps: int | None
    loss: float | None  # mean of the epoch so far
    samples_per_s: float | None
    time_left_s: float | None  # if nothing ends it early
    least_time_left_s: float | None  # if nothing improves any more
    slowdown: float | None  # of a step by the plan, as expected
    max_slowdown: float | None  # by the plan, as promised
    measured_slowdown: float | None  # of a step, whatever the reason
    device_bytes: int | None  # held between two steps
    device_peak_bytes: int | None
    planned_bytes: int | None
    granted_bytes: int | None
    vanilla_bytes: int | None  # peak without a plan
    bytes_swapped: int | None  # both ways, since its trainer started, as the next two
    stall_s: float | None
    passive_swap_ins: int | None
    plan_generation: int | None

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def may_stop_early(self) -> bool:
        return (self.least_time_left_s or 0.0) < (self.time_left_s or 0.0)

    @property
    def done(self) -> float | None:
        """Epochs done, with the fraction of the current one; None before its first step is reported."""
        if self.step is None or not self.steps:
            return None
        return min(max(self.epoch or 1, 1) - 1 + min(1.0, self.step / self.steps), float(self.epochs))

    @property
    def memory_bytes(self) -> int | None:
        """Device memory of its steps: as planned, or without a plan the highest measured so far."""
        return self.device_peak_bytes if self.planned_bytes is None else self.planned_bytes

    @property
    def progress(self) -> float | None:
        """Share of all epochs that is done, from 0 to 1; None if not known."""
        return None if self.done is None or not self.epochs else self.done / self.epochs


@dataclass(frozen=True)
class Drift:
    """A deployed version whose predicted rows have drifted from its training rows, and the column that has most."""

    model: str
    version: int
    column_name: str
    psi: float
    threshold: float
    at: float  # when the threshold was exceeded, in seconds since 1970


@dataclass(frozen=True)
class Tuning:
    """An open tuning: fields of tensile.tunings."""

    tuning: int
    model: str
    owner: str
    state: str
    trials: int  # to be made
    ended: int
    running: int
    pruned: int
    metric: str | None
    best_trial: int | None
    best_value: float | None
    started_at: float | None  # seconds since 1970


@dataclass(frozen=True)
class Snapshot:
    at: float  # the server's clock, seconds since 1970
    ageing_s: float | None  # seconds of waiting that raise the priority by one
    sees_all: bool  # whether it has the jobs of all roles
    devices: tuple[Device, ...]
    jobs: tuple[Job, ...]  # by number
    drifted: tuple[Drift, ...] = ()
    tunings: tuple[Tuning, ...] = ()  # by number

    def queue(self) -> list[Job]:
        """Return the waiting jobs, in the order in which they would be started now."""
        return sorted((job for job in self.jobs if job.waits), key=self._turn)

    def _turn(self, job: Job) -> tuple[bool, bool, float, float, int]:
        """Return the sort key of a waiting job.

        Jobs that wait for memory come first, as they have started already; interrupted jobs whose retry time is in the
        future come last."""
        later = job.not_before is not None and job.not_before > self.at
        return job.state != "waiting", later, -self.aged_priority(job), job.submitted_at, job.job

    def aged_priority(self, job: Job) -> float:
        return job.priority + ((self.at - job.submitted_at) / self.ageing_s if self.ageing_s else 0.0)

    def waited_s(self, job: Job) -> float:
        """Return the seconds since the job was submitted."""
        return max(0.0, self.at - job.submitted_at)

    def retry_in_s(self, job: Job) -> float | None:
        """Return the seconds until an interrupted job may start again, or None if it may now."""
        return None if job.not_before is None or job.not_before <= self.at else job.not_before - self.at

    def silent_s(self, job: Job) -> float | None:
        """Return the seconds since the job's last heartbeat, or None if it has sent none yet."""
        return None if job.heartbeat_at is None else max(0.0, self.at - job.heartbeat_at)


def read(connection: Connection) -> Snapshot:
    """Return a snapshot of the server. Raises psycopg.Error."""
    row = connection.execute(SNAPSHOT, prepare=True).fetchone()
    assert row is not None
    return Snapshot(
        row["at"],
        row["ageing_s"],
        row["sees_all"],
        tuple(Device(**_finite(values)) for values in row["devices"] or ()),
        tuple(Job(**_finite(values)) for values in row["jobs"] or ()),
        tuple(Drift(**values) for values in row["drifted"] or ()),
        tuple(Tuning(**_finite(values)) for values in row["tunings"] or ()),
    )


class Epoch(NamedTuple):
    """A completed epoch. `done`: epochs done at its end; `at`: its end, in seconds since 1970."""

    done: float
    loss: float
    at: float


def read_epochs(connection: Connection, jobs: list[int]) -> dict[int, list[Epoch]]:
    """Return the last epochs of each of the jobs, at most 200, in order. Raises psycopg.Error."""
    epochs_of: dict[int, list[Epoch]] = {}
    for row in connection.execute(EPOCHS, (jobs,)):
        if row["loss"] is not None and math.isfinite(row["loss"]):
            epochs_of.setdefault(row["job"], []).append(Epoch(row["done"], row["loss"], row["at"]))
    return epochs_of


NUMBERS = {field.name for kind in (Device, Job, Tuning) for field in fields(kind) if "float" in str(field.type)}


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with None for NaN and infinities, which PostgreSQL writes as text because JSON lacks them."""
    return {name: None if name in NUMBERS and isinstance(value, str) else value for name, value in row.items()}
