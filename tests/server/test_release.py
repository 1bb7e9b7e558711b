"""release_database and resume_database: a database is renamed, copied and dropped while the server runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.server.refusals import refused
from tests.server.stage import BOTH, LAUNCHER, processes, running_in
from tests.server.support import FOREVER, MLP, Connection, Wait, finish, reason, state, submit, value

ROW = Jsonb({"a": 1, "b": 1, "c": "c1"})
IN_USE = "is being accessed by other users"


@pytest.fixture(scope="module")
def server(new_cluster: Callable[..., Any]) -> Iterator[Any]:
    cluster = new_cluster({"pg_tensile.database": "src"}, extension=False)
    yield cluster
    cluster.end()


@pytest.fixture
def admin(server: Any, wait_until: Wait) -> Iterator[Connection]:
    """A superuser's connection to `postgres`; pg_tensile runs in a new database `src`, which is dropped after the
    test."""
    with server.connect() as conn:
        conn.execute("CREATE DATABASE src")
        with server.connect("src") as src:
            src.execute("CREATE EXTENSION pg_tensile CASCADE")
        wait_until(lambda: running_in(conn, "src") == BOTH)
        yield conn
    with server.connect() as conn:  # the server may have been restarted
        if value(conn, "SELECT count(*) FROM pg_database WHERE datname = 'src'"):
            release(server)  # the launcher waits before it starts again what DROP DATABASE has terminated
            conn.execute("DROP DATABASE src")


def release(server: Any, database: str = "src") -> None:
    with server.connect(database) as conn:
        conn.execute("SELECT release_database()")


@pytest.mark.long
def test_a_released_database_is_copied_and_its_job_continues(server: Any, admin: Connection, wait_until: Wait) -> None:
    """Takes long because a trainer starts twice."""
    with server.connect("src") as src:
        job = submit(src, "m", MLP, epochs=FOREVER)
        wait_until(lambda: value(src, "SELECT count(*) > 0 FROM tensile_internal.epochs WHERE job = %s", job))
    if admin.info.server_version < 190000:  # from there on, processes give way
        refused("55006", IN_USE, "release_database()", lambda: admin.execute("CREATE DATABASE copy TEMPLATE src"))
        refused("55006", IN_USE, "release_database()", lambda: admin.execute("ALTER DATABASE src RENAME TO dst"))
        refused("55006", IN_USE, "release_database()", lambda: admin.execute("DROP DATABASE src"))

    release(server)
    assert set(processes(admin)) == {LAUNCHER}
    admin.execute("CREATE DATABASE copy TEMPLATE src")
    with server.connect("copy") as copy:
        assert state(copy, job) == "interrupted"
        assert reason(copy, job) == "its database was released (release_database)"
    admin.execute("DROP DATABASE copy")
    assert set(processes(admin)) == {LAUNCHER}

    with server.connect("src") as src:
        assert value(src, "SELECT resume_database()") is True
        assert value(src, "SELECT resume_database()") is False
        wait_until(lambda: state(src, job) == "running", what="the job continues")
        assert value(src, "SELECT attempts FROM tensile.jobs WHERE job = %s", job) == 2
        src.execute("SELECT cancel_job(%s)", (job,))
    assert server.log().count('pg_tensile has released database "src"') == 1


@pytest.mark.long
def test_processes_give_way_to_commands_on_the_database(server: Any, admin: Connection, wait_until: Wait) -> None:
    """From PostgreSQL 19 on; before, the commands are refused. Takes long because a trainer starts twice."""
    gives_way = admin.info.server_version >= 190000
    with server.connect("src") as src:
        job = submit(src, "m", MLP, epochs=FOREVER)
        wait_until(lambda: value(src, "SELECT count(*) > 0 FROM tensile_internal.epochs WHERE job = %s", job))
    if not gives_way:
        refused("55006", IN_USE, "release_database()", lambda: admin.execute("CREATE DATABASE copy TEMPLATE src"))
    else:
        admin.execute("CREATE DATABASE copy TEMPLATE src")
        with server.connect("copy") as copy:
            assert state(copy, job) == "interrupted"
            assert reason(copy, job) == "a command such as CREATE DATABASE needed its database for itself"
        admin.execute("DROP DATABASE copy")
    with server.connect("src") as src:
        wait_until(lambda: state(src, job) == "running", what="the job continues")
        assert value(src, "SELECT attempts FROM tensile.jobs WHERE job = %s", job) == 1 + gives_way
        src.execute("SELECT cancel_job(%s)", (job,))


def test_a_renamed_database_stays_released_until_the_setting_names_it(
    server: Any, admin: Connection, wait_until: Wait
) -> None:
    release(server)
    admin.execute("ALTER DATABASE src RENAME TO dst")
    server.alter({"pg_tensile.database": "dst"})
    try:
        with server.connect("dst") as dst:
            assert value(dst, "SELECT resume_database()") is True
        wait_until(lambda: running_in(admin, "dst") == BOTH)
        release(server, "dst")
        admin.execute("DROP DATABASE dst")
    finally:
        server.alter({"pg_tensile.database": None})


def test_what_needs_a_supervisor_says_how_to_resume(server: Any, admin: Connection) -> None:
    with server.connect("src") as src:
        finish(src, submit(src, "m", MLP))
        src.execute("SELECT release_database()")
        src.execute("SELECT release_database()")  # again, by somebody else perhaps
        refused("55000", "released", "resume_database()", lambda: submit(src, "m"))
        assert value(src, "SELECT predict_class('m', %s)", ROW)  # by the session itself
        by_predictor = "SELECT predict_class('m', %s, '1GB')"
        refused("55000", "released", "resume_database()", lambda: src.execute(by_predictor, (ROW,)))
        assert value(src, "SELECT resume_database()") is True
        assert submit(src, "m") == 2


def test_a_start_of_the_server_ends_a_release(server: Any, admin: Connection, wait_until: Wait) -> None:
    release(server)
    server.restart()
    with server.connect() as conn:
        wait_until(lambda: running_in(conn, "src") == BOTH)


def test_the_owner_of_the_database_may_release_it(server: Any, admin: Connection) -> None:
    admin.execute("CREATE ROLE keeper LOGIN; CREATE ROLE member LOGIN IN ROLE tensile_user")
    admin.execute("ALTER DATABASE src OWNER TO keeper")
    with server.connect("src", user="member") as conn:
        for function in ("release_database", "resume_database"):
            attempt = partial(conn.execute, f"SELECT {function}()".encode())
            refused("42501", f"function {function}", "owner of the database", attempt)
    with server.connect("src", user="keeper") as conn:
        conn.execute("SELECT release_database()")
        assert value(conn, "SELECT resume_database()") is True
    admin.execute("ALTER DATABASE src OWNER TO postgres; DROP ROLE keeper, member")


def test_another_database_cannot_be_released(server: Any, admin: Connection) -> None:
    admin.execute("CREATE EXTENSION pg_tensile CASCADE")
    try:
        refused("55000", 'pg_tensile does not work in database "postgres"', "", lambda: release(server, "postgres"))
        assert value(admin, "SELECT resume_database()") is False
    finally:
        admin.execute("DROP EXTENSION pg_tensile")
    admin.execute("CREATE DATABASE other")
    with server.connect("other"), pytest.raises(psycopg.errors.ObjectInUse) as caught:
        admin.execute("DROP DATABASE other")
    assert caught.value.diag.message_hint is None
    admin.execute("DROP DATABASE other WITH (FORCE)")


def test_waiting_for_the_end_can_be_cancelled(server: Any, admin: Connection, wait_until: Wait) -> None:
    """The release itself stays: a worker that takes long to end must not keep its caller."""
    with server.connect("src") as src:
        pid = processes(admin)["pg_tensile controller"][0]
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(psycopg.errors.QueryCanceled) as caught:
                src.execute("SET statement_timeout = '200ms'; SELECT release_database()")
            assert caught.value.diag.context is None
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: set(processes(admin)) == {LAUNCHER})
