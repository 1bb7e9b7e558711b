"""The page about one job: kept up to date while it is open, also after the job has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from pg_tensile.client.connection import Connection, no_such_job
from pg_tensile.text import NONE, count, printable, short, short_duration, short_size
from pg_tensile.tools.top.cells import fit, flow, wrap

Row = dict[str, Any]
Parts = Sequence[str | None]

DETAILS = """
    SELECT j.job, j.model, j.owner, j.kind, j.state, left(j.reason, 4000) AS reason,
           left(j.query, 8000) AS query, j.target, j.epochs,
           coalesce(j.chosen_batch_size, j.batch_size) AS batch_size, j.optimizer,
           coalesce(j.chosen_learning_rate, j.learning_rate) AS learning_rate, j.validation, j.seed, j.policy,
           j.split_by, left(j.validation_query, 8000) AS validation_query, j.max_time::text AS max_time,
           j.memory_budget, j.priority, j.options::text AS options, j.attempts, j.retries, j.rows,
           j.version, j.kept_epoch, j.stopped, extract(epoch FROM j.submitted_at)::float8 AS submitted_at,
           extract(epoch FROM j.started_at)::float8 AS started_at, extract(epoch FROM j.ended_at)::float8 AS ended_at,
           j.sqlstate, left(j.error, 4000) AS error, left(j.hint, 4000) AS hint, left(j.detail, 4000) AS detail,
           left(array_to_string(j.warnings, '; '), 4000) AS warnings,
           t.device, t.policy AS planned_policy, t.parameters, t.vanilla_bytes, t.least_bytes, t.largest_operator,
           f.generation, f.planned_bytes, f.granted_bytes, f.host_bytes, f.out_bytes, f.in_bytes, f.iteration_us,
           f.vanilla_us, f.stall_us, f.recomputes,
           (SELECT json_agg(l) FROM (
                SELECT extract(epoch FROM x.at)::float8 AS at, x.event, x.generation, left(x.reason, 1000) AS reason
                FROM tensile.scheduler_log x WHERE x.job = j.job ORDER BY x.id DESC LIMIT 8) l) AS log,
           (SELECT json_agg(r) FROM (
                SELECT x.rank, x.node, x.device, x.state, x.step, x.samples_per_s, x.device_bytes
                FROM tensile.ranks x WHERE x.job = j.job ORDER BY x.rank) r) AS ranks
    FROM tensile.jobs j LEFT JOIN tensile.traces t ON t.job = j.job LEFT JOIN tensile.plans f ON f.job = j.job
    WHERE j.job = %s
