"""The processes of the shim: who starts them, how they wait and stop, what they tell each other."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.server.stage import (
    CONTROLLER,
    LAUNCHER,
    SCHEDULER,
    Stage,
    Wait,
    processes,
    replace_step,
    terminate,
    train,
)
from tests.server.support import Connection, register, state, value

BOTH = {CONTROLLER, SCHEDULER}
FATAL = r"\] +FATAL"  # of a process that is no client's session


def running_in(conn: Connection, database: str) -> set[str]:
    return {kind for kind, (_, name) in processes(conn).items() if name == database}


# -- the launcher -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LAUNCHER, CONTROLLER, SCHEDULER])
def test_a_terminated_process_comes_back(fresh_cluster: Callable[..., Any], wait_until: Wait, kind: str) -> None:
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        wait_until(lambda: {LAUNCHER, *BOTH} <= set(processes(conn)))
        others = {name: pid for name, pid in processes(conn).items() if name != kind}
        old = terminate(conn, kind)
        wait_until(lambda: processes(conn).get(kind, (old,))[0] not in (old, None), what=f"{kind} runs again")
        assert {name: pid for name, pid in processes(conn).items() if name != kind} == others
    assert not re.search(FATAL, cluster.log())


def test_processes_come_and_go_with_the_extension(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster(extension=False)
    with cluster.connect() as conn:
        wait_until(lambda: LAUNCHER in processes(conn))
        for _ in range(2):
            conn.execute("CREATE EXTENSION pg_tensile CASCADE")
            wait_until(lambda: running_in(conn, "postgres") == BOTH, what="they start when CREATE EXTENSION commits")
            conn.execute("DROP EXTENSION pg_tensile")
            wait_until(lambda: not running_in(conn, "postgres"), what="they end after DROP EXTENSION")
        with conn.transaction(force_rollback=True):
            conn.execute("CREATE EXTENSION pg_tensile")
        assert not running_in(conn, "postgres")
    assert not re.search("ERROR|FATAL|LOG: +pg_tensile", cluster.log())


def test_a_missing_database_is_said_once(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster({"pg_tensile.database": "later"}, extension=False)
    complaint = 'pg_tensile waits for database "later", which does not exist'
    wait_until(lambda: complaint in cluster.log())
    with cluster.connect() as conn:
        for memory in ("1GB", "2GB"):  # each reload wakes the launcher for another look
            cluster.configure({"pg_tensile.device_memory": memory})
            cluster.reload()
            wait_until(lambda: value(conn, "SHOW pg_tensile.device_memory") == memory)  # noqa: B023
        conn.execute("CREATE DATABASE later")
    with cluster.connect("later") as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        wait_until(lambda: running_in(conn, "later") == BOTH, what="found when CREATE EXTENSION commits")
    assert cluster.log().count(complaint) == 1


def test_a_database_that_takes_no_connections_is_said_once(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster({"pg_tensile.database": "template0"}, extension=False)
    wait_until(lambda: 'database "template0", which does not accept connections' in cluster.log())
    assert not re.search(FATAL, cluster.log())


def test_drop_database_with_force(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster({"pg_tensile.database": "doomed"}, extension=False)
    with cluster.connect() as conn:
        conn.execute("CREATE DATABASE doomed")
        with cluster.connect("doomed") as doomed:
            doomed.execute("CREATE EXTENSION pg_tensile CASCADE")
            wait_until(lambda: running_in(conn, "doomed") == BOTH)
        conn.execute("DROP DATABASE doomed WITH (FORCE)")
        assert set(processes(conn)) == {LAUNCHER}
    wait_until(lambda: 'database "doomed", which does not exist' in cluster.log())
    assert not re.search(FATAL, cluster.log())


def test_another_database_after_a_reload(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        conn.execute("CREATE DATABASE other")
        with cluster.connect("other") as other:
            other.execute("CREATE EXTENSION pg_tensile CASCADE")
        wait_until(lambda: running_in(conn, "postgres") == BOTH)
        for name in ("other", "postgres"):
            cluster.configure({"pg_tensile.database": name})
            cluster.reload()
            wait_until(lambda: running_in(conn, name) == BOTH, what=f"they move to {name}")  # noqa: B023
            assert len(processes(conn)) == 3
        cluster.configure({"pg_tensile.database": ""})
        cluster.reload()
        wait_until(lambda: set(processes(conn)) == {LAUNCHER}, what="an empty name stops them")


def test_an_error_that_stays_is_logged_once(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        wait_until(lambda: running_in(conn, "postgres") == BOTH)
        conn.execute("CREATE SEQUENCE attempts")
        replace_step(
            conn,
            "plpgsql",
            "BEGIN timeout_ms := CASE WHEN bits & 48 = 0 THEN 1000 END; IF tensile._process() = 'scheduler' THEN"
            " PERFORM nextval('public.attempts'); RAISE 'broken for good'; END IF; END",
        )
        terminate(conn, SCHEDULER)
        # 6 s after it was terminated, and 12 s after its first failure
        wait_until(lambda: value(conn, "SELECT last_value FROM attempts") == 2, what="the second attempt")
        wait_until(lambda: SCHEDULER not in processes(conn))
    assert cluster.log().count("broken for good") == 1


def test_every_process_is_named_in_pg_stat_activity(db: Connection, wait_until: Wait) -> None:
    wait_until(lambda: running_in(db, "postgres") >= BOTH)
    calls: dict[str, str] = dict(
        db.execute(
            "SELECT application_name, query FROM pg_stat_activity WHERE backend_type LIKE 'pg_tensile%'"
        ).fetchall()
    )
    for process in BOTH:
        assert calls[process].startswith("CALL tensile._step(")


def test_waiting_processes_hold_no_snapshot(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    """They wait outside any transaction, for half a minute if nothing happens; VACUUM need not wait with them."""
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        wait_until(lambda: running_in(conn, "postgres") == BOTH)
        waiting = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE backend_type LIKE 'pg_tensile %%' AND wait_event_type = 'Extension'"
        )
        wait_until(
            lambda: (
                value(
                    conn,
                    waiting
                    + " AND datname = 'postgres' AND backend_xmin IS NULL AND xact_start IS NULL AND state = 'idle'",
                )
                == 2
            ),
        )
        conn.execute("CREATE TABLE t AS SELECT 1 AS a")
        conn.execute("CREATE INDEX CONCURRENTLY ON t (a)")


def test_waits_have_names_from_17_on(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    with fresh_cluster().connect() as conn:
        name = "PgTensileSupervisor" if conn.info.server_version >= 170000 else "Extension"
        waits = "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'pg_tensile %%' AND wait_event = %s"
        wait_until(lambda: value(conn, waits, name) == 3)  # launcher, controller, scheduler


def test_idle_processes_sleep(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        wait_until(lambda: running_in(conn, "postgres") == BOTH)
        pids = [pid for pid, _ in processes(conn).values()]
        wait_until(  # until they have started altogether
            lambda: (
                value(
                    conn,
                    "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s) AND wait_event_type = 'Extension'",
                    pids,
                )
                == len(pids)
            ),
        )

        def woken() -> dict[int, str]:
            """Voluntary context switches: one for each time a process went to sleep."""
            lines = (Path(f"/proc/{pid}/status").read_text() for pid in pids)
            return {
                pid: re.findall(r"voluntary_ctxt_switches:\t(\d+)", line)[0]
                for pid, line in zip(pids, lines, strict=True)
            }

        def sleeps() -> bool:
            """For two seconds; statistics of what was done before are reported a while later, once."""
            before = woken()
            value(conn, "SELECT pg_sleep(2)")
            return woken() == before

        wait_until(sleeps, what="nobody wakes up for two seconds")


# -- settings and loading ---------------------------------------------------------------------------------------------


def test_without_preload_it_says_what_to_do(fresh_cluster: Callable[..., Any]) -> None:
    cluster = fresh_cluster({"shared_preload_libraries": ""}, extension=False)
    with cluster.connect() as conn, pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
    assert "shared_preload_libraries" in str(caught.value)
    assert caught.value.diag.message_hint is not None and "restart" in caught.value.diag.message_hint


def test_library_and_extension_have_one_version(db: Connection) -> None:
    version = value(db, "SELECT extversion FROM pg_extension WHERE extname = 'pg_tensile'")
    assert value(db, "SELECT tensile._version()") == version


@pytest.fixture
def other_version(fresh_cluster: Callable[..., Any], wait_until: Wait) -> Any:
    """A cluster whose extension has another version than its library: before ALTER EXTENSION UPDATE."""
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        wait_until(lambda: running_in(conn, "postgres") == BOTH)
        register(conn, "m")
        conn.execute("UPDATE pg_extension SET extversion = '0.0.1' WHERE extname = 'pg_tensile'")
    return cluster


@pytest.mark.parametrize(
    "call",
    [
        "train_model('m', 'SELECT 1.0 AS x, 2.0 AS y', 'y')",
        "explain_training('m', 'SELECT 1.0 AS x, 2.0 AS y', 'y')",
        "predict('m', '{1}'::float8[])",
        "(SELECT count(*) FROM predict_rows('m', 'SELECT 1.0 AS x'))",
    ],
)
def test_another_version_of_the_extension_is_refused(other_version: Any, call: str) -> None:
    with other_version.connect() as conn:
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
            conn.execute(f"SELECT {call}")
        version = value(conn, "SELECT tensile._version()")
        assert f'"pg_tensile" has version 0.0.1, but the server\'s library has version {version}' in str(caught.value)
        hint = caught.value.diag.message_hint or ""
        assert "ALTER EXTENSION pg_tensile UPDATE" in hint and "make install" in hint
        conn.execute("UPDATE pg_extension SET extversion = %s WHERE extname = 'pg_tensile'", (version,))
        conn.execute("SELECT tensile._notify(0)")  # as ALTER EXTENSION UPDATE does
        try:
            conn.execute(f"SELECT {call}")
        except psycopg.Error as error:
            assert "version 0.0.1" not in str(error)


def test_processes_wait_for_their_version(other_version: Any, wait_until: Wait) -> None:
    other_version.stop("fast")
    other_version.start()
    complaint = 'LOG: +extension "pg_tensile" has version 0.0.1, but'
    wait_until(lambda: len(re.findall(complaint, other_version.log())) == len(BOTH))
    with other_version.connect() as conn:
        for memory in ("1GB", "2GB"):  # each CREATE EXTENSION and reload wakes the launcher for another look
            other_version.configure({"pg_tensile.device_memory": memory})
            other_version.reload()
            conn.execute("SELECT tensile._notify(0)")
            value(conn, "SELECT pg_sleep(1)")
        assert not running_in(conn, "postgres")
        assert len(re.findall(complaint, other_version.log())) == len(BOTH), "one line for each process"
        version = value(conn, "SELECT tensile._version()")
        conn.execute("UPDATE pg_extension SET extversion = %s WHERE extname = 'pg_tensile'", (version,))
        conn.execute("SELECT tensile._notify(0)")
        wait_until(lambda: running_in(conn, "postgres") == BOTH, what="they start")


def test_python_files_of_another_version_are_refused(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    """As between make install and the restart."""
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        asleep = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = ANY(%s) AND wait_event_type = 'Extension'"
        wait_until(lambda: value(conn, asleep, list(BOTH)) == len(BOTH), what="they have looked at the version")
        register(conn, "m")
        conn.execute("CREATE OR REPLACE FUNCTION tensile._version() RETURNS text LANGUAGE sql AS $$SELECT '0.0.1'$$")
        job = train(conn)
        wait_until(lambda: state(conn, job) == "failed")
        sqlstate, error, hint = conn.execute("SELECT sqlstate, error, hint FROM tensile.jobs").fetchone()
        assert sqlstate == "55000" and error.endswith("the server's library has 0.0.1") and "restart" in hint
        terminate(conn, SCHEDULER)
        wait_until(lambda: "ERROR:  plpy.Error: the Python files of pg_tensile have" in cluster.log())
        wait_until(lambda: SCHEDULER not in processes(conn))


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:1234", "", "CPU "])
def test_a_device_that_cannot_exist_is_refused(db: Connection, device: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        db.execute(f"ALTER SYSTEM SET pg_tensile.device = '{device}'")
    assert "cuda:N" in (caught.value.diag.message_detail or "")


def test_settings_are_documented_and_reserved(db: Connection) -> None:
    rows = db.execute("SELECT name, short_desc, context FROM pg_settings WHERE name LIKE 'pg\\_tensile.%'").fetchall()
    assert all(row[1].startswith(("Sets ", "Logs ")) for row in rows)
    of_sessions = {f"pg_tensile.{name}" for name in ("policy", "predict_spin", "predict_timeout")}
    assert {row[0] for row in rows if row[2] == "user"} == of_sessions
    assert {row[0] for row in rows if row[2] == "postmaster"} == {"pg_tensile.max_jobs", "pg_tensile.plan_events"}
    with pytest.raises(psycopg.errors.InvalidName):
        db.execute("SET pg_tensile.no_such_setting = 1")


# -- what a transaction tells -----------------------------------------------------------------------------------------


@pytest.fixture
def quiet(fresh_cluster: Callable[..., Any], wait_until: Wait) -> Any:
    """A cluster whose processes work elsewhere, so that nothing happens but what the test does."""
    cluster = fresh_cluster({"pg_tensile.database": "", "max_prepared_transactions": 2})
    with cluster.connect() as conn:
        wait_until(lambda: set(processes(conn)) == {LAUNCHER})
        conn.execute("CREATE TABLE t (x float8, y float8)")
    return cluster


class Sleeper(threading.Thread):
    """A session in tensile._wait_for_change; `seconds` is how long it slept."""

    def __init__(self, conn: Connection, timeout_ms: int) -> None:
        super().__init__(daemon=True)
        self._conn = conn
        self._timeout_ms = timeout_ms
        self.seconds: float | None = None
        self.pid = conn.info.backend_pid
        conn.execute("SELECT tensile._wait_for_change(0)")
        self.start()

    def run(self) -> None:
        start = time.monotonic()
        self._conn.execute("SELECT tensile._wait_for_change(%s)", (self._timeout_ms,))
        self.seconds = time.monotonic() - start

    def sleeps(self, conn: Connection) -> bool:
        return bool(value(conn, "SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = %s", self.pid))


def test_a_commit_wakes_those_who_wait_and_a_rollback_does_not(quiet: Any, wait_until: Wait) -> None:
    with quiet.connect() as conn, quiet.connect() as other:
        sleeper = Sleeper(other, 60_000)
        wait_until(lambda: sleeper.sleeps(conn))
        with conn.transaction(force_rollback=True):
            conn.execute("SELECT tensile._notify(7)")
        with conn.transaction():
            with conn.transaction(force_rollback=True):
                conn.execute("SELECT tensile._notify(7)")
            conn.execute("SELECT 1")
        sleeper.join(0.3)
        assert sleeper.seconds is None
        with conn.transaction():
            with conn.transaction():
                conn.execute("SELECT tensile._notify(7)")
            sleeper.join(0.3)
            assert sleeper.seconds is None, "not before the commit"
        sleeper.join(2)
        assert sleeper.seconds is not None


def test_a_change_between_looking_and_waiting_is_not_missed(quiet: Any) -> None:
    with quiet.connect() as conn, quiet.connect() as other:
        conn.execute("SELECT tensile._wait_for_change(60000)")  # the first call returns at once: nobody has looked yet
        other.execute("SELECT tensile._notify(7)")
        conn.execute("SET statement_timeout = '30 s'; SELECT tensile._wait_for_change(60000)")
        start = time.monotonic()
        conn.execute("SELECT tensile._wait_for_change(200)")
        assert time.monotonic() - start >= 0.2, "the change is told twice"


def test_waiting_for_a_change_can_be_cancelled(quiet: Any, wait_until: Wait) -> None:
    with quiet.connect() as conn, quiet.connect() as other:
        other.execute("SELECT tensile._wait_for_change(0)")
        timer = threading.Timer(0.2, other.cancel)
        timer.start()
        with pytest.raises(psycopg.errors.QueryCanceled):
            other.execute("SELECT tensile._wait_for_change(60000)")
        timer.join()
        assert value(other, "SELECT 1") == 1
        assert value(conn, "SELECT 1") == 1


def test_submitted_here_follows_savepoints(db: Connection) -> None:
    for model in "abc":
        register(db, model)

    def here(job: int) -> bool:
        return bool(value(db, "SELECT tensile._submitted_here(%s)", job))

    with db.transaction(force_rollback=True):
        first = train(db, "a")
        assert here(first) and not here(first + 1)
        with db.transaction(force_rollback=True):
            second = train(db, "b")
            assert here(second)
        assert here(first) and not here(second)
        with db.transaction():
            third = train(db, "c")
        assert here(third)
    assert not here(first) and not here(third)


def test_prepare_transaction_is_refused_after_a_change(quiet: Any) -> None:
    with quiet.connect(autocommit=False) as conn:
        for statement in ("SELECT tensile._notify(7)", "SELECT register_model('n', '{\"type\": \"mlp\"}')"):
            conn.execute(statement)
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="cannot PREPARE"):
                conn.execute("PREPARE TRANSACTION 'p'")
            conn.rollback()
        conn.execute("INSERT INTO t VALUES (1, 2)")
        conn.execute("PREPARE TRANSACTION 'p'")
        conn.rollback()
        conn.autocommit = True
        conn.execute("COMMIT PREPARED 'p'")


def test_models_are_served_in_the_one_database_only(quiet: Any) -> None:
    """Versions have the same numbers in other databases, so the predictor would answer with another model."""
    preprocessing = '{"task": "regression", "features": [{"name": "x", "kind": "numeric", "type": "float8"}]}'
    with quiet.connect() as conn:
        register(conn, "m")
        conn.execute(
            "INSERT INTO tensile.model_versions (model, version, task, preprocessing, architecture, weight_bytes)"
            " SELECT id, 1, 'regression', %s, '{}', 1 FROM tensile.models",
            (preprocessing,),
        )
        conn.execute("UPDATE tensile.models SET deployed_version = 1")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
            conn.execute("SELECT predict('m', '{1}'::float8[])")
        assert 'does not work in database "postgres"' in str(caught.value)


# -- scheduler and workers that do as the test orders -----------------------------------------------------------------


def test_a_worker_knows_its_job_and_runs_as_the_submitter(stage: Stage, job: int) -> None:
    assert stage.order(job, "SELECT tensile._my_job() AS j, current_user AS c, session_user AS s") == [
        {"j": job, "c": "alice", "s": "alice"}
    ]


ROLE_SETTINGS = {  # what the role has set → what its worker has
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


def test_what_a_role_sets_for_its_sessions_does_not_reach_the_supervisor(stage: Stage) -> None:
    known = {name for (name,) in stage.conn.execute("SELECT name FROM pg_settings").fetchall()} | {"role"}
    settings = {name: values for name, values in ROLE_SETTINGS.items() if name in known}
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
        (job, "SELECT tensile._publish_plan(1, '', 1, 1, 1)"),
        (job, "SELECT tensile._grants()"),
        (job, "SELECT tensile._device_memory()"),
        (job, "SELECT tensile._inference_memory('cpu', 1, 1, 1)"),
        (job, "SELECT tensile._launch_worker(1, 10)"),
        ("scheduler", "SELECT tensile._launch_worker(1, 10)"),
        ("scheduler", "SELECT tensile._job_slots()"),
        ("scheduler", "SELECT tensile._my_job()"),
        ("scheduler", "SELECT tensile._fetch_plan(0)"),
        ("scheduler", "SELECT tensile._acknowledge_plan(1)"),
        ("scheduler", "SELECT tensile._report(NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL)"),
        ("scheduler", "SELECT tensile._register_device('x', 1, 1, 1, 0)"),
        ("scheduler", "SELECT tensile._inference_memory('cpu', 1, 1, 1)"),
        ("scheduler", "SELECT tensile._report_loaded('{}')"),
        ("scheduler", "SELECT tensile._predictor_socket()"),
        ("scheduler", "SELECT tensile._job_refusal()"),
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            stage.order(process, sql)
    for call in (
        *("_process()", "_my_job()", "_launch_worker(1, 10)", "_job_slots()", "_publish_plan(1, '', 1, 1, 1)"),
        *("_grants()", "_device_memory()", "_inference_memory('cpu', 1, 1, 1)"),
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            stage.conn.execute(f"SELECT tensile.{call}")


def test_a_wait_says_what_ended_it(stage: Stage, job: int, wait_until: Wait) -> None:
    start = time.monotonic()
    assert stage.order("scheduler", "WAIT 0; WAIT 50") == [{"bits": 8}]  # 0: whatever has happened before
    assert time.monotonic() - start >= 0.05

    number = stage.place(job, "WAIT 0; WAIT 10000")
    time.sleep(0.2)
    stage.conn.execute("SELECT tensile._notify(%s)", (job,))
    answer = wait_until(lambda: value(stage.conn, "SELECT answer FROM stage.orders WHERE id = %s", number))
    assert answer[0]["bits"] == 4


def test_a_wake_up_is_not_lost_while_the_process_waits_for_something_else(
    stage: Stage, job: int, wait_until: Wait
) -> None:
    """pg_sleep resets the latch."""
    number = stage.place(job, "WAIT 0; SELECT pg_sleep(0.5); WAIT 10000")
    time.sleep(0.2)
    stage.conn.execute("SELECT tensile._notify(%s)", (job,))
    answer = wait_until(lambda: value(stage.conn, "SELECT answer FROM stage.orders WHERE id = %s", number))
    assert answer[0]["bits"] == 4


def test_a_cancel_request_and_a_stop_that_come_together_are_both_told(stage: Stage, job: int, wait_until: Wait) -> None:
    """The process cannot take the one before the other has come: it is stopped in its wait."""
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


def test_a_cancel_request_outside_of_python_reaches_the_supervisor(
    fresh_cluster: Callable[..., Any], wait_until: Wait
) -> None:
    """It interrupts the CALL, not the process: the step is made again, and is told."""
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        wait_until(lambda: running_in(conn, "postgres") == BOTH)
        conn.execute("CREATE TABLE seen (bits int)")
        replace_step(
            conn,
            "plpgsql",
            "BEGIN timeout_ms := CASE WHEN bits & 48 = 0 THEN 100 END;"
            " IF tensile._process() = 'scheduler' AND bits & 48 = 0 THEN"
            " INSERT INTO public.seen VALUES (bits);"
            " IF NOT EXISTS (SELECT FROM public.seen s WHERE s.bits & 64 > 0) THEN PERFORM pg_sleep(60); END IF;"
            " END IF; END",
        )
        terminate(conn, SCHEDULER)
        sleeps = "SELECT pid FROM pg_stat_activity WHERE backend_type = %s AND wait_event = 'PgSleep'"
        pid = wait_until(lambda: value(conn, sleeps, SCHEDULER))
        assert value(conn, "SELECT pg_cancel_backend(%s)", pid)
        wait_until(lambda: value(conn, "SELECT count(*) FROM seen WHERE bits & 64 > 0") == 1)
        wait_until(lambda: value(conn, "SELECT count(*) FROM seen WHERE bits & 64 = 0") > 1, what="it goes on")
        assert processes(conn)[SCHEDULER][0] == pid
    assert "ERROR" not in cluster.log()


def endings(stage: Stage, job: int) -> list[int]:
    rows = stage.conn.execute("SELECT bits FROM stage.endings WHERE process = %s", (str(job),)).fetchall()
    return [bits & 48 for (bits,) in rows]


def worker(stage: Stage, job: int) -> int | None:
    pid: int | None = value(stage.conn, "SELECT pid FROM tensile._progress() WHERE job = %s", job)
    return pid


AGAIN = "DROP EXTENSION pg_tensile; CREATE EXTENSION pg_tensile"
HELD = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


@pytest.mark.parametrize(
    ("process", "write", "written"),
    [
        pytest.param(
            "worker",
            """PERFORM tensile._job_metric('{"epoch": 75, "split": "training", "samples": 1, "loss": 1}')""",
            "SELECT count(*) FROM tensile.metrics",
            id="worker",
        ),
        pytest.param(
            "worker",
            "PERFORM tensile._job_end('cancelled')",
            "SELECT count(*) FROM tensile.jobs WHERE ended_at IS NOT NULL",
            id="worker's end",
        ),
        pytest.param(
            "scheduler",
            "PERFORM tensile._log('ghost')",
            "SELECT count(*) FROM tensile.scheduler_log WHERE event = 'ghost'",
            id="scheduler",
        ),
    ],
)
def test_a_process_of_a_dropped_extension_writes_nothing_into_the_next_one(
    new_cluster: Callable[..., Any], wait_until: Wait, process: str, write: str, written: str
) -> None:
    """Both have a job 1. The old process is in the middle of a statement while the extension is replaced."""
    stage = Stage(new_cluster({"pg_tensile.plan_events": 1024}), wait_until)
    try:
        old = stage.job()
        with stage.cluster.connect() as conn:
            conn.execute("SELECT pg_advisory_lock(8)")
            # The wait ends the transaction, whose locks DROP EXTENSION would wait for. A table that is locked for the
            # first time, as one that DROP has locked, makes the process hear of the new extension.
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
            wait_until(lambda: value(conn, gone, pid), what="it leaves")
            assert value(conn, written) == 0
            conn.execute("SELECT cancel_job(%s)", (old,))
            assert "PANIC" not in stage.cluster.log()
    finally:
        stage.close()


def test_a_terminated_worker_stops_at_its_next_wait(stage: Stage, job: int, wait_until: Wait) -> None:
    """It is busy when the signal comes, for less than a second."""
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


def test_a_worker_whose_role_is_dropped_is_told(stage: Stage, wait_until: Wait) -> None:
    stage.conn.execute("CREATE ROLE leaver LOGIN IN ROLE tensile_user")
    with stage.cluster.connect(user="leaver") as conn:
        register(conn, "leaves")
        job = train(conn, "leaves")
    stage.order(job, "SELECT 1 AS one")
    stage.conn.execute("DROP ROLE leaver")
    wait_until(lambda: worker(stage, job) is None)
    assert endings(stage, job) in ([32], [])  # [] if its own ending could not be written any more


def test_a_job_whose_worker_cannot_connect_does_not_stay_in_starting(stage: Stage, wait_until: Wait) -> None:
    with stage.alice.transaction():
        job = train(stage.alice)
        stage.conn.execute("REVOKE CONNECT ON DATABASE postgres FROM PUBLIC")
    try:
        wait_until(lambda: state(stage.conn, job) == "failed")
        assert value(stage.conn, "SELECT count(*) FROM tensile._progress()") == 0
    finally:
        stage.conn.execute("GRANT CONNECT ON DATABASE postgres TO PUBLIC")
