"""The policies' plans, and what is known of them without executing anything."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from pg_tensile.bench.options import BenchOptions
from pg_tensile.bench.progress import Progress
from pg_tensile.bench.report import Row, machine, message_of, versions
from pg_tensile.bench.workload import Workload
from pg_tensile.capture import Captured
from pg_tensile.peak import floor_bytes, footprint
from pg_tensile.plan import NO_EVENTS, Plan
from pg_tensile.policies import named_policy
from pg_tensile.profile import GB, DeviceProfile
from pg_tensile.simulator import SimulatedJob, Timeline, simulate
from pg_tensile.trace import Trace

VANILLA = "none"


def budget_of(policy: str, options: BenchOptions, budget_bytes: int | None) -> int | None:
    """The budget that a policy has to keep to. Vanilla has none where it is what other policies are compared with."""
    compared = policy == VANILLA and any(name != VANILLA for name in options.policies)
    return None if compared else budget_bytes


@dataclass(frozen=True)
class PlannedPolicy:
    """A policy's plan on its graph. `error`: why there is none; `plan` is empty then."""

    name: str
    captured: Captured
    plan: Plan
    planning_ms: float | None
    error: str | None


def plan_policies(
    workload: Workload, profile: DeviceProfile, budget_bytes: int | None, progress: Progress
) -> list[PlannedPolicy]:
    """A plan of each policy asked for, made with the latencies in the graphs' traces. Vanilla is never reordered."""
    planned = []
    for name in workload.options.policies:
        progress.say(f"planning: {name}")
        captured = workload.vanilla if name == VANILLA else workload.planned
        try:
            started = time.perf_counter()
            plan = named_policy(name)({0: captured.trace}, profile, budget_bytes)[0]
            planning_ms = (time.perf_counter() - started) * 1e3
            simulate([SimulatedJob(captured.trace, plan)], profile)  # a plan that is not valid ends here
            planned.append(PlannedPolicy(name, captured, plan, planning_ms, None))
        except Exception as error:
            planned.append(PlannedPolicy(name, captured, NO_EVENTS, None, message_of(error)))
    return planned


def empty_row(options: BenchOptions, policy: str, device: torch.device | None = None) -> Row:
    """What is known before anything is done."""
    return Row(
        model=options.model,
        policy=policy,
        device=str(options.device),
        batch=options.batch,
        optimizer=options.optimizer,
        rounds=options.rounds,
        iterations=options.iterations,
        warmup=options.warmup,
        early_update=options.early_update,
        seed=options.seed,
        threads=torch.get_num_threads(),
        versions=versions(),
        machine=machine(device),
    )


def planned_row(
    row: Row, workload: Workload, policy: PlannedPolicy, profile: DeviceProfile, budget_bytes: int | None
) -> Row:
    """`row` with what the trace, the plan and the simulator tell; of the plan only where there is one."""
    trace = policy.captured.trace
    row = row.with_values(
        operators=trace.operator_count,
        tensors=trace.tensor_count,
        vanilla_peak_bytes=footprint(workload.vanilla.trace).peak_bytes,
        workspace_peak_bytes=int(trace.workspace_bytes.max()),
        floor_bytes=floor_bytes(trace),
        budget_bytes=budget_of(policy.name, workload.options, budget_bytes),
        link_gbps=profile.out_bytes_per_s / GB,
        planning_ms=policy.planning_ms,
        capture_ms=workload.capture_ms,
        error=policy.error,
    )
    if policy.error is not None:
        return row
    timeline = predicted(trace, policy.plan, profile)
    return row.with_values(
        predicted_peak_bytes=timeline.peak_bytes,
        host_arena_bytes=timeline.host_arena_bytes,
        simulated_ms=timeline.iteration_us / 1e3,
    )


def predicted(trace: Trace, plan: Plan, profile: DeviceProfile) -> Timeline:
    return simulate([SimulatedJob(trace, plan)], profile)[0]


def failed_rows(options: BenchOptions, error: BaseException) -> list[Row]:
    """A row for each policy where nothing could be measured or planned."""
    return [empty_row(options, policy).with_values(error=message_of(error)) for policy in options.policies]
