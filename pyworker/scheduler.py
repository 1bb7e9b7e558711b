"""The scheduler's supervisor: the place where traces and latencies will become plans.

No policy needs it yet ('none' has no plan), so it owns no planner process and only waits for STOP or GONE.
"""

from __future__ import annotations

from typing import Any

from pyworker.supervisor import Server

IDLE = 30.0  # seconds


def run(plpy: Any) -> None:
    """The body of `tensile.run_scheduler()`."""
    Server(plpy).loop(lambda: IDLE)
