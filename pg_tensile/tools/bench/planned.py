"""The policies' plans, and their properties that are known without execution."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from pg_tensile.errors import BudgetError
from pg_tensile.execution.capture import Captured
from pg_tensile.planning import bounds
from pg_tensile.planning.device.profile import GB, DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.memory import floor_bytes, footprint
from pg_tensile.planning.plan.order import as_executed
from pg_tensile.planning.plan.plan import CODECS, NO_EVENTS, Plan
from pg_tensile.planning.policies import named_policy
from pg_tensile.planning.simulator.simulator import SimulatedJob, Timeline, simulate
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench.clone import KNOWN
from pg_tensile.tools.bench.compression import Sparsity, plan_compressed
from pg_tensile.tools.bench.options import MEASURED, MODELS, BenchOptions, PolicyChoice
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.report import machine, message_of, versions
from pg_tensile.tools.bench.row import Row
from pg_tensile.tools.bench.timeline import timeline
from pg_tensile.tools.bench.transfers import overlap, transfer_ms
from pg_tensile.tools.bench.workload import Workload

NOT_SIMULATED = "PyTorch's own means can be executed, but not simulated"  # error of a peer on a simulated device


@dataclass(frozen=True)
class PlannedPolicy:
    """A policy's plan on its graph. `error`: why it has no plan; `plan` is empty then, and for a peer."""

    choice: PolicyChoice
    captured: Captured
    budget_bytes: int | None
    plan: Plan = NO_EVENTS
    planning_ms: float | None = None
    planned_ms: float | None = None  # simulated with the latencies that it was planned with
    latency_error: float | None = None  # the median relative error of the latencies that it was planned with
    error: str | None = None


def plan_policies(
    workload: Workload, profile: DeviceProfile, progress: Progress, sparsity: Sparsity | None = None
) -> list[PlannedPolicy]:
    """Return the plan of each requested policy; with `sparsity` swaps are compressed.

    Vanilla is never reordered. A peer has no plan.
    """
    vanilla_peak = footprint(workload.vanilla.trace).peak_bytes
    simulated = workload.options.device.kind == "sim"
    planned = []
    for choice in workload.options.policies:
        if choice.is_peer:
            error = NOT_SIMULATED if simulated else None
            planned.append(PlannedPolicy(choice, workload.vanilla, None, error=error))
            continue
        progress.say(f"planning: {choice}")
        captured = workload.early if choice.early_update else workload.vanilla
        budget = choice.budget.nbytes(vanilla_peak) if choice.budget else None
        planned.append(with_plan(PlannedPolicy(choice, captured, budget), profile, workload.options, sparsity))
    return planned


def with_plan(
    policy: PlannedPolicy, profile: DeviceProfile, options: BenchOptions, sparsity: Sparsity | None
) -> PlannedPolicy:
    """Plan with the latencies in the graph's trace, or with the requested estimate.

    The workspaces are always the trace's, because without them no plan can be held to a budget to the byte.
    """
    choice, trace = policy.choice, policy.captured.trace
    function, planned_trace, models = named_policy(choice.name, KNOWN), trace, options.latency_models
    latency_error = None
    try:
        started = time.perf_counter()
        if choice.latencies != MEASURED:
            estimate = models.predict if models and choice.latencies == MODELS else roofline.estimate
            planned_trace = trace.with_latencies(estimate(trace, profile))
            measured = np.maximum(trace.latency_us, roofline.SMALLEST_US)[1:-1]
            latency_error = float(np.median(np.abs(planned_trace.latency_us[1:-1] / measured - 1)))

        def make(trace: Trace) -> Plan:
            return function({0: trace}, profile, policy.budget_bytes, **dict(choice.keywords))[0]

        if sparsity is None:
            plan = make(planned_trace)
        else:
            plan, coding = plan_compressed(make, planned_trace, profile, options.compression, sparsity)
            trace, planned_trace = trace.with_coding(coding), planned_trace.with_coding(coding)
            policy = replace(policy, captured=replace(policy.captured, trace=trace))
        planning_ms = (time.perf_counter() - started) * 1e3
        planned_ms = predicted(planned_trace, plan, profile).iteration_us / 1e3  # a plan that is not valid ends here
        return replace(policy, plan=plan, planning_ms=planning_ms, planned_ms=planned_ms, latency_error=latency_error)
    except Exception as error:
        return replace(policy, error=message_of(error))


