"""batch_size => 0: the job chooses its batch size, reports and keeps it, and explain_training predicts it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.server.explaining import explain, explained
from tests.server.refusals import refused
from tests.server.support import Connection, Row, Wait, finish, register, submit, trainer_pid, value

ROWS = 2000
QUERY = f"""
    SELECT (SELECT array_agg(sin(i * g)::float4) FROM generate_series(1, 64) g) AS pixels, mod(i, 4)::text AS y
    FROM generate_series(1, {ROWS}) i
"""
CNN: dict[str, Any] = {"type": "cnn", "channels": [4, 8], "hidden": [16], "dropout": 0.1}
JOB: dict[str, Any] = {"query": QUERY, "batch_size": 0, "validation": 0.2, "epochs": 2, "policy": "joint"}

CHOSEN = "SELECT {} FROM tensile.batch_sizes WHERE job = %s AND chosen"


def choose(conn: Connection, model: str = "m", **arguments: Any) -> int:
    return submit(conn, model, CNN, **(JOB | arguments))


def test_a_job_chooses_its_batch_size_and_reports_it(db: Connection, job_row: Row) -> None:
    job = choose(db)
    finish(db, job)
    row = job_row(db, job)
    chosen = row["chosen_batch_size"]
    assert row["batch_size"] == 0 and 8 <= chosen <= ROWS // 16
    rate = value(db, CHOSEN.format("learning_rate"), job)
    assert rate == pytest.approx(1 - (1 - row["learning_rate"]) ** (chosen / 64))
    sizes = db.execute(
        "SELECT batch_size, chosen, feasible, samples_per_s > 0, device_bytes > 0, measured_us > 0, reason"
        " FROM tensile.batch_sizes WHERE job = %s ORDER BY samples_per_s DESC",
        (job,),
    ).fetchall()
    assert len(sizes) >= 4 and [size for size, is_chosen, *_ in sizes if is_chosen] == [chosen]
    assert all(fits and positive and takes and reason for _, _, fits, positive, takes, _, reason in sizes)
    assert 0 < sum(bool(measured) for *_, measured, _ in sizes) < len(sizes)
    shown = db.execute("SELECT batch_size, learning_rate, epochs FROM tensile.job_history WHERE job = %s", (job,))
    assert shown.fetchone() == (chosen, rate, 2)
    log = "SELECT reason, details->>'law' FROM tensile.scheduler_log WHERE job = %s AND event = 'batch size'"
    reason, law = db.execute(log, (job,)).fetchall()[-1]
    assert reason.startswith(f"{chosen} rows, of {len(sizes)} sizes: ") and law == "accudnn"
    trained = "SELECT DISTINCT samples FROM tensile.epoch_metrics WHERE job = %s AND split = 'training'"
    rows = value(db, "SELECT preprocessing->'rows'->>'training' FROM tensile.model_versions WHERE job = %s", job)
    assert db.execute(trained, (job,)).fetchall() == [(int(rows),)]  # each row once an epoch
    graphs = value(db, "SELECT graphs FROM tensile.traces WHERE job = %s", job)
    assert graphs[0] == {"name": "train", "rows": chosen}
    operators = "SELECT count(*) FROM tensile.operators WHERE job = %s"
    assert value(db, operators, job) == value(db, operators.replace("operators", "latency"), job)


def test_options(db: Connection, job_row: Row) -> None:
    options = {"batch_size_range": [40, 48], "learning_rate_scaling": "linear"}
    job = choose(db, options=options, learning_rate=0.01, epochs=1)
    finish(db, job)
    row = job_row(db, job)
    assert 40 <= row["chosen_batch_size"] <= 48
    assert value(db, CHOSEN.format("learning_rate"), job) == pytest.approx(0.01 * row["chosen_batch_size"] / 64)
    result = value(db, "SELECT array[min(batch_size), max(batch_size)] FROM tensile.batch_sizes WHERE job = %s", job)
    assert result[0] >= 40 and result[1] <= 48


@pytest.mark.long
def test_a_killed_job_keeps_its_batch_size(db: Connection, wait_until: Wait, job_row: Row) -> None:
    job = choose(db, epochs=40, options={"checkpoint_interval": 0.1})
    saved = "SELECT meta FROM tensile_internal.checkpoints WHERE job = %s AND meta IS NOT NULL"
    wait_until(lambda: value(db, saved, job), what="a checkpoint")
    chosen = job_row(db, job)["chosen_batch_size"]
    assert value(db, "SELECT batch_size FROM tensile.progress WHERE job = %s", job) == chosen
    pid = trainer_pid(db, job)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    finish(db, job)
    row = job_row(db, job)
    assert row["attempts"] == 2 and row["chosen_batch_size"] == chosen
    assert not [warning for warning in row["warnings"] or [] if "batch" in warning]
    log = "SELECT count(*) FROM tensile.scheduler_log WHERE job = %s AND event = 'batch size'"
    assert value(db, log, job) == 1
    assert value(db, "SELECT graphs->0->>'rows' FROM tensile.traces WHERE job = %s", job) == str(chosen)


@pytest.mark.long
def test_a_tight_budget_makes_a_smaller_batch_and_an_impossible_one_an_error(db: Connection) -> None:
    register(db, "m", CNN)
    free = explained(db, query=QUERY, batch_size=0)["choice"]
    assert free["batch_size"] == free["candidates"][0]["batch_size"]
    budget = int(0.3 * free["candidates"][0]["device_bytes"])
    job = choose(db, "tight", memory_budget=f"{budget}B", epochs=1)
    finish(db, job)
    chosen = value(db, CHOSEN.format("batch_size"), job)
    device_bytes = value(db, CHOSEN.format("device_bytes"), job)
    assert chosen < free["batch_size"] and device_bytes <= budget
    planned = value(db, "SELECT planned_bytes FROM tensile.plans WHERE job = %s", job)
    assert planned <= budget

    def train() -> None:
        finish(db, choose(db, "other", memory_budget="1kB"))

    message = r"no batch size fits: a batch of \d+ needs at least [\d,]+ bytes of device memory; the budget is 1,024"
    for attempt in (train, lambda: explain(db, query=QUERY, batch_size=0, memory_budget="1kB")):
        with pytest.raises(psycopg.Error) as error:
            attempt()
        assert error.value.sqlstate == "53200" and re.search(message, error.value.diag.message_primary or "")
        assert "memory" in (error.value.diag.message_hint or "")


@pytest.mark.long
def test_explain_shows_the_choice_and_the_runners_up(db: Connection) -> None:
    register(db, "m", CNN)
    lines = explain(db, query=QUERY, batch_size=0, learning_rate=0.01)
    result = explained(db, query=QUERY, batch_size=0, learning_rate=0.01)
    chosen = result["batch_size"]
    assert f"of {chosen} rows" in lines[0] and result["choice"]["batch_size"] == chosen
    (choice,) = [line for line in lines if line.startswith("  Batch size")]
    assert choice.startswith(f"  Batch size  {chosen} rows, learning rate 0.0")
    assert choice.endswith("scaled (accudnn) from 0.01 for 64 rows")
    whole = "\n".join(lines)
    assert re.search(rf"{chosen} rows, chosen +[\d,]+ rows/s +[\d.]+ ms a step", whole)
    assert len(re.findall(r"rows/s", whole)) > 3
    assert result["memory"]["planned_bytes"] == pytest.approx(
        result["choice"]["candidates"][0]["device_bytes"], rel=0.05
    )
    assert "choice" not in explained(db, query=QUERY)


def test_a_batch_larger_than_the_table(db: Connection) -> None:
    register(db, "m", CNN)
    options = {"batch_size_range": [5000, 6000]}
    refused("22000", "batch_size is 5000", "at most", lambda: explain(db, query=QUERY, batch_size=0, options=options))


@pytest.mark.long
def test_two_jobs_that_choose_at_once_both_train(fresh_cluster: Callable[..., Any]) -> None:
    """The device cannot hold twice the batch that a job would choose alone."""
    cluster = fresh_cluster({"pg_tensile.device_memory": "3MB"})
    with cluster.connect() as conn:
        options = {"batch_size_range": [8, 512]}
        architecture = CNN | {"channels": [16, 16]}
        jobs = [submit(conn, name, architecture, **(JOB | {"options": options})) for name in ("one", "two")]
        for job in jobs:
            finish(conn, job)
        device_bytes = [value(conn, CHOSEN.format("device_bytes"), job) for job in jobs]
        assert all(0 < nbytes <= 3 << 20 for nbytes in device_bytes)
