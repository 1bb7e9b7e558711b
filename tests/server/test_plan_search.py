"""Searches for better plans while jobs train: of policy swapadvisor, with another order of operators, and of joint."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.trace.trace import Trace
from tests.server.pressure import Lab, Wait
from tests.server.stage import processes
from tests.server.support import FOREVER, alive, children, register, value

CLUSTER_SETTINGS = {"pg_tensile.search_processes": 1}
QUERY = "query => 'SELECT label, image FROM images LIMIT 256', target => 'label', batch_size => 64, validation => 0.0"
# All branches begin before the first one ends: branch by branch it takes an eighth of the memory.
BRANCHES = """
import torch
from torch import nn

class Branches(nn.Module):
    def __init__(self, n_inputs, n_outputs):
        super().__init__()
        self.register_buffer("wide", torch.linspace(-1, 1, n_inputs * 4096).reshape(n_inputs, 4096))
        self.head = nn.Linear(8, n_outputs)

    def forward(self, x):
        large = [torch.sin((x * (1 + branch)) @ self.wide) for branch in range(8)]
        return self.head(torch.stack([branch.amax(1) for branch in large], 1))

def build(n_inputs, n_outputs):
    return Branches(n_inputs, n_outputs)
"""


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "branches": {"type": "python", "source": BRANCHES},
    "wide": {"type": "mlp", "hidden": [512, 512, 512]},
}


class Searching(Lab):
    """A server whose jobs have half the memory that they need without plans."""

    def __init__(self, cluster: Any, wait_until: Wait) -> None:
        super().__init__(cluster, wait_until, trained=())
        self.budgets: dict[str, int] = {}  # by network, once it is trained
        self.plain = self.train(policy="none")
        self.plain_digest = self.digest(self.plain)
        # Over such a link swaps take longer than a step, however slow the machine is. Where the plan that
        # a search starts from hides them behind operators, nothing can be better, and the search ends at once.
        slow = """'{"out_bytes_per_s": 1e6, "in_bytes_per_s": 1e6}'"""
        self.conn.execute(f"UPDATE tensile_internal.device_profiles SET profile = profile || {slow}")

    def budget(self, name: str, architecture: dict[str, Any]) -> int:
        register(self.conn, name, architecture)
        options = """options => '{"task": "classification", "format": "json"}'"""
        memory = json.loads(value(self.conn, f"SELECT explain_training('{name}', {QUERY}, {options})"))["memory"]
        return int(memory["least_bytes"] + memory["vanilla_bytes"]) // 2

    def train(self, name: str = "branches", policy: str = "swapadvisor", epochs: int = 15, **options: Any) -> int:
        """Submit a job of a new model."""
        self._models += 1
        model = f"{name}{self._models}"
        register(self.conn, model, ARCHITECTURES[name])
        given = json.dumps({"task": "classification", "deploy": False, "keep": "last"} | options)
        if policy != "none" and name not in self.budgets:
            self.budgets[name] = self.budget(name, ARCHITECTURES[name])
        budget = "NULL" if policy == "none" else f"'{self.budgets[name] // 1024}kB'"
        arguments = f"{QUERY}, policy => '{policy}', epochs => {epochs}, seed => 3, memory_budget => {budget}"
        return int(value(self.conn, f"SELECT train_model('{model}', {arguments}, options => '{given}')"))

    def search(self, job: int, columns: str = "state") -> Any:
        row = self.conn.execute(f"SELECT {columns} FROM tensile.plan_searches WHERE job = %s", (job,)).fetchone()
        return row if row is None or "," in columns else row[0]

    def await_state(self, job: int, *states: str, timeout: float = 60) -> None:
        self.wait_until(lambda: self.search(job) in states, timeout, lambda: f"{self.search(job)}: {self.told()}")

    def order(self, job: int) -> bytes:
        return bytes(value(self.conn, "SELECT plan_order FROM tensile.plans WHERE job = %s", job) or b"")

    def searcher(self) -> int:
        """Wait for the process that searches and return its pid."""
        pids = children(processes(self.conn)["pg_tensile scheduler"][0])
        return next(pid for pid in pids if b"plan_search" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))


@pytest.fixture(scope="module")
def lab(module_cluster: Any, wait_until: Wait) -> Iterator[Searching]:
    lab = Searching(module_cluster, wait_until)
    yield lab
    lab.conn.close()


@pytest.mark.parametrize("seconds", [0, 0.5, 86401, "soon", None, True])
def test_an_invalid_search_time_is_refused_at_submission(lab: Searching, seconds: Any) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="search_time") as refused:
        lab.train(search_time=seconds)
    assert "at least 1 and at most 86400" in (refused.value.diag.message_hint or "")


def test_a_job_gets_a_better_plan_while_it_trains(lab: Searching) -> None:
    job = lab.train(epochs=FOREVER, search_time=2)
    lab.await_training(job)
    lab.await_state(job, "finished")
    first, best, evaluations, cached = lab.search(job, "first_us, best_us, evaluations, cached")
    assert best < 0.98 * first and evaluations > 0 and not cached
    lab.wait_until(lambda: lab.order(job) and lab.used_generation(job) == lab.newest_generation(job), what=lab.told)
    assert lab.search(job, "elapsed > '0 s' AND elapsed < '60 s'")
    lab.await_log("planned", job, "a search has found a better plan for job")
    lab.await_log("search", job, "has ended")
    columns = "generation, events, plan_order, iteration_us, planned_bytes, granted_bytes"
    row = lab.conn.execute(f"SELECT {columns} FROM tensile.plans WHERE job = %s", (job,)).fetchone()
    assert row is not None and row[4] <= row[5] <= lab.budgets["branches"]
    plan = Plan.from_rows(row[1], row[0], row[2])
    trace = Trace.from_bytes(value(lab.conn, "SELECT traces[1] FROM tensile.traces WHERE job = %s", job))
    validate(trace, plan)
    executed = "SELECT array_agg(operator ORDER BY sequence) FROM tensile.footprint WHERE job = %s"
    assert plan.order is not None and set(plan.order.tolist()) == set(value(lab.conn, executed, job))
    shown = "SELECT trigger_operator FROM tensile.plan_events WHERE job = %s ORDER BY sequence"
    triggers = [int(plan.order[event.trigger]) for event in plan.events]
    assert [row[0] for row in lab.conn.execute(shown, (job,)).fetchall()] == triggers
    assert value(lab.conn, "SELECT count(*) FROM tensile_internal.search_results") == 1
    lab.cancel(job)


def test_the_next_job_with_the_graph_has_the_result_at_once_and_learns_the_same(lab: Searching) -> None:
    """Runs after the test above. The losses are bitwise those without a plan."""
    searched = lab.train(search_time=2)
    assert lab.digest(searched) == lab.plain_digest
    assert lab.search(searched, "state, cached, elapsed") == ("finished", True, None)
    assert lab.order(searched)
    losses = "SELECT array_agg(loss ORDER BY epoch) FROM tensile.epoch_metrics WHERE job = %s"
    assert value(lab.conn, losses, lab.plain) == value(lab.conn, losses, searched)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_long_job_of_the_default_policy_is_searched_for(lab: Searching) -> None:
    """Long: a search begins after a minute."""
    job = lab.train("wide", "joint", epochs=FOREVER, search_time=5)
    lab.await_training(job)
    lab.await_state(job, "finished", timeout=300)
    first, best, evaluations, order = lab.search(job, "first_us, best_us, evaluations, generation")
    assert best <= first and evaluations > 0 and order == 0
    lab.await_log("search", job, "has ended")
    lab.cancel(job)


@pytest.mark.long
def test_a_search_ends_with_its_job_and_its_process_may_die(lab: Searching) -> None:
    """Long: two searches run beside two jobs."""
    jobs = [lab.train("wide", epochs=FOREVER, search_time=600) for _ in range(2)]
    lab.wait_until(lambda: {lab.search(job) for job in jobs} == {"queued", "searching"}, what=lab.told)
    first, second = sorted(jobs, key=lab.search, reverse=True)
    os.kill(lab.searcher(), signal.SIGKILL)
    lab.await_state(first, "failed")
    assert "was killed by signal 9" in lab.await_log("search", first, "has failed")
    lab.await_steps(first, 2)
    lab.await_state(second, "searching")
    searcher = lab.searcher()
    lab.cancel(second)
    lab.await_state(second, "stopped")
    lab.wait_until(lambda: not alive(searcher))
    lab.cancel(first)
    assert lab.search(first) == "failed"