def empty_row(options: BenchOptions, choice: PolicyChoice, device: torch.device | None = None) -> Row:
    """Return the row with the values known in advance."""
    return Row(
        model=options.model,
        policy=choice.name,
        device=str(options.device),
        label=choice.label,
        keywords=dict(choice.keywords),
        budget=str(choice.budget) if choice.budget else None,
        latencies=choice.latencies,
        batch=options.batch,
        optimizer=options.optimizer,
        rounds=options.rounds,
        light=options.light,
        iterations=options.iterations,
        warmup=options.warmup,
        early_update=choice.early_update,
        compression=options.compression,
        seed=options.seed,
        threads=torch.get_num_threads(),
        versions=versions(),
        machine=machine(device),
    )


def planned_row(row: Row, workload: Workload, policy: PlannedPolicy, profile: DeviceProfile) -> Row:
    """Add the values of the trace, the plan and the simulator to `row`; those of the plan only if it exists."""
    trace = policy.captured.trace
    row = row.with_values(
        operators=trace.operator_count,
        tensors=trace.tensor_count,
        vanilla_peak_bytes=footprint(workload.vanilla.trace).peak_bytes,
        link_gbps=profile.out_bytes_per_s / GB,
        error=policy.error,
    )
    if policy.choice.is_peer:
        return row
    row = row.with_values(
        workspace_peak_bytes=int(trace.workspace_bytes.max()),
        floor_bytes=floor_bytes(trace),
        budget_bytes=policy.budget_bytes,
        planning_ms=policy.planning_ms,
        planned_ms=policy.planned_ms,
        latency_error=policy.latency_error,
        capture_ms=workload.capture_ms,
    )
    if policy.error is not None:
        return row
    timeline = predicted(trace, policy.plan, profile)
    return row.with_values(
        predicted_peak_bytes=timeline.peak_bytes,
        host_arena_bytes=timeline.host_arena_bytes,
        simulated_ms=timeline.iteration_us / 1e3,
        simulated_stall_ms=timeline.stall_us / 1e3,
        simulated_transfer_ms=transfer_ms(timeline.transfers),
        simulated_overlap=overlap(timeline.transfers, timeline.stall_us),
        codecs=codecs_of(policy.plan),
    )


def codecs_of(plan: Plan) -> dict[str, int]:
    """Count the swap-outs of each codec."""
    counts = np.bincount(plan.rows["codec"], minlength=len(CODECS)).tolist()
    return {name: count for name, count in zip(CODECS[1:], counts[1:], strict=True) if count}


def distance(row: Row, workload: Workload, policy: PlannedPolicy, profile: DeviceProfile) -> Row:
    """Add the simulated bound for the row's device peak and, if requested, the plan's memory over time.

    The bound is that of the policy's graph in the plan's order of operators, as a multiple of the time of the same
    graph. Both use the latencies known before the rounds.
    """
    assert row.device_peak_bytes is not None
    trace = policy.captured.trace
    with contextlib.suppress(BudgetError):  # a peer's own graph may need less than the captured one
        least_us = bounds.least_us(as_executed(trace, policy.plan), profile, row.device_peak_bytes)
        row = row.with_values(least_eor=least_us / float(trace.latency_us.sum()))
    if workload.options.timeline and not policy.choice.is_peer:
        row = row.with_values(timeline=timeline(trace, policy.plan, profile))
    return row


def predicted(trace: Trace, plan: Plan, profile: DeviceProfile) -> Timeline:
    return simulate([SimulatedJob(trace, plan)], profile)[0]


def failed_rows(options: BenchOptions, error: BaseException) -> list[Row]:
    """Return a row with the error for each policy, if nothing could be measured or planned."""
    return [empty_row(options, choice).with_values(error=message_of(error)) for choice in options.policies]
