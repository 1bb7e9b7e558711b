"""The launcher: processes start, restart and end with the database, the extension and the settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.server.stage import (
    BOTH,
    CONTROLLER,
    LAUNCHER,
    SCHEDULER,
    processes,
    replace_step,
    running_in,
    terminate,
)
from tests.server.support import Connection, Wait, value

FATAL = r"\] +FATAL"  # logged by background processes


@pytest.fixture(scope="module")
def bare_cluster(new_cluster: Callable[..., Any]) -> Iterator[Any]:
    cluster = new_cluster(extension=False)
    yield cluster
    cluster.end()


@pytest.fixture
def bare(bare_cluster: Any, wait_until: Wait) -> Iterator[Any]:
    """A cluster without the extension, whose launcher waits for it in database `postgres`."""
    with bare_cluster.connect() as conn:
        wait_until(lambda: set(processes(conn)) == {LAUNCHER})
    yield bare_cluster
    bare_cluster.alter(dict.fromkeys(("pg_tensile.database", "pg_tensile.device_memory")))


@pytest.fixture
def news(bare: Any) -> Callable[[], str]:
    """Return what the server has logged since the beginning of the test."""
    start = len(bare.log())
    return lambda: bare.log()[start:]


def test_create_extension_in_another_database_says_which_one_is_served(bare: Any) -> None:
    """Not in a session that shows no NOTICE, as that of a dump's script does not."""
    said: list[list[str]] = []

    def hear(notice: psycopg.errors.Diagnostic) -> None:
        said.append([notice.message_primary or "", notice.message_detail or "", notice.message_hint or ""])

    with bare.connect() as conn:
        conn.execute("CREATE DATABASE elsewhere")
    with bare.connect("elsewhere") as conn:
        conn.execute("CREATE EXTENSION plpython3u")
        conn.add_notice_handler(hear)
        conn.execute("CREATE EXTENSION pg_tensile")
        ((message, detail, hint),) = said
        assert message == 'pg_tensile works in database "postgres" only, not in "elsewhere"'
        assert "one scheduler" in detail and "Those of other databases are not run" in detail
        assert "pg_tensile.database = 'elsewhere'" in hint
        conn.execute("DROP EXTENSION pg_tensile; SET client_min_messages = warning; CREATE EXTENSION pg_tensile")
        conn.execute("RESET client_min_messages; DROP EXTENSION pg_tensile")
        assert len(said) == 1
        bare.alter({"pg_tensile.database": ""})
        conn.execute("CREATE EXTENSION pg_tensile; DROP EXTENSION pg_tensile")
        assert said[1][0] == "pg_tensile works in no database, because pg_tensile.database is empty"
        bare.alter({"pg_tensile.database": "elsewhere"})
        conn.execute("CREATE EXTENSION pg_tensile; DROP EXTENSION pg_tensile")
        assert len(said) == 2
    bare.alter({"pg_tensile.database": None})
    with bare.connect() as conn:
        conn.execute("DROP DATABASE elsewhere WITH (FORCE)")


def test_processes_come_and_go_with_the_extension(bare: Any, news: Callable[[], str], wait_until: Wait) -> None:
    with bare.connect() as conn:
        for _ in range(2):
            conn.execute("CREATE EXTENSION pg_tensile CASCADE")
            wait_until(
                lambda: running_in(conn, "postgres") == BOTH, what="processes start when CREATE EXTENSION commits"
            )
            conn.execute("DROP EXTENSION pg_tensile")
            wait_until(lambda: not running_in(conn, "postgres"), what="processes end after DROP EXTENSION")
        with conn.transaction(force_rollback=True):
            conn.execute("CREATE EXTENSION pg_tensile")
        assert not running_in(conn, "postgres")
    assert not re.search("ERROR|FATAL|LOG: +pg_tensile", news())


def test_a_missing_database_is_logged_once(bare: Any, news: Callable[[], str], wait_until: Wait) -> None:
    bare.alter({"pg_tensile.database": "later"})
    complaint = 'pg_tensile waits for database "later", which does not exist'
    wait_until(lambda: complaint in news())
    with bare.connect() as conn:
        for memory in ("1GB", "2GB"):  # each reload wakes the launcher
            bare.alter({"pg_tensile.device_memory": memory})
        conn.execute("CREATE DATABASE later")
        with bare.connect("later") as later:
            later.execute("CREATE EXTENSION pg_tensile CASCADE")
            wait_until(lambda: running_in(conn, "later") == BOTH, what="processes start when CREATE EXTENSION commits")
        assert news().count(complaint) == 1
        conn.execute("DROP DATABASE later WITH (FORCE)")


def test_a_database_without_connections_is_logged_once(bare: Any, news: Callable[[], str], wait_until: Wait) -> None:
    bare.alter({"pg_tensile.database": "template0"})
    wait_until(lambda: 'database "template0", which does not accept connections' in news())
    assert not re.search(FATAL, news())


