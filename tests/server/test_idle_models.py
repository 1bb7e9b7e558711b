"""Jobs and predictions take turns with a device's memory: neither waits for what only the other side leaves unused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.server.refusals import refusal
from tests.server.support import FOREVER, Connection, Wait, phase, python_model, reason, state, submit, value

Alter = Callable[[dict[str, object]], None]

MODELS = 3
BUDGET = "20MB"  # of a prediction
CLAIM = "40MB"  # of a job: beside one model, not beside two
ASK = "SELECT predict(%s, '{1,2,3}'::float8[], %s)"
NUMBERS = {"type": "mlp", "hidden": [16, 16], "norm": "layer"}
ROWS = "SELECT cos(i) AS a, sin(i * 0.7) AS b, i % 10.0 AS c, cos(i) + sin(i) AS y FROM generate_series(1, 200) i"
LASTING: dict[str, Any] = {"query": ROWS, "epochs": FOREVER, "memory_budget": CLAIM}


def loaded(conn: Connection) -> set[str]:
    return {model for (model,) in conn.execute("SELECT model FROM tensile.loaded_models WHERE memory_budget > 0")}


@pytest.fixture
def conn(db: Connection, alter: Alter, wait_until: Wait) -> Iterator[Connection]:
    """Trained models, of which three fill the device within the budget."""
    alter({"pg_tensile.device_memory": "64MB", "pg_tensile.model_idle": 0})
    jobs = [submit(db, f"m{k}", NUMBERS, query=ROWS, epochs=1, seed=k) for k in range(MODELS)]
    assert all(value(db, "SELECT wait_for_job(%s, '100 s')", job) == "finished" for job in jobs)
    db.execute("SELECT register_model('lasting', %s)", (Jsonb(python_model(on_forward="time.sleep(0.02)")),))
    yield db
    for (job,) in db.execute("SELECT job FROM tensile.jobs WHERE ended_at IS NULL").fetchall():
        cancel(db, job)


def cancel(conn: Connection, job: int) -> None:
    conn.execute("SELECT cancel_job(%s)", (job,))
    conn.execute("SELECT wait_for_job(%s, '60 s')", (job,))


def fill(conn: Connection, wait_until: Wait) -> None:
    for k in range(MODELS):
        value(conn, ASK, f"m{k}", BUDGET)
    wait_until(lambda: loaded(conn) == {"m0", "m1", "m2"})


def test_a_waiting_job_takes_the_memory_of_idle_models_and_predictions_load_them_again(
    conn: Connection, wait_until: Wait
) -> None:
    fill(conn, wait_until)
    conn.execute("SET pg_tensile.predict_in_session = off")
    expected = [value(conn, ASK, f"m{k}", None) for k in range(MODELS)]
    value(conn, ASK, "m0", BUDGET)  # was used last
    job = submit(conn, "lasting", **LASTING)
    wait_until(lambda: phase(conn, job) == "training")
    assert loaded(conn) == {"m0"}, "the least recently used gave way, and no more than the job lacked"
    assert [value(conn, ASK, f"m{k}", BUDGET) for k in range(MODELS)] == expected, "one after the other"
    wait_until(lambda: loaded(conn) == {"m2"})
    assert state(conn, job) == "running"


def test_models_stay_where_they_would_not_suffice_for_the_job(conn: Connection, wait_until: Wait) -> None:
    first = submit(conn, "lasting", **LASTING)
    wait_until(lambda: phase(conn, first) == "training")
    value(conn, ASK, "m0", BUDGET)
    second = submit(conn, "m1", **LASTING)
    wait_until(lambda: "needs at least" in (reason(conn, second) or ""))
    value(conn, "SELECT pg_sleep(2)")  # longer than the pauses of the scheduler
    assert loaded(conn) == {"m0"} and state(conn, second) == "waiting"
    cancel(conn, first)
    wait_until(lambda: phase(conn, second) == "training")


def test_models_in_use_keep_their_memory_for_as_long_as_pg_tensile_model_idle_says(
    conn: Connection, alter: Alter, wait_until: Wait
) -> None:
    alter({"pg_tensile.model_idle": "1h"})
    fill(conn, wait_until)
    job = submit(conn, "lasting", **LASTING)
    wait_until(lambda: "models for prediction" in (reason(conn, job) or ""))
    assert loaded(conn) == {"m0", "m1", "m2"}
    alter({"pg_tensile.model_idle": 0})
    wait_until(lambda: phase(conn, job) == "training")


@pytest.mark.long
def test_a_prediction_that_has_waited_in_vain_comes_before_later_jobs(
    conn: Connection, connect: Callable[..., Connection], wait_until: Wait
) -> None:
    """Long: a prediction waits for ten seconds before it fails. Afterwards it is asked for again while a job waits."""
    whole = "60MB"
    first = submit(conn, "lasting", **LASTING)
    wait_until(lambda: phase(conn, first) == "training")
    sqlstate, message, _ = refusal(conn, ASK, "m0", whole)
    assert sqlstate == "53200" and "there is no device memory" in message
    second = submit(conn, "m1", **LASTING)
    wait_until(lambda: "models for prediction" in (reason(conn, second) or ""))
    cancel(conn, first)
    with connect() as session, ThreadPoolExecutor(1) as pool:
        assert pool.submit(value, session, ASK, "m0", whole).result(60) is not None
    wait_until(lambda: phase(conn, second) == "training", what="its turn, once the model is idle")
    assert loaded(conn) == set()


def test_a_job_that_came_first_does_not_wait_for_predictions_that_cannot_have_their_memory(
    conn: Connection, connect: Callable[..., Connection], wait_until: Wait
) -> None:
    first = submit(conn, "lasting", **LASTING)
    wait_until(lambda: phase(conn, first) == "training")
    waiting = submit(conn, "m1", **LASTING | {"memory_budget": "30MB"})
    wait_until(lambda: "needs at least" in (reason(conn, waiting) or ""))
    with connect() as session, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(refusal, session, ASK, "m0", "60MB")
        wait_until(lambda: value(conn, "SELECT count(*) FROM tensile.scheduler_log WHERE reason ~ 'models for pred'"))
        cancel(conn, first)
        wait_until(lambda: phase(conn, waiting) == "training")
        session.cancel()
        asked.exception(60)
