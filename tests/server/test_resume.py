"""Interrupted jobs resume from a checkpoint, after a stop of the server as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import sweep
from tests.server.support import (
    ENDLESS_ROWS,
    MLP,
    Connection,
    Row,
    Wait,
    interrupt,
    phase,
    python_model,
    reason,
    state,
    steps,
    submit,
    value,
    worker_pid,
)


def resumable(conn: Connection, name: str = "m", epochs: int = 40, **options: Any) -> int:
    """Submit a job that takes some seconds, too few for a checkpoint unless options ask for one."""
    model = python_model(on_forward="time.sleep(0.005)")
    return submit(conn, name, model, epochs=epochs, batch_size=40, options=options)


def has_checkpoint(conn: Connection, job: int) -> bool:
    return value(conn, "SELECT count(*) FROM tensile_internal.checkpoints WHERE job = %s AND meta IS NOT NULL", job) > 0


def epochs_done(conn: Connection, job: int) -> int:
    return value(conn, "SELECT coalesce(max(epoch), 0) FROM tensile.epoch_metrics WHERE job = %s", job)


@pytest.mark.long
def test_a_stopped_worker_leaves_a_checkpoint_and_the_job_resumes(
    db: Connection, cluster: Any, wait_until: Wait, job_row: Row
) -> None:
    job = resumable(db)
    wait_until(lambda: epochs_done(db, job) >= 3)
    assert not has_checkpoint(db, job)
    first = worker_pid(db, job)
    interrupt(cluster, db, job, wait_until)
    assert reason(db, job) == "pg_tensile.database was changed"
    wait_until(lambda: worker_pid(db, job) not in (first, None), what="the next attempt")
    epoch = value(db, "SELECT (meta ->> 'epoch')::int FROM tensile_internal.checkpoints WHERE job = %s", job)
    assert epoch >= 2
    wait_until(lambda: state(db, job) == "finished")
    row = job_row(db, job)
    assert (row["attempts"], row["retries"]) == (2, 0)
    assert epochs_done(db, job) == 40


@pytest.mark.long
def test_an_interrupted_job_ends_with_the_numbers_of_an_undisturbed_one(
    db: Connection, cluster: Any, wait_until: Wait
) -> None:
    undisturbed = resumable(db, "undisturbed", 12)
    wait_until(lambda: state(db, undisturbed) == "finished")
    disturbed = resumable(db, "disturbed", 12)
    wait_until(lambda: epochs_done(db, disturbed) >= 2)
    interrupt(cluster, db, disturbed, wait_until)
    wait_until(lambda: state(db, disturbed) == "finished")
    assert value(db, "SELECT attempts FROM tensile.jobs WHERE job = %s", disturbed) == 2
    numbers = "SELECT epoch, split, samples, loss, accuracy, f1 FROM tensile.epoch_metrics WHERE job = %s ORDER BY 1, 2"
    assert db.execute(numbers, (disturbed,)).fetchall() == db.execute(numbers, (undisturbed,)).fetchall()
    weights = (
        "SELECT data FROM tensile_internal.model_weights w"
        " JOIN tensile.model_versions v ON v.version_id = w.version WHERE job = %s"
    )
    assert value(db, weights, disturbed) == value(db, weights, undisturbed)


@pytest.fixture
def server(module_cluster: Any) -> Iterator[Any]:
    """A cluster that a test stops and starts, without jobs."""
    yield module_cluster
    with module_cluster.connect() as conn:
        sweep(conn)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_jobs_resume_after_a_stop_of_the_server(server: Any, wait_until: Wait, mode: str) -> None:
    """One that trained, and waits in its third epoch, goes on from its checkpoint, one that loaded its rows starts
    again.

    It takes seconds, as each start of the server imports PyTorch anew.
    """
    marker = server.folder / f"stopped-{mode}"
    waits = python_model(on_forward=f"while step > 12 and not os.path.exists({str(marker)!r}): time.sleep(0.01)")
    with server.connect() as db:
        loads = submit(db, "loads", MLP, query=ENDLESS_ROWS)
        job = submit(db, "m", waits, epochs=4, options={"checkpoint_interval": 0})
        wait_until(lambda: epochs_done(db, job) >= 2 and has_checkpoint(db, job))
        wait_until(lambda: phase(db, loads) == "loading")
    server.stop(mode)
    wait_until(lambda: not server.processes(), what="the end of every process")
    marker.touch()
    server.start()
    with server.connect() as db:
        wait_until(lambda: phase(db, loads) == "loading", what="the job starts again")
        wait_until(lambda: state(db, job) == "finished")
        attempts, retries, submitted = db.execute(
            "SELECT attempts, retries, started_at < pg_postmaster_start_time() FROM tensile.jobs WHERE job = %s", (job,)
        ).fetchone()
        assert (attempts, retries, submitted) == (2, 0, True)
        assert epochs_done(db, job) == 4


@pytest.mark.long
def test_a_fast_stop_saves_what_no_checkpoint_had(server: Any, wait_until: Wait) -> None:
    """The job is stopped within its first epoch, without a checkpoint so far.

    Takes seconds: the server is restarted.
    """
    server.alter({"pg_tensile.checkpoint_interval": 0})
    with server.connect() as db:
        job = submit(db, "m", python_model(on_forward="time.sleep(0.01)"), epochs=1, batch_size=1)
        wait_until(lambda: steps(db, job) >= 20)
        assert not has_checkpoint(db, job)
    server.stop("fast")
    server.start()
    with server.connect() as db:
        wait_until(lambda: has_checkpoint(db, job) or state(db, job) == "finished")
        assert value(db, "SELECT (meta ->> 'step')::int FROM tensile_internal.checkpoints WHERE job = %s", job) >= 20
        wait_until(lambda: state(db, job) == "finished")
    server.alter({"pg_tensile.checkpoint_interval": None})
