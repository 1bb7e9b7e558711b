"""How much device memory a job asks for, and how much it may have: its memory_budget, and the limit of its role."""

from __future__ import annotations

from typing import Any

ROLE_SETTING = "pg_tensile.role_job_memory"


def most_bytes(spec: dict[str, Any]) -> int | None:
    """Return the most device memory that the job may have in bytes, or None if only the device limits it."""
    limits = [limit for limit in (spec["memory_budget"], spec["role_memory"]) if limit is not None]
    return min(limits, default=None)


def claimed_bytes(spec: dict[str, Any]) -> int | None:
    """Return what a job without plans asks for, which is no more than it may have; None without a memory_budget."""
    return None if spec["memory_budget"] is None else most_bytes(spec)


def limiting(spec: dict[str, Any]) -> str:
    """Return the name of what limits the job's memory: the argument, or the setting of its role."""
    limit = most_bytes(spec)
    return "memory_budget" if limit is None or limit == spec["memory_budget"] else ROLE_SETTING
