"""The view as JSON, for scripts. Existing keys are stable; further ones may be added.

Memory is in bytes, durations in seconds, moments in seconds since 1970; null means unknown or not applicable.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from pg_tensile.tools.top.history import History
from pg_tensile.tools.top.snapshot import Device, Job, Snapshot


def document(snapshot: Snapshot, history: History) -> str:
    """Return one line: {"at", "devices": [columns of tensile.devices, link_bytes_per_s], "jobs": [open jobs by number:
    fields of snapshot.Job, progress, eta_s (time_left_s), may_stop_early, swap_bytes_per_s, stall_share, silent_s],
    "queue": [the waiting jobs, the next one first: job, model, state, reason, priority, waited_s, retry_in_s],
    "drifted": [deployed versions, the most drifted first: fields of snapshot.Drift], "tunings": [open tunings by
    number: fields of snapshot.Tuning]}.

    link_bytes_per_s, swap_bytes_per_s and stall_share are rates between snapshots: null in the first document of a run.
    """
    content = {
        "at": snapshot.at,
        "devices": [_device(device, snapshot, history) for device in snapshot.devices],
        "jobs": [_job(job, snapshot, history) for job in snapshot.jobs],
        "queue": [_waiting(job, snapshot) for job in snapshot.queue()],
        "drifted": [asdict(item) for item in snapshot.drifted],
        "tunings": [asdict(tuning) for tuning in snapshot.tunings],
    }
    return json.dumps(content, allow_nan=False)


def _device(device: Device, snapshot: Snapshot, history: History) -> dict[str, Any]:
    return asdict(device) | {"link_bytes_per_s": history.link_bytes_per_s(snapshot, device.name)}


def _job(job: Job, snapshot: Snapshot, history: History) -> dict[str, Any]:
    course = history.of(job)
    return asdict(job) | {
        "progress": job.progress,
        "eta_s": job.time_left_s,
        "may_stop_early": job.may_stop_early,
        "swap_bytes_per_s": course.swap_bytes_per_s,
        "stall_share": course.stall_share,
        "silent_s": snapshot.silent_s(job),
    }


def _waiting(job: Job, snapshot: Snapshot) -> dict[str, Any]:
    return {
        "job": job.job,
        "model": job.model,
        "state": job.state,
        "reason": job.reason,
        "priority": job.priority,
        "waited_s": snapshot.waited_s(job),
        "retry_in_s": snapshot.retry_in_s(job),
    }
