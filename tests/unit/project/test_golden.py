"""Plans, timelines, an explanation and a report page, compared with hashes of earlier ones.

A change that keeps behaviour keeps these hashes. A change of behaviour rewrites them, and its commit says why:

    .venv/bin/python -m tests.unit.project.test_golden

Floats are hashed with nine significant digits, so that sums in another order (numpy's depend on the processor) are the
same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from pg_tensile.errors import BudgetError
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.explain.numbers import explain
from pg_tensile.planning.explain.request import Admission, Ahead, Request
from pg_tensile.planning.explain.text import render
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.simulator.simulator import SimulatedJob, simulate
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.report import page
from tests.unit.graphs import random_trace
from tests.unit.handmade import network
from tests.unit.records import facts_in, record, saving

GOLDEN = Path(__file__).with_name("golden.json")
RANDOM_TRACES = 40
SEARCHED_TRACES = 6  # of those, for the policy that searches: one plan takes it a third of a second
BRIEF = (*(f"random {seed}" for seed in range(0, RANDOM_TRACES, 4)), "network")  # of all sizes
SLOW_LINK = RTX_A6000.with_link(2e6)  # bytes/s: as slow beside the random traces as a real one is beside real traces
MB = 1 << 20


# ---- hashing ----


def rounded(value: Any) -> Any:
    """Return JSON of a value, with nine digits of each float."""
    if isinstance(value, np.ndarray):
        return rounded(value.tolist())
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def digest(value: bytes | Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(rounded(value), sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:16]


# ---- what is hashed ----


def cases(policy: str) -> dict[str, dict[int, Trace]]:
    """Return jobs by name of the case: random traces, chains of layers, and pairs of them."""
    count = SEARCHED_TRACES if policy == "swapadvisor" else RANDOM_TRACES
    traces = {f"random {seed}": {1: random_trace(Random(seed), 8 + seed % 17, 24)} for seed in range(count)}
    return traces | {"network": {1: network(8)}, "two networks": {1: network(5), 2: network(8, 1 << 19)}}


def budgets(traces: dict[int, Trace]) -> tuple[int | None, ...]:
    """Return budgets: none, half of the possible saving, and almost the minimum of swapping everything."""
    most = sum(footprint(trace).device_peak_bytes for trace in traces.values())
    least = sum(least_bytes(trace) for trace in traces.values())
    return None, (most + least) // 2, least + (most - least) // 10


def plans(policy: str, traces: dict[int, Trace]) -> Iterator[dict[int, Plan] | str]:
    """Return the plans, or the error, for each budget."""
    for budget in budgets(traces):
        try:
            yield POLICIES[policy](traces, SLOW_LINK, budget)
        except BudgetError as error:
            yield str(error)


def hashes_of(policy: str, names: Collection[str] | None = None) -> dict[str, list[str]]:
    """Return by case the hashes of the plans and of the timelines of all jobs under them.

    names: those of the cases; None means all.
    """
    hashes = {}
    for name, traces in cases(policy).items():
        if names is not None and name not in names:
            continue
        written: list[Any] = []
        timelines: list[Any] = []
        for planned in plans(policy, traces):
            if isinstance(planned, str):
                written.append(planned)
                continue
            written.append({job: planned[job].to_bytes().hex() for job in traces})
            jobs = [SimulatedJob(traces[job], planned[job], start_us=100.0 * job) for job in traces]
            timelines.append([vars(timeline) for timeline in simulate(jobs, SLOW_LINK)])
        hashes[name] = [digest(written), digest(timelines)]
    return hashes


def explanation_hashes() -> dict[str, str]:
    request = Request("late", "mlp", "cpu", "joint", 10, 64, 25, 1600, 400, 0, 1000, 16 * MB, 16 * MB)
    trace = network(24)
    budget = (least_bytes(trace) + footprint(trace).device_peak_bytes) // 2
    wanted = {
        "roomy": (request, Admission(1 << 40)),
        "within a budget": (request._replace(memory_budget=budget), Admission(1 << 40)),
        "waits": (request, Admission(budget, 0, 1, 0, budget // 2, ahead=(Ahead(True, budget // 2, 9.0),))),
        "swaps all": (request._replace(policy="swap_all"), Admission(1 << 40)),
    }
    hashes = {}
    for name, (asked, admission) in wanted.items():
        explanation = explain(asked, {"train": trace, "evaluate": network(3)}, RTX_A6000.with_link(2e9), admission)
        hashes[name] = digest([explanation.to_json(), render(explanation)])
    return hashes


def page_hashes() -> dict[str, str]:
    """Return hashes of a report: its facts, and its HTML without scripts, styles, white space around tags, versions
    and what Bokeh numbers."""
    html = page.render(record(saving(share=0.5)))
    facts = facts_in(html)
    del facts["iteration"]["bound_us"]  # a solver's, whose last digits depend on the processor
    for version in facts.pop("versions").values():
        html = html.replace(f"<td>{version}</td>", "")
    html = re.sub(r"<(script|style)\b.*?</\1>", "", html, flags=re.DOTALL)
    html = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\bp[0-9]{4,}\b", "", html)
    html = re.sub(r"\s+<", "<", re.sub(r">\s+", ">", html)).replace("&#34;", "&quot;").replace("&#39;", "&#x27;")
    return {"facts": digest(facts), "html": digest(html.encode())}


# ---- tests ----


def golden_hashes(policy: str) -> dict[str, list[str]]:
    hashes: dict[str, list[str]] = json.loads(GOLDEN.read_text())["policies"][policy]
    return hashes


def brief(policy: str) -> set[str]:
    """Return the cases of `make test`; the long tests have the others. Two jobs take `joint` five seconds."""
    pairs = set() if policy == "joint" else {"two networks"}
    return set() if policy == "swapadvisor" else {*BRIEF, *pairs}


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "swapadvisor"])
def test_plans_and_their_timelines_are_as_before(policy: str) -> None:
    expected = golden_hashes(policy)
    assert hashes_of(policy, brief(policy)) == {name: expected[name] for name in brief(policy)}


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_those_of_the_other_cases_are_as_before(policy: str) -> None:
    """Long for the number of cases, and for the policy that searches."""
    expected = golden_hashes(policy)
    others = {*expected} - brief(policy)
    assert hashes_of(policy, others) == {name: expected[name] for name in others}


def test_explanations_are_as_before() -> None:
    assert explanation_hashes() == json.loads(GOLDEN.read_text())["explanations"]


def test_the_report_is_as_before() -> None:
    assert page_hashes() == json.loads(GOLDEN.read_text())["report"]


if __name__ == "__main__":
    golden = {
        "policies": {policy: hashes_of(policy) for policy in POLICIES},
        "explanations": explanation_hashes(),
        "report": page_hashes(),
    }
    GOLDEN.write_text(re.sub(r"\[\s+(\S+)\s+(\S+)\s+\]", r"[\1 \2]", json.dumps(golden, indent=1)) + "\n")
