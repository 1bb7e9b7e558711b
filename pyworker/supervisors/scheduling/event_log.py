"""The scheduler's events in tensile_internal.scheduler_log. Standard library only."""

from __future__ import annotations

from typing import Any

from pyworker.supervisors.server import Server


def log_event(
    server: Server,
    event: str,
    job: int | None,
    device: str | None,
    reason: str,
    details: dict[str, Any] | None = None,
    generation: int | None = None,
) -> None:
    signature = "tensile_internal._log(text,int8,int8,text,text,jsonb)"
    server.call(signature, event, job, generation, device, reason, details or {})
