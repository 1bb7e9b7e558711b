"""Durations of jobs: the time that train_model expects, and the columns of tensile.progress about time and speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.server.cast import Cast, current_user
from tests.server.stage import Stage, report
from tests.server.support import SMALL_JOB, Connection, submit, value

# ---- before ----


@pytest.fixture
def told(db: Connection) -> Iterator[list[str]]:
    """Messages of the session about jobs."""
    messages: list[str] = []

    def keep(diagnostic: psycopg.errors.Diagnostic) -> None:
        if (diagnostic.message_primary or "").startswith("job "):
            messages.append(diagnostic.message_primary or "")

    db.add_notice_handler(keep)
    yield messages
    db.remove_notice_handler(keep)


@pytest.fixture
def former(flights: Connection) -> Iterator[Callable[..., int]]:
    """Insert an ended job of model `late` with the query of `submit`, 240 s long and of two epochs, but for changes."""

    def insert(epochs_done: int = 2, **changes: Any) -> int:
        fields = {key: SMALL_JOB[key] for key in ("query", "target", "epochs", "learning_rate", "policy")}
        fields |= {"optimizer": "adamw", "validation": 0.2, "seed": 0, "priority": 0, "state": "finished"}
        fields |= {"batch_size": 64, "options": Jsonb({"keep": "last"}), "settings": Jsonb({}), "attempts": 1}
        fields |= {"model": "late", "owner": "postgres", "stopped": "epochs"} | changes
        names, marks = ", ".join(fields), ", ".join(f"%({name})s" for name in fields)
        row = flights.execute(
            f"INSERT INTO tensile_internal.jobs (model_id, started_at, ended_at, {names})"
            " SELECT m.id, now() - interval '240 s',"
            f" now(), {marks} FROM tensile_internal.models m WHERE m.name = 'late' RETURNING id",
            fields,
        ).fetchone()
        assert row is not None
        job = int(row[0])
        for epoch in range(1, epochs_done + 1):
            flights.execute(
                "INSERT INTO tensile_internal.epochs (job, epoch, split) VALUES (%s, %s, 'training')", (job, epoch)
            )
        return job

    yield insert
    flights.execute("DELETE FROM tensile_internal.jobs")


def submitted(db: Connection, told: list[str], **changes: Any) -> str | None:
    """Return what train_model says of the time, in a transaction that is rolled back."""
    told.clear()
    with db.transaction(force_rollback=True):
        job = submit(db, "late", **({"query": SMALL_JOB["query"], "epochs": 2, "batch_size": 64} | changes))
    (message,) = told
    begin, end = f"job {job}", f": SELECT wait_for_job({job})"
    assert message.startswith(begin) and message.endswith(end)
    return message[len(begin) : -len(end)].removeprefix(", ") or None


def test_a_first_training_is_submitted_without_a_time(flights: Connection, told: list[str]) -> None:
    assert submitted(flights, told) is None


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({}, "about 4 minutes"),
        ({"epochs": 20}, "about 40 minutes"),
        ({"epochs": 1}, "about 2 minutes"),
        ({"max_time": "1 hour"}, None),
        ({"query": SMALL_JOB["query"] + " LIMIT 50"}, None),
        ({"batch_size": 32}, None),
        ({"options": {"clip": 1}}, None),
        ({"validation": 0.1}, None),
    ],
)
def test_a_training_is_expected_to_take_as_long_as_the_same_one_did(
    flights: Connection, told: list[str], former: Callable[..., int], changes: dict[str, Any], about: str | None
) -> None:
    former()
    assert submitted(flights, told, **changes) == about


def test_only_the_last_undisturbed_training_counts(
    flights: Connection, told: list[str], former: Callable[..., int]
) -> None:
    former(state="failed", error="x")
    former(attempts=2)
    former(0)
    former(kind="evaluate")
    assert submitted(flights, told) is None
    former(epochs_done=1)
    assert submitted(flights, told) == "about 8 minutes"
    former()
    assert submitted(flights, told) == "about 4 minutes"


def test_one_that_has_chosen_the_architecture_counts_and_a_trial_of_another_one_does_not(
    flights: Connection, told: list[str], former: Callable[..., int]
) -> None:
    chosen = value(flights, "SELECT architecture FROM tensile.models WHERE model = 'late'")
    former(architecture=Jsonb({"type": "mlp", "hidden": [3]}))
    assert submitted(flights, told) is None
    former(architecture=Jsonb(chosen), architecture_reason="its arrays are numbers")
    assert submitted(flights, told) == "about 4 minutes"


def test_one_that_stopped_early_is_expected_to_stop_again(
    flights: Connection, told: list[str], former: Callable[..., int]
) -> None:
    former(epochs=200, epochs_done=4, stopped="early_stopping")
    assert submitted(flights, told, epochs=300) == "about 4 minutes"
    assert submitted(flights, told, epochs=2) == "about 2 minutes"


def test_the_time_of_others_jobs_is_not_told(play: Cast, told: list[str], db: Connection) -> None:
    """A role with the privilege to train has no part in the owner's jobs."""
    db.execute("DELETE FROM tensile_internal.jobs")
    arguments = "'late', 'SELECT 1.5 AS x, y FROM secrets', 'y', epochs => 2"
    db.execute(f"GRANT SELECT ON secrets TO {current_user(play.alice)}, {current_user(play.mallory)}")
    play.alice.execute("SELECT grant_model('late', 'public', 'train')")
    said: dict[Connection, list[str]] = {play.alice: [], play.mallory: []}
    job = value(play.alice, f"SELECT train_model({arguments})")
    db.execute(
        "UPDATE tensile_internal.jobs SET state = 'finished', started_at = now() - interval '240 s', ended_at = now(),"
        " attempts = 1, stopped = 'epochs' WHERE id = %s",
        (job,),
    )
    db.execute("INSERT INTO tensile_internal.epochs (job, epoch, split) VALUES (%s, 2, 'training')", (job,))
    for conn, messages in said.items():

        def keep(diagnostic: psycopg.errors.Diagnostic, kept: list[str] = messages) -> None:
            kept.append(diagnostic.message_primary or "")

        conn.add_notice_handler(keep)
        with conn.transaction(force_rollback=True):
            conn.execute(f"SELECT train_model({arguments})")
    assert ["about 4 minutes" in messages[-1] for messages in said.values()] == [True, False]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "about 1 second"),
        (1.4, "about 1 second"),
        (40, "about 40 seconds"),
        (89.9, "about 90 seconds"),
        (90, "about 2 minutes"),
        (60 * 89, "about 89 minutes"),
        (3600 * 5.4, "about 5 hours"),
        (86400 * 1.5, "about 2 days"),
        (86400 * 400, "about 400 days"),
    ],
)
def test_a_time_in_words(db: Connection, seconds: float, words: str) -> None:
    assert value(db, "SELECT tensile_internal._about(%s)", seconds) == words


