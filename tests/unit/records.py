"""Records of jobs built from a trace and a plan, like those that pg_tensile.client.record reads from a database."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from pg_tensile.client.record import JobRecord, Planned
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile
from pg_tensile.planning.latency.collectives import ALL_REDUCE, WAIT
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Access, Kind, Mode, Operator, Phase, Trace
from tests.unit.handmade import network

SUBMITTED = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
JOB: dict[str, Any] = {
    "job": 7,
    "kind": "train",
    "model_id": 1,
    "model": "late",
    "owner_id": 10,
    "owner": "alice",
    "query": "SELECT * FROM departures",
    "target": "late",
    "epochs": 20,
    "batch_size": 64,
    "optimizer": "adamw",
    "learning_rate": 0.001,
    "validation": 0.2,
    "seed": 0,
    "policy": None,
    "memory_budget": None,
    "priority": 0,
    "options": {"task": "classification"},
    "settings": {"search_path": "public", "TimeZone": "UTC"},
    "state": "finished",
    "reason": None,
    "cancel_requested": False,
    "attempts": 1,
    "retries": 0,
    "not_before": None,
    "version": 1,
    "submitted_at": SUBMITTED,
    "started_at": SUBMITTED + timedelta(seconds=1),
    "ended_at": SUBMITTED + timedelta(minutes=3),
    "rows": 4096,
    "fingerprint": "4096:00ff",
    "sqlstate": None,
    "error": None,
    "hint": None,
    "detail": None,
    "traceback": None,
    "warnings": None,
    "device": "cpu",
    "planned_policy": "joint",
    "vanilla_bytes": None,
    "least_bytes": None,
    "largest_operator": None,
    "overhead_bytes": 0,
    "persistent_bytes": None,
    "parameters": 93_642,
    "alone_us": None,
    "captured_at": SUBMITTED + timedelta(seconds=2),
    "architecture": {"type": "mlp", "hidden": [8]},
}
METRIC: dict[str, Any] = {"job": 7, "samples": 3200, "f1": None, "rmse": None, "r2": None, "seconds": 1.5}
RANK: dict[str, Any] = {"job": 7, "rank": 0, "node": "10.0.0.4", "device": "cuda:0", "state": "training", "step": 5}
RANK |= {"samples_per_s": 1204.5, "device_bytes": 1 << 20}
NEVER_CAPTURED: dict[str, Any] = {"device": "", "planned_policy": None, "parameters": None, "captured_at": None}
# What a name, a query or an error may be
HOSTILE = "</script></title><b id=evil onclick='x()'>\"\\u003c&amp;\x00\x1b[31m\u202e\ud800{{x}}$$x$$"


def record(planned: Planned | None = None, **changes: Any) -> JobRecord:
    """Build a record; `changes` are columns of the job or fields of the record."""
    fields: dict[str, Any] = {
        "read_at": SUBMITTED + timedelta(minutes=5),
        "progress": None,
        "ranks": [],
        "metrics": metrics(3),
        "latency": [] if planned is None else latency(planned.trace),
        "tensors": [],
        "log": [] if planned is None else [line(planned.numbers)],
        "settings": {"pg_tensile.device_memory": "1GB"},
        "versions": {"PostgreSQL": "15.4", "pg_tensile": "0.1.0"},
        "evaluation": None,
        "memory_flow": None,
    }
    fields |= {name: changes.pop(name) for name in list(changes) if name in fields}
    unknown = changes.keys() - JOB.keys()
    assert not unknown, unknown
    return JobRecord(job=JOB | changes, planned=planned, **fields)


def planned_of(trace: Trace, plan: Plan = NO_EVENTS, profile: DeviceProfile = RTX_A6000) -> Planned:
    """Build the plan's columns as the scheduler publishes them."""
    sequence = AccessSequence(trace, plan)
    held = sequence.footprint + trace.workspace_bytes[sequence.operators]
    without = AccessSequence(trace, NO_EVENTS).footprint + trace.workspace_bytes
    (timeline,) = simulate([SimulatedJob(trace, plan)], profile)
    (vanilla,) = simulate([SimulatedJob(trace)], profile)
    numbers = {
        "generation": plan.generation,
        "iteration_us": timeline.iteration_us,
        "vanilla_us": vanilla.iteration_us,
        "planned_bytes": int(held.max()),
        "granted_bytes": int(held.max()) * 51 // 50,
        "host_bytes": timeline.host_arena_bytes,
        "out_bytes": timeline.bytes_out,
        "in_bytes": timeline.bytes_in,
        "stall_us": timeline.stall_us,
        "recomputes": timeline.recomputes,
    }
    return Planned(trace, plan, profile, sequence.operators, held, without[sequence.operators], numbers)


