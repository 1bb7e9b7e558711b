"""Device memory that PyTorch's allocator takes for plans, beside what their tensors take.

For each network and policy: the peak of the tensors; what the allocator takes without a limit; and the grant, the
least limit with which it can execute the plan. All by the planner's model of the allocator, which
tests/emulated/test_replay.py compares with the allocator's rules. Plans are made for tensors of 60 % of what the
network takes without a plan; in the last row of a network the grant has that size, as in the server. Latencies are the
roofline's of an A100; nothing is executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.experiments.networks import (
    ALEXNET,
    BERT,
    DENSENET121,
    GPT2,
    INCEPTION3,
    LSTM,
    MOBILENET,
    RESNET50,
    SQUEEZENET,
    VGG16,
    Network,
    named,
)
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.tables import table
from pg_tensile.errors import BudgetError
from pg_tensile.planning.device.profile import A100_40GB
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.allocator import plan_bytes, replayed
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench.simulated import captured, with_estimates
from pg_tensile.tools.cli.bench import parse

NETWORKS = (ALEXNET, VGG16, INCEPTION3, RESNET50, DENSENET121, SQUEEZENET, MOBILENET, BERT, GPT2, LSTM)
BATCH = 16
SHARE = 0.6  # of the memory without a plan
PLANNED = ("none", "swap_all", "recompute_all", "vdnn", "lru", "capuchin", "tensile", "joint")
MIB = 1 << 20
HEADINGS = ("network", "policy", "tensors, MiB", "without a limit", "grant, MiB", "more", "step, times `none`")


def trace_of(network: Network) -> Trace:
    options = parse(["bench", *network.arguments(BATCH), "--device", f"sim:{A100_40GB.name}", "--policies", "none"])
    return with_estimates(captured(options), A100_40GB).vanilla.trace


def measure(network: Network) -> Iterator[dict[str, Any]]:
    host = trace_of(network)
    device = replace(host, device="cuda")
    budget = int(SHARE * footprint(host).device_peak_bytes)
    for policy in PLANNED:
        try:
            plan = POLICIES[policy]({0: host}, A100_40GB, budget)[0]
        except BudgetError as error:
            yield labels(network, policy) | {"error": error.message}
            continue
        yield row(network, policy, device, plan)
    within = JobPlanner(device, A100_40GB).within(int(SHARE * plan_bytes(device)))
    yield row(network, "joint, within a grant", device, within.plan)


def row(network: Network, policy: str, trace: Trace, plan: Plan) -> dict[str, Any]:
    planner = JobPlanner(trace, A100_40GB)
    return {
        **labels(network, policy),
        "peak_bytes": footprint(trace, plan).device_peak_bytes,
        "unlimited_bytes": replayed(AccessSequence(trace, plan)).peak_bytes,
        "granted_bytes": plan_bytes(trace, plan),
        "slowdown": planner.candidate(plan).us / planner.vanilla.us,
    }


def labels(network: Network, policy: str) -> dict[str, Any]:
    return {"network": network.title, "policy": policy, "error": None}


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            row["network"],
            f"`{row['policy']}`" if "," not in row["policy"] else f"`joint`{row['policy'][len('joint') :]}",
            *(
                (row["error"], "", "", "", "")
                if row["error"] is not None
                else (
                    f"{row['peak_bytes'] / MIB:.0f}",
                    f"{row['unlimited_bytes'] / MIB:.0f}",
                    f"{row['granted_bytes'] / MIB:.0f}",
                    f"{row['granted_bytes'] / row['peak_bytes'] - 1:.0%}",
                    f"{row['slowdown']:.2f}",
                )
            ),
        )
        for row in rows
    ]


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Plan for all networks; `quick`: for one."""
    for title in run.scenarios([SQUEEZENET.title] if run.quick else expected(run.kind)):
        yield from measure(named(NETWORKS, title))


def tables(results: Results) -> list[str]:
    return table(HEADINGS, table_rows(results.rows()))


def expected(_kind: str) -> list[str]:
    return [network.title for network in NETWORKS]


BENCHMARK = Section("Memory of the allocator", rows, tables, expected=expected, device=f"sim:{A100_40GB.name}")
