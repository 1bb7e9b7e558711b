"""The numbers of a report: everything that the page shows, as JSON. Tests compare it with SQL.

Units are bytes, µs (`…_us`), seconds, and shares from 0 to 1; None means unknown. Arrays over operators or steps are in
execution order.
"""

from __future__ import annotations

import math
import platform
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from pg_tensile.planning.device.profile import Direction
from pg_tensile.planning.plan.plan import EventKind, Plan
from pg_tensile.planning.simulator.simulator import Transfer
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.report.iteration import Iteration

if TYPE_CHECKING:
    from pg_tensile.client.record import JobRecord, Planned, Row

Facts = dict[str, Any]

PLAN_NUMBERS = (
    *("generation", "planned_bytes", "granted_bytes", "host_bytes", "iteration_us", "vanilla_us", "stall_us"),
    *("out_bytes", "in_bytes", "recomputes"),
)
LOG_NUMBERS = (*PLAN_NUMBERS[1:], "link_share", "events")
ERROR_EDGES = np.arange(21) / 20  # bins of the histogram of relative errors; the last one is open
MOST_EPOCHS = 2000  # whose metrics are kept
MOST_TENSORS = 500  # listed: those that move the most bytes
PACKAGES = ("bokeh", "numpy")


def facts_of(record: JobRecord, iteration: Iteration | None) -> Facts:
    """Return all facts of a report. `iteration` is None if the job has none to show."""
    tensors = [] if iteration is None else _tensors(iteration)
    return {
        "read_at": plain(record.read_at),
        "seconds": ((record.job["ended_at"] or record.read_at) - record.job["submitted_at"]).total_seconds(),
        "job": plain(record.job),
        "progress": plain(record.progress),
        "summary": _summary(record),
        "footprint": None if record.planned is None else _footprint(record.planned),
        "iteration": None if iteration is None else _iteration(iteration),
        "moved": None if iteration is None else _moved(tensors),
        "tensors": tensors[:MOST_TENSORS],
        "latency": _latency(record.latency),
        "epochs": len({row["epoch"] for row in record.metrics}),
        "metrics": plain(_thinned(record.metrics)),
        "log": [_line(line, record.job) for line in record.log],
        "profile": None if record.planned is None else plain(vars(record.planned.profile)),
        "settings": plain(record.settings),
        "versions": plain(record.versions | _own_versions()),
    }


