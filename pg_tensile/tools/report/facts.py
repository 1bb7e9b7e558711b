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
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from pg_tensile.planning.bounds import solved_us
from pg_tensile.planning.device.profile import Direction
from pg_tensile.planning.plan.order import as_executed
from pg_tensile.planning.plan.plan import EventKind, Plan
from pg_tensile.planning.simulator.simulator import Transfer
from pg_tensile.tools.report.evaluation import Evaluation, evaluation_of
from pg_tensile.tools.report.iteration import Iteration
from pg_tensile.tools.report.memory_flow import MemoryFlowFacts, memory_flow_of
from pg_tensile.tools.report.ranks import Ranks, ranks_of

if TYPE_CHECKING:
    from pg_tensile.client.record import JobRecord, Planned, Row

ERROR_EDGES = np.arange(21) / 20  # bins of the histogram of relative errors; the last one is open
MOST_EPOCHS = 2000  # whose metrics are kept
BOUND_LIMIT_S = 10.0  # for the solver
MOST_TENSORS = 500  # listed: those that move the most bytes
PACKAGES = ("bokeh", "numpy")


@dataclass(frozen=True)
class Summary:
    """Numbers of the newest plan, and of the job without it."""

    generation: int | None = None
    planned_bytes: int | None = None
    granted_bytes: int | None = None
    host_bytes: int | None = None
    iteration_us: float | None = None
    vanilla_us: float | None = None
    stall_us: float | None = None
    out_bytes: int | None = None
    in_bytes: int | None = None
    recomputes: int | None = None
    vanilla_bytes: int | None = None
    least_bytes: int | None = None
    saved_share: float | None = None
    slower: float | None = None  # relative to the iteration without a plan
    step_us: float | None = None  # of an iteration, measured over all epochs: whatever slowed it down counts
    alone_us: float | None = None  # the same while nothing else used the device


PLAN_NUMBERS = tuple(field.name for field in fields(Summary))[:10]  # those that the scheduler stores


@dataclass(frozen=True)
class Footprint:
    """Columns of the view tensile.footprint, with a row for each step."""

    operator: list[int]
    planned_bytes: list[int]
    vanilla_bytes: list[int]


@dataclass(frozen=True)
class LaneTotals:
    """Totals of the transfers in one direction of the link in an iteration."""

    transfers: int
    bytes: int
    busy_us: float


@dataclass(frozen=True)
class IterationTotals:
    """Totals of the iteration, simulated with the latencies measured so far; those of the summary are as old as the
    plan."""

    iteration_us: float
    vanilla_us: float
    bound_us: float | None  # no plan within the same memory takes less; None if the solver took too long
    compute_us: float
    stall_us: float
    repeated_us: float  # of steps that recompute
    steps: int
    repeated_steps: int
    operators: int
    tensors: int
    out: LaneTotals
    in_: LaneTotals


@dataclass(frozen=True)
class MovedTensor:
    """A tensor that is swapped or recomputed, with its numbers for each iteration."""

    tensor: int
    name: str
    kind: str
    dtype: str
    shape: list[int]
    bytes: int
    out: int  # times that it is swapped out
    in_: int
    recomputed: int
    stall_us: float
    gone_after: int | None  # operators around its first interval off the device, see _absences
    back_before: int | None
    moved_bytes: int  # both ways


@dataclass(frozen=True)
class MovedTotals:
    """Totals over all tensors that are swapped or recomputed."""

    tensors: int
    swapped: int
    recomputed: int
    bytes: int


@dataclass(frozen=True)
class Latency:
    """Columns of the view tensile.latency, and statistics of the prediction errors."""

    predicted_us: list[float | None]
    measured_us: list[float | None]
    average_us: list[float | None]
    operators: int
    measured: int
    samples: int
    total_us: float | None
    median_error: float | None
    error_edges: list[float]
    error_counts: list[int]


@dataclass(frozen=True)
class LogLine:
    """A line of the scheduler's log; `seconds` count from the submission of the job."""

    id: int
    at: str
    event: str
    generation: int | None
    reason: str | None
    seconds: float
    planned_bytes: int | None = None
    granted_bytes: int | None = None
    host_bytes: int | None = None
    iteration_us: float | None = None
    vanilla_us: float | None = None
    stall_us: float | None = None
    out_bytes: int | None = None
    in_bytes: int | None = None
    recomputes: int | None = None
    link_share: float | None = None
    events: int | None = None


LOG_NUMBERS = tuple(field.name for field in fields(LogLine))[6:]  # those in the details of a line


