"""The processes of the shim: who starts them, how they wait and stop, what they share.

Where a test needs a call that only the scheduler or a worker may make, the process is a real one, but its procedure is
replaced by one that executes what the test orders (`Stage`).
"""

from __future__ import annotations

import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.server.support import Connection, register, state, value

Wait = Callable[..., Any]

LAUNCHER, CONTROLLER, SCHEDULER, WORKER = (
    f"pg_tensile {name}" for name in ("launcher", "controller", "scheduler", "worker")
)
BOTH = {CONTROLLER, SCHEDULER}
LIMIT = 3  # seconds that stopping may take
BACKOFF = 6  # seconds until a process that failed is started again
FATAL = r"\] +FATAL"  # of a process that is no client's session


def processes(conn: Connection) -> dict[str, tuple[int, str | None]]:
    """Type of each process of ours → its pid and database."""
    rows = conn.execute(
        "SELECT backend_type, pid, datname FROM pg_stat_activity WHERE backend_type LIKE 'pg_tensile%'"
    ).fetchall()
    return {row[0]: (row[1], row[2]) for row in rows}


def running_in(conn: Connection, database: str) -> set[str]:
    return {kind for kind, (_, name) in processes(conn).items() if name == database}


def terminate(conn: Connection, kind: str) -> int:
    pid, _ = processes(conn)[kind]
    assert value(conn, "SELECT pg_terminate_backend(%s)", pid)
    return pid


# -- the launcher -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LAUNCHER, CONTROLLER, SCHEDULER])
def test_a_terminated_process_comes_back(fresh_cluster: Callable[..., Any], wait_until: Wait, kind: str) -> None:
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        wait_until(lambda: {LAUNCHER, *BOTH} <= set(processes(conn)), 10)
        others = {name: pid for name, pid in processes(conn).items() if name != kind}
        old = terminate(conn, kind)
        wait_until(lambda: processes(conn).get(kind, (old,))[0] not in (old, None), BACKOFF + 6, f"{kind} runs again")
        assert {name: pid for name, pid in processes(conn).items() if name != kind} == others
    assert not re.search(FATAL, cluster.log())


