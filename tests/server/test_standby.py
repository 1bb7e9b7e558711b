"""A streaming standby: it predicts like its primary, follows its models and trains after promotion; and base
backups of a server whose predictor runs.

Long: a test has two or three servers that train and predict.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.conftest import TestCluster
from tests.server.support import MLP, ROWS, Connection, Wait, inference_pid, submit, value

pytestmark = pytest.mark.long


CLASS = f"SELECT string_agg(predict_class('m', r), '' ORDER BY a), sum(predict('m', r)) FROM ({ROWS}) r"
MANY = f"SELECT count(*), sum(prediction) FROM predict_rows('m', $q${ROWS}$q$)"

BY_PREDICTOR = {"pg_tensile.predict_in_session": "off", "pg_tensile.predict_batching": "off"}
ONE = f"SELECT predict('m', r) FROM ({ROWS} LIMIT 1) r"
WHY = f"SELECT e.* FROM ({ROWS} LIMIT 1) r, explain_prediction('m', r) e"


def train(conn: Connection, **arguments: Any) -> None:
    job = submit(conn, "m", None if value(conn, "SELECT 1 FROM tensile.models") else MLP, **arguments)
    assert value(conn, "SELECT wait_for_job(%s, '100 s')", job) == "finished"


def answers(conn: Connection) -> list[tuple[Any, ...]]:
    return [*conn.execute(CLASS).fetchall(), *conn.execute(MANY).fetchall(), *conn.execute(WHY).fetchall()]


def backup(server: TestCluster, folder: Path, *options: str) -> str:
    """pg_basebackup into `folder`, as the server's user; what it prints."""
    command = [str(server.bin / "pg_basebackup"), "-D", str(folder), "-d", server.dsn(), "-c", "fast", *options]
    if os.geteuid() == 0:
        command = ["runuser", "-u", server.os_user, "--", *command]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def sockets(server: TestCluster) -> list[Path]:
    """Return the predictor's sockets."""
    paths = set(server.folder.rglob("*pg_tensile*")) - {fork_socket(server)}
    return [path for path in paths if stat.S_ISSOCK(path.lstat().st_mode)]


def fork_socket(server: TestCluster) -> Path:
    return server.data / "base" / "pgsql_tmp" / "pgsql_tmp.pg_tensile_fork"


@pytest.fixture
def pair(fresh_cluster: Callable[..., TestCluster], clusters_folder: Path) -> Iterator[tuple[TestCluster, TestCluster]]:
    """A primary with a trained model, and a standby that streams from it."""
    primary = fresh_cluster(BY_PREDICTOR | {"pg_tensile.drift_sample_rate": 1})
    standby = TestCluster(clusters_folder / f"{primary.folder.name}s")
    standby._make_folder()
    TestCluster.live.append(standby)
    try:
        with primary.connect() as conn:
            train(conn)
        backup(primary, standby.data, "-R", "-X", "stream")
        standby.configure({"unix_socket_directories": str(standby.folder)})
        standby.start()
        yield primary, standby
    finally:
        standby.end()


def catch_up(primary: Connection, standby: Connection, wait_until: Wait) -> None:
    position = value(primary, "SELECT pg_current_wal_insert_lsn()")
    wait_until(lambda: value(standby, "SELECT pg_last_wal_replay_lsn() >= %s", position))


