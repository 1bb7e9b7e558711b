"""Background workers of the extension: identity, privileges, waits, signals and ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.server.stage import (
    BOTH,
    SCHEDULER,
    Stage,
    processes,
    replace_step,
    running_in,
    terminate,
    train,
)
from tests.server.support import Wait, register, state, value


def test_a_worker_knows_its_job_and_runs_as_the_submitter(stage: Stage, job: int) -> None:
    assert stage.order(job, "SELECT tensile_worker._my_job() AS j, current_user AS c, session_user AS s") == [
        {"j": job, "c": "alice", "s": "alice"}
    ]


ROLE_SETTINGS = {  # setting of the role → setting of its worker
    "search_path": ("public", "pg_catalog, pg_temp"),
    "default_transaction_read_only": ("on", "off"),
    "default_transaction_isolation": ("serializable", "read committed"),
    "default_transaction_deferrable": ("on", "off"),
    "lock_timeout": ("1", "0"),
    "statement_timeout": ("1", "0"),
    "idle_in_transaction_session_timeout": ("1", "0"),
    "idle_session_timeout": ("1", "0"),
    "transaction_timeout": ("2s", "0"),
    "row_security": ("off", "on"),
    "extra_float_digits": ("-15", "1"),
    "bytea_output": ("escape", "hex"),
    "array_nulls": ("off", "on"),
    "standard_conforming_strings": ("off", "on"),
    "transform_null_equals": ("on", "off"),
    "role": ("mallory", "none"),
}


def test_settings_of_a_role_do_not_reach_the_supervisor(stage: Stage) -> None:
    existing = {name for (name,) in stage.conn.execute("SELECT name FROM pg_settings").fetchall()} | {"role"}
    settings = {name: values for name, values in ROLE_SETTINGS.items() if name in existing}
    assert settings.keys() >= ROLE_SETTINGS.keys() - {"transaction_timeout"}  # of version 17 and later
    if stage.conn.info.server_version >= 190000:
        del settings["standard_conforming_strings"]  # cannot be switched off from version 19 on
    stage.conn.execute("GRANT mallory TO alice")
    for name, (text, _) in settings.items():
        stage.conn.execute(f"ALTER ROLE alice SET {name} = '{text}'")
    job = stage.job()
    try:
        names = [*settings, "transaction_read_only", "transaction_isolation"]
        columns = ", ".join(f"current_setting('{name}') AS {name}" for name in names)
        expected = {name: text for name, (_, text) in settings.items()}
        expected |= {"transaction_read_only": "off", "transaction_isolation": "read committed"}
        assert stage.order(job, f"SELECT {columns}") == [expected]
    finally:
        stage.conn.execute("ALTER ROLE alice RESET ALL; REVOKE mallory FROM alice")
        stage.end(job)


def test_calls_of_other_processes_are_refused(stage: Stage, job: int) -> None:
    for process, sql in (
        (job, "SELECT tensile_internal._publish_plan(1, '', 1, 1, 1)"),
        (job, "SELECT tensile_internal._grants()"),
        (job, "SELECT tensile_internal._device_memory()"),
        (job, "SELECT tensile_internal._inference_memory('cpu', 1, 1, 1)"),
        (job, "SELECT tensile_internal._launch_worker(1, 10)"),
        ("scheduler", "SELECT tensile_internal._launch_worker(1, 10)"),
        ("scheduler", "SELECT tensile_internal._job_slots()"),
        ("scheduler", "SELECT tensile_worker._my_job()"),
        ("scheduler", "SELECT tensile_worker._fetch_plan(0)"),
        ("scheduler", "SELECT tensile_worker._acknowledge_plan(1)"),
        (
            "scheduler",
            "SELECT tensile_worker._report(NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL)",
        ),
        ("scheduler", "SELECT tensile_worker._register_device('x', 1, 1, 1, 0)"),
        ("scheduler", "SELECT tensile_internal._inference_memory('cpu', 1, 1, 1)"),
        ("scheduler", "SELECT tensile_internal._lacking_memory()"),
        (job, "SELECT tensile_internal._lack_memory('cpu', '{1}', 1, 0)"),
        ("scheduler", "SELECT tensile_internal._report_loaded('{}', '{}')"),
        ("scheduler", "SELECT tensile_internal._predictor_socket()"),
        ("scheduler", "SELECT tensile_worker._job_refusal()"),
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            stage.order(process, sql)
    for call in (
        *("worker._process()", "worker._my_job()", "internal._launch_worker(1, 10)", "internal._job_slots()"),
        *("internal._publish_plan(1, '', 1, 1, 1)", "internal._grants()", "internal._device_memory()"),
        "internal._inference_memory('cpu', 1, 1, 1)",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            stage.conn.execute(f"SELECT tensile_{call}")


def test_a_wait_reports_what_ended_it(stage: Stage, job: int, wait_until: Wait) -> None:
    start = time.monotonic()
    assert stage.order("scheduler", "WAIT 0; WAIT 50") == [{"bits": 8}]  # 0: clears earlier events
    assert time.monotonic() - start >= 0.05

    number = stage.place(job, "WAIT 0; WAIT 10000")
    time.sleep(0.2)
    stage.conn.execute("SELECT tensile_internal._notify(%s)", (job,))
    answer = wait_until(lambda: value(stage.conn, "SELECT answer FROM stage.orders WHERE id = %s", number))
    assert answer[0]["bits"] == 4


def test_a_wake_up_during_another_wait_is_not_lost(stage: Stage, job: int, wait_until: Wait) -> None:
    """pg_sleep resets the latch."""
    number = stage.place(job, "WAIT 0; SELECT pg_sleep(0.5); WAIT 10000")
    time.sleep(0.2)
    stage.conn.execute("SELECT tensile_internal._notify(%s)", (job,))
    answer = wait_until(lambda: value(stage.conn, "SELECT answer FROM stage.orders WHERE id = %s", number))
    assert answer[0]["bits"] == 4


def test_simultaneous_cancel_and_stop_are_both_reported(stage: Stage, job: int, wait_until: Wait) -> None:
    """SIGSTOP holds the process in its wait until both signals are pending."""
    number = stage.place(job, "WAIT 0; SELECT pg_advisory_lock(7); WAIT 60000")
    waits = (
        "SELECT a.pid FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
        " WHERE l.locktype = 'advisory' AND a.wait_event_type = 'Extension' AND a.state = 'idle'"
    )
    pid = wait_until(lambda: value(stage.conn, waits))
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGCONT)
    assert stage.answer(number)[0]["bits"] & 80 == 80
    stage.order(job, "SELECT pg_advisory_unlock(7)")


@pytest.mark.long
def test_a_cancel_request_outside_of_python_reaches_the_supervisor(
    fresh_cluster: Callable[..., Any], wait_until: Wait
) -> None:
    """The request interrupts the CALL, not the process: the step is repeated and gets the request."""
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        wait_until(lambda: running_in(conn, "postgres") == BOTH)
        conn.execute("CREATE TABLE seen (bits int)")
        replace_step(
            conn,
            "plpgsql",
            "BEGIN timeout_ms := CASE WHEN bits & 48 = 0 THEN 100 END;"
            " IF tensile_worker._process() = 'scheduler' AND bits & 48 = 0 THEN"
            " INSERT INTO public.seen VALUES (bits);"
            " IF NOT EXISTS (SELECT FROM public.seen s WHERE s.bits & 64 > 0) THEN PERFORM pg_sleep(60); END IF;"
            " END IF; END",
        )
        # The terminated process may have taken the new step already, and is seen to sleep until it ends.
        old = terminate(conn, SCHEDULER)
        sleeps = "SELECT pid FROM pg_stat_activity WHERE backend_type = %s AND wait_event = 'PgSleep' AND pid <> %s"
        pid = wait_until(lambda: value(conn, sleeps, SCHEDULER, old))
        assert value(conn, "SELECT pg_cancel_backend(%s)", pid)
        wait_until(lambda: value(conn, "SELECT count(*) FROM seen WHERE bits & 64 > 0") == 1)
        wait_until(
            lambda: value(conn, "SELECT count(*) FROM seen WHERE bits & 64 = 0") > 1, what="steps after the request"
        )
        assert processes(conn)[SCHEDULER][0] == pid
    assert "ERROR" not in cluster.log()


def endings(stage: Stage, job: int) -> list[int]:
    rows = stage.conn.execute("SELECT bits FROM stage.endings WHERE process = %s", (str(job),)).fetchall()
    return [bits & 48 for (bits,) in rows]


def worker(stage: Stage, job: int) -> int | None:
    pid: int | None = value(stage.conn, "SELECT pid FROM tensile_worker._progress() WHERE job = %s", job)
    return pid


AGAIN = "DROP EXTENSION pg_tensile; CREATE EXTENSION pg_tensile"


HELD = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


@pytest.mark.long
@pytest.mark.parametrize(
    ("process", "write", "written"),
    [
        pytest.param(
            "worker",
            """PERFORM tensile_worker._job_metric('{"epoch": 75, "split": "training", "samples": 1, "loss": 1}')""",
            "SELECT count(*) FROM tensile.metrics",
            id="worker",
        ),
        pytest.param(
            "worker",
            "PERFORM tensile_worker._job_end('cancelled')",
            "SELECT count(*) FROM tensile.jobs WHERE ended_at IS NOT NULL",
            id="worker's end",
        ),
        pytest.param(
            "scheduler",
            "PERFORM tensile_internal._log('ghost')",
            "SELECT count(*) FROM tensile.scheduler_log WHERE event = 'ghost'",
            id="scheduler",
        ),
    ],
)
def test_a_process_of_a_dropped_extension_writes_nothing_into_the_next_one(
    new_cluster: Callable[..., Any], wait_until: Wait, process: str, write: str, written: str
) -> None:
    """Old and new extension both have job 1. The old process is within a statement while the extension is replaced."""
    stage = Stage(new_cluster({"pg_tensile.plan_events": 1024}), wait_until)
    try:
        old = stage.job()
        with stage.cluster.connect() as conn:
            conn.execute("SELECT pg_advisory_lock(8)")
            # The wait ends the transaction, whose locks DROP EXTENSION would wait for. A table that is locked for the
            # first time, as one that DROP has locked, makes the process see the new extension.
            look = "PERFORM 1 FROM stage.endings"
            body = f"WAIT 0; DO $$BEGIN PERFORM pg_advisory_xact_lock(8);{look};{write};END$$"
            stage.place(old if process == "worker" else process, body)
            wait_until(lambda: value(conn, HELD) == 1)
            pid = value(conn, "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
            with conn.transaction():
                conn.execute(AGAIN)
                register(conn, "m")
                assert train(conn) == old
            conn.execute("SELECT pg_advisory_unlock(8)")
            gone = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = %s"
            wait_until(lambda: value(conn, gone, pid), what="the old process exits")
            assert value(conn, written) == 0
            conn.execute("SELECT cancel_job(%s)", (old,))
            assert "PANIC" not in stage.cluster.log()
    finally:
        stage.close()


def test_a_terminated_worker_stops_at_its_next_wait(stage: Stage, job: int, wait_until: Wait) -> None:
    """The worker is busy when the signal arrives, for less than a second."""
    stage.place(job, "SELECT pg_sleep(0.6)")
    time.sleep(0.2)
    pid = worker(stage, job)
    stage.conn.execute("SELECT pg_terminate_backend(%s)", (pid,))
    wait_until(lambda: worker(stage, job) != pid)
    assert endings(stage, job) == [16]
    wait_until(lambda: state(stage.conn, job) == "cancelled", what="the controller ends a job whose worker could not")


def test_a_terminated_worker_that_does_not_come_to_a_wait_dies(stage: Stage, job: int, wait_until: Wait) -> None:
    number = stage.place(job, "SELECT pg_sleep(60)")
    time.sleep(0.2)
    pid = worker(stage, job)
    stage.conn.execute("SELECT pg_terminate_backend(%s)", (pid,))
    wait_until(lambda: worker(stage, job) != pid)
    assert endings(stage, job) == []
    stage.conn.execute("UPDATE stage.orders SET answer = '[]' WHERE id = %s", (number,))


def test_a_worker_whose_role_is_dropped_ends(stage: Stage, wait_until: Wait) -> None:
    stage.conn.execute("CREATE ROLE leaver LOGIN IN ROLE tensile_user")
    with stage.cluster.connect(user="leaver") as conn:
        register(conn, "leaves")
        job = train(conn, "leaves")
    stage.order(job, "SELECT 1 AS one")
    stage.conn.execute("DROP ROLE leaver")
    wait_until(lambda: worker(stage, job) is None)
    assert endings(stage, job) in ([32], [])  # [] if it could no longer write its ending


def test_a_job_whose_worker_cannot_connect_does_not_stay_in_starting(stage: Stage, wait_until: Wait) -> None:
    with stage.alice.transaction():
        job = train(stage.alice)
        stage.conn.execute("REVOKE CONNECT ON DATABASE postgres FROM PUBLIC")
    try:
        wait_until(lambda: state(stage.conn, job) == "failed")
        assert value(stage.conn, "SELECT count(*) FROM tensile_worker._progress()") == 0
    finally:
        stage.conn.execute("GRANT CONNECT ON DATABASE postgres TO PUBLIC")