def plain(value: Any) -> Any:
    """Return a value as JSON types: moments as ISO text, NaN and infinities as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def _own_versions() -> dict[str, str]:
    return {"Python": platform.python_version()} | {name: version(name) for name in PACKAGES}


# ---- the plan --------------------------------------------------------------------------------------------------------


def _summary(record: JobRecord) -> Facts:
    """Return the numbers of the newest plan: from tensile.footprints, or from the log if the plan is not kept."""
    job, planned = record.job, record.planned
    found: Facts = dict.fromkeys(PLAN_NUMBERS)
    vanilla_bytes = job["vanilla_bytes"]
    if planned is not None:
        found |= {name: plain(planned.numbers.get(name)) for name in PLAN_NUMBERS}
        vanilla_bytes = int(planned.vanilla_bytes.max(initial=0)) or vanilla_bytes
    else:
        lines = [line for line in record.log if line["event"] == "planned"]
        if lines:
            details = lines[-1]["details"] or {}
            found |= {name: plain(details.get(name)) for name in PLAN_NUMBERS} | {"generation": lines[-1]["generation"]}
    found |= {"vanilla_bytes": vanilla_bytes, "least_bytes": job["least_bytes"], "saved_share": None, "slower": None}
    if vanilla_bytes and found["planned_bytes"] is not None:
        found["saved_share"] = 1 - found["planned_bytes"] / vanilla_bytes
    if found["vanilla_us"] and found["iteration_us"] is not None:
        found["slower"] = found["iteration_us"] / found["vanilla_us"] - 1
    return found


def _footprint(planned: Planned) -> Facts:
    """Return columns of the view tensile.footprint."""
    return {
        "operator": planned.operators.tolist(),
        "planned_bytes": planned.planned_bytes.tolist(),
        "vanilla_bytes": planned.vanilla_bytes.tolist(),
    }


def _iteration(iteration: Iteration) -> Facts:
    """Return numbers simulated with the latencies measured so far; those of the summary are as old as the plan."""
    timeline = iteration.timeline
    repeated = iteration.repeated
    return {
        "iteration_us": timeline.iteration_us,
        "vanilla_us": iteration.vanilla.iteration_us,
        "compute_us": timeline.compute_us,
        "stall_us": timeline.stall_us,
        "repeated_us": float((timeline.step_end_us - timeline.step_start_us)[repeated].sum()),
        "steps": len(timeline.steps),
        "repeated_steps": int(repeated.sum()),
        "operators": iteration.trace.operator_count,
        "tensors": iteration.trace.tensor_count,
        "out": _lane(timeline.transfers, Direction.OUT),
        "in": _lane(timeline.transfers, Direction.IN),
    }


def _lane(transfers: Sequence[Transfer], direction: Direction) -> Facts:
    own = [transfer for transfer in transfers if transfer.direction == direction]
    busy_us = sum(transfer.end_us - transfer.start_us for transfer in own)
    return {"transfers": len(own), "bytes": sum(transfer.bytes for transfer in own), "busy_us": busy_us}


def _tensors(iteration: Iteration) -> list[Facts]:
    """Return the tensors that are swapped or recomputed, those with the most bytes moved first."""
    timeline, trace = iteration.timeline, iteration.trace
    absences = _absences(iteration.plan)
    moves: dict[int, list[int]] = defaultdict(lambda: [0, 0])  # tensor → number of transfers out, in
    for transfer in timeline.transfers:
        moves[transfer.tensor][transfer.direction] += 1
    stalls: dict[int, float] = defaultdict(float)
    for stall in timeline.stalls:
        stalls[stall.tensor] += stall.us
    rows = iteration.plan.rows
    remade = Counter(rows["tensor"][rows["kind"] == EventKind.RECOMPUTE].tolist())
    found = [
        _tensor(trace, tensor)
        | {"out": moves[tensor][Direction.OUT], "in": moves[tensor][Direction.IN]}
        | {"recomputed": remade[tensor], "stall_us": stalls[tensor]}
        | dict(zip(("gone_after", "back_before"), absences.get(tensor, (None, None)), strict=True))
        for tensor in sorted({*moves, *remade})
    ]
    for row in found:
        row["moved_bytes"] = row["bytes"] * (row["out"] + row["in"])
    return sorted(found, key=lambda row: (-row["moved_bytes"], -row["bytes"], row["tensor"]))


def _moved(tensors: Sequence[Facts]) -> Facts:
    """Return totals over all tensors that are swapped or recomputed."""
    return {
        "tensors": len(tensors),
        "swapped": sum(row["out"] + row["in"] > 0 for row in tensors),
        "recomputed": sum(row["recomputed"] > 0 for row in tensors),
        "bytes": sum(row["moved_bytes"] for row in tensors),
    }


def _tensor(trace: Trace, number: int) -> Facts:
    tensor = trace.tensor(number)
    return {
        "tensor": number,
        "name": tensor.name,
        "kind": tensor.kind.name.lower(),
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.bytes,
    }


def _absences(plan: Plan) -> dict[int, tuple[int | None, int | None]]:
    """Return tensor → (gone_after, back_before): the operators around its first interval off the device.

    gone_after is the trigger of its first swap-out or release, back_before the deadline of the next swap-in or
    recomputation, which may lie in the next iteration; both are captured operator numbers. They are None if there is no
    such event (only implicit release frees the tensor, or it does not return)."""
    gone: dict[int, list[int]] = defaultdict(list)
    back: dict[int, list[int]] = defaultdict(list)
    for event in plan.events:
        if event.kind in (EventKind.SWAP_IN, EventKind.RECOMPUTE):
            back[event.tensor].append(event.deadline)
        else:
            gone[event.tensor].append(event.trigger)
    found: dict[int, tuple[int | None, int | None]] = {}
    for tensor in {*gone, *back}:
        first = min(gone[tensor], default=None)
        returns = back[tensor] if first is None else [operator for operator in back[tensor] if operator > first]
        found[tensor] = first, min(returns or back[tensor], default=None)
    if plan.order is None:
        return found
    number: dict[int | None, int | None] = {None: None} | dict(enumerate(plan.order.tolist()))
    return {tensor: (number[gone_after], number[back_before]) for tensor, (gone_after, back_before) in found.items()}


# ---- the job's life --------------------------------------------------------------------------------------------------


def _latency(rows: Sequence[Row]) -> Facts:
    """Return columns of the view tensile.latency, and statistics of the prediction errors."""
    errors = [error for row in rows if (error := plain(row["relative_error"])) is not None]
    bins = np.searchsorted(ERROR_EDGES, np.array(errors, np.float64), side="right") - 1
    averages = [row["average_us"] for row in rows if row["average_us"] is not None]
    return {
        **{name: plain([row[name] for row in rows]) for name in ("predicted_us", "measured_us", "average_us")},
        "operators": len(rows),
        "measured": len(errors),
        "samples": max((row["samples"] or 0 for row in rows), default=0),
        "total_us": sum(averages) if averages else None,
        "median_error": statistics.median(errors) if errors else None,
        "error_edges": ERROR_EDGES.tolist(),
        "error_counts": np.bincount(bins, minlength=len(ERROR_EDGES)).tolist(),
    }


def _thinned(rows: Sequence[Row]) -> list[Row]:
    """Return the metrics of at most MOST_EPOCHS epochs, equally spaced and including the last one."""
    epochs = sorted({row["epoch"] for row in rows})
    every = -(-len(epochs) // MOST_EPOCHS) or 1
    kept = set(epochs[::-1][::every])
    return [row for row in rows if row["epoch"] in kept]


def _line(line: Row, job: Row) -> Facts:
    """Return a line of the scheduler's log; its `seconds` count from the submission of the job."""
    details = line["details"] or {}
    found = {name: plain(line[name]) for name in ("id", "at", "event", "generation", "reason")}
    found["seconds"] = (line["at"] - job["submitted_at"]).total_seconds()
    return found | {name: plain(details.get(name)) for name in LOG_NUMBERS}
