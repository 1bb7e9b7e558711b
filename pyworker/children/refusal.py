"""The error of a job that is refused memory, with the batch size that would fit as its hint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import Any

from pg_tensile.errors import CaptureError, MemoryRefusedError, TrainingError
from pg_tensile.execution.training.graphs import capture_step
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.trace.trace import Trace
from pyworker.children.job import Job

SEARCH_S = 20.0  # limit of the search for a batch size that fits


def refusal_error(
    refusal: dict[str, Any],
    job: Job,
    traces: Collection[Trace],
    alive: Callable[[], object],
    limit: str = "memory_budget",
) -> MemoryRefusedError:
    """Return the error that a REFUSE frame's header means for a job with a batch size.

    `traces` are those of its graphs that were refused, none for a job without plans; `alive` is called repeatedly;
    `limit` names what limits the job's memory besides the device's.
    """
    least, budget = refusal["least_bytes"], refusal["budget_bytes"]
    error = MemoryRefusedError(least, budget, refusal["operator"], max_slowdown=refusal.get("max_slowdown"))
    if refusal.get("max_slowdown") is not None:
        error.hint = f"Use a larger max_slowdown, {limit} or device_memory, or a smaller batch_size."
        return error
    if not traces:
        error.hint = f"Use a larger {limit}, or a policy that saves memory: policy => 'joint'."
        return error
    factor = least / max(least_bytes(trace) for trace in traces)
    fitting = _largest_batch_size(job, budget, factor, alive)
    if fitting:
        error.hint = f"Use batch_size => {fitting}, or a larger {limit}."
    else:
        error.hint = f"No batch size would fit: use a smaller model, or a larger {limit} or device_memory."
    return error


def refusal_while_choosing(refusal: dict[str, Any], limit: str = "memory_budget") -> MemoryRefusedError:
    """Return the error that a REFUSE frame's header means while the batch size is chosen."""
    needs = refusal["least_bytes"], refusal["budget_bytes"], refusal["operator"]
    error = MemoryRefusedError(*needs, max_slowdown=refusal.get("max_slowdown"))
    error.hint = f"Give a batch_size, or use a larger {limit}."
    return error


def _largest_batch_size(job: Job, budget_bytes: int, factor: float, alive: Callable[[], object]) -> int:
    """Return the largest batch size found in SEARCH_S whose least memory, times `factor`, is within the budget.

    0 means that none was found. Halves until one fits, then bisects between that and the last one that did not.
    """
    deadline = time.monotonic() + SEARCH_S
    fits, exceeds = 0, job.settings.batch_size
    while exceeds - fits > 1 and time.monotonic() < deadline:
        alive()
        size = exceeds // 2 if not fits else (fits + exceeds) // 2
        try:
            least = factor * least_bytes(capture_step(*job.with_batch_size(size)).trace)
        except (CaptureError, TrainingError):  # such as batch normalisation of one row
            least = math.inf
        if least <= budget_bytes:
            fits = size
        else:
            exceeds = size
    return fits
