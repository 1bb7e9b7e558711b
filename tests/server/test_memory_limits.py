"""Jobs at the limits: their plan is damaged in shared memory, host memory ends, predictions need what they hold."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pg_tensile.plan import Event, EventKind, Plan
from tests.server.pressure import Lab, Wait
from tests.server.support import FOREVER, value, worker_pid
from tests.server.test_ledger import DAMAGE


@pytest.fixture(scope="module")
def lab(new_cluster: Callable[..., Any], wait_until: Wait) -> Iterator[Lab]:
    cluster = new_cluster()
    lab = Lab(cluster, wait_until, (("mlp", 1), ("mlp", 2)))
    yield lab
    lab.conn.close()
    cluster.end()


def stop_where_it_waits(lab: Lab, pid: int) -> None:
    """SIGSTOP for a server process in a wait for its latch, where it holds no lock of shared memory."""

    def stopped() -> bool:
        os.kill(pid, signal.SIGSTOP)
        waits = "SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = %s"
        lab.wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        if value(lab.conn, waits, pid):
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    lab.wait_until(stopped)


def test_a_plan_that_is_damaged_before_it_is_fetched_is_made_again(lab: Lab) -> None:
    lab.set_memory(0.62 * lab.vanilla(["mlp", "mlp"]))
    first = lab.submit("mlp", epochs=FOREVER)
    lab.await_training(first)
    generation = lab.newest_generation(first)
    worker = worker_pid(lab.conn, first)
    assert worker is not None
    stop_where_it_waits(lab, worker)
    try:
        second = lab.submit("mlp", 2)
        lab.wait_until(lambda: lab.newest_generation(first) > generation, 60, lab.told)
        events = lab.conn.execute(
            "SELECT event, tensor, trigger_operator, deadline_operator, version, delay_us, bytes FROM tensile.plan"
            " WHERE job = %s ORDER BY sequence",
            (first,),
        ).fetchall()
        plan = Plan.build(Event(EventKind[name.upper()], *numbers[:-1]) for name, *numbers in events)
        rows = plan.rows.copy()
        rows["bytes"] = [event[-1] for event in events]
        lab.conn.execute(DAMAGE.format(pattern=rows.tobytes().hex(), offset=9))
        with pytest.raises(psycopg.errors.DataCorrupted):
            lab.conn.execute("SELECT * FROM tensile.plan")
    finally:
        os.kill(worker, signal.SIGCONT)
    lab.await_log("damaged", first)
    assert lab.digest(second) == lab.weights["mlp", 2]
    lab.await_steps(first)
    lab.cancel(first)
    assert len(lab.log("damaged")) == 1


def test_a_model_for_prediction_has_its_memory_beside_jobs(lab: Lab) -> None:
    model = lab.submit("mlp", 1)
    assert lab.digest(model) == lab.weights["mlp", 1]
    ask = f"SELECT predict_class('{lab.column(model, 'model_name')}', i) FROM images i WHERE id = 7"
    lab.set_memory(2.05 * lab.sizes["mlp"].least)
    jobs = [lab.submit("mlp", seed, epochs=FOREVER) for seed in (1, 2)]
    lab.await_training(*jobs)
    with pytest.raises(psycopg.Error, match="there is no device memory for the") as full:
        lab.conn.execute(ask)
    assert full.value.sqlstate == "53200" and "pg_tensile.device_memory" in (full.value.diag.message_hint or "")
    assert device(lab, "inference_bytes") == 0
    for job in jobs:
        lab.await_steps(job)
    lab.cancel(*jobs)

    lab.set_memory(0.62 * lab.vanilla(["mlp", "mlp"]))
    jobs = [lab.submit("mlp", seed, epochs=FOREVER) for seed in (1, 2)]
    lab.await_training(*jobs)
    weights = value(lab.conn, "SELECT weight_bytes FROM tensile.model_versions WHERE job = %s", model)
    assert device(lab, "granted_bytes") + weights > device(lab, "budget_bytes")
    with lab.watch():
        assert value(lab.conn, ask) == "3"  # 7 % 4
        assert device(lab, "inference_bytes") >= weights
        for job in jobs:
            lab.await_steps(job)
    assert any("models for prediction" in reason for _, _, reason in lab.log("scheduled"))
    lab.cancel(*jobs)


def device(lab: Lab, column: str) -> int:
    return int(value(lab.conn, f"SELECT {column} FROM tensile.devices WHERE name = 'cpu'"))


def test_a_job_whose_copies_have_no_room_on_the_host_waits(lab: Lab) -> None:
    lab.set("host_memory", "1MB")
    lab.set_memory(0.62 * lab.vanilla(["mlp", "mlp"]))
    jobs = [lab.submit("mlp", seed) for seed in (1, 2)]
    waiting = "SELECT reason FROM tensile.jobs WHERE id = ANY(%s) AND state = 'waiting' AND reason ~ 'host memory'"
    reason = lab.bring_together(*jobs, until=lambda: value(lab.conn, waiting, jobs))
    assert "1.0 MB are allowed (pg_tensile.host_memory)" in reason
    assert value(lab.conn, "SELECT sum(host_bytes) FROM tensile.footprints WHERE job = ANY(%s)", jobs) <= 1 << 20
    assert [lab.digest(job) for job in jobs] == [lab.weights["mlp", seed] for seed in (1, 2)]
