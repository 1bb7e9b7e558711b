"""The iteration that a report shows: the steady state of the job's newest plan, with the link to itself.

Memory at each operator is that of tensile.footprint; times are the simulator's, with the latencies that the job has
measured so far. A job without a plan has no such iteration; NoIterationError says why, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import InvalidPlanError, TensileError
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.actions import ActionKind
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.simulator.simulator import Timeline
from pg_tensile.planning.trace.trace import Trace

if TYPE_CHECKING:
    from pg_tensile.client.record import JobRecord

LATER = "Try again when it trains: SELECT state, reason FROM tensile.progress;"


class NoIterationError(TensileError):
    """The job has no plan whose iteration could be shown. The message says why, the hint what to do."""


class Instruction(NamedTuple):
    """An instruction of the executor between two steps: it requests a copy of a tensor, waits for one, or frees memory.

    Times are in µs since the start of the iteration; only waits have a duration. `event` is an index in the plan, or −1
    if no event caused the instruction."""

    kind: ActionKind
    tensor: int
    step: int
    event: int
    start_us: float
    end_us: float


@dataclass(frozen=True, eq=False)
class Iteration:
    """One iteration, with o operators of the trace and s steps under the plan."""

    trace: Trace
    plan: Plan
    timeline: Timeline  # under the plan
    vanilla: Timeline  # without a plan: its steps are the operators
    planned_bytes: NDArray[np.int64]  # [s] on the device, workspaces included
    vanilla_bytes: NDArray[np.int64]  # [o] without a plan
    repeated: NDArray[np.bool_]  # [s] whether the step recomputes a tensor
    instructions: list[Instruction]  # in the order of their execution


def iteration_of(record: JobRecord) -> Iteration:
    """Return the iteration of a job. Raises NoIterationError if the job has no plan, or none that fits its trace."""
    planned = record.planned
    if planned is None:
        raise NoIterationError(*_why_there_is_none(record.job))
    try:
        timeline, vanilla = planned.timeline(), planned.vanilla()
        sequence = AccessSequence(planned.trace, planned.plan)
        instructions = _instructions(sequence, timeline, planned.profile.handover_us)
    except InvalidPlanError as error:
        raise _outdated(record.job["job"], error.message) from None
    by_step = (planned.operators, planned.planned_bytes, planned.vanilla_bytes)
    if any(len(column) != len(sequence.steps) for column in by_step) or np.any(sequence.operators != planned.operators):
        raise _outdated(record.job["job"], "its steps are not those of the trace")
    vanilla_bytes = np.zeros(planned.trace.operator_count, np.int64)
    vanilla_bytes[planned.operators] = planned.vanilla_bytes
    return Iteration(
        planned.trace,
        planned.plan,
        timeline,
        vanilla,
        planned.planned_bytes,
        vanilla_bytes,
        sequence.step_event >= 0,
        instructions,
    )


def _instructions(sequence: AccessSequence, timeline: Timeline, handover_us: float) -> list[Instruction]:
    """Return the actions of the sequence other than running operators, with their times."""
    step_end_us = timeline.step_end_us.tolist()
    waits = zip(sequence.transfers.wait.tolist(), timeline.transfers, strict=True)
    known_us = {wait: transfer.end_us + handover_us for wait, transfer in waits}  # by the action that waits for it
    instructions: list[Instruction] = []
    now = 0.0
    for index, (kind, step, tensor, event) in enumerate(sequence.actions()):
        if kind is ActionKind.RUN:
            now = max(now, step_end_us[step])
            continue
        start = now
        now = max(now, known_us.get(index, now))
        instructions.append(Instruction(kind, tensor, step, event, start, now))
    return instructions


# ---- why an iteration is missing -------------------------------------------------------------------------------------


def _outdated(job: int, detail: str) -> NoIterationError:
    message = f"the newest plan of job {job} was made for another trace than the one that the job has sent since"
    return NoIterationError(message, "Try again when the scheduler has made another plan; it does so at once.", detail)


def is_eager(job: Mapping[str, Any]) -> bool:
    """Return whether eager PyTorch executes the job, because its policy is none."""
    return bool((job["planned_policy"] or job["policy"]) == "none")


def _why_there_is_none(job: Mapping[str, Any]) -> tuple[str, str]:
    """Return message and hint of the error for a job without a plan."""
    number, ended = job["job"], job["ended_at"] is not None
    if job["kind"] == "calibrate":
        hint = "tensile.latency_models has what it found. Name a job that train_model has returned."
        return f"job {number} measures the device and trains no model: there is no plan", hint
    if is_eager(job):
        hint = "Train with policy => 'joint' to have the iteration captured and planned."
        return f"job {number} is executed eagerly (policy none): its iteration is not captured, and not planned", hint
    if not ended:
        waits = f"it is {job['state']}" + (f": {job['reason']}" if job["reason"] else "")
        missing = "has not captured its iteration" if job["captured_at"] is None else "has no plan"
        return f"job {number} {missing} yet; {waits}", LATER
    hint = "Only the last job of each model keeps its plan, and a dump has none."
    if job["captured_at"] is not None:
        return f"job {number} ended before it had a plan", hint
    if job["state"] == "finished":
        return f"the plan of job {number} is not kept any more: a later job of its model has ended since", hint
    return f"job {number} ended before it had a plan, or a later job of its model has taken its place", hint


# ---- names -----------------------------------------------------------------------------------------------------------


def short(target: str) -> str:
    """Return the short name of an operator: "convolution" for "aten.convolution.default"."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def tensor_name(trace: Trace, tensor: int) -> str:
    """Return the name of a tensor, or its number if it has no name."""
    return trace.tensor_name[tensor] or f"tensor {tensor}"
