"""Sessions that predict while the predictor loads a model: they wait for their own model only.

The model waits for a pipe when it is built in the predictor, so that the tests decide when it has been loaded.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.server.refusals import refusal
from tests.server.shared import SharedServer
from tests.server.support import Connection, Wait, finish, submit, value

ROWS = """
    CREATE TABLE points AS
    SELECT i AS id, cos(i) AS a, sin(i * 0.7) AS b, cos(i) + sin(i * 0.7) AS y FROM generate_series(1, 200) i
"""
HELD = """
import os
import torch
def build(n_inputs, n_outputs):
    if os.path.exists({pipe!r}):
        with open({pipe!r}) as pipe:
            if pipe.read() == "fail":
                raise ZeroDivisionError("no")
    return torch.nn.Linear(n_inputs, n_outputs)
"""
QUICK = "SELECT predict('quick', '{1,2}'::float8[])"
QUERY = "SELECT a, b, y FROM points"
NAMES = ("cancelled", "failing", "replaced", "dropped", "killed")  # of models, one for each test


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> SharedServer:
    """The worker's cluster with a model that is loaded at once, and copies of one that waits for the pipe."""
    with shared_server.connect() as conn:
        conn.execute(ROWS)
        slow = {"type": "python", "source": HELD.format(pipe=str(shared_server.folder / "pipe"))}
        for model, architecture in ((NAMES[0], slow), ("quick", {"type": "mlp", "hidden": [8]})):
            finish(conn, submit(conn, model, architecture, query=QUERY, target="y", epochs=1))
        finish(conn, submit(conn, "replaced", slow, query=QUERY, target="y", epochs=1, seed=2))
        contents = value(conn, "SELECT export_model(%s)", NAMES[0])
        for name in NAMES[1:]:
            conn.execute("SELECT import_model(%b, %s)", (contents, name))
        conn.execute("SELECT deploy_model('replaced', 2)")
    return shared_server


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        value(connection, QUICK)
        yield connection


class Loading:
    """A model that waits for a pipe when it is loaded, and sessions that ask for it."""

    def __init__(self, server: Any, model: str, wait_until: Wait) -> None:
        self._server = server
        self._wait_until = wait_until
        self.query = f"SELECT predict('{model}', '{{1,2}}'::float8[])"
        self.pipe: Path = server.folder / "pipe"
        self._pool = ThreadPoolExecutor(8)
        self.sessions: list[Connection] = []
        os.mkfifo(self.pipe)
        if os.geteuid() == 0:
            shutil.chown(self.pipe, server.os_user)

    def ask(self) -> Future[Any]:
        """Have a new session ask; return its answer to come."""
        self.sessions.append(self._server.connect())
        return self._pool.submit(value, self.sessions[-1], self.query)

    def await_waiting(self, count: int) -> None:
        """Wait until so many sessions wait for the predictor."""
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Extension' AND state = 'active'"
            " AND pid = ANY(%s)"
        )
        pids = [session.info.backend_pid for session in self.sessions]
        with self._server.connect() as conn:
            self._wait_until(lambda: value(conn, waiting, pids) == count, what="the sessions wait")

    def fail(self) -> None:
        """Let the load fail, and each that comes after it; blocks until it waits.

        A session may wait for the predictor before the predictor has read its question, and ask for a load of its own.
        """
        failing = self.pipe.with_suffix(".failing")
        failing.write_text("fail")
        with self.pipe.open("w") as writer:
            failing.replace(self.pipe)
            writer.write("fail")

    def end(self) -> None:
        self.pipe.unlink(missing_ok=True)
        self._pool.shutdown()
        for session in self.sessions:
            session.close()


@pytest.fixture
def loading(server: Any, wait_until: Wait, request: pytest.FixtureRequest) -> Iterator[Loading]:
    """The model of the test's mark."""
    slow = Loading(server, request.param, wait_until)
    yield slow
    slow.end()


def with_model(name: str) -> pytest.MarkDecorator:
    assert name in NAMES
    return pytest.mark.parametrize("loading", [name], indirect=True)


def predictors(server: Any) -> list[int]:
    return [pid for pid, command in server.processes().items() if "-m pyworker predictor" in command]