"""
LABEL = 10  # cells
LONGEST = 12  # lines of one text, at most
WIDEST = 39  # cells of a column about ranks, at most: an IPv6 address


def read(connection: Connection, job: int) -> Row:
    """Return the row of DETAILS of a job. Raises ServerError if the job does not exist any more, and psycopg.Error."""
    row = connection.execute(DETAILS, (job,), prepare=True).fetchone()
    if row is None:
        raise no_such_job(job)
    return row


def page(row: Row, width: int) -> list[Text]:
    """Return all lines about the job; the caller chooses which of them to show."""
    lines: list[Text] = []
    for label, text, style in _facts(row):
        if text:
            parts = [text] if isinstance(text, str) else flow(text, width - LABEL - 1)
            wrapped = [line for part in parts for line in wrap(part, width - LABEL - 1, LONGEST)]
            for number, line in enumerate(wrapped):
                lines.append(Text.assemble(((label if number == 0 else "").ljust(LABEL), "dim"), " ", (line, style)))
    return lines


def _facts(row: Row) -> list[tuple[str, str | Parts | None, str]]:
    """Return (label, text or its parts, style) of each fact; those without a text are left out of the page."""
    named = f"{row['job']} {row['model']}" + (", a calibration" if row["kind"] == "calibrate" else "")
    trains = row["kind"] == "train"
    return [
        ("job", f"{named}, of {row['owner']}", "bold"),
        ("state", _state(row), ""),
        ("reason", row["reason"], "yellow"),
        ("error", row["error"] and f"{row['error']} ({row['sqlstate']})", "red"),
        ("detail", row["detail"], "red"),
        ("hint", row["hint"], "yellow"),
        ("warnings", row["warnings"], "yellow"),
        ("query", " ".join(row["query"].split()), ""),
        ("validation", row["validation_query"] and " ".join(row["validation_query"].split()), ""),
        ("target", row["target"], ""),
        ("training", _training(row) if trains else None, ""),
        ("options", row["options"] if row["options"] != "{}" else None, ""),
        ("asks for", _asked(row), ""),
        ("model", _model(row), ""),
        ("planned", _planned(row), ""),
        ("iteration", _iteration(row), ""),
        *(("ranks" if number == 0 else "", line, "") for number, line in enumerate(_ranks(row["ranks"] or ()))),
        *(("log" if number == 0 else "", _line(line), "") for number, line in enumerate(row["log"] or ())),
    ]


def _state(row: Row) -> Parts:
    begun = row["started_at"] and f"started {_clock(row['started_at'])}"
    ended = row["ended_at"] and f"ended {_clock(row['ended_at'])}"
    took = row["ended_at"] and row["started_at"] and f"after {short_duration(row['ended_at'] - row['started_at'])}"
    tries = f"attempt {row['attempts']}" if row["attempts"] > 1 else None
    version = row["version"] and f"version {row['version']}"
    return [row["state"], f"submitted {_clock(row['submitted_at'])}", begun, ended, took, tries, version]


def _training(row: Row) -> Parts:
    rows = None if row["rows"] is None else f"{row['rows']:,} rows"
    parts = [
        rows,
        f"{row['epochs']:,} epochs",
        f"batch size {row['batch_size']:,}" if row["batch_size"] else "batch size to be chosen",
        f"{row['optimizer']}, "
        + (f"learning rate {row['learning_rate']:g}" if row["learning_rate"] else "learning rate to be chosen"),
        f"validation {row['validation']:g}" if row["validation_query"] is None else None,
        row["split_by"] and f"split by {row['split_by']}",
        f"seed {row['seed']}",
        row["max_time"] and f"at most {row['max_time']}",
        row.get("kept_epoch") and f"weights of epoch {row['kept_epoch']:,} kept, ended by {row['stopped']}",
    ]
    return parts


def _asked(row: Row) -> Parts:
    budget = row["memory_budget"]
    parts = [
        f"priority {row['priority']}",
        f"policy {row['policy']}" if row["policy"] else None,
        None if budget is None else f"memory budget {short_size(budget)}",
    ]
    return parts


def _model(row: Row) -> Parts | None:
    if row["device"] is None:
        return None
    parts = [
        f"on {row['device']}",
        None if row["parameters"] is None else f"{count(row['parameters'])} parameters",
        None if row["vanilla_bytes"] is None else f"{short_size(row['vanilla_bytes'])} without a plan",
        f"{short_size(row['least_bytes'])} at least",
        row["largest_operator"] and f"{row['largest_operator']} takes the most",
    ]
    return parts


def _planned(row: Row) -> Parts | None:
    if row["generation"] is None:
        return None
    parts = [
        f"plan {row['generation']} by {row['planned_policy']}",
        f"{short_size(row['planned_bytes'])} of {short_size(row['granted_bytes'])} granted",
        f"{short_size(row['host_bytes'])} of host memory",
    ]
    return parts


def _iteration(row: Row) -> Parts | None:
    """Return the planned time and traffic of an iteration, or None without a plan."""
    if row["iteration_us"] is None:
        return None
    us = row["iteration_us"]
    parts = [
        short_duration(us / 1e6) if us >= 1e6 else f"{us / 1e3:.3g} ms",
        f"{us / row['vanilla_us'] - 1:+.1%} by the plan" if row["vanilla_us"] else None,
        f"{short_size(row['out_bytes'])} out, {short_size(row['in_bytes'])} in",
        f"stall {(row['stall_us'] or 0) / 1e3:.3g} ms",
        f"{count(row['recomputes'])} recomputations" if row["recomputes"] else None,
    ]
    return parts


def _ranks(ranks: Sequence[Row]) -> list[str]:
    """Return a heading and a line for each rank, in columns; nothing without ranks."""
    if not ranks:
        return []
    columns = [
        ["rank", *(str(rank["rank"]) for rank in ranks)],
        *([name, *(rank[name] or NONE for rank in ranks)] for name in ("node", "device", "state")),
        ["step", *(NONE if rank["step"] is None else count(rank["step"]) for rank in ranks)],
        ["rows/s", *(short(rank["samples_per_s"]) for rank in ranks)],
        ["memory", *(short_size(rank["device_bytes"]) for rank in ranks)],
    ]
    widths = [min(max(cell_len(printable(text)) for text in texts), WIDEST) for texts in columns]
    lefts = [texts[0] in ("node", "device", "state") for texts in columns]
    return [
        "  ".join(fit(text, width, right=not left) for text, width, left in zip(line, widths, lefts, strict=True))
        for line in zip(*columns, strict=True)
    ]


def _line(line: Row) -> str:
    generation = f" {line['generation']}" if line["generation"] is not None else ""
    return f"{_clock(line['at'], '%H:%M:%S')} {line['event']}{generation}: {line['reason'] or NONE}"


def _clock(at: float, how: str = "%Y-%m-%d %H:%M:%S") -> str:
    return time.strftime(how, time.localtime(at))
