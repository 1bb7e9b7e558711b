"""explain_training: what it says, as whom it reads, what it leaves behind, and how it ends."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from tests.server.refusals import refused
from tests.server.support import (
    FOREVER,
    ROWS,
    Connection,
    Wait,
    alive,
    children,
    phase,
    python_model,
    register,
    submit,
    value,
)

TOKENS = """
    SELECT (SELECT array_agg(mod(i * g, 500)) FROM generate_series(1, 40 + mod(i, 9)) g) AS tokens,
           mod(i, 3)::text AS y
    FROM generate_series(1, 200) i
"""
IMAGES = """
    SELECT (SELECT array_agg(sin(i * g)::float4) FROM generate_series(1, 144) g) AS pixels, mod(i, 4)::text AS y
    FROM generate_series(1, 200) i
"""


def call(function: str, arguments: dict[str, Any]) -> str:
    named = ", ".join(f"{name} => %({name})s" for name in arguments)
    return f"SELECT {function}({named})"


def explain(conn: Connection, model: str = "m", **arguments: Any) -> list[str]:
    """Call explain_training and return its lines."""
    arguments = {"model": model, "query": ROWS, "target": "y"} | arguments
    if "options" in arguments:
        arguments["options"] = Jsonb(arguments["options"])
    return [line for (line,) in conn.execute(call("explain_training", arguments), arguments).fetchall()]


def explained(conn: Connection, model: str = "m", **arguments: Any) -> dict[str, Any]:
    (line,) = explain(conn, model, **(arguments | {"options": {"format": "json"} | arguments.get("options", {})}))
    explanation: dict[str, Any] = json.loads(line)
    return explanation


def backend(conn: Connection) -> int:
    return int(value(conn, "SELECT pg_backend_pid()"))


# -- contents ---------------------------------------------------------------------------------------------------------


def test_a_job_is_explained_and_nothing_is_stored(db: Connection) -> None:
    register(db, "m")
    lines = explain(db, epochs=3, batch_size=50)
    steps = explained(db, batch_size=50)["steps"]
    assert lines[0] == f'Train "m" (mlp) on cpu, policy joint: 3 epochs of {steps} steps of 50 rows'
    whole = "\n".join(lines)
    for topic in ("Rows", "Model", "Graph", "Memory", "Time a step", "Start       now:"):
        assert topic in whole
    assert value(db, "SELECT count(*) FROM tensile.jobs") == 0
    assert value(db, "SELECT count(*) FROM tensile.model_versions") == 0
    assert value(db, "SELECT count(*) FROM tensile.traces") == 0
    assert not children(backend(db))


def test_the_numbers_of_an_explanation_are_those_of_data_and_model(db: Connection) -> None:
    register(db, "m")
    explanation = explained(db, validation=0.25)
    assert explanation["training_rows"] + explanation["validation_rows"] == 400
    # a, b and 5 categories (and the unknown one) of 16 numbers; 8 hidden units
    assert explanation["parameters"] == 6 * 16 + (2 + 16) * 8 + 8 + 8 + 1
    memory = explanation["memory"]
    assert memory["floor_bytes"] <= memory["least_bytes"] <= memory["planned_bytes"] <= memory["vanilla_bytes"]
    assert explanation["time"]["vanilla_us"] > 0


@pytest.mark.parametrize(
    ("architecture", "query", "policy"),
    [
        ({"type": "cnn", "channels": [8, 16], "norm": "batch"}, IMAGES, "joint"),
        ({"type": "transformer", "dim": 32, "layers": 2}, TOKENS, "tensile"),
    ],
)
def test_a_budget_makes_a_plan(db: Connection, architecture: dict[str, Any], query: str, policy: str) -> None:
    register(db, "m", architecture)
    free = explained(db, query=query, batch_size=32, policy=policy)["memory"]
    budget = (free["least_bytes"] + free["vanilla_bytes"]) // 2
    explanation = explained(db, query=query, batch_size=32, policy=policy, memory_budget=f"{budget}B")
    assert explanation["memory"]["planned_bytes"] <= budget < free["vanilla_bytes"]
    assert explanation["swapped"]["tensors"] + explanation["recomputed"]["tensors"] > 0
    assert explanation["start"]["when"] == "now"


def test_a_model_that_never_fits_names_the_operator(db: Connection) -> None:
    register(db, "m", {"type": "cnn", "channels": [8, 16]})
    start = explained(db, query=IMAGES, memory_budget="10kB")["start"]
    assert start["when"] == "never"
    assert "10.0 kB" in start["why"]
    assert "aten." in start["why"]


def test_policy_none_is_eager(db: Connection) -> None:
    register(db, "m")
    whole = "\n".join(explain(db, policy="none"))
    assert "policy none" in whole
    assert "eagerly" in whole
    assert "reserved" in whole


def test_a_model_that_cannot_be_captured(db: Connection) -> None:
    """As a job it would fail; with policy none it would run."""
    register(db, "m", python_model(on_forward="if x.sum() > 0: x = x + 1"))
    refused("0A000", "reads the value of a tensor", "policy => 'none'", lambda: explain(db))
    assert "not captured" in "\n".join(explain(db, policy="none"))


def test_an_imported_architecture(db: Connection) -> None:
    register(db, "m", {"type": "import", "callable": "torch.nn:Linear"})
    assert explain(db)[0].startswith('Train "m" (torch.nn:Linear) on cpu')


def test_a_model_that_is_being_trained(db: Connection, wait_until: Wait) -> None:
    job = submit(db, "m", {"type": "mlp", "hidden": [4]}, epochs=FOREVER)
    wait_until(lambda: phase(db, job) is not None)
    start = explained(db)["start"]
    assert (start["when"], start["why"]) == ("later", f"the model is being trained by job {job}")


def test_an_explanation_waits_for_memory_that_others_need(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster({"pg_tensile.device_memory": "64MB"})
    with cluster.connect() as conn:
        job = submit(conn, "large", {"type": "mlp", "hidden": [8]}, epochs=FOREVER, policy="none", memory_budget="62MB")
        register(conn, "m", {"type": "mlp", "hidden": [1024]})
        wait_until(lambda: phase(conn, job) == "training")
        wait_until(lambda: value(conn, "SELECT max(epoch) > 2 FROM tensile.epochs WHERE job = %s", job))
        start = explained(conn, batch_size=256)["start"]
        assert start["when"] == "later", start
        assert "1 running job at least 62.0 MB" in start["why"]
        # by the epochs so far, however long each took: a row for each split
        rows = "SELECT min(seconds), 2 * max(seconds), max(epoch) FROM tensile.epochs WHERE job = %s"
        least, most, epoch = conn.execute(rows, (job,)).fetchone()
        assert least * (FOREVER - epoch - 1) <= start["wait_s"] <= most * FOREVER
        register(conn, "small", {"type": "mlp", "hidden": [8]})
        assert explained(conn, "small")["start"]["when"] == "now"
        conn.execute("SELECT cancel_job(%s)", (job,))


def test_an_explanation_without_a_calibration_says_so(db: Connection) -> None:
    register(db, "m")
    assert explained(db)["calibrated"] is False
    assert "tensile.calibrate()" in "\n".join(explain(db))


# -- privileges of the query ------------------------------------------------------------------------------------------


@pytest.fixture
def user(db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]) -> Connection:
    """A connection of an ordinary role with a grant on model m, in the test's schema."""
    register(db, "m")
    role = roles("user")
    db.execute("SELECT grant_model('m', %s, 'train')", (role,))
    conn = connect(role)
    conn.execute(f"SET search_path = {value(db, 'SELECT current_schema()')}, public")
    return conn