def inference_bytes(conn: Connection) -> int:
    return int(value(conn, "SELECT inference_bytes FROM tensile.devices WHERE name = 'cpu'") or 0)


@with_model("cancelled")
def test_other_sessions_predict_and_those_that_wait_can_be_cancelled(
    server: Any, loading: Loading, conn: Connection
) -> None:
    before = inference_bytes(conn)
    answers = [loading.ask(), loading.ask()]
    loading.await_waiting(2)
    with loading.pipe.open("w"):  # opens when the model is being loaded
        assert len({value(conn, QUICK) for _ in range(20)}) == 1
        rows = "SELECT count(*) FROM predict_rows('quick', 'SELECT a, b FROM points')"
        assert value(conn, rows) == 200
        assert value(conn, "SELECT count(*) FROM tensile.loaded_models WHERE model = 'cancelled'") == 0
        assert inference_bytes(conn) > before  # it counts before it is there
        with server.connect() as timed:
            timed.execute("SET statement_timeout = '200 ms'")
            with pytest.raises(psycopg.errors.QueryCanceled, match="statement timeout"):
                timed.execute(loading.query)
            timed.execute("RESET statement_timeout")
            timed.execute("SET pg_tensile.predict_timeout = '200 ms'")
            assert refusal(timed, loading.query)[0] == "57014"
            assert value(timed, QUICK) == value(conn, QUICK)
        cancelled = loading.ask()
        loading.await_waiting(3)
        loading.sessions[-1].cancel()
        with pytest.raises(psycopg.errors.QueryCanceled, match="user request"):
            cancelled.result()
        assert not any(answer.done() for answer in answers)
    first, second = (answer.result() for answer in answers)
    assert first == second == value(conn, loading.query)
    assert value(loading.sessions[-1], loading.query) == first


@with_model("failing")
def test_a_load_that_fails_is_an_error_of_those_who_wait_and_takes_no_memory(
    loading: Loading, conn: Connection, wait_until: Wait
) -> None:
    before = inference_bytes(conn)
    answers = [loading.ask(), loading.ask()]
    loading.await_waiting(2)
    loading.fail()
    for answer in answers:
        with pytest.raises(psycopg.Error, match="ZeroDivisionError: no"):
            answer.result()
    wait_until(lambda: inference_bytes(conn) == before)
    loading.pipe.unlink()
    assert value(conn, loading.query) is not None


@with_model("replaced")
def test_a_version_that_is_replaced_while_it_loads(loading: Loading, conn: Connection) -> None:
    answer = loading.ask()
    loading.await_waiting(1)
    with loading.pipe.open("w"):
        loading.pipe.unlink()
        conn.execute("SELECT deploy_model('replaced', 1)")
        replaced = value(conn, loading.query)  # loaded meanwhile
    assert answer.result() != replaced
    assert value(loading.sessions[0], loading.query) == replaced
    conn.execute("SELECT deploy_model('replaced', 2)")
    assert value(conn, loading.query) == answer.result()


@with_model("dropped")
def test_a_model_that_is_dropped_while_it_loads(loading: Loading, conn: Connection) -> None:
    answer = loading.ask()
    loading.await_waiting(1)
    with loading.pipe.open("w"):
        conn.execute("SELECT drop_model('dropped')")
        assert refusal(conn, loading.query)[0] == "42704"
        assert value(conn, QUICK) is not None
    assert answer.result() is not None  # of the version that the session has asked for
    assert refusal(loading.sessions[0], loading.query)[0] == "42704"


@with_model("killed")
def test_a_predictor_that_is_killed_while_it_loads_is_replaced(
    server: Any, loading: Loading, conn: Connection, wait_until: Wait
) -> None:
    server.expect("predictor was killed by signal 9")
    answer = loading.ask()
    loading.await_waiting(1)
    with loading.pipe.open("w"):
        loading.pipe.unlink()
        (pid,) = predictors(server)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(psycopg.errors.ConnectionFailure, match="the predictor went away"):
            answer.result()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the predictor's end")
    assert value(conn, loading.query) is not None
    value(conn, QUICK)
    loaded = "SELECT sum(device_bytes) FROM tensile.loaded_models"
    wait_until(lambda: value(conn, "SELECT count(*) FROM tensile.loaded_models") == 2)
    wait_until(lambda: inference_bytes(conn) == value(conn, loaded))