@dataclass(frozen=True)
class Facts:
    """The numbers of a report. Rows are those of the views, as JSON types."""

    read_at: str
    seconds: float  # from the submission to the end, or until now
    job: Row
    progress: Row | None
    summary: Summary
    footprint: Footprint | None
    iteration: IterationTotals | None
    moved: MovedTotals | None
    tensors: list[MovedTensor]
    latency: Latency
    epochs: int
    metrics: list[Row]
    log: list[LogLine]
    profile: Row | None
    settings: Row
    versions: Row
    evaluation: Evaluation | None
    memory_flow: MemoryFlowFacts | None
    ranks: Ranks | None  # None if the job trains in one process

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON types. Fields are called as in Python, but for `in_`, which is "in"."""
        return asdict(self, dict_factory=lambda items: {name.rstrip("_"): value for name, value in items})


def facts_of(record: JobRecord, iteration: Iteration | None) -> Facts:
    """Return all facts of a report. `iteration` is None if the job has none to show."""
    tensors = [] if iteration is None else _tensors(iteration)
    return Facts(
        read_at=record.read_at.isoformat(),
        seconds=((record.job["ended_at"] or record.read_at) - record.job["submitted_at"]).total_seconds(),
        job=json_value(record.job),
        progress=json_value(record.progress),
        summary=_summary(record),
        footprint=None if record.planned is None else _footprint(record.planned),
        iteration=None if iteration is None else _iteration_totals(iteration, record.planned),
        moved=None if iteration is None else _moved_totals(tensors),
        tensors=tensors[:MOST_TENSORS],
        latency=_latency(record.latency),
        epochs=len({row["epoch"] for row in record.metrics}),
        metrics=json_value(_thinned(record.metrics, record.job.get("kept_epoch"))),
        log=[_log_line(line, record.job) for line in record.log],
        profile=None if record.planned is None else json_value(asdict(record.planned.profile)),
        settings=json_value(record.settings),
        versions=json_value(record.versions | _own_versions()),
        evaluation=None if record.evaluation is None else evaluation_of(record.evaluation),
        memory_flow=memory_flow_of(record),
        ranks=ranks_of(record),
    )


def json_value(value: Any) -> Any:
    """Return a value as JSON types: moments as ISO text, NaN and infinities as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return str(value)


def _own_versions() -> dict[str, str]:
    return {"Python": platform.python_version()} | {name: version(name) for name in PACKAGES}


# ---- the plan --------------------------------------------------------------------------------------------------------


def _summary(record: JobRecord) -> Summary:
    """Return the numbers of the newest plan: from tensile.plans, or from the log if the plan is not kept."""
    job, planned = record.job, record.planned
    numbers: Row = {}
    vanilla_bytes = job["vanilla_bytes"]
    if planned is not None:
        numbers = planned.numbers
        vanilla_bytes = int(planned.vanilla_bytes.max(initial=0)) or vanilla_bytes
    else:
        lines = [line for line in record.log if line["event"] == "planned"]
        if lines:
            numbers = (lines[-1]["details"] or {}) | {"generation": lines[-1]["generation"]}
    summary = Summary(
        **{name: json_value(numbers.get(name)) for name in PLAN_NUMBERS},
        vanilla_bytes=vanilla_bytes,
        least_bytes=job["least_bytes"],
        step_us=_step_us(record),
        alone_us=job["alone_us"],
    )
    if vanilla_bytes and summary.planned_bytes is not None:
        summary = replace(summary, saved_share=1 - summary.planned_bytes / vanilla_bytes)
    if summary.vanilla_us and summary.iteration_us is not None:
        summary = replace(summary, slower=summary.iteration_us / summary.vanilla_us - 1)
    return summary


def _step_us(record: JobRecord) -> float | None:
    """Return the mean duration of the steps in all epochs in µs, or None before the first epoch has ended."""
    epochs = [row for row in record.metrics if row["split"] == "training" and row["samples"] and row["seconds"]]
    batch_size = record.job.get("chosen_batch_size") or record.job["batch_size"]
    if not epochs or not batch_size:
        return None
    return float(1e6 * batch_size * sum(row["seconds"] for row in epochs) / sum(row["samples"] for row in epochs))


def _footprint(planned: Planned) -> Footprint:
    return Footprint(planned.operators.tolist(), planned.planned_bytes.tolist(), planned.vanilla_bytes.tolist())


def _iteration_totals(iteration: Iteration, planned: Planned | None) -> IterationTotals:
    timeline = iteration.timeline
    bound_us = None
    if planned is not None:
        budget = max(planned.numbers.get("granted_bytes") or 0, timeline.device_peak_bytes)
        bound_us = solved_us(as_executed(iteration.trace, iteration.plan), planned.profile, budget, BOUND_LIMIT_S)
    repeated = iteration.repeated
    return IterationTotals(
        iteration_us=timeline.iteration_us,
        vanilla_us=iteration.vanilla.iteration_us,
        bound_us=bound_us,
        compute_us=timeline.compute_us,
        stall_us=timeline.stall_us,
        repeated_us=float((timeline.step_end_us - timeline.step_start_us)[repeated].sum()),
        steps=len(timeline.steps),
        repeated_steps=int(repeated.sum()),
        operators=iteration.trace.operator_count,
        tensors=iteration.trace.tensor_count,
        out=_lane_totals(timeline.transfers, Direction.OUT),
        in_=_lane_totals(timeline.transfers, Direction.IN),
    )