def test_an_ordinary_role_with_a_grant(user: Connection) -> None:
    user.execute("CREATE TABLE own AS " + ROWS)
    assert explain(user, query="SELECT * FROM own")[-1].startswith("  Start       now:")


def test_the_query_runs_as_the_caller(db: Connection, user: Connection) -> None:
    db.execute("CREATE TABLE secret AS " + ROWS)
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for table secret"):
        explain(user, query="SELECT * FROM secret")


def test_without_a_grant_it_is_refused_like_the_job(user: Connection, db: Connection) -> None:
    register(db, "mine")
    refused("42501", 'permission denied for model "mine"', "grant_model", lambda: explain(user, "mine"))


def test_the_query_sees_the_callers_transaction(user: Connection, db: Connection) -> None:
    user.execute("CREATE TABLE own AS " + ROWS)
    user.autocommit = False
    user.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    user.execute("DELETE FROM own WHERE a > 0.9")
    rows = value(user, "SELECT count(*) FROM own")
    db.execute("INSERT INTO own " + ROWS)
    explanation = explained(user, query="SELECT * FROM own")
    assert explanation["training_rows"] + explanation["validation_rows"] == rows < 400
    user.execute("INSERT INTO own (a) VALUES (1)")  # the transaction goes on, and may write
    user.commit()
    assert value(user, "SELECT count(*) FROM own") == rows + 401


