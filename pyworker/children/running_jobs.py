"""The jobs that run on a device, as a trainer in a session is sent them: descriptions, traces, latencies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyworker.wire import Buffer

if TYPE_CHECKING:
    from pg_tensile.planning.scheduling.decisions import JobState


def running_jobs(described: Iterable[Mapping[str, Any]], buffers: Iterable[Buffer], device: str) -> list[JobState]:
    """Return the states of the jobs on the device, for the scheduler's decision about another one.

    `described`: fields of JobState without `trace` and `given`, and `device`, `granted_bytes` and `traced`. For each
    that is traced, `buffers` has its trace and its average latencies, float32 in µs, empty before a measurement.
    A job whose trace cannot be read is left out, as the planner cannot plan it either.
    """
    from pg_tensile.errors import TraceError
    from pg_tensile.planning.scheduling.decisions import Given, JobState

    rest = iter(buffers)
    states = []
    for row in described:
        fields = dict(row)
        at, granted_bytes, traced = (fields.pop(name) for name in ("device", "granted_bytes", "traced"))
        try:
            trace = _trace(rest) if traced else None
        except TraceError:
            continue
        if at == device:
            states.append(JobState(trace=trace, given=Given(None, granted_bytes), **fields))
    return states


def _trace(buffers: Iterator[Buffer]) -> Any:
    import numpy as np

    from pg_tensile.planning.trace.trace import Trace

    data, averages = next(buffers), next(buffers)
    trace = Trace.from_bytes(bytes(data))
    latency_us = np.frombuffer(averages, "<f4").astype(np.float64)
    if len(latency_us) != trace.operator_count:
        return trace
    measured = np.isfinite(latency_us) & (latency_us >= 0)
    return trace.with_latencies(np.where(measured, latency_us, trace.latency_us))
