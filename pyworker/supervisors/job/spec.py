"""The JOB frame's header (docs/internals.md, "The job's spec"). Standard library only."""

from __future__ import annotations

import json
from typing import Any

from pyworker.supervisors.child_environment import cores, spool_folder
from pyworker.supervisors.job.ranks import asked_ranks
from pyworker.supervisors.server import Server

MOST_QUERY = 1 << 18  # characters of a training query from which a query for predictions is derived

# Columns of the job's row that the header has unchanged
COPIED = (
    "attempt", "architecture", "target", "epochs", "batch_size", "optimizer", "learning_rate", "validation", "seed",
    "policy", "memory_budget", "role_memory", "options", "split_by", "max_time_s", "tuning",
)  # fmt: skip


def choose_threads(server: Server, options: dict[str, Any], running: int = 1) -> int:
    """Return the number of computing threads of one of `running` jobs; one core is left to the server."""
    threads = options.get("threads") or server.number("pg_tensile.threads")
    return int(threads) or max(1, (cores() - 1) // max(1, running))


def most_threads(server: Server, options: dict[str, Any], running: int) -> int:
    """Return the most threads of work that takes seconds: those that are set, or a share of all cores."""
    threads = options.get("threads") or server.number("pg_tensile.threads")
    return int(threads) or max(1, cores() // max(1, running))


def job_spec(server: Server, job: int, row: dict[str, Any], threads: int) -> dict[str, Any]:
    """Return the header for a job, whose row is what `_job_begin` returned."""
    interval = row["options"].get("checkpoint_interval", server.number("pg_tensile.checkpoint_interval"))
    workloads = server.call("tensile_worker._calibration_workloads()") if row["kind"] == "calibrate" else "null"
    ranks = asked_ranks(row["options"])
    return {
        "job": job,
        "kind": row["kind"],
        "profiles": json.loads(server.call("tensile_worker._job_profiles()")),
        "overheads": [] if ranks is not None else json.loads(server.call("tensile_worker._job_overheads()")),
        "codecs": json.loads(server.call("tensile_worker._job_codecs()")),
        "workloads": json.loads(workloads),
        "ranks": ranks,
        "ray": None if ranks is None else json.loads(server.call("tensile_worker._job_ray()")),
        "latency_weight": float(server.setting("pg_tensile.latency_weight")),
        **{key: row[key] for key in COPIED},
        "validation_query": row["validation_query"] is not None,  # the rows carry the flag column
        **_settings(server, threads),
        **({"device": row["options"]["device"]} if row["automatic"] else {}),
        "most_threads": most_threads(server, row["options"], row["running"]),
        "has_version": row["version"] is not None,  # the first one of an ensemble, from an earlier attempt
        "checkpoint_interval_s": interval,
        "resume": row["checkpoint"],
        "start": row["start"],
        "query": row["query"] if len(row["query"]) <= MOST_QUERY else None,
        "rows_file": None if row["rows_file"] is None else _rows_file(row["rows_file"]),
    }


def _rows_file(name: str) -> dict[str, Any]:
    """Return the path of the file with the rows of a job's tuning, and whether an earlier trial has written it."""
    path = spool_folder() / name
    return {"path": str(path), "written": path.exists()}


def session_spec(server: Server, request: dict[str, Any], threads: int) -> dict[str, Any]:
    """Return the header for a trainer in a session (session_run.py), without those of its buffers."""
    return {
        **request,
        **_settings(server, threads),
        "host_memory_bytes": server.number("pg_tensile.host_memory") << 20,
        "memory_flow": server.setting("pg_tensile.memory_flow") == "auto",
        "checkpoint_interval_s": 0,
        "latency_weight": 1.0,
        "workloads": None,
        "ranks": asked_ranks(request["options"]),
        "resume": None,
    }


def _settings(server: Server, threads: int) -> dict[str, Any]:
    return {
        "device": server.setting("pg_tensile.device"),
        "device_memory_bytes": server.number("pg_tensile.device_memory") << 10,
        "plan_events": server.number("pg_tensile.plan_events"),
        "threads": threads,
        "dataset_cache_bytes": server.number("pg_tensile.dataset_cache") << 20,
        "spool_directory": str(spool_folder()),
    }
