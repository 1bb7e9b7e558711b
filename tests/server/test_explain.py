"""explain_training: contents, privileges of the query, and errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.server.explaining import backend, call, explain, explained
from tests.server.refusals import refused
from tests.server.support import (
    FOREVER,
    ROWS,
    Connection,
    Wait,
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


# -- contents ---------------------------------------------------------------------------------------------------------


def test_a_job_is_explained_and_nothing_is_stored(db: Connection) -> None:
    register(db, "m")
    lines = explain(db, epochs=3, batch_size=50, policy="joint")
    assert re.fullmatch(r'Train "m" \(mlp\) on cpu, policy joint: 3 epochs of \d steps of 50 rows', lines[0])
    whole = "\n".join(lines)
    for topic in ("Rows", "Model", "Graph", "Memory", "Time a step", "Start       now:"):
        assert topic in whole
    assert value(db, "SELECT count(*) FROM tensile.jobs") == 0
    assert value(db, "SELECT count(*) FROM tensile.model_versions") == 0
    assert value(db, "SELECT count(*) FROM tensile.traces") == 0
    assert not children(backend(db))


@pytest.mark.long
def test_the_numbers_of_an_explanation_are_those_of_data_and_model(db: Connection) -> None:
    register(db, "m")
    explanation = explained(db, validation=0.25)
    assert explanation["training_rows"] + explanation["validation_rows"] == 400
    # a, b and 5 categories (and the unknown one) of 16 numbers; 8 hidden units
    assert explanation["parameters"] == 6 * 16 + (2 + 16) * 8 + 8 + 8 + 1
    memory = explanation["memory"]
    assert memory["floor_bytes"] <= memory["least_bytes"] <= memory["planned_bytes"] <= memory["vanilla_bytes"]
    assert explanation["time"]["vanilla_us"] > 0


@pytest.mark.long
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
    time = explanation["time"]
    least_us = time.get("bound_us", time["vanilla_us"])  # not known if the solver had too little of a busy machine
    assert time["vanilla_us"] * (1 - 1e-9) <= least_us <= time["planned_us"] * (1 + 1e-9)
    assert explanation["start"]["when"] == "now"


@pytest.mark.long
def test_a_model_that_never_fits_names_the_operator(db: Connection) -> None:
    register(db, "m", {"type": "cnn", "channels": [8, 16]})
    start = explained(db, query=IMAGES, memory_budget="10kB")["start"]
    assert start["when"] == "never"
    assert "10.0 kB" in start["why"]
    assert "aten." in start["why"]


@pytest.mark.long
def test_policy_none_is_eager(db: Connection) -> None:
    register(db, "m")
    whole = "\n".join(explain(db, policy="none"))
    assert "policy none" in whole
    assert "eagerly" in whole
    assert "reserved" in whole


@pytest.mark.long
def test_a_model_that_cannot_be_captured(db: Connection) -> None:
    """As a job it would fail; with policy none it would run."""
    register(db, "m", python_model(on_forward="if x.sum() > 0: x = x + 1"))
    refused("0A000", "reads the value of a tensor", "policy => 'none'", lambda: explain(db))
    assert "not captured" in "\n".join(explain(db, policy="none"))


@pytest.mark.long
def test_an_imported_architecture(db: Connection) -> None:
    register(db, "m", {"type": "import", "callable": "torch.nn:Linear"})
    assert explain(db)[0].startswith('Train "m" (torch.nn:Linear) on cpu')


@pytest.mark.long
def test_a_model_that_is_being_trained(db: Connection, wait_until: Wait) -> None:
    job = submit(db, "m", {"type": "mlp", "hidden": [4]}, epochs=FOREVER)
    wait_until(lambda: phase(db, job) is not None)
    start = explained(db)["start"]
    assert (start["when"], start["why"]) == ("later", f"the model is being trained by job {job}")


@pytest.mark.long
def test_an_explanation_waits_for_memory_that_others_need(
    db: Connection, alter: Callable[..., None], wait_until: Wait
) -> None:
    """Takes seconds: a job trains for epochs while models are explained."""
    alter({"pg_tensile.device_memory": "64MB"})
    job = submit(db, "large", {"type": "mlp", "hidden": [8]}, epochs=FOREVER, policy="none", memory_budget="62MB")
    register(db, "m", {"type": "mlp", "hidden": [1024]})
    wait_until(lambda: phase(db, job) == "training")
    wait_until(lambda: value(db, "SELECT max(epoch) > 2 FROM tensile_internal.epochs WHERE job = %s", job))
    start = explained(db, batch_size=256)["start"]
    assert start["when"] == "later", start
    assert "1 running job at least 62.0 MB" in start["why"]
    # scaled by the number of epochs so far; a row for each split
    rows = "SELECT min(seconds), 2 * max(seconds), max(epoch) FROM tensile_internal.epochs WHERE job = %s"
    row = db.execute(rows, (job,)).fetchone()
    assert row is not None
    least, most, epoch = row
    assert least * (FOREVER - epoch - 1) <= start["wait_s"] <= most * FOREVER
    register(db, "small", {"type": "mlp", "hidden": [8]})
    assert explained(db, "small")["start"]["when"] == "now"
    db.execute("SELECT cancel_job(%s)", (job,))


@pytest.mark.long
def test_an_explanation_counts_what_running_jobs_were_promised(db: Connection, wait_until: Wait) -> None:
    """Takes seconds: a job trains while another model is explained."""
    job = submit(
        *(db, "kept", {"type": "mlp", "hidden": [1024]}),
        epochs=FOREVER,
        batch_size=256,
        policy="joint",
        options={"max_slowdown": 1},
    )
    wait_until(lambda: phase(db, job) == "training")
    least = value(db, "SELECT least_bytes + overhead_bytes FROM tensile.traces WHERE job = %s", job)
    register(db, "m")
    explanation = explained(db)
    admission, beside = explanation["admission"], explanation["beside"]
    assert admission["running"] == 1 and admission["least_bytes"] > least
    assert beside["slowdown"] == 1 and beside["planned_bytes"] == explanation["memory"]["vanilla_bytes"]
    db.execute("SELECT cancel_job(%s)", (job,))


@pytest.mark.long
def test_an_explanation_without_a_calibration_says_so(db: Connection) -> None:
    register(db, "m")
    assert explained(db)["calibrated"] is False
    assert "calibrate_device()" in "\n".join(explain(db))


# -- privileges of the query ------------------------------------------------------------------------------------------


def test_an_ordinary_role_with_a_grant(grantee: Connection) -> None:
    grantee.execute("CREATE TABLE own AS " + ROWS)
    assert explain(grantee, query="SELECT * FROM own", policy="none")[-1].startswith("  Start       now:")


def test_the_query_runs_as_the_caller(db: Connection, grantee: Connection) -> None:
    db.execute("CREATE TABLE secret AS " + ROWS)
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for table secret"):
        explain(grantee, query="SELECT * FROM secret")


def test_without_a_grant_it_is_refused_like_the_job(grantee: Connection, db: Connection) -> None:
    register(db, "mine")
    refused("42501", 'permission denied for model "mine"', "grant_model", lambda: explain(grantee, "mine"))


def test_the_query_sees_the_callers_transaction(grantee: Connection, db: Connection) -> None:
    grantee.execute("CREATE TABLE own AS " + ROWS)
    grantee.autocommit = False
    grantee.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    grantee.execute("DELETE FROM own WHERE a > 0.9")
    rows = value(grantee, "SELECT count(*) FROM own")
    db.execute("INSERT INTO own " + ROWS)
    explanation = explained(grantee, query="SELECT * FROM own", policy="none")
    assert explanation["training_rows"] + explanation["validation_rows"] == rows < 400
    grantee.execute("INSERT INTO own (a) VALUES (1)")  # the transaction continues and may write
    grantee.commit()
    assert value(grantee, "SELECT count(*) FROM own") == rows + 401


def test_the_query_runs_read_only(grantee: Connection) -> None:
    grantee.execute("CREATE TABLE log (x int)")
    grantee.execute(
        "CREATE FUNCTION note() RETURNS int LANGUAGE sql VOLATILE AS 'INSERT INTO log VALUES (1) RETURNING x'"
    )
    query = f"SELECT note() AS n, q.* FROM ({ROWS}) q"
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        explain(grantee, query=query)
    assert value(grantee, "SELECT count(*) FROM log") == 0


def test_names_of_the_query_are_found_with_the_callers_search_path(grantee: Connection) -> None:
    grantee.execute("CREATE TABLE own AS " + ROWS)
    grantee.execute(
        "CREATE FUNCTION twice(x float8) RETURNS float8 LANGUAGE plpgsql AS 'BEGIN RETURN halved(x) * 4; END'"
    )
    grantee.execute("CREATE FUNCTION halved(x float8) RETURNS float8 LANGUAGE sql AS 'SELECT x / 2'")
    before = value(grantee, "SHOW search_path")
    assert explain(grantee, query="SELECT twice(a) AS a, y FROM own", policy="none")
    assert value(grantee, "SHOW search_path") == before
    assert value(grantee, "SHOW transaction_read_only") == "off"


# -- errors -----------------------------------------------------------------------------------------------------------


WRONG: list[dict[str, Any]] = [
    {"model": "a line\nbreak"},
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


def test_a_trainer_that_dies(db: Connection, cluster: Any) -> None:
    register(db, "m", python_model(on_build="os.kill(os.getpid(), signal.SIGSEGV)"))
    error = refused("58000", "trainer was killed by signal 11 (SIGSEGV)", "log", lambda: explain(db))
    assert "Fatal Python error" in (error.diag.context or "")
    assert not children(backend(db))


def test_errors_leave_a_transaction_that_a_savepoint_saves(db: Connection) -> None:
    register(db, "m")
    with db.transaction():
        with pytest.raises(psycopg.errors.DataException), db.transaction():
            explain(db, batch_size=1000)
        assert explain(db, policy="none")