@pytest.mark.long
def test_drop_database_with_force(bare: Any, news: Callable[[], str], wait_until: Wait) -> None:
    """Processes are waited for that end and start anew."""
    bare.alter({"pg_tensile.database": "doomed"})
    with bare.connect() as conn:
        conn.execute("CREATE DATABASE doomed")
        with bare.connect("doomed") as doomed:
            doomed.execute("CREATE EXTENSION pg_tensile CASCADE")
            wait_until(lambda: running_in(conn, "doomed") == BOTH)
        before = len(news())
        conn.execute("DROP DATABASE doomed WITH (FORCE)")
        assert set(processes(conn)) == {LAUNCHER}
    wait_until(lambda: 'database "doomed", which does not exist' in news()[before:])
    assert not re.search(FATAL, news())


@pytest.mark.long
@pytest.mark.parametrize("kind", [LAUNCHER, CONTROLLER, SCHEDULER])
def test_a_terminated_process_comes_back(module_cluster: Any, wait_until: Wait, kind: str) -> None:
    """Takes seconds: the launcher and the postmaster wait before they start a process again."""
    start = len(module_cluster.log())
    with module_cluster.connect() as conn:
        wait_until(lambda: {LAUNCHER, *BOTH} <= set(processes(conn)))
        others = {name: pid for name, pid in processes(conn).items() if name != kind}
        old = terminate(conn, kind)
        wait_until(lambda: processes(conn).get(kind, (old,))[0] not in (old, None), what=f"{kind} runs again")
        assert {name: pid for name, pid in processes(conn).items() if name != kind} == others
    assert not re.search(FATAL, module_cluster.log()[start:])


def test_another_database_after_a_reload(module_cluster: Any, wait_until: Wait) -> None:
    with module_cluster.connect() as conn:
        conn.execute("CREATE DATABASE other")
        with module_cluster.connect("other") as other:
            other.execute("CREATE EXTENSION pg_tensile CASCADE")
        wait_until(lambda: running_in(conn, "postgres") == BOTH)
        for name in ("other", "postgres"):
            module_cluster.alter({"pg_tensile.database": name})
            wait_until(lambda: running_in(conn, name) == BOTH, what=f"they move to {name}")  # noqa: B023
            assert len(processes(conn)) == 3
        module_cluster.alter({"pg_tensile.database": ""})
        wait_until(lambda: set(processes(conn)) == {LAUNCHER}, what="an empty name stops the processes")
        module_cluster.alter({"pg_tensile.database": None})
        conn.execute("DROP DATABASE other")


@pytest.mark.long
def test_an_error_that_stays_is_logged_once(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster()
    with cluster.connect() as conn:
        wait_until(lambda: running_in(conn, "postgres") == BOTH)
        conn.execute("CREATE SEQUENCE attempts")
        terminate(conn, SCHEDULER)  # before the step is replaced, which would end it too
        replace_step(
            conn,
            "plpgsql",
            "BEGIN timeout_ms := CASE WHEN bits & 48 = 0 THEN 1000 END; IF tensile_worker._process() = 'scheduler' THEN"
            " PERFORM nextval('public.attempts'); RAISE 'broken for good'; END IF; END",
        )
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
        assert calls[process].startswith("CALL tensile_worker._step(")


def test_waiting_processes_hold_no_snapshot(module_cluster: Any, wait_until: Wait) -> None:
    """They wait outside any transaction for up to half a minute; VACUUM need not wait for them."""
    with module_cluster.connect() as conn:
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
        conn.execute("DROP TABLE t")


def test_waits_have_names_from_17_on(module_cluster: Any, wait_until: Wait) -> None:
    with module_cluster.connect() as conn:
        name = "PgTensileSupervisor" if conn.info.server_version >= 170000 else "Extension"
        waits = "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'pg_tensile %%' AND wait_event = %s"
        wait_until(lambda: value(conn, waits, name) == 3)  # launcher, controller, scheduler


def test_idle_processes_sleep(module_cluster: Any, wait_until: Wait) -> None:
    with module_cluster.connect() as conn:
        wait_until(lambda: running_in(conn, "postgres") == BOTH)
        pids = [pid for pid, _ in processes(conn).values()]
        wait_until(  # until all of them have started
            lambda: (
                value(
                    conn,
                    "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s) AND wait_event_type = 'Extension'",
                    pids,
                )
                == len(pids)
            ),
        )

        def switches() -> dict[int, str]:
            """Return voluntary context switches by pid: one for each time that a process went to sleep."""
            lines = (Path(f"/proc/{pid}/status").read_text() for pid in pids)
            return {
                pid: re.findall(r"voluntary_ctxt_switches:\t(\d+)", line)[0]
                for pid, line in zip(pids, lines, strict=True)
            }

        def all_sleep() -> bool:
            """True if no process wakes up for two seconds; statistics of earlier work are reported once."""
            before = switches()
            value(conn, "SELECT pg_sleep(2)")
            return switches() == before

        wait_until(all_sleep, what="no process wakes up for two seconds")