@pytest.mark.timeout(300)
def test_a_standby_predicts_follows_its_primary_and_trains_when_promoted(
    pair: tuple[TestCluster, TestCluster], wait_until: Wait
) -> None:
    primary, standby = pair
    loaded = "SELECT model, version, memory_budget, planned_bytes FROM tensile.loaded_models"
    with primary.connect() as up, standby.connect() as down, standby.connect() as other:
        catch_up(up, down, wait_until)
        assert value(down, "SELECT pg_is_in_recovery()")
        assert down.execute(loaded).fetchall() == []
        for session in (up, down):  # without the predictor
            session.execute("SET pg_tensile.predict_in_session = on")
        assert value(down, ONE) == value(up, ONE) and inference_pid(down) is None
        for session in (up, down):
            session.execute("RESET pg_tensile.predict_in_session")
        first = answers(up)
        assert answers(down) == first == answers(other)
        wait_until(lambda: {*down.execute(loaded)} == {("m", 1, None, None)})
        assert value(down, "SELECT sum(rows) FROM tensile.predictions") == 2403
        kinds = "SELECT backend_type FROM pg_stat_activity WHERE backend_type LIKE 'pg_tensile%' ORDER BY 1"
        assert [kind for (kind,) in down.execute(kinds)] == ["pg_tensile inference", "pg_tensile launcher"]
        counted = "SELECT sum(rows) FROM tensile_internal.drift_counts"
        wait_until(lambda: value(up, counted) == 1201)  # none of the standby's
        catch_up(up, down, wait_until)
        assert value(down, counted) == 1201 and value(down, "SELECT tensile_internal._drift_rate()") == 0
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            submit(down, "m")
        exported = "SELECT export_model('m')"
        assert value(down, exported) == value(up, exported)
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            value(down, f"SELECT import_model(({exported}), 'm')")

        train(up, seed=7)  # deploys version 2
        catch_up(up, down, wait_until)
        second = answers(up)
        assert second != first
        assert answers(down) == second == answers(other)
        up.execute("SELECT set_model_memory_budget('m', '1 MB')")
        catch_up(up, down, wait_until)
        second = answers(up)  # computed by PyTorch, with other last digits
        assert answers(down) == second
        wait_until(lambda: ("m", 2, 1 << 20) in {row[:3] for row in down.execute(loaded)})
        up.execute("CREATE ROLE stranger LOGIN IN ROLE tensile_user")
        catch_up(up, down, wait_until)
        down.execute("SET ROLE stranger")
        assert down.execute(loaded).fetchall() == []
        assert value(down, "SELECT count(*) FROM tensile_worker._loaded_models()") == 0
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            value(down, ONE)
        down.execute("RESET ROLE")

        value(down, "SELECT pg_promote()")
        assert not value(down, "SELECT pg_is_in_recovery()")
        assert answers(down) == second
        assert answers(other) == second  # its first prediction since the memory budget was set
        train(down, seed=8)
        third = answers(down)
        assert third not in (first, second) and third == answers(other)
        assert answers(up) == second
        wait_until(lambda: ("m", 3) in {row[:2] for row in down.execute(loaded)})

        def counts() -> bool:
            """Predict; return whether rows of the new version are counted since the standby was promoted."""
            answers(down)
            return bool(value(down, "SELECT count(*) FROM tensile.drift WHERE version = 3"))

        wait_until(counts)


def leave_socket(path: Path, server: TestCluster) -> None:
    """Leave a socket on which nobody listens, as of a process that was killed."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    if os.geteuid() == 0:
        shutil.chown(path, server.os_user)


def test_a_backup_contains_no_files_of_the_extension_and_logs_nothing(
    fresh_cluster: Callable[..., TestCluster], clusters_folder: Path
) -> None:
    """The socket lies beside the server's, or, if that is elsewhere, among its temporary files."""
    server = fresh_cluster(BY_PREDICTOR)
    with server.connect() as conn:
        train(conn)
        answers(conn)
    (beside,) = sockets(server)
    assert beside == server.folder / f".s.pg_tensile.{server.port}"
    assert stat.S_IMODE(beside.stat().st_mode) == 0o600
    folder = clusters_folder / f"{server.folder.name}b"
    folder.mkdir(mode=0o700)
    if os.geteuid() == 0:
        shutil.chown(folder, server.os_user)
    try:
        assert fork_socket(server).is_socket() and not fork_socket(server).stat().st_mode & 0o077
        assert backup(server, folder / "one") == ""
        assert not list((folder / "one").rglob("*pg_tensile*")) and sockets(server) == [beside]
        server.stop()
        assert server.leftovers() == []

        # libpq finds no server at such an address without its socket: the tests' own connections go to a second folder.
        server.configure({"unix_socket_directories": f"@{server.folder},{server.folder}"})
        stale = server.data / "base" / "pgsql_tmp" / "pgsql_tmp.pg_tensile"
        server.start()
        with server.connect() as conn:
            answers(conn)
            train(conn)
            assert fork_socket(server).is_socket() and sockets(server) == [stale]
            assert stat.S_IMODE(stale.stat().st_mode) == 0o600
            assert backup(server, folder / "two") == ""
        assert not list((folder / "two").rglob("*pg_tensile*"))
        assert not list((folder / "two").glob("base/pgsql_tmp/*"))
        server.kill()
        leave_socket(stale, server)
        server.start()
        assert not stale.exists(), "the server's temporary files are not cleaned up"
        assert not fork_socket(server).exists()
        log = server.log()
        assert "skipping special file" not in log and "unexpected file found" not in log
    finally:
        shutil.rmtree(folder)


def test_a_stale_socket_is_replaced_and_a_foreign_one_is_not_used(
    fresh_cluster: Callable[..., TestCluster],
) -> None:
    server = fresh_cluster(BY_PREDICTOR)
    path = server.folder / f".s.pg_tensile.{server.port}"
    with server.connect() as conn:
        train(conn)
        expected = answers(conn)
    server.kill()
    leave_socket(path, server)
    server.start()
    with server.connect() as conn:
        assert answers(conn) == expected
    if os.geteuid() != 0:
        return  # there is no second user
    server.restart()
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as impostor, server.connect() as conn:
        impostor.bind(str(path))
        impostor.listen()
        path.chmod(0o777)
        with pytest.raises(psycopg.errors.ConnectionException, match="belongs to another operating-system user"):
            value(conn, ONE)
    path.unlink()