def test_processes_come_and_go_with_the_extension(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster(extension=False)
    with cluster.connect() as conn:
        wait_until(lambda: LAUNCHER in processes(conn), 10)
        for _ in range(2):
            conn.execute("CREATE EXTENSION pg_tensile CASCADE")
            wait_until(lambda: running_in(conn, "postgres") == BOTH, 3, "they start when CREATE EXTENSION commits")
            conn.execute("DROP EXTENSION pg_tensile")
            wait_until(lambda: not running_in(conn, "postgres"), LIMIT, "they end after DROP EXTENSION")
        with conn.transaction(force_rollback=True):
            conn.execute("CREATE EXTENSION pg_tensile")
        assert not running_in(conn, "postgres")
    assert not re.search("ERROR|FATAL|LOG: +pg_tensile", cluster.log())


def test_a_missing_database_is_said_once(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster({"pg_tensile.database": "later"}, extension=False)
    complaint = 'pg_tensile waits for database "later", which does not exist'
    wait_until(lambda: complaint in cluster.log(), 5)
    with cluster.connect() as conn:
        for memory in ("1GB", "2GB"):  # each reload wakes the launcher for another look
            cluster.configure({"pg_tensile.device_memory": memory})
            cluster.reload()
            wait_until(lambda: value(conn, "SHOW pg_tensile.device_memory") == memory, 5)  # noqa: B023
        conn.execute("CREATE DATABASE later")
    with cluster.connect("later") as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        wait_until(lambda: running_in(conn, "later") == BOTH, 3, "found when CREATE EXTENSION commits")
    assert cluster.log().count(complaint) == 1


def test_a_database_that_takes_no_connections_is_said_once(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster({"pg_tensile.database": "template0"}, extension=False)
    wait_until(lambda: 'database "template0", which does not accept connections' in cluster.log(), 5)
    assert not re.search(FATAL, cluster.log())


def test_drop_database_with_force(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster({"pg_tensile.database": "doomed"}, extension=False)
    with cluster.connect() as conn:
        conn.execute("CREATE DATABASE doomed")
        with cluster.connect("doomed") as doomed:
            doomed.execute("CREATE EXTENSION pg_tensile CASCADE")
            wait_until(lambda: running_in(conn, "doomed") == BOTH, 5)
        start = time.monotonic()
        conn.execute("DROP DATABASE doomed WITH (FORCE)")
        assert time.monotonic() - start < LIMIT
        assert set(processes(conn)) == {LAUNCHER}
    wait_until(lambda: 'database "doomed", which does not exist' in cluster.log(), BACKOFF + 4)
    assert not re.search(FATAL, cluster.log())


def test_another_database_after_a_reload(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        conn.execute("CREATE DATABASE other")
        with cluster.connect("other") as other:
            other.execute("CREATE EXTENSION pg_tensile CASCADE")
        wait_until(lambda: running_in(conn, "postgres") == BOTH, 10)
        for name in ("other", "postgres"):
            cluster.configure({"pg_tensile.database": name})
            cluster.reload()
            wait_until(lambda: running_in(conn, name) == BOTH, 5, f"they move to {name}")  # noqa: B023
            assert len(processes(conn)) == 3
        cluster.configure({"pg_tensile.database": ""})
        cluster.reload()
        wait_until(lambda: set(processes(conn)) == {LAUNCHER}, LIMIT, "an empty name stops them")


def test_an_error_that_stays_is_logged_once(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        wait_until(lambda: running_in(conn, "postgres") == BOTH, 10)
        conn.execute("CREATE SEQUENCE attempts")
        conn.execute(
            "CREATE OR REPLACE PROCEDURE tensile.run_scheduler() LANGUAGE plpgsql AS"
            " $$BEGIN PERFORM nextval('public.attempts'); RAISE 'broken for good'; END$$"
        )
        terminate(conn, SCHEDULER)
        # 6 s after it was terminated, and 12 s after its first failure
        wait_until(lambda: value(conn, "SELECT last_value FROM attempts") == 2, 30, "the second attempt")
        wait_until(lambda: SCHEDULER not in processes(conn), 5)
    assert cluster.log().count("broken for good") == 1


def test_every_process_is_named_in_pg_stat_activity(db: Connection, wait_until: Wait) -> None:
    wait_until(lambda: running_in(db, "postgres") >= BOTH, 10)
    calls: dict[str, str] = dict(
        db.execute(
            "SELECT application_name, query FROM pg_stat_activity WHERE backend_type LIKE 'pg_tensile%'"
        ).fetchall()
    )
    assert calls[CONTROLLER] == "CALL tensile.run_controller()"
    assert calls[SCHEDULER] == "CALL tensile.run_scheduler()"


def test_waiting_processes_hold_no_snapshot(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    """They wait inside a SELECT, for half a minute if nothing happens; VACUUM need not wait with them."""
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        wait_until(lambda: running_in(conn, "postgres") == BOTH, 10)
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'pg_tensile %%' AND wait_event = 'Extension'"
        )
        wait_until(lambda: value(conn, waiting + " AND datname = 'postgres' AND backend_xmin IS NULL") == 2, 5)
        conn.execute("CREATE TABLE t AS SELECT 1 AS a")
        started = time.monotonic()
        conn.execute("CREATE INDEX CONCURRENTLY ON t (a)")
        assert time.monotonic() - started < 5


def test_idle_processes_sleep(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        wait_until(lambda: running_in(conn, "postgres") == BOTH, 10)
        pids = [pid for pid, _ in processes(conn).values()]
        wait_until(  # until they have started altogether
            lambda: (
                value(
                    conn, "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s) AND wait_event = 'Extension'", pids
                )
                == len(pids)
            ),
            10,
        )

        def woken() -> dict[int, str]:
            """Voluntary context switches: one for each time a process went to sleep."""
            lines = (Path(f"/proc/{pid}/status").read_text() for pid in pids)
            return {
                pid: re.findall(r"voluntary_ctxt_switches:\t(\d+)", line)[0]
                for pid, line in zip(pids, lines, strict=True)
            }

        before = woken()
        value(conn, "SELECT pg_sleep(2)")
        assert woken() == before


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


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:1234", "", "CPU "])
def test_a_device_that_cannot_exist_is_refused(db: Connection, device: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        db.execute(f"ALTER SYSTEM SET pg_tensile.device = '{device}'")
    assert "cuda:N" in (caught.value.diag.message_detail or "")


def test_settings_are_documented_and_reserved(db: Connection) -> None:
    rows = db.execute("SELECT name, short_desc, context FROM pg_settings WHERE name LIKE 'pg\\_tensile.%'").fetchall()
    assert all(row[1].startswith("Sets ") for row in rows)
    assert {row[0] for row in rows if row[2] == "user"} == {"pg_tensile.policy", "pg_tensile.predict_timeout"}
    assert {row[0] for row in rows if row[2] == "postmaster"} == {"pg_tensile.max_jobs", "pg_tensile.plan_events"}
    with pytest.raises(psycopg.errors.InvalidName):
        db.execute("SET pg_tensile.no_such_setting = 1")


# -- what a transaction tells -----------------------------------------------------------------------------------------


def train(conn: Connection, model: str = "m") -> int:
    return int(value(conn, "SELECT train_model(%s, 'SELECT 1.0 AS x, 2.0 AS y', 'y')", model))


@pytest.fixture
def quiet(fresh_cluster: Callable[..., Any], wait_until: Wait) -> Any:
    """A cluster whose processes work elsewhere, so that nothing happens but what the test does."""
    cluster = fresh_cluster({"pg_tensile.database": "", "max_prepared_transactions": 2})
    with cluster.connect() as conn:
        wait_until(lambda: set(processes(conn)) == {LAUNCHER}, 10)
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
        return bool(value(conn, "SELECT wait_event = 'Extension' FROM pg_stat_activity WHERE pid = %s", self.pid))


def test_a_commit_wakes_those_who_wait_and_a_rollback_does_not(quiet: Any, wait_until: Wait) -> None:
    with quiet.connect() as conn, quiet.connect() as other:
        sleeper = Sleeper(other, 60_000)
        wait_until(lambda: sleeper.sleeps(conn), 5)
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
        start = time.monotonic()
        conn.execute("SELECT tensile._wait_for_change(60000)")
        assert time.monotonic() - start < 5
        start = time.monotonic()
        conn.execute("SELECT tensile._wait_for_change(200)")
        assert 0.2 <= time.monotonic() - start < 5


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

LOOP = """
import json
kind = {kind}
plpy.execute("SELECT set_config('client_min_messages', 'error', false)")
{begin}
while True:
    bits = plpy.execute("SELECT tensile._wait(-1, 20) AS bits")[0]["bits"]
    plpy.commit()
    if bits & 48:
        plpy.execute("INSERT INTO stage.endings VALUES ('%s', %d)" % (kind, bits))
        plpy.commit()
        break
    {leave}
    orders = plpy.execute("SELECT id, sql FROM stage.orders WHERE process = '%s' AND answer IS NULL ORDER BY id" % kind)
    for order in orders:
        try:
            with plpy.subtransaction():
                result = plpy.execute(order["sql"])
            answer = [dict(row) for row in result]
        except plpy.SPIError as error:
            answer = {{"error": error.sqlstate, "message": str(error)}}
        plan = plpy.prepare("UPDATE stage.orders SET answer = $1 WHERE id = $2", ["json", "int"])
        plpy.execute(plan, [json.dumps(answer, default=str), order["id"]])
        plpy.commit()
"""
WORKER_BEGIN = """
plpy.execute("SELECT tensile._job_begin(0)")
plpy.commit()
"""
WORKER_LEAVE = """
    if plpy.execute("SELECT tensile._job_status() AS s")[0]["s"] != "ok":
        plpy.execute("SELECT tensile._job_end('cancelled', NULL, NULL, NULL, NULL, NULL, NULL)")
        plpy.commit()
        break
    plpy.commit()
"""


class Stage:
    """A cluster whose scheduler and workers execute what the test orders, inside those processes."""

    def __init__(self, cluster: Any, wait_until: Wait) -> None:
        self.cluster = cluster
        self.conn: Connection = cluster.connect()
        self._wait_until = wait_until
        self.conn.execute(
            "CREATE SCHEMA stage; CREATE TABLE stage.orders (id serial, process text, sql text, answer json);"
            "CREATE TABLE stage.endings (process text, bits int); GRANT USAGE ON SCHEMA stage TO PUBLIC;"
            "GRANT ALL ON ALL TABLES IN SCHEMA stage TO PUBLIC; CREATE ROLE alice LOGIN; CREATE ROLE mallory LOGIN;"
            "CREATE ROLE watcher LOGIN IN ROLE pg_read_all_stats"
        )
        body = LOOP.format(kind="'scheduler'", begin="", leave="")
        self.conn.execute(
            f"CREATE OR REPLACE PROCEDURE tensile.run_scheduler() LANGUAGE plpython3u AS $body${body}$body$"
        )
        body = LOOP.format(kind="str(job)", begin=WORKER_BEGIN, leave=WORKER_LEAVE)
        self.conn.execute(
            f"CREATE OR REPLACE PROCEDURE tensile.run_worker(job bigint) LANGUAGE plpython3u AS $body${body}$body$"
        )
        wait_until(lambda: SCHEDULER in processes(self.conn), 10)
        terminate(self.conn, SCHEDULER)
        self.order("scheduler", "SELECT 1 AS one")
        self.alice: Connection = cluster.connect(user="alice")
        register(self.alice, "m")
        register(self.alice, "n")

    def place(self, process: str | int, sql: str) -> int:
        """An order without waiting for it."""
        return int(
            value(self.conn, "INSERT INTO stage.orders (process, sql) VALUES (%s, %s) RETURNING id", str(process), sql)
        )

    def order(self, process: str | int, sql: str) -> Any:
        """Rows of the SQL run in the scheduler or in the worker of a job; raises what it raised."""
        return self.answer(self.place(process, sql))

    def answer(self, number: int) -> Any:
        """The rows of a placed order, once it was executed; raises what it raised."""
        row = self._wait_until(lambda: self._answer(number), 15, f"the answer to order {number}")
        if isinstance(row, dict):
            raise psycopg.errors.lookup(row["error"])(row["message"])
        return row

    def _answer(self, number: int) -> Any:
        answer = value(self.conn, "SELECT answer FROM stage.orders WHERE id = %s", number)
        return [None] if answer == [] else answer

    def job(self, model: str = "m") -> int:
        """A new job of alice's with its worker."""
        job = train(self.alice, model)
        self.order(job, "SELECT 1 AS one")
        return job

    def end(self, job: int) -> None:
        self.conn.execute("SELECT cancel_job(%s)", (job,))
        self._wait_until(lambda: state(self.conn, job) == "cancelled", 10)
        self._wait_until(lambda: value(self.conn, "SELECT count(*) FROM tensile._progress()") == 0, 10)

    def close(self) -> None:
        self.alice.close()
        self.conn.close()
        self.cluster.end()


@pytest.fixture(scope="module")
def stage(new_cluster: Callable[..., Any], wait_until: Wait) -> Iterator[Stage]:
    stage = Stage(new_cluster({"pg_tensile.plan_events": 1024, "pg_tensile.device_memory": "1GB"}), wait_until)
    yield stage
    stage.close()


@pytest.fixture
def job(stage: Stage) -> Iterator[int]:
    job = stage.job()
    yield job
    if value(stage.conn, "SELECT ended_at IS NULL FROM tensile.jobs WHERE id = %s", job):
        stage.end(job)


def test_a_worker_knows_its_job_and_runs_as_the_submitter(stage: Stage, job: int) -> None:
    assert stage.order(job, "SELECT tensile._my_job() AS j, current_user AS c, session_user AS s") == [
        {"j": job, "c": "alice", "s": "alice"}
    ]


def test_what_a_role_sets_for_its_sessions_does_not_reach_the_supervisor(stage: Stage) -> None:
    stage.conn.execute(
        "ALTER ROLE alice SET search_path = public; ALTER ROLE alice SET default_transaction_read_only = on;"
        "ALTER ROLE alice SET default_transaction_isolation = 'serializable'; ALTER ROLE alice SET lock_timeout = 1;"
        "GRANT mallory TO alice; ALTER ROLE alice SET role = mallory"
    )
    job = stage.job()
    try:
        names = ("search_path", "transaction_read_only", "transaction_isolation", "lock_timeout", "role")
        settings = ", ".join(f"current_setting('{name}') AS {name}" for name in names)
        assert list(stage.order(job, f"SELECT {settings}")[0].values()) == [
            *("pg_catalog, pg_temp", "off", "read committed", "0", "none")
        ]
    finally:
        stage.conn.execute("ALTER ROLE alice RESET ALL; REVOKE mallory FROM alice")
        stage.end(job)


def test_calls_of_other_processes_are_refused(stage: Stage, job: int) -> None:
    for process, sql in (
        (job, "SELECT tensile._publish_plan(1, '')"),
        (job, "SELECT tensile._launch_worker(1, 10)"),
        ("scheduler", "SELECT tensile._launch_worker(1, 10)"),
        ("scheduler", "SELECT tensile._job_slots()"),
        ("scheduler", "SELECT tensile._my_job()"),
        ("scheduler", "SELECT tensile._fetch_plan(0)"),
        ("scheduler", "SELECT tensile._report(NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL)"),
        ("scheduler", "SELECT tensile._register_device('x', 1)"),
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            stage.order(process, sql)
    for call in ("_wait(-1, 0)", "_my_job()", "_launch_worker(1, 10)", "_publish_plan(1, '')", "_job_slots()"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            stage.conn.execute(f"SELECT tensile.{call}")


def test_a_wait_says_what_ended_it(stage: Stage, job: int) -> None:
    start = time.monotonic()
    stage.order("scheduler", "SELECT tensile._wait(-1, 0)")  # whatever has happened before
    assert stage.order("scheduler", "SELECT tensile._wait(-1, 50) AS bits") == [{"bits": 8}]
    assert time.monotonic() - start >= 0.05

    number = stage.place(job, "SELECT tensile._wait(-1, 0), tensile._wait(-1, 10000) AS bits")
    time.sleep(0.2)
    stage.conn.execute("SELECT tensile._notify(%s)", (job,))
    start = time.monotonic()
    while (answer := value(stage.conn, "SELECT answer FROM stage.orders WHERE id = %s", number)) is None:
        assert time.monotonic() - start < 5
        time.sleep(0.02)
    assert answer[0]["bits"] == 4


def test_a_wake_up_is_not_lost_while_the_process_waits_for_something_else(stage: Stage, job: int) -> None:
    """pg_sleep resets the latch."""
    number = stage.place(job, "SELECT tensile._wait(-1, 0), pg_sleep(0.5), tensile._wait(-1, 10000) AS bits")
    time.sleep(0.2)
    stage.conn.execute("SELECT tensile._notify(%s)", (job,))
    start = time.monotonic()
    while value(stage.conn, "SELECT answer FROM stage.orders WHERE id = %s", number) is None:
        assert time.monotonic() - start < 5
        time.sleep(0.02)


def endings(stage: Stage, job: int) -> list[int]:
    rows = stage.conn.execute("SELECT bits FROM stage.endings WHERE process = %s", (str(job),)).fetchall()
    return [bits & 48 for (bits,) in rows]


def worker(stage: Stage, job: int) -> int | None:
    pid: int | None = value(stage.conn, "SELECT pid FROM tensile._progress() WHERE job = %s", job)
    return pid


def test_a_terminated_worker_stops_at_its_next_wait(stage: Stage, job: int, wait_until: Wait) -> None:
    """It is busy when the signal comes, for less than a second."""
    stage.place(job, "SELECT pg_sleep(0.6)")
    time.sleep(0.2)
    pid = worker(stage, job)
    stage.conn.execute("SELECT pg_terminate_backend(%s)", (pid,))
    wait_until(lambda: worker(stage, job) != pid, LIMIT)
    assert endings(stage, job) == [16]


def test_a_terminated_worker_that_does_not_come_to_a_wait_dies(stage: Stage, job: int, wait_until: Wait) -> None:
    number = stage.place(job, "SELECT pg_sleep(60)")
    time.sleep(0.2)
    pid = worker(stage, job)
    stage.conn.execute("SELECT pg_terminate_backend(%s)", (pid,))
    wait_until(lambda: worker(stage, job) != pid, LIMIT)
    assert endings(stage, job) == []
    stage.conn.execute("UPDATE stage.orders SET answer = '[]' WHERE id = %s", (number,))


def test_a_worker_whose_role_is_dropped_is_told(stage: Stage, wait_until: Wait) -> None:
    stage.conn.execute("CREATE ROLE leaver LOGIN")
    with stage.cluster.connect(user="leaver") as conn:
        register(conn, "leaves")
        job = train(conn, "leaves")
    stage.order(job, "SELECT 1 AS one")
    stage.conn.execute("DROP ROLE leaver")
    wait_until(lambda: worker(stage, job) is None, LIMIT)
    assert endings(stage, job) in ([32], [])  # [] if its own ending could not be written any more


def test_a_job_whose_worker_cannot_connect_does_not_stay_in_starting(stage: Stage, wait_until: Wait) -> None:
    with stage.alice.transaction():
        job = train(stage.alice)
        stage.conn.execute("REVOKE CONNECT ON DATABASE postgres FROM PUBLIC")
    try:
        wait_until(lambda: state(stage.conn, job) in ("interrupted", "failed"), 10)
        assert value(stage.conn, "SELECT count(*) FROM tensile._progress()") == 0
    finally:
        stage.conn.execute("GRANT CONNECT ON DATABASE postgres TO PUBLIC")
        stage.end(job)


# -- progress and devices ---------------------------------------------------------------------------------------------


def progress(conn: Connection, job: int) -> Any:
    columns = (
        "phase, epoch, epochs, step, steps, loss, samples_per_s,"
        " device_bytes, device_peak_bytes, bytes_swapped, stall_us"
    )
    return conn.execute(f"SELECT {columns} FROM tensile._progress() WHERE job = %s", (job,)).fetchone()


def test_progress_is_live_and_null_leaves_a_number_as_it_is(stage: Stage, job: int) -> None:
    assert progress(stage.alice, job) == (None,) * 11
    stage.order(job, "SELECT tensile._report('training', 1, 10, 2, 20, 0.5, 1000, 4096, 8192, NULL, NULL)")
    assert progress(stage.alice, job) == ("training", 1, 10, 2, 20, 0.5, 1000, 4096, 8192, None, None)
    stage.order(job, "SELECT tensile._report(NULL, NULL, NULL, 3, NULL, 'NaN', NULL, 0, NULL, 7, 8)")
    row = progress(stage.alice, job)
    assert row[:5] == ("training", 1, 10, 3, 20) and row[5] != row[5] and row[6:] == (1000, 0, 8192, 7, 8)
    stage.order(
        job, f"SELECT tensile._report('{'ä' * 100}', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)"
    )
    assert progress(stage.alice, job)[0] == "ä" * 15, "cut to 31 bytes, never within a character"


def test_progress_and_plan_are_for_the_owner_and_those_who_may_see_all(stage: Stage, job: int) -> None:
    stage.order("scheduler", f"SELECT tensile._publish_plan({job}, '{hexadecimal([event(1)])}')")
    for user, seen in (("alice", 1), ("watcher", 1), ("postgres", 1), ("mallory", 0)):
        with stage.cluster.connect(user=user) as conn:
            assert value(conn, "SELECT count(*) FROM tensile._progress()") == seen, user
            assert value(conn, "SELECT count(*) FROM tensile._plan()") == seen, user


def test_devices_count_their_jobs_against_the_budget(stage: Stage, job: int) -> None:
    second = stage.job("n")
    stage.order(job, "SELECT tensile._register_device('cuda:7', 3000000000)")
    stage.order(second, "SELECT tensile._register_device('cuda:7', 5)")  # the first one's word counts
    devices = "SELECT total_bytes, budget_bytes, granted_bytes, jobs FROM tensile.devices WHERE name = 'cuda:7'"
    assert stage.alice.execute(devices).fetchone() == (3_000_000_000, 1 << 30, 0, 2)
    stage.order(second, "SELECT tensile._register_device('cuda:8', 1000)")
    assert stage.alice.execute(devices).fetchone() == (3_000_000_000, 1 << 30, 0, 1)
    assert value(stage.alice, "SELECT budget_bytes FROM tensile.devices WHERE name = 'cuda:8'") == 1000
    for number in range(40):  # more than the ledger holds, but never two at once
        stage.order(second, f"SELECT tensile._register_device('device {number}', 1)")
    for bad in ("'', 1", "'x', 0", "'x', -1"):
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            stage.order(second, f"SELECT tensile._register_device({bad})")
    stage.conn.execute("SELECT cancel_job(%s)", (second,))


# -- plans ------------------------------------------------------------------------------------------------------------


def event(
    kind: int, tensor: int = 0, version: int = 0, trigger: int = 0, delay_us: int = 0, deadline: int = 0, size: int = 0
) -> bytes:
    """One event row (docs/internals.md, "Event rows")."""
    return struct.pack("<B3xiiiiiq", kind, tensor, version, trigger, delay_us, deadline, size)


def hexadecimal(events: list[bytes]) -> str:
    return "\\x" + b"".join(events).hex()


def publish(stage: Stage, job: int, plan: str) -> int:
    return int(stage.order("scheduler", f"SELECT tensile._publish_plan({job}, '{plan}') AS g")[0]["g"])


def fetch(stage: Stage, job: int, after: int) -> Any:
    sql = f"SELECT generation AS g, encode(events, 'hex') AS e FROM tensile._fetch_plan({after})"
    return stage.order(job, sql)


def test_a_published_plan_arrives_at_the_worker_and_in_sql(stage: Stage, job: int) -> None:
    assert fetch(stage, job, 0) == [None]
    plan = hexadecimal(
        [event(1, 5, 1, 10, 250, 12, 1 << 40), event(2, 5, 1, 30, 0, 40, 1 << 40), event(3, 6), event(4, 7)]
    )
    first = publish(stage, job, plan)
    assert fetch(stage, job, 0) == [{"g": first, "e": plan[2:]}]
    assert fetch(stage, job, first) == [None]
    rows = stage.alice.execute(
        "SELECT generation, event, kind, tensor, version, trigger_operator, delay_us, deadline_operator, bytes"
        " FROM tensile.plan WHERE job = %s ORDER BY event",
        (job,),
    ).fetchall()
    assert rows[0] == (first, 0, "swap_out", 5, 1, 10, 250, 12, 1 << 40)
    assert [row[2] for row in rows] == ["swap_out", "swap_in", "recompute", "release"]
    assert value(stage.alice, "SELECT plan_generation FROM tensile._progress() WHERE job = %s", job) == first

    second = publish(stage, job, "\\x")
    assert second > first
    assert fetch(stage, job, first) == [{"g": second, "e": ""}]
    assert value(stage.alice, "SELECT count(*) FROM tensile._plan()") == 0


def test_the_next_job_does_not_inherit_a_plan_nor_numbers(stage: Stage, job: int, wait_until: Wait) -> None:
    publish(stage, job, hexadecimal([event(4, 1)]))
    stage.order(job, "SELECT tensile._report('training', 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)")
    stage.end(job)
    following = stage.job()
    assert progress(stage.alice, following) == (None,) * 11
    assert fetch(stage, following, 0) == [None]
    stage.end(following)


@pytest.mark.parametrize(
    ("plan", "sqlstate"),
    [
        ("\\x00", "22023"),
        (hexadecimal([event(1)])[:-2], "22023"),
        (hexadecimal([event(0)]), "22023"),
        (hexadecimal([event(1), event(5)]), "22023"),
        (hexadecimal([b"\1\1" + event(1)[2:]]), "22023"),
        (hexadecimal([event(4)] * 1025), "54000"),
    ],
    ids=["one byte", "not whole", "kind 0", "kind 5", "padding", "too long"],
)
def test_what_is_no_plan_is_refused_and_the_old_one_stays(stage: Stage, job: int, plan: str, sqlstate: str) -> None:
    generation = publish(stage, job, hexadecimal([event(4, 9)] * 1024))
    with pytest.raises(psycopg.errors.lookup(sqlstate)):
        publish(stage, job, plan)
    assert fetch(stage, job, generation) == [None]
    assert stage.alice.execute("SELECT DISTINCT tensor FROM tensile._plan()").fetchall() == [(9,)]


def test_a_plan_for_a_job_without_a_worker_is_refused(stage: Stage) -> None:
    with pytest.raises(psycopg.errors.UndefinedObject):
        publish(stage, 1_000_000, hexadecimal([event(4)]))


def test_nobody_sees_half_a_plan(stage: Stage, job: int) -> None:
    """The scheduler replaces the plan as fast as it can; each plan's events all have one tensor."""
    plans = [hexadecimal([event(4, number)] * 1000) for number in (1, 2)]
    writer = " ".join(f"PERFORM tensile._publish_plan({job}, '{plan}');" for plan in plans)
    unread = "NOT EXISTS (SELECT FROM stage.endings WHERE process = 'reader')"
    number = stage.place("scheduler", f"DO $$BEGIN WHILE {unread} LOOP {writer} END LOOP; END$$")
    seen: set[int | None] = set()
    deadline = time.monotonic() + 60
    while len(seen) < 50 and time.monotonic() < deadline:
        row = stage.alice.execute(
            "SELECT count(*), count(DISTINCT tensor), count(DISTINCT generation), min(generation) FROM tensile._plan()"
        ).fetchone()
        assert row is not None and row[:3] in ((1000, 1, 1), (0, 0, 0)), row
        seen.add(row[3])
    stage.conn.execute("INSERT INTO stage.endings VALUES ('reader', 0)")
    stage.answer(number)
    assert len(seen) == 50, "the readers saw the plan change"