def reduced(trace: Trace, ranks: int = 2, every: int = 4) -> Trace:
    """Return the trace with an all-reduce after every few gradients, for which it waits 250 µs, as soon as the next one
    has begun."""
    operators: list[Operator] = []
    behind = 0
    begun: list[int] = []  # tensors
    for operator in trace.operators:
        operators.append(operator)
        made = [access.tensor for access in operator.accesses if access.mode == Mode.CREATE]
        gradients = [tensor for tensor in made if trace.tensor_kind[tensor] == Kind.GRADIENT]
        behind += bool(gradients)
        if gradients and behind % every == 0:
            signature = f"f32[4], i64[], f64[], {ranks}"
            write = Access(gradients[0], Mode.WRITE)
            operators.append(Operator(ALL_REDUCE, Phase.OPTIMIZER, (write,), signature=signature, latency_us=2.0))
            begun += gradients[:1]
            if len(begun) > 1:
                operators.append(_wait_for(begun.pop(0)))
    operators[-1:] = [*map(_wait_for, begun), operators[-1]]
    return Trace.build(operators, trace.tensors, trace.device)


def _wait_for(tensor: int) -> Operator:
    return Operator(WAIT, Phase.OPTIMIZER, (Access(tensor, Mode.WRITE),), latency_us=250.0)


def saving(layers: int = 12, share: float = 0.6, policy: str = "joint", generation: int = 3) -> Planned:
    """Build a plan of a chain of layers for a share of its memory, or for the least that the policy reaches."""
    trace = network(layers)
    budget = int(footprint(trace).device_peak_bytes * share)
    plan = POLICIES[policy]({0: trace}, RTX_A6000, budget)[0]
    return planned_of(trace, Plan(plan.rows, generation))


def line(numbers: dict[str, Any], event: str = "planned", seconds: float = 2.5, **columns: Any) -> dict[str, Any]:
    """Build a line of the scheduler's log."""
    details = {name: number for name, number in numbers.items() if name != "generation"}
    row = {"id": 1, "at": SUBMITTED + timedelta(seconds=seconds), "event": event, "job": 7, "device": "cpu"}
    row |= {"generation": numbers.get("generation"), "reason": "job 7 has come"}
    return row | {"details": details | {"link_share": 1.0, "events": 4}} | columns


def metrics(epochs: int) -> list[dict[str, Any]]:
    return [
        METRIC
        | {"epoch": epoch, "split": split, "loss": 1 / epoch, "accuracy": 1 - 1 / (epoch + 1)}
        | {"at": SUBMITTED + timedelta(seconds=epoch)}
        for epoch in range(1, epochs + 1)
        for split in ("training", "validation")
    ]


def latency(trace: Trace) -> list[dict[str, Any]]:
    """Build latencies: all operators that take time are measured, and predicted a tenth too long."""
    rows = []
    for number, us in enumerate(trace.latency_us.tolist()):
        measured = us or None
        rows.append(
            {
                "job": 7,
                "operator": number,
                "phase": Phase(trace.phase[number]).name.lower(),
                "target": trace.target[number],
                "predicted_us": 1.1 * us,
                "measured_us": measured,
                "average_us": us,
                "samples": 5,
                "relative_error": None if measured is None else abs(1.1 * us - measured) / measured,
            }
        )
    return rows


def facts_in(page: str) -> dict[str, Any]:
    """Parse the numbers of a page; fail on invalid JSON such as NaN."""
    scripts = re.findall(r'<script type="application/json" id="facts">(.*?)</script>', page, re.DOTALL)
    assert len(scripts) == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    facts: dict[str, Any] = json.loads(scripts[0], parse_constant=refuse)
    return facts


def relabelled(trace: Trace, label: str) -> Trace:
    """Set names, modules, sources and targets to `label`, except of the first and last operator; return the trace."""
    operators = list(trace.operators)
    tensors = [tensor._replace(name=label, dtype=label) for tensor in trace.tensors]
    inner = [operator._replace(target=label, module=label, source=label) for operator in operators[1:-1]]
    return Trace.build([operators[0], *inner, operators[-1]], tensors, trace.device)


def fractional(trace: Trace, seed: int = 0) -> Trace:
    """Return the trace with latencies that no clock measures."""
    return trace.with_latencies(np.random.default_rng(seed).uniform(0.01, 40.0, trace.operator_count))