def test_the_query_runs_read_only(user: Connection) -> None:
    user.execute("CREATE TABLE log (x int)")
    user.execute("CREATE FUNCTION note() RETURNS int LANGUAGE sql VOLATILE AS 'INSERT INTO log VALUES (1) RETURNING x'")
    query = f"SELECT note() AS n, q.* FROM ({ROWS}) q"
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        explain(user, query=query)
    assert value(user, "SELECT count(*) FROM log") == 0


def test_names_of_the_query_are_found_with_the_callers_search_path(user: Connection) -> None:
    user.execute("CREATE TABLE own AS " + ROWS)
    user.execute("CREATE FUNCTION twice(x float8) RETURNS float8 LANGUAGE plpgsql AS 'BEGIN RETURN halved(x) * 4; END'")
    user.execute("CREATE FUNCTION halved(x float8) RETURNS float8 LANGUAGE sql AS 'SELECT x / 2'")
    before = value(user, "SHOW search_path")
    assert explain(user, query="SELECT twice(a) AS a, y FROM own")
    assert value(user, "SHOW search_path") == before
    assert value(user, "SHOW transaction_read_only") == "off"


# -- errors -----------------------------------------------------------------------------------------------------------

WRONG: list[dict[str, Any]] = [
    {"model": "nothing"},
    {"model": None},
    {"query": ""},
    {"query": "SELECT 1 AS x; SELECT 2"},
    {"query": "DELETE FROM pg_class"},
    {"query": "SELECT a, y FRM b"},
    {"query": "SELECT nothing FROM pg_class"},
    {"query": "SELECT 1 AS a, 1 AS a, 2 AS y"},
    {"target": "z"},
    {"epochs": 0},
    {"batch_size": -1},
    {"optimizer": "adagrad"},
    {"learning_rate": -1.0},
    {"validation": 1.0},
    {"policy": "magic"},
    {"priority": 5000},
    {"memory_budget": "lots"},
    {"options": {"tsak": "regression"}},
    {"options": {"weight_decay": -1}},
]


def error_of(conn: Connection, function: str, arguments: dict[str, Any]) -> tuple[str | None, ...]:
    with pytest.raises(psycopg.Error) as caught:
        conn.execute(call(function, arguments), arguments)
    diag = caught.value.diag
    fields = (diag.message_primary, diag.message_detail, diag.message_hint, diag.internal_query, diag.internal_position)
    return (diag.sqlstate, *fields)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: next(iter(wrong)))
def test_everything_that_train_model_refuses_is_refused_in_the_same_words(
    db: Connection, wrong: dict[str, Any]
) -> None:
    register(db, "m")
    arguments = {"model": "m", "query": ROWS, "target": "y"} | wrong
    if "options" in arguments:
        arguments["options"] = Jsonb(arguments["options"])
    assert error_of(db, "explain_training", arguments) == error_of(db, "train_model", arguments)


def test_errors_that_only_the_rows_show(db: Connection) -> None:
    register(db, "m")
    with pytest.raises(psycopg.errors.DivisionByZero) as caught:
        explain(db, query="SELECT 1 / (i - 7) AS x, i % 2 = 0 AS y FROM generate_series(1, 20) i")
    assert caught.value.diag.message_detail == "row 7 of the training query"
    refused("22000", "no rows", "WHERE", lambda: explain(db, query=f"SELECT * FROM ({ROWS}) q LIMIT 0"))
    error = refused("22000", "batch_size is 1000", "at most", lambda: explain(db, batch_size=1000))
    assert "Traceback" not in (error.diag.context or "")


def test_an_error_in_the_models_code_shows_its_traceback(db: Connection) -> None:
    register(db, "m", python_model(on_build="raise ValueError('no such layer')"))
    error = refused("22023", "no such layer", "traceback", lambda: explain(db))
    assert "ValueError: no such layer" in (error.diag.context or "")
    assert '"<architecture>"' in (error.diag.context or "")


