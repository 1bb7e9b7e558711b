"""A job as an object: its state and progress, its measurements, and its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING
from warnings import warn

from psycopg.pq import TransactionStatus

from pg_tensile.client.bar import ENDED, Bar
from pg_tensile.client.calls import ArgumentError, converted
from pg_tensile.client.connection import ServerError, no_such_job
from pg_tensile.client.frames import FOOTPRINT, LATENCY, METRICS, PLAN, RANKS, frame
from pg_tensile.client.session import Row, Session
from pg_tensile.errors import TensileError, noted
from pg_tensile.extras import needing

if TYPE_CHECKING:
    import pandas as pd

    from pg_tensile.client.record import JobRecord

INTERVAL_S = 0.25  # between two queries of a job's state
LOOK = """
    SELECT j.state, j.reason, j.version, j.epochs, j.sqlstate, j.error, j.hint, j.detail, j.traceback, j.warnings,
           p.phase, p.epoch, p.step, p.steps, p.loss, p.samples_per_s,
           extract(epoch FROM p.time_left)::float8 AS time_left_s,
           extract(epoch FROM p.least_time_left)::float8 AS least_time_left_s
    FROM tensile.jobs j LEFT JOIN tensile.progress p ON p.job = j.job WHERE j.job = %s
"""
PLANNED = """
    SELECT f.generation, f.events, f.plan_order,
           (SELECT jsonb_object_agg(t.tensor, jsonb_build_array(t.name, t.kind)) FROM tensile.tensors t
            WHERE t.job = f.job) AS tensors,
           (SELECT jsonb_object_agg(o.operator, o.target) FROM tensile.operators o WHERE o.job = f.job) AS operators
    FROM tensile.plans f WHERE f.job = %s
"""
SUMMARY = """
    SELECT j.state, j.reason, j.error, j.epochs, coalesce(j.chosen_batch_size, nullif(j.batch_size, 0)) AS batch_size,
           coalesce(j.chosen_learning_rate, j.learning_rate) AS learning_rate,
           m.epoch, m.split, m.loss, m.accuracy, m.rmse, t.vanilla_bytes,
           f.planned_bytes, j.kept_epoch, j.stopped, j.baseline,
           (SELECT max(e.epoch) FROM tensile.epoch_metrics e WHERE e.job = j.job) AS last_epoch,
           array_to_string(j.warnings, '; ') AS warnings
    FROM tensile.jobs j
         LEFT JOIN LATERAL (SELECT * FROM tensile.epoch_metrics x WHERE x.job = j.job
                            ORDER BY x.epoch IS NOT DISTINCT FROM j.kept_epoch DESC, x.epoch DESC, x.split DESC
                            LIMIT 1) m ON true
         LEFT JOIN tensile.traces t ON t.job = j.job LEFT JOIN tensile.plans f ON f.job = j.job
    WHERE j.job = %s
"""


class TrainingFailed(TensileError):
    """Error of a failed job: message, hint and detail are the job's own, as `wait_for_job` would raise them in SQL.

    `traceback` is that of the training process, or None if the error did not occur there."""

    def __init__(self, job: int, row: Row) -> None:
        super().__init__(row["error"] or f"job {job} has failed", row["hint"], row["detail"])
        self.job = job
        self.sqlstate: str | None = row["sqlstate"]
        self.traceback: str | None = row["traceback"]


class JobWarning(UserWarning):
    """What a finished job warns of, such as rows that were skipped."""


class JobTimeout(TensileError):
    """A job has not ended within the timeout of `wait`. The job continues."""


class Report:
    """A job's report: one self-contained HTML page. A notebook shows it inline, in a frame of its own."""

    def __init__(self, job: int, html: str) -> None:
        self.job = job
        self.html = html

    def save(self, path: str | PathLike[str]) -> None:
        """Write the page to a file. Raises ArgumentError if the file cannot be written."""
        try:
            Path(path).write_text(self.html, encoding="utf-8")
        except OSError as error:
            raise noted(ArgumentError(f"{path} cannot be written: {error.strerror}", "Choose another file.")) from None

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{escape(self.html)}" title="report of job {self.job}" sandbox="allow-scripts"'
            ' width="100%" height="720" style="border: 0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<report of job {self.job}: {len(self.html):,} characters of HTML; save(path) writes them>"


