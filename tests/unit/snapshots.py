"""Invented snapshots of servers for the tests of `pg-tensile top`."""

from __future__ import annotations

from typing import Any

from pg_tensile.tools.top.snapshot import Device, Job, Snapshot, Tuning

MB = 1 << 20
NOW = 1_800_000_000.0  # seconds since 1970
HOSTILE = "\x1b[31mred\x07\x1b]0;title\x07\n\r\t\u202e\x9b1m[bold]x[/bold] :boom: 漢字 e\u0301 \u2028\x00" + "w" * 300
LIVE = (
    *("phase", "epoch", "step", "steps", "loss", "samples_per_s", "pid", "heartbeat_at", "started_at"),
    *("device_bytes", "device_peak_bytes", "planned_bytes", "granted_bytes", "vanilla_bytes", "device"),
    *("bytes_swapped", "stall_s", "passive_swap_ins", "plan_generation"),
    *("time_left_s", "least_time_left_s", "slowdown", "max_slowdown", "measured_slowdown"),
)
QUEUED: dict[str, Any] = dict.fromkeys(LIVE) | {"state": "queued", "attempts": 0}  # without a worker so far


def new_job(number: int = 1, **changes: Any) -> Job:
    """Build a job that trains, half way through epoch 7 of 20."""
    numbers: dict[str, Any] = {
        "job": number,
        "model": f"model {number}",
        "owner": "alice",
        "kind": "train",
        "state": "running",
        "reason": None,
        "priority": 0,
        "policy": "joint",
        "device": "cpu",
        "batch_size": 64,
        "attempts": 1,
        "submitted_at": NOW - 300,
        "started_at": NOW - 200,
        "not_before": None,
        "heartbeat_at": NOW - 0.25,
        "pid": 4711,
        "phase": "training",
        "epoch": 7,
        "epochs": 20,
        "step": 5,
        "steps": 10,
        "loss": 0.1134,
        "samples_per_s": 1204.0,
        "time_left_s": 44.0,
        "least_time_left_s": 44.0,
        "slowdown": 1.02,
        "max_slowdown": None,
        "measured_slowdown": 1.5,
        "device_bytes": 98 * MB,
        "device_peak_bytes": 100 * MB,
        "planned_bytes": 101 * MB,
        "granted_bytes": 102 * MB,
        "vanilla_bytes": 118 * MB,
        "bytes_swapped": 4239 * MB,
        "stall_s": 0.083,
        "passive_swap_ins": 0,
        "plan_generation": 3,
    }
    return Job(**(numbers | changes))


def new_device(name: str = "cpu", **changes: Any) -> Device:
    numbers: dict[str, Any] = {
        "total_bytes": 512 * MB,
        "budget_bytes": 210 * MB,
        "granted_bytes": 203 * MB,
        "in_use_bytes": 150 * MB,
    }
    numbers |= {"inference_bytes": 0, "jobs": 2}
    return Device(name, **(numbers | {"out_bytes_per_s": 6e9, "in_bytes_per_s": 7e9, "utilisation": 0.04} | changes))


def new_tuning(number: int = 1, **changes: Any) -> Tuning:
    """Build a tuning with 7 of its 20 trials made."""
    fields: dict[str, Any] = {"tuning": number, "model": f"model {number}", "owner": "alice", "state": "running"}
    fields |= {"trials": 20, "ended": 7, "running": 2, "pruned": 3, "metric": "rmse", "best_trial": 5}
    return Tuning(**(fields | {"best_value": 0.1134, "started_at": NOW - 200} | changes))


def new_snapshot(
    *jobs: Job, devices: list[Device] | None = None, at: float = NOW, sees_all: bool = True, ageing_s: float = 300.0
) -> Snapshot:
    return Snapshot(at, ageing_s, sees_all, tuple([new_device()] if devices is None else devices), jobs)