# ---- while it runs ----

PROGRESS = "SELECT time_left, least_time_left, measured_slowdown FROM tensile.progress WHERE job = %s"


def test_progress_has_the_time_left_while_the_job_trains(stage: Stage, job: int) -> None:
    report(stage, job, phase="'training'")
    assert stage.alice.execute(PROGRESS, (job,)).fetchone() == (None, None, None)
    report(stage, job, phase="'validating'", time_left_s=90.5, least_time_left_s=9)
    expected = (timedelta(seconds=90.5), timedelta(seconds=9), None)
    assert stage.alice.execute(PROGRESS, (job,)).fetchone() == expected
    for phase, known in (("refitting", True), ("saving", False), ("comparing", False), ("waiting", False)):
        report(stage, job, phase=f"'{phase}'")
        assert stage.alice.execute(PROGRESS, (job,)).fetchone() == (expected if known else (None, None, None))


def capture(stage: Stage, job: int, fingerprint: str, alone_us: float | None, device: str = "cpu") -> None:
    """Store a graph of the job's, and the latencies that its trainer has reported."""
    stage.conn.execute(
        "INSERT INTO tensile_internal.traces (job, device, revision, policy, fingerprint, overhead_bytes,"
        " least_bytes, graphs, traces) VALUES (%s, %s, 1, 'joint', %s, 0, 0, '[]', '{}')",
        (job, device, fingerprint),
    )
    header = Jsonb({"samples": 1, "total_us": 5.0, "load": 0.5, "average_load": 0.5, "alone_us": alone_us})
    stage.conn.execute("CREATE TABLE IF NOT EXISTS stage.headers (header jsonb); GRANT ALL ON stage.headers TO PUBLIC")
    stage.conn.execute("TRUNCATE stage.headers")
    stage.conn.execute("INSERT INTO stage.headers VALUES (%s)", (header,))
    stage.order(job, "SELECT tensile_worker._job_latency((SELECT header FROM stage.headers), '{}', '{}', '{}')")


def test_a_step_is_compared_with_one_of_the_job_alone(stage: Stage, job: int, second: int) -> None:
    """Or with one of an earlier job with the same graph on the same device, as long as this one was never alone."""

    def slowdown() -> float | None:
        found: float | None = value(stage.alice, "SELECT measured_slowdown FROM tensile.progress WHERE job = %s", job)
        return found

    report(stage, job, phase="'training'", samples_per_s=5715)
    assert slowdown() is None
    capture(stage, job, "f", None)
    capture(stage, second, "other", 1.0)
    assert slowdown() is None
    stage.conn.execute(
        "UPDATE tensile_internal.traces SET fingerprint = 'f', device = 'cuda:0' WHERE job = %s", (second,)
    )
    assert slowdown() is None
    stage.conn.execute("UPDATE tensile_internal.traces SET device = 'cpu' WHERE job = %s", (second,))
    stage.conn.execute(
        "UPDATE tensile_internal.operator_latencies SET alone_us = %s WHERE job = %s", (64e6 / 13158, second)
    )
    assert slowdown() == pytest.approx(13158 / 5715)
    stage.conn.execute(
        "UPDATE tensile_internal.operator_latencies SET alone_us = %s WHERE job = %s", (64e6 / 5715, job)
    )
    assert slowdown() == pytest.approx(1)