def test_an_unknown_format(db: Connection) -> None:
    register(db, "m")
    refused("22023", 'unknown format "xml"', "json", lambda: explain(db, options={"format": "xml"}))
    arguments = {"model": "m", "query": ROWS, "target": "y", "options": Jsonb({"format": "json"})}
    assert error_of(db, "train_model", arguments)[0] == "22023"


def test_an_executor_that_dies(db: Connection, cluster: Any) -> None:
    register(db, "m", python_model(on_build="os.kill(os.getpid(), signal.SIGSEGV)"))
    error = refused("58000", "executor was killed by signal 11 (SIGSEGV)", "log", lambda: explain(db))
    assert "Fatal Python error" in (error.diag.context or "")
    assert not children(backend(db))


def test_errors_leave_a_transaction_that_a_savepoint_saves(db: Connection) -> None:
    register(db, "m")
    with db.transaction():
        with pytest.raises(psycopg.errors.DataException), db.transaction():
            explain(db, batch_size=1000)
        assert explain(db)


# -- ends -------------------------------------------------------------------------------------------------------------


@contextmanager
def explaining(conn: Connection, **arguments: Any) -> Iterator[list[BaseException]]:
    """Call explain_training in a thread, which appends its error to `errors`."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            explain(conn, **arguments)
        except psycopg.Error as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield errors
    thread.join(30)
    assert not thread.is_alive()


SLOW_QUERY = f"SELECT q.*, pg_sleep(1) IS NULL AS slow FROM ({ROWS}) q"


@pytest.mark.parametrize("busy_with", ["query", "model"])
def test_cancel_ends_the_executor_at_once(
    db: Connection, connect: Callable[..., Connection], wait_until: Wait, busy_with: str
) -> None:
    register(db, "m", python_model(on_build="time.sleep(1000)" if busy_with == "model" else ""))
    conn = connect()
    conn.execute(f"SET search_path = {value(db, 'SELECT current_schema()')}, public")
    pid = backend(conn)
    with explaining(conn, query=SLOW_QUERY if busy_with == "query" else ROWS) as errors:
        executor = wait_until(lambda: next(iter(children(pid)), None))
        wait_until(lambda: value(db, "SELECT wait_event FROM pg_stat_activity WHERE pid = %s", pid) is not None)
        time.sleep(1)  # into the query, or the model's code
        db.execute("SELECT pg_cancel_backend(%s)", (pid,))
    (error,) = errors
    assert isinstance(error, psycopg.errors.QueryCanceled)
    assert "user request" in str(error)
    wait_until(lambda: not alive(executor))
    assert value(conn, "SELECT 1") == 1


def test_statement_timeout(db: Connection) -> None:
    register(db, "m", python_model(on_build="time.sleep(1000)"))
    db.execute("SET statement_timeout = '3s'")
    with pytest.raises(psycopg.errors.QueryCanceled, match="statement timeout"):
        explain(db)
    db.execute("RESET statement_timeout")
    assert not children(backend(db))


def test_the_executor_ends_with_its_session(
    db: Connection, connect: Callable[..., Connection], wait_until: Wait
) -> None:
    register(db, "m", python_model(on_build="time.sleep(1000)"))
    conn = connect()
    pid = backend(conn)
    with explaining(conn) as errors:
        executor = wait_until(lambda: next(iter(children(pid)), None))
        db.execute("SELECT pg_terminate_backend(%s)", (pid,))
    assert len(errors) == 1
    wait_until(lambda: not alive(executor))


def test_several_sessions_explain_at_once(db: Connection, connect: Callable[..., Connection]) -> None:
    register(db, "m")
    sessions = [connect() for _ in range(3)]
    explanations: list[list[str]] = []
    threads = [threading.Thread(target=lambda conn=conn: explanations.append(explain(conn))) for conn in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(explanations) == 3
    assert len({lines[0] for lines in explanations}) == 1


def test_an_explanation_takes_a_job_slot_and_gives_it_back(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    cluster = fresh_cluster({"pg_tensile.max_jobs": 1})
    with cluster.connect() as db, cluster.connect() as conn:
        running = submit(db, "busy", python_model(), epochs=FOREVER)
        register(db, "m", python_model(on_build="time.sleep(1000)"))
        register(db, "wrong", python_model(on_build="raise ValueError('no')"))
        wait_until(lambda: phase(db, running) == "training")
        with pytest.raises(psycopg.errors.InsufficientResources, match="no job slot is free") as caught:
            explain(conn)
        assert "pg_tensile.max_jobs" in (caught.value.diag.message_hint or "")
        db.execute("SELECT cancel_job(%s)", (running,))
        for _ in range(2):  # an error gives it back

            def refused() -> bool:
                try:
                    explain(conn, "wrong")
                except psycopg.errors.InsufficientResources:
                    return False  # the job's worker is on its way out
                except psycopg.Error as error:
                    assert "no" in str(error)
                return True

            wait_until(refused)
        pid = backend(conn)
        with explaining(conn) as errors:
            wait_until(lambda: next(iter(children(pid)), None))
            waits = submit(db, "waits", python_model())
            with cluster.connect() as other, pytest.raises(psycopg.errors.InsufficientResources):
                explain(other)
            assert value(db, "SELECT state FROM tensile.jobs WHERE id = %s", waits) == "queued"
            assert value(db, "SELECT count(*) FROM tensile._progress()") == 0
            db.execute("SELECT pg_terminate_backend(%s)", (pid,))
        assert len(errors) == 1
        assert value(db, "SELECT wait_for_job(%s, '60 s')", waits) == "finished", "the slot is free again"


# -- attacks ----------------------------------------------------------------------------------------------------------


def test_sessions_cannot_start_an_executor_with_their_own_spec(user: Connection) -> None:
    spec = Jsonb({"architecture": {"type": "python", "source": "import os; os.abort()"}, "options": {}})
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for function _explain"):
        user.execute("SELECT tensile._explain(%s, '/tmp')", (spec,))
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for function _explain_training"):
        user.execute("SELECT tensile._explain_training(0, 'm', '', '', 1, 1, 'sgd', 1, 0, 0, NULL, NULL, 0, '{}', '')")
    for private in ("tensile._explain_wait(-1, 0, false)", "tensile._explain_feed(0)"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            user.execute(f"SELECT {private}")


@pytest.mark.parametrize(
    ("attempt", "sqlstate"),
    [
        ("tensile._explain_wait(-1, 0, false)", "42501"),
        ("tensile._explain_feed(3)", "42501"),
        ("explain_training('m', 'SELECT 1 AS a, 2 AS y', 'y')", "55000"),
    ],
)
def test_the_query_of_an_explanation_cannot_use_what_the_explanation_may(
    user: Connection, attempt: str, sqlstate: str
) -> None:
    body = sql.Literal(f"BEGIN PERFORM {attempt}; RETURN 1; END")
    user.execute(sql.SQL("CREATE FUNCTION attempt() RETURNS int LANGUAGE plpgsql AS {}").format(body))
    with pytest.raises(psycopg.Error) as caught:
        explain(user, query=f"SELECT attempt() AS z, q.* FROM ({ROWS}) q")
    assert caught.value.sqlstate == sqlstate


def test_others_jobs_are_not_shown(fresh_cluster: Callable[..., Any], wait_until: Wait) -> None:
    """The sums include other roles' jobs without naming them."""
    with fresh_cluster().connect() as conn:
        job = submit(conn, "secret_model", {"type": "mlp", "hidden": [8]}, epochs=FOREVER)
        wait_until(lambda: phase(conn, job) == "training")
        conn.execute("CREATE ROLE mallory LOGIN IN ROLE tensile_user")
        register(conn, "m")
        conn.execute("SELECT grant_model('m', 'mallory', 'train')")
        conn.execute("SET ROLE mallory")
        explanation = explained(conn)
        conn.execute("RESET ROLE")
        conn.execute("SELECT cancel_job(%s)", (job,))
    assert explanation["admission"]["running"] == 1
    assert "secret_model" not in json.dumps(explanation)


def test_nothing_is_left_in_the_file_system(db: Connection, cluster: Any) -> None:
    register(db, "m")
    explain(db)
    assert os.listdir(cluster.data / "base" / "pgsql_tmp") == []
    assert not (cluster.data / "pg_tensile").exists()
