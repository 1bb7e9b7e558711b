"""Faults of the predictor as sessions see them: its death, a time out, a cancel, and answers that are none.

Sessions ask it for every model here, also for those that they would evaluate themselves.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import errors

from pyworker.connection import Connection as FrameConnection
from pyworker.version import VERSION
from pyworker.wire import FrameType, encode
from tests.server.refusals import refusal
from tests.server.shared import SharedServer
from tests.server.support import MLP, Connection, finish, inference_pid, submit, value

FLIGHTS = """
    CREATE TABLE flights AS
    SELECT i AS id, (i % 24)::int2 AS hour, nullif(i % 700, 13)::int AS distance, (i % 100) / 10.0 AS wind,
           i % 3 = 0 AS weekend, (i % 24) * 2.0 + (i % 100) / 10.0 AS delay
    FROM generate_series(1, 4000) i
"""


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> Iterator[SharedServer]:
    """The worker's cluster with a trained model."""
    with shared_server.connect() as conn:
        conn.execute("ALTER ROLE postgres SET pg_tensile.predict_in_session = off")
        conn.execute(FLIGHTS)
        query = "SELECT hour, distance, wind, weekend, delay FROM flights"
        finish(conn, submit(conn, "numbers", MLP, query=query, target="delay", epochs=1, seed=1))
        yield shared_server
        conn.execute("ALTER ROLE postgres RESET pg_tensile.predict_in_session")


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        connection.execute("SET pg_tensile.predict_timeout = '20 s'")
        value(connection, "SELECT predict('numbers', '{1,2,3,1}'::float8[])")  # starts the predictor
        yield connection


def predictor_pid(server: Any) -> int:
    pids = [pid for pid, command in server.processes().items() if "-m pyworker predictor" in command]
    assert len(pids) == 1
    return pids[0]


ASK = "SELECT predict('numbers', f) FROM flights f WHERE id = %s"


def test_a_predictor_that_died_while_idle_is_replaced_silently(
    conn: Connection, server: Any, wait_until: Callable[..., Any]
) -> None:
    server.expect("predictor was killed by signal 9")
    before = value(conn, ASK, 7)
    pid = predictor_pid(server)
    os.kill(pid, signal.SIGKILL)
    # reaped: its connections accept requests until its last thread has ended
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the predictor's end")
    assert value(conn, ASK, 7) == before
    assert predictor_pid(server) != pid


def test_a_predictor_that_dies_in_the_middle_is_an_error_and_then_replaced(conn: Connection, server: Any) -> None:
    server.expect("predictor was killed by signal 9")
    before = value(conn, ASK, 7)
    pid = predictor_pid(server)
    os.kill(pid, signal.SIGSTOP)
    killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    killer.start()
    sqlstate, message, hint = refusal(conn, ASK, 7)
    killer.join()
    assert (sqlstate, message) == ("08006", "the predictor went away")
    assert "Try again" in hint
    assert value(conn, ASK, 7) == before


def test_a_predictor_that_hangs_runs_into_the_time_out(conn: Connection, server: Any) -> None:
    first, second = value(conn, ASK, 1), value(conn, ASK, 2)
    assert first != second
    pid = predictor_pid(server)
    conn.execute("SET pg_tensile.predict_timeout = '300 ms'")
    os.kill(pid, signal.SIGSTOP)
    try:
        sqlstate, message, _ = refusal(conn, ASK, 1)
        assert sqlstate == "57014"
        assert "pg_tensile.predict_timeout" in message
        assert refusal(conn, "SELECT * FROM predict_rows('numbers', 'SELECT * FROM flights')")[0] == "57014"
    finally:
        os.kill(pid, signal.SIGCONT)
    conn.execute("SET pg_tensile.predict_timeout = '20 s'")
    assert value(conn, ASK, 2) == second  # not the late answer to the request that timed out
    assert predictor_pid(server) == pid


