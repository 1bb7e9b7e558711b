"""Memory of jobs that is known only when something is executed: measured, booked, and planned anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.explaining import explained
from tests.server.support import (
    FOREVER,
    Connection,
    Row,
    Wait,
    ended,
    reason,
    register,
    settle,
    state,
    steps,
    submit,
    value,
)

Alter = Callable[[dict[str, object]], None]

# Activations of 960 rows take far more than the weights
WIDE = {"type": "mlp", "hidden": [64] * 16}
ROWS = "SELECT cos(i) AS a, sin(i * 0.7) AS b, cos(i) + sin(i) AS y FROM generate_series(1, 1200) i"
JOB: dict[str, Any] = {"query": ROWS, "batch_size": 960, "epochs": FOREVER}
RECURRENT = {
    "type": "python",
    "source": """
import torch
class Model(torch.nn.Module):
    def __init__(self, n_inputs, n_outputs):
        super().__init__()
        self.layers, self.last = torch.nn.LSTM(1, 64, batch_first=True), torch.nn.Linear(64, n_outputs)
    def forward(self, x):
        return self.last(self.layers(x.unsqueeze(-1))[0][:, -1])
def build(n_inputs, n_outputs):
    return Model(n_inputs, n_outputs)
""",
}
FEATURES = ", ".join(f"cos(i * {k}) AS c{k}" for k in range(1, 41))
SEQUENCES = f"SELECT {FEATURES}, cos(i) AS y FROM generate_series(1, 400) i"


def granted(conn: Connection) -> int:
    return int(value(conn, "SELECT granted_bytes FROM tensile.devices WHERE name = 'cpu'") or 0)


@pytest.fixture
def conn(db: Connection, wait_until: Wait) -> Iterator[Connection]:
    wait_until(lambda: granted(db) == 0)
    yield db
    for (job,) in db.execute("SELECT job FROM tensile.jobs WHERE ended_at IS NULL").fetchall():
        db.execute("SELECT cancel_job(%s)", (job,))
        db.execute("SELECT wait_for_job(%s, '60 s')", (job,))


def test_a_job_of_the_policy_none_has_what_its_first_step_took(
    conn: Connection, alter: Alter, wait_until: Wait
) -> None:
    register(conn, "wide", WIDE)
    memory = explained(conn, "wide", query=ROWS, batch_size=960, policy="none")
    peak = memory["memory"]["vanilla_bytes"]
    job = submit(conn, "wide", **JOB)
    reserved = wait_until(lambda: granted(conn))
    assert peak > 3 * reserved
    wait_until(lambda: steps(conn, job) > 3)
    assert granted(conn) == pytest.approx(peak, rel=0.2)
    other = submit(conn, "second", WIDE, **JOB)
    wait_until(lambda: steps(conn, other) > 3)
    assert granted(conn) == pytest.approx(2 * peak, rel=0.2)


def test_jobs_that_turn_out_larger_do_not_take_the_memory_of_others(
    conn: Connection, alter: Alter, wait_until: Wait
) -> None:
    """Both fit with what they reserve, but not with what they take: the second goes on when the first has ended."""
    alter({"pg_tensile.device_memory": "8MB"})
    first = submit(conn, "first", WIDE, **JOB)
    wait_until(lambda: steps(conn, first) > 3)
    second = submit(conn, "second", WIDE, **JOB)
    wait_until(lambda: "given memory back" in (reason(conn, second) or ""))
    assert state(conn, second) == "waiting" and granted(conn) <= 8 << 20 and steps(conn, second) <= 1
    conn.execute("SELECT cancel_job(%s)", (first,))
    wait_until(lambda: steps(conn, second) > 3)


def test_a_memory_budget_is_a_limit_of_jobs_without_plans_too(conn: Connection, wait_until: Wait, job_row: Row) -> None:
    job = submit(conn, "wide", WIDE, **JOB | {"memory_budget": "1MB"})
    settle(conn, wait_until, job)
    row = job_row(conn, job)
    assert (row["state"], row["sqlstate"]) == ("failed", "53200")
    assert "but may have 1,048,576" in row["error"] and "policy => 'joint'" in row["hint"]
    start = explained(conn, "wide", query=ROWS, batch_size=960, policy="none", memory_budget="1MB")["start"]
    assert start["when"] == "never"


def test_a_budget_that_an_explanation_calls_sufficient_suffices_for_a_recurrent_layer(
    conn: Connection, wait_until: Wait, job_row: Row
) -> None:
    """Its library decides what the layer keeps for its backward pass: several times what capturing tells."""
    register(conn, "recurrent", RECURRENT)
    arguments: dict[str, Any] = {"query": SEQUENCES, "target": "y", "batch_size": 300}
    memory = explained(conn, "recurrent", **arguments)["memory"]
    budget = f"{memory['least_bytes'] + 4096} B"
    assert explained(conn, "recurrent", **arguments, memory_budget=budget)["start"]["when"] == "now"
    job = submit(conn, "recurrent", **arguments, policy="joint", epochs=2, memory_budget=budget, options=None)
    wait_until(lambda: ended(conn, job))
    row = job_row(conn, job)
    assert (row["state"], row["error"]) == ("finished", None)
    tight = f"{memory['least_bytes'] * 9 // 10} B"
    job = submit(conn, "recurrent", **arguments, policy="joint", epochs=2, memory_budget=tight, options=None)
    settle(conn, wait_until, job)
    assert job_row(conn, job)["sqlstate"] == "53200"
