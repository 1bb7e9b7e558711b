"""A job's live numbers in shared memory. Standard library only."""

from __future__ import annotations

from typing import Any

from pyworker.supervisors.server import Server

# Fields of PROGRESS frames besides the phase, in the order of tensile_worker._report's arguments
REPORTED = (
    *("epoch", "epochs", "step", "steps", "loss", "samples_per_s", "device_bytes", "device_peak_bytes"),
    *("bytes_swapped", "stall_us", "passive_swap_ins", "utilisation", "raw_bytes_swapped", "time_left_s"),
    "least_time_left_s",
)
REPORT = (
    "tensile_worker._report(text,int4,int4,int8,int8,float8,float8,int8,int8,int8,int8,int8,float8,int8,float8,float8)"
)


def report_progress(server: Server, progress: dict[str, Any]) -> None:
    """Write the fields of a PROGRESS frame; those that are absent stay as they were."""
    numbers = (progress.get(key) for key in REPORTED)
    server.call(REPORT, progress.get("phase"), *numbers)
