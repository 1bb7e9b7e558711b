"""Checkpoints and weights that jobs write, and the state that loading leaves in the session."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from pg_tensile.execution.training.checkpoint_schedule import PAUSE
from tests.server.cast import visible
from tests.server.support import (
    FOREVER,
    MLP,
    ROWS,
    Connection,
    Wait,
    finish,
    python_model,
    register,
    state,
    steps,
    submit,
    trainer_pid,
    value,
)

WIDE = {"type": "mlp", "hidden": [3000, 3000]}  # weights of 36 MB: three chunks


@pytest.fixture
def written(db: Connection) -> Iterator[None]:
    """A table `written` of stored checkpoints, with the times of the first chunk and of completion."""
    db.execute(
        """
        CREATE TABLE written (job bigint, generation int, began timestamptz, ended timestamptz);
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
        BEGIN
            INSERT INTO written VALUES (NEW.job, NEW.generation, NEW.created_at, clock_timestamp());
            RETURN NULL;
        END $$;
        CREATE TRIGGER note AFTER UPDATE ON tensile_internal.checkpoints FOR EACH ROW EXECUTE FUNCTION note();
        """
    )
    yield
    db.execute("DROP TRIGGER note ON tensile_internal.checkpoints")


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_job_of_short_epochs_writes_no_checkpoint(db: Connection, written: None) -> None:
    """A second job, which asks for checkpoints, shows that they would be seen."""
    job = submit(db, "m", MLP, epochs=50)
    finish(db, job)
    asking = submit(db, "other", MLP, epochs=50, options={"checkpoint_interval": 0})
    finish(db, asking)
    assert value(db, "SELECT count(*) FROM tensile.epoch_metrics WHERE job = %s AND split = 'training'", job) == 50
    assert value(db, "SELECT count(*) FROM written WHERE job = %s", job) == 0
    assert value(db, "SELECT count(*) FROM written WHERE job = %s", asking) > 0
    assert value(db, "SELECT count(*) FROM tensile_internal.checkpoint_chunks") == 0


def test_the_pause_after_a_checkpoint_is_many_times_what_writing_it_took(
    db: Connection, written: None, wait_until: Wait
) -> None:
    """This holds for any interval that the user sets. The measured time is the server's part, without the child's."""
    architecture = {"type": "mlp", "hidden": [256, 256]}
    job = submit(db, "m", architecture, epochs=FOREVER, options={"checkpoint_interval": 0.001})
    wait_until(lambda: value(db, "SELECT count(*) FROM written") >= 4, what="checkpoints")
    pauses = db.execute(
        "SELECT extract(epoch FROM b.began - a.ended)::float8, extract(epoch FROM a.ended - a.began)::float8"
        " FROM written a JOIN written b ON b.job = a.job AND b.generation = a.generation + 1 WHERE a.job = %s",
        (job,),
    ).fetchall()
    assert len(pauses) >= 3 and all(pause >= PAUSE * took > 0 for pause, took in pauses)


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(db: Connection, connect: Callable[..., Connection]) -> Iterator[Connection]:
    """A connection that holds up the second chunk of all weights until it calls `pg_advisory_unlock_all`."""
    holder = connect()
    holder.execute("SELECT pg_advisory_lock(4711)")
    db.execute(
        """
        CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NEW; END $$;
        CREATE TRIGGER hold BEFORE INSERT ON tensile_internal.model_weights FOR EACH ROW WHEN (NEW.seq = 1)
            EXECUTE FUNCTION hold();
        """
    )
    yield holder
    holder.close()
    db.execute("DROP TRIGGER hold ON tensile_internal.model_weights")


def refusal(conn: Connection, sql: str) -> str:
    with pytest.raises(psycopg.Error) as error:
        conn.execute(sql)
    return str(error.value)


@pytest.mark.long
def test_weights_are_written_as_they_arrive_and_visible_only_at_the_end(
    db: Connection, held: Connection, wait_until: Wait, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    """A trainer that dies while it sends weights leaves none; the next attempt stores the version."""
    role = roles("owner")
    owner = connect(user=role)
    register(owner, "m", WIDE)
    job = submit(owner, "m", epochs=1)
    chunks = "SELECT count(*) FROM tensile_internal.model_weights"
    wait_until(lambda: value(db, chunks) == 1, 90, "a chunk")
    assert value(db, "SELECT weight_bytes FROM tensile.model_versions WHERE job = %s", job) is None
    assert value(owner, "SELECT count(*) FROM tensile.model_versions") == 0
    assert visible(db, role, "model_weights") == 0
    assert 'model "m" has no version 1' in refusal(owner, "SELECT deploy_model('m', 1)")
    assert 'model "m" has no version 1' in refusal(owner, "SELECT drop_model_version('m', 1)")
    assert 'model "m" has no version to predict with' in refusal(owner, "SELECT predict('m', ARRAY[1.0, 2.0, 3.0])")
    assert value(owner, "SELECT version FROM tensile.jobs WHERE job = %s", job) is None
    pid = trainer_pid(db, job)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    held.execute("SELECT pg_advisory_unlock_all()")
    wait_until(lambda: state(db, job) == "interrupted", what="the end of the attempt")
    assert value(db, chunks) == value(db, "SELECT count(*) FROM tensile.model_versions") == 0
    finish(owner, job)
    assert value(owner, "SELECT version FROM tensile.jobs WHERE job = %s", job) == 1
    sizes = db.execute("SELECT octet_length(data) FROM tensile_internal.model_weights ORDER BY seq").fetchall()
    assert [size for (size,) in sizes[:2]] == [16 << 20, 16 << 20] and len(sizes) == 3
    total = sum(size for (size,) in sizes)
    assert value(owner, "SELECT weight_bytes FROM tensile.model_versions WHERE version = 1") == total
    assert value(owner, "SELECT deployed_version FROM tensile.models") == 1


def test_dropping_a_model_while_its_weights_arrive_ends_its_job(
    db: Connection, held: Connection, wait_until: Wait, job_row: Callable[..., Any]
) -> None:
    job = submit(db, "m", WIDE, epochs=1)
    wait_until(lambda: value(db, "SELECT count(*) FROM tensile_internal.model_weights") == 1, 90, "a chunk")
    db.execute("SELECT drop_model('m')")
    held.execute("SELECT pg_advisory_unlock_all()")
    wait_until(lambda: state(db, job) == "failed", what="the end of the job")
    row = job_row(db, job)
    assert (row["sqlstate"], row["error"]) == ("42704", 'model "m" was dropped')
    assert value(db, "SELECT count(*) FROM tensile_internal.model_weights") == 0


@pytest.mark.long
@pytest.mark.parametrize(("kind", "options"), [("weights", {}), ("checkpoint", {"checkpoint_interval": 0})])
def test_a_job_that_stores_more_than_allowed_fails(
    db: Connection, alter: Callable[..., None], job_row: Callable[..., Any], kind: str, options: dict[str, Any]
) -> None:
    alter({"pg_tensile.max_state_size": "1MB"})
    job = submit(db, "m", {"type": "mlp", "hidden": [600, 600]}, epochs=2, options=options)  # 1.4 MB
    with pytest.raises(psycopg.Error, match=f"the trainer sent more than 1 MB of {kind}"):
        finish(db, job)
    row = job_row(db, job)
    assert (row["state"], row["sqlstate"]) == ("failed", "54000") and "max_state_size" in row["hint"]
    assert value(db, "SELECT count(*) FROM tensile.model_versions") == 0
    assert value(db, "SELECT count(*) FROM tensile_internal.checkpoint_chunks") == 0


# -- session state of the training query ------------------------------------------------------------------------------


def test_session_state_of_the_query_is_reset_after_its_rows(db: Connection, wait_until: Wait) -> None:
    """Checked in the worker's session by a trigger of its next statement, and in pg_locks while it trains."""
    db.execute(
        """
        CREATE FUNCTION litter() RETURNS float8 LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_advisory_lock(4711), pg_advisory_lock_shared(4712);
            RETURN 0;
        END $$;
        CREATE TABLE seen (locks bigint);
        CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
        BEGIN
            INSERT INTO seen SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
            RETURN NULL;
        END $$;
        CREATE TRIGGER look AFTER UPDATE OF rows ON tensile_internal.jobs FOR EACH ROW EXECUTE FUNCTION look();
        """
    )
    query = f"SELECT r.*, l.x FROM ({ROWS}) r, (SELECT litter() AS x OFFSET 0) l"
    try:
        job = submit(db, "m", python_model(), query=query, epochs=FOREVER)
        wait_until(lambda: steps(db, job) > 0, what="steps")
    finally:
        db.execute("DROP TRIGGER look ON tensile_internal.jobs")
    assert db.execute("SELECT * FROM seen").fetchall() == [(0,)]
    assert value(db, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("LISTEN news", "cannot execute LISTEN within security-restricted operation"),
        ("PREPARE left_over AS SELECT 1", "cannot execute PREPARE within security-restricted operation"),
        ("DECLARE left_open CURSOR WITH HOLD FOR SELECT 1", "cursor WITH HOLD within security-restricted operation"),
        ("CREATE TEMP TABLE left_over (x int)", "cannot execute CREATE TABLE in a read-only transaction"),
    ],
)
def test_other_session_objects_cannot_be_created(db: Connection, command: str, message: str) -> None:
    db.execute(
        f"CREATE FUNCTION litter() RETURNS float8 LANGUAGE plpgsql AS $$ BEGIN EXECUTE '{command}'; RETURN 0; END $$"
    )
    job = submit(db, "m", MLP, query=f"SELECT r.*, l.x FROM ({ROWS}) r, (SELECT litter() AS x OFFSET 0) l")
    with pytest.raises(psycopg.Error, match=message):
        finish(db, job)


# -- ended jobs -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_ended_jobs_are_deleted_after_their_retention_unless_their_version_exists(
    db: Connection, alter: Callable[..., None], wait_until: Wait
) -> None:
    """Long: the controller looks for ended jobs twice a minute."""
    alter({"pg_tensile.job_retention": "1s"})
    kept = submit(db, "m", MLP)
    finish(db, kept)
    failed = submit(db, "m", query="SELECT 1.0 AS a, 1.0 / (i - 3) AS y FROM generate_series(1, 9) i")
    running = submit(db, "endless", MLP, epochs=FOREVER)
    wait_until(lambda: value(db, "SELECT count(*) FROM tensile.jobs WHERE job = %s", failed) == 0, 90, "retention")
    assert db.execute("SELECT job FROM tensile.jobs ORDER BY job").fetchall() == [(kept,), (running,)]
    assert value(db, "SELECT count(*) FROM tensile.metrics WHERE job = %s", kept) > 0