def test_cancel_works_while_waiting_and_leaves_the_session_usable(conn: Connection, server: Any) -> None:
    second = value(conn, ASK, 2)
    pid = predictor_pid(server)
    os.kill(pid, signal.SIGSTOP)
    try:
        for ask in (ASK.replace("%s", "1"), "SELECT * FROM predict_rows('numbers', 'SELECT * FROM flights')"):
            canceller = threading.Timer(0.3, conn.cancel)
            canceller.start()
            sqlstate, message, _ = refusal(conn, ask)
            canceller.join()
            assert (sqlstate, message) == ("57014", "canceling statement due to user request")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert value(conn, ASK, 2) == second


def test_an_error_caught_in_a_subtransaction_leaves_no_answer_behind(conn: Connection, server: Any) -> None:
    first, second = value(conn, ASK, 1), value(conn, ASK, 2)
    pid = predictor_pid(server)
    conn.execute("""
        CREATE FUNCTION pg_temp.ask_twice() RETURNS float8 LANGUAGE plpgsql AS $$
        BEGIN
            BEGIN
                PERFORM set_config('pg_tensile.predict_timeout', '200ms', true);
                PERFORM predict('numbers', f) FROM flights f WHERE id = 1;
            EXCEPTION WHEN query_canceled THEN
                PERFORM set_config('pg_tensile.predict_timeout', '20s', true);
                PERFORM pg_sleep(1);
                RETURN predict('numbers', f) FROM flights f WHERE id = 2;
            END;
            RETURN NULL;
        END $$
    """)
    os.kill(pid, signal.SIGSTOP)
    waker = threading.Timer(0.7, os.kill, (pid, signal.SIGCONT))
    waker.start()
    answer = value(conn, "SELECT pg_temp.ask_twice()")
    waker.join()
    assert answer == second != first


def test_a_session_leaves_no_open_files_behind(conn: Connection, server: Any) -> None:
    backend = conn.info.backend_pid

    def sockets() -> int:
        return sum(
            os.readlink(f"/proc/{backend}/fd/{fd}").startswith("socket") for fd in os.listdir(f"/proc/{backend}/fd")
        )

    value(conn, ASK, 1)
    before = sockets()
    for query in ("SELECT * FROM flights", "SELECT 1 / (id - 3000) AS hour, distance, wind, weekend FROM flights") * 3:
        with contextlib.suppress(errors.DivisionByZero):
            conn.execute("SELECT count(*) FROM predict_rows('numbers', %s)", (query,))
    assert sockets() == before


@pytest.fixture
def impostor(server: Any) -> Iterator[Callable[[bytes], None]]:
    """`impostor(answer)`: replace the predictor for a session: greet it and answer its request with these bytes."""
    path = server.folder / f".s.pg_tensile.{server.port}"
    aside = path.with_name("aside")
    threads: list[threading.Thread] = []

    def reply(listener: socket.socket, answer: bytes) -> None:
        accepted = listener.accept()[0]
        peer = FrameConnection(accepted)
        peer.recv(20)
        peer.send(FrameType.HELLO, header={"version": VERSION, "python": None, "pid": os.getpid()})
        peer.recv(20)
        accepted.sendall(answer)
        peer.close()

    with contextlib.ExitStack() as stack:
        path.rename(aside)
        stack.callback(aside.rename, path)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        path.chmod(0o777)
        ours = os.geteuid()
        os.seteuid(server.data.stat().st_uid)  # sessions accept processes of their own user only
        stack.callback(os.seteuid, ours)
        listener.listen()
        os.seteuid(ours)
        listener.settimeout(20)

        def pose(answer: bytes) -> None:
            threads.append(threading.Thread(target=reply, args=(listener, answer)))
            threads[-1].start()

        yield pose
        for thread in threads:
            thread.join()