class Job:
    """A job of the server, as `Client.train` and `Client.job` return it. The job does not depend on this object or on
    the connection."""

    def __init__(self, session: Session, number: int) -> None:
        self._session = session
        self.number: int = converted("job", number)
        self.model: str = self._one("SELECT model FROM tensile.jobs WHERE job = %s")["model"]

    def _one(self, query: str) -> Row:
        rows = self._session.rows(query, (self.number,))
        if not rows:
            raise noted(no_such_job(self.number))
        return rows[0]

    @property
    def state(self) -> str:
        """The state now: queued, starting, running, waiting (for device memory or a Ray cluster), finished, failed,
        cancelled, or interrupted. An interrupted job is continued by the server."""
        return str(self._one("SELECT state FROM tensile.jobs WHERE job = %s")["state"])

    def wait(self, progress: bool = True, timeout: float | None = None) -> str:
        """Wait until the job has ended and return "finished" or "cancelled"; `progress` shows a bar meanwhile.

        As SQL's wait_for_job it warns (JobWarning) of what the job warned of, raises TrainingFailed if the job has
        failed, and JobTimeout after `timeout` seconds (None means to wait without limit). Raises ConnectionLost if the
        connection breaks, and ServerError in an open transaction, in which the job could not even start. Ctrl-C ends
        the waiting and leaves the job running; cancel() stops it. The connection is free between two queries, so that
        other threads can use the client.
        """
        row = self._await(lambda row: row["state"] in ENDED, progress, timeout)
        if row["state"] == "failed":
            raise noted(TrainingFailed(self.number, row))
        for warning in row["warnings"] or ():
            warn(f"job {self.number}: {warning}", JobWarning, stacklevel=2)
        return str(row["state"])

    def first_version(self, progress: bool = True, timeout: float | None = None) -> int | None:
        """Wait until the job has made a first version, which predicts while it goes on, and return its number.

        Returns None if the job was cancelled before, and raises what `wait` raises. SQL: wait_for_first_version."""
        row = self._await(lambda row: row["version"] is not None or row["state"] in ENDED, progress, timeout)
        if row["version"] is None and row["state"] == "failed":
            raise noted(TrainingFailed(self.number, row))
        return None if row["version"] is None else int(row["version"])

    def _await(self, done: Callable[[Row], bool], progress: bool, timeout: float | None) -> Row:
        """Wait until the job's row is as `done` says, and return it."""
        deadline = None if timeout is None else time.monotonic() + converted("timeout", timeout)
        with self._session.asking() as connection:
            if connection.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                hint = "Commit first, then wait."
                raise ServerError(f"job {self.number} can't be waited for in an open transaction", hint)
        with Bar(f"job {self.number} {self.model}", progress) as bar:
            while True:
                row = self._one(LOOK)
                bar.show(row)
                if done(row):
                    return row
                time.sleep(INTERVAL_S if deadline is None else self._left(deadline, row))

    def _left(self, deadline: float, row: Row) -> float:
        """Return the seconds until the next query. Raises JobTimeout after the deadline."""
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            hint = f"Wait longer, or stop it with job({self.number}).cancel()."
            message = f"job {self.number} has not ended in time: it is {row['state']}"
            raise noted(JobTimeout(message, hint, row["reason"] or "The job continues."))
        return min(seconds, INTERVAL_S)

    def cancel(self) -> bool:
        """Stop the job (SQL: cancel_job). Return False if it had ended already."""
        return bool(self._session.answer("cancel_job", {"job": self.number})[0])

    def set_priority(self, priority: int) -> bool:
        """Set the priority, from -1000 to 1000 (SQL: set_job_priority). Return False if the job had ended already."""
        return bool(self._session.answer("set_job_priority", {"job": self.number, "priority": priority})[0])

    def metrics(self) -> pd.DataFrame:
        """Return the view tensile.epoch_metrics: a row for each epoch and split.

        `metrics()["loss"].unstack().plot()` draws the losses."""
        return frame(METRICS, self._rows("SELECT * FROM tensile.epoch_metrics WHERE job = %s ORDER BY epoch, split"))

    def plan(self) -> pd.DataFrame:
        """Return the events of the job's newest memory plan, with the columns of the view tensile.plan_events.

        The frame is empty if the plan neither swaps nor recomputes anything, or if the job has no plan. An ended job
        still has its plan, until a later job of its model replaces it."""
        return frame(PLAN, (event for row in self._rows(PLANNED) for event in events_of(row)))

    def latency(self) -> pd.DataFrame:
        """Return the view tensile.latency: microseconds of each operator, predicted, measured last, and on average."""
        return frame(LATENCY, self._rows("SELECT * FROM tensile.latency WHERE job = %s ORDER BY operator"))

    def footprint(self) -> pd.DataFrame:
        """Return the view tensile.footprint: device bytes at each step of an iteration, with and without the plan."""
        return frame(FOOTPRINT, self._rows("SELECT * FROM tensile.footprint WHERE job = %s ORDER BY sequence"))

    def ranks(self) -> pd.DataFrame:
        """Return the view tensile.ranks: the processes of a Ray cluster that train the job, a row for each.

        The frame is empty if the job has no ranks, waits for them, or has ended."""
        return frame(RANKS, self._rows("SELECT * FROM tensile.ranks WHERE job = %s ORDER BY rank"))

    def report(self, path: str | PathLike[str] | None = None, evaluate: str | None = None) -> Report:
        """Return one HTML page about the job, which a notebook shows inline; unless `path` is None, write it there too.

        `evaluate` is a query, as `Client.evaluate` takes one: the page then shows how good the version that the job has
        trained is on its rows, and how important each feature is. The command `pg-tensile report` makes the same page.
        Raises MissingPackageError if a package that reports need is not installed, ArgumentError if the file cannot be
        written, ServerError if the job has no version to evaluate."""
        render = renderer()
        from pg_tensile.client.record import read_job

        query = None if evaluate is None else converted("query", evaluate)
        with self._session.asking() as connection:
            record = read_job(connection, self.number, query)
        page = Report(self.number, render(record))
        if path is not None:
            page.save(path)
        return page

    def _rows(self, query: str) -> list[Row]:
        return self._session.rows(query, (self.number,))

    def __repr__(self) -> str:
        return f"<job {self.number} of model {self.model!r}>"

    def _repr_html_(self) -> str:
        try:
            facts = _facts(self._one(SUMMARY))
        except ServerError as error:
            facts = {"Error": error.message}
        rows = "".join(f"<tr><th>{name}</th><td>{escape(str(fact))}</td></tr>" for name, fact in facts.items())
        return f"<table><caption>Job {self.number} of {escape(self.model)}</caption>{rows}</table>"