def _lane_totals(transfers: Sequence[Transfer], direction: Direction) -> LaneTotals:
    own = [transfer for transfer in transfers if transfer.direction == direction]
    busy_us = sum(transfer.end_us - transfer.start_us for transfer in own)
    return LaneTotals(len(own), sum(transfer.bytes for transfer in own), busy_us)


def _tensors(iteration: Iteration) -> list[MovedTensor]:
    """Return the tensors that are swapped or recomputed, those with the most bytes moved first."""
    timeline = iteration.timeline
    absences = _absences(iteration.plan)
    moves: dict[int, list[int]] = defaultdict(lambda: [0, 0])  # tensor → number of transfers out, in
    for transfer in timeline.transfers:
        moves[transfer.tensor][transfer.direction] += 1
    stalls: dict[int, float] = defaultdict(float)
    for stall in timeline.stalls:
        stalls[stall.tensor] += stall.us
    rows = iteration.plan.rows
    recomputations = Counter(rows["tensor"][rows["kind"] == EventKind.RECOMPUTE].tolist())
    tensors = []
    for number in {*moves, *recomputations}:
        tensor = iteration.trace.tensor(number)
        gone_after, back_before = absences.get(number, (None, None))
        out, back = moves[number][Direction.OUT], moves[number][Direction.IN]
        tensors.append(
            MovedTensor(
                tensor=number,
                name=tensor.name,
                kind=tensor.kind.name.lower(),
                dtype=tensor.dtype,
                shape=list(tensor.shape),
                bytes=tensor.bytes,
                out=out,
                in_=back,
                recomputed=recomputations[number],
                stall_us=stalls[number],
                gone_after=gone_after,
                back_before=back_before,
                moved_bytes=tensor.bytes * (out + back),
            )
        )
    return sorted(tensors, key=lambda row: (-row.moved_bytes, -row.bytes, row.tensor))


def _moved_totals(tensors: Sequence[MovedTensor]) -> MovedTotals:
    return MovedTotals(
        tensors=len(tensors),
        swapped=sum(row.out + row.in_ > 0 for row in tensors),
        recomputed=sum(row.recomputed > 0 for row in tensors),
        bytes=sum(row.moved_bytes for row in tensors),
    )


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
    absences: dict[int, tuple[int | None, int | None]] = {}
    for tensor in {*gone, *back}:
        first = min(gone[tensor], default=None)
        returns = back[tensor] if first is None else [operator for operator in back[tensor] if operator > first]
        absences[tensor] = first, min(returns or back[tensor], default=None)
    if plan.order is None:
        return absences
    number: dict[int | None, int | None] = {None: None} | dict(enumerate(plan.order.tolist()))
    return {tensor: (number[gone_after], number[back_before]) for tensor, (gone_after, back_before) in absences.items()}


# ---- the job's life --------------------------------------------------------------------------------------------------


def _latency(rows: Sequence[Row]) -> Latency:
    errors = [error for row in rows if (error := json_value(row["relative_error"])) is not None]
    bins = np.searchsorted(ERROR_EDGES, np.array(errors, np.float64), side="right") - 1
    averages = [row["average_us"] for row in rows if row["average_us"] is not None]
    return Latency(
        **{name: json_value([row[name] for row in rows]) for name in ("predicted_us", "measured_us", "average_us")},
        operators=len(rows),
        measured=len(errors),
        samples=max((row["samples"] or 0 for row in rows), default=0),
        total_us=sum(averages) if averages else None,
        median_error=statistics.median(errors) if errors else None,
        error_edges=ERROR_EDGES.tolist(),
        error_counts=np.bincount(bins, minlength=len(ERROR_EDGES)).tolist(),
    )


def _thinned(rows: Sequence[Row], kept_epoch: int | None) -> list[Row]:
    """Return the metrics of about MOST_EPOCHS epochs: equally spaced, the last one, and the one that was kept."""
    epochs = sorted({row["epoch"] for row in rows})
    every = -(-len(epochs) // MOST_EPOCHS) or 1
    shown = {*epochs[::-1][::every], kept_epoch}
    return [row for row in rows if row["epoch"] in shown]


def _log_line(line: Row, job: Row) -> LogLine:
    details = line["details"] or {}
    return LogLine(
        **{name: json_value(line[name]) for name in ("id", "at", "event", "generation", "reason")},
        seconds=(line["at"] - job["submitted_at"]).total_seconds(),
        **{name: json_value(details.get(name)) for name in LOG_NUMBERS},
    )