def frame(type: FrameType, header: Any = None, buffers: Sequence[bytes] = ()) -> bytes:
    return b"".join(map(bytes, encode(type, 0, 0, header, buffers)))


@pytest.mark.parametrize(
    ("sent", "raised"),
    [("22023", "22023"), *((bad, "XX000") for bad in ("00000", "01000", "ab!{}", "42", "4270412", "", 5, None))],
)
def test_an_sqlstate_that_cannot_be_raised_becomes_an_internal_error(
    server: Any, impostor: Callable[[bytes], None], sent: object, raised: str
) -> None:
    header = {"sqlstate": sent, "message": "no", "hint": "perhaps", "detail": "at all"}
    impostor(frame(FrameType.ERROR, header))
    with server.connect() as conn:
        with pytest.raises(psycopg.Error) as caught:
            conn.execute(ASK, (7,))
        diag = caught.value.diag
        assert (diag.sqlstate, diag.severity_nonlocalized) == (raised, "ERROR")
        assert (diag.message_primary, diag.message_hint, diag.message_detail) == ("no", "perhaps", "at all")
        assert value(conn, "SELECT 1") == 1


@pytest.mark.parametrize(
    "header", [["sqlstate"] * 1_300_000, "message", 7, [[]]], ids=["array", "text", "number", "[]"]
)
def test_an_error_whose_header_is_no_object_has_no_message(
    server: Any, impostor: Callable[[bytes], None], header: Any
) -> None:
    """An array with as many strings once ended the server."""
    impostor(frame(FrameType.ERROR, header))
    with server.connect() as conn:
        with pytest.raises(errors.InternalError_, match="the predictor failed without a message"):
            conn.execute(ASK, (7,))
        assert value(conn, "SELECT 1") == 1


def test_whatever_a_predictor_answers_the_session_lives(server: Any, impostor: Callable[[bytes], None]) -> None:
    """Damaged answers, and frames that are valid but none that was asked for."""
    rng = random.Random(1)
    headers = [None, {"sqlstate": "22023", "message": "no"}, {"message": ["no"], "hint": {}}, [1], "text"]
    with server.connect() as conn:
        for _ in range(200):
            buffers = [rng.randbytes(rng.choice((0, 1, 8, 64))) for _ in range(rng.randrange(4))]
            answer = bytearray(frame(rng.choice([*FrameType]), rng.choice(headers), buffers))
            for _ in range(rng.choice((0, 0, 1, 5))):
                answer[rng.randrange(len(answer))] = rng.randrange(256)
            impostor(bytes(answer[: rng.choice((len(answer), rng.randrange(len(answer))))]))
            with contextlib.suppress(psycopg.Error):
                conn.execute(ASK, (7,))
            assert value(conn, "SELECT 1") == 1


def test_an_inference_process_that_is_ended_in_a_query_leaves_no_socket(
    conn: Connection, server: Any, wait_until: Callable[..., Any]
) -> None:
    """It waits for a lock, so that Python does not hear of the end."""
    server.expect("terminating background worker")
    value(conn, ASK, 1)
    supervisor = inference_pid(conn)
    path = server.folder / f".s.pg_tensile.{server.port}"
    assert path.is_socket()

    def ask() -> None:
        with pytest.raises(psycopg.OperationalError):  # cancelled, or "the predictor went away"
            third.execute("SELECT predict('numbers', f, '900MB') FROM flights f WHERE id = 1")

    thread = threading.Thread(target=ask)
    with server.connect() as third, server.connect() as other, other.transaction():
        third.execute("SET pg_tensile.predict_timeout = '60 s'")
        other.execute("LOCK TABLE tensile_internal.model_weights")
        thread.start()
        waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
        wait_until(lambda: value(conn, waits, supervisor))
        conn.execute("SELECT pg_terminate_backend(%s)", (supervisor,))
        wait_until(lambda: inference_pid(conn) is None)
        assert not path.exists()
        third.cancel()
        thread.join()