def renderer() -> Callable[[JobRecord], str]:
    """Return the function that renders a report. Raises MissingPackageError if a package that it needs is missing."""
    with needing("report", "reports need"):
        from pg_tensile.tools.report.page import render
    return render


def events_of(row: Row) -> list[Row]:
    """Return the rows of the view tensile.plan_events, made from one row of PLANNED."""
    from pg_tensile.planning.plan.plan import CODECS, EventKind, Plan

    plan = Plan.from_rows(row["events"], row["generation"], row["plan_order"])
    captured = {} if plan.order is None else dict(enumerate(plan.order.tolist()))
    tensors, operators = row["tensors"] or {}, row["operators"] or {}
    events = []
    for sequence, (kind, codec, _, tensor, version, *places, nbytes) in enumerate(plan.rows.tolist()):
        name, tensor_kind = tensors.get(str(tensor), (None, None))
        trigger, delay_us, deadline = places
        trigger, deadline = captured.get(trigger, trigger), captured.get(deadline, deadline)
        events.append(
            {"generation": plan.generation, "sequence": sequence, "event": EventKind(kind).label, "tensor": tensor}
            | {"tensor_name": name, "tensor_kind": tensor_kind, "bytes": nbytes, "trigger_operator": trigger}
            | {"trigger_name": operators.get(str(trigger)), "delay_us": delay_us, "deadline_operator": deadline}
            | {"version": version, "codec": CODECS[codec] if codec else None}
        )
    return events


def _facts(row: Row) -> dict[str, str]:
    """Return what a notebook shows about a job, by title, from a row of SUMMARY."""
    from pg_tensile.text import size

    because = row["error"] or row["reason"]
    facts = {"State": f"{row['state']}: {because}" if because else row["state"]}
    if row["batch_size"] is not None and row["learning_rate"] is not None:
        facts["Training"] = f"batches of {row['batch_size']:,} rows, learning rate {row['learning_rate']:.4g}"
    if row["epoch"] is not None:
        facts["Epochs"] = f"{row['epoch']} of {row['epochs']}"
        if row["kept_epoch"] is not None:
            facts["Epochs"] = f"{row['last_epoch']} of {row['epochs']} ({row['stopped']})"
            facts["Kept weights"] = f"of epoch {row['kept_epoch']}"
        baseline = row["baseline"] or {}
        for name in ("loss", "accuracy", "rmse"):
            if row[name] is not None:
                known = name in baseline and baseline["split"] == row["split"]
                beside = f" (baseline {baseline[name]:.4g})" if known else ""
                facts[f"{name.capitalize()} of {row['split']}"] = f"{row[name]:.4g}{beside}"
    if row["vanilla_bytes"] is not None and row["planned_bytes"] is not None:
        facts["Memory"] = f"{size(row['planned_bytes'])}, without a plan {size(row['vanilla_bytes'])}"
    if row["warnings"]:
        facts["Warnings"] = row["warnings"]
    return facts
